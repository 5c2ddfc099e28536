"""The texts of --help and --help-all."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from megatron.arguments import model_choice, run_script, script_defaults
from megatron.arguments.argparse_parsers import RaisingParser
from megatron.arguments.extra_flags import ExtraArgs
from megatron.arguments.flag_values import all_sections, takes
from megatron.arguments.model_choice import ModelChoice
from megatron.arguments.scan import Scan
from megatron.arguments.sources import SOURCES, Source, values_of
from megatron.config.option import Option, options_of
from megatron.models.registry import family_of

HELP_FLAGS = frozenset(("-h", "--help", "--help-all"))
REST = "--help-all lists every flag. docs/other_flags.md lists which flags of Megatron-LM are accepted."


def help_text(
    extra_args_provider: ExtraArgs | None = None,
    family: str = "gpt2",
    defaults: Mapping[str, Any] = MappingProxyType({}),
    *,
    is_whole: bool = False,
    env: Mapping[str, str] = MappingProxyType({}),
    choice: ModelChoice | None = None,
    accepts_model: bool = True,
) -> str:
    """Return the text of --help: the flags of ``family`` that have a ``short`` text, by section.

    Args:
        is_whole: return the text of --help-all: every flag of ``family`` with its full help, and the sources of values.
        env: environment of a run script; its defaults and variables are shown.
        choice: the model that ``--model`` names.
        accepts_model: show ``--model``.
    """
    choice = choice or ModelChoice(family=family, program=family)
    trained = family_of(family)
    program = run_script.command(env) or f"bash {trained.run_command}"
    script = script_defaults.of_environment(env, Scan(family), (), choice.recipe)
    script = {name: run_script.shown(value) for name, value in script.items()}
    defaults = {**trained.config.DEFAULTS, **values_of(choice.layers(script, choice.taken(defaults)))}
    parser = RaisingParser(
        prog=program,
        usage=f"{program} [flags]",
        epilog=None if is_whole else REST,
        allow_abbrev=False,
        add_help=False,
        formatter_class=argparse.HelpFormatter if is_whole else partial(argparse.HelpFormatter, max_help_position=36),
    )
    parser.add_argument("-h", "--help", action="help", help="show the most common flags, and exit")
    parser.add_argument("--help-all", action="help", help="show every flag, and exit")
    for name, section in all_sections().items():
        options = [option for option in options_of(section) if takes(family, name, option)]
        options = [option for option in options if is_whole or option.short]
        if not accepts_model:
            options = [option for option in options if option.name != model_choice.FIELD]
        if options:
            about = (section.__doc__ or "").splitlines()[0].replace("`", "") if is_whole else None
            group = parser.add_argument_group(name, about)
        for option in options:
            add = _add_help if is_whole else _add_short_help
            add(group, option, defaults.get(option.name, option.shown_default))
    if extra_args_provider is not None:
        extra_args_provider(parser)
    text, variables = parser.format_help(), run_script.variables_text(env)
    if is_whole:
        text = f"{text}\n{sources_text()}"
    return f"{text}\n{variables}" if variables else text


def _add_short_help(group: argparse._ArgumentGroup, option: Option, shown: Any) -> None:
    """Add one line for ``option``: its first flag, its short help, and its default if that is a single word."""
    is_switch = option.kind == "bool" or not option.flag
    default = "" if is_switch or shown in ("", None) or " " in str(shown) else f" (default: {shown})"
    text = (option.short + default).replace("%", "%%")
    if is_switch:
        flags = [option.flag] if option.flag else list(option.constants)
        group.add_argument(*flags, dest=option.name, action="store_true", help=text)
    else:
        metavar = option.kind.upper() + (" ..." if option.join else "")
        group.add_argument(option.flag, dest=option.name, metavar=metavar, help=text)


def _add_help(group: argparse._ArgumentGroup, option: Option, shown: Any) -> None:
    valued = [flag for flag in option.flags if flag not in option.constants]
    default = f" (default: {shown})" if shown not in ("", None) else ""
    text = (option.help + default).replace("%", "%%")
    if valued and option.kind == "bool":
        group.add_argument(*valued, dest=option.name, action="store_true", help=text)
    elif valued:
        metavar = "{" + ",".join(option.choices) + "}" if option.choices else option.shown_kind.upper()
        group.add_argument(*valued, dest=option.name, metavar=metavar, help=text)
    for flag, value in option.constants.items():
        about = f"{option.name} = {value}" + (f": {text}" if not valued else "")
        group.add_argument(flag, dest=f"{option.name}_{value}", action="store_true", help=about)


def sources_text() -> str:
    """Return the section of --help-all on the sources of a value, in order of precedence."""
    width = max(shutil.get_terminal_size().columns - 2, 40)
    lines = ["sources of a value, the strongest first:"]
    for rank, source in enumerate(SOURCES, 1):
        text = f"{rank}. {source.name}: {source.about}"
        if source.overrides and source.overrides != Source.overrides:
            text += f". It overrides {source.overrides}"
        if source.conflict and source.conflict != Source.conflict:
            text += f". If a source above differs: {source.conflict}"
        lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="     ")
    lines += textwrap.wrap(
        "docs/flags.md has this list as a table; docs/other_flags.md lists flags of other trainers.", width
    )
    return "\n".join(lines) + "\n"
