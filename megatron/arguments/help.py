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
from megatron.arguments.flag_values import accepts_option, all_sections
from megatron.arguments.model_choice import ModelChoice
from megatron.arguments.scan import Scan
from megatron.arguments.sources import SOURCES, Source, merged_values
from megatron.config.option import Option, options_of
from megatron.models.registry import family_of

HELP_FLAGS = frozenset(("-h", "--help", "--help-all"))
HELP_EPILOG = "--help-all lists every flag. docs/other_flags.md lists which flags of Megatron-LM are accepted."


def help_text(
    extra_args_provider: ExtraArgs | None = None,
    family: str = "gpt2",
    defaults: Mapping[str, Any] = MappingProxyType({}),
    *,
    show_all: bool = False,
    env: Mapping[str, str] = MappingProxyType({}),
    choice: ModelChoice | None = None,
    accepts_model: bool = True,
) -> str:
    """Format --help: the flags of ``family`` that have a ``short`` text, by section.

    Args:
        show_all: format --help-all: every flag of ``family`` with its full help, and the sources of values.
        env: environment of a run script; its defaults and variables are shown.
        choice: the model that ``--model`` names.
        accepts_model: show ``--model``.
    """
    choice = choice or ModelChoice(family=family, program=family)
    model_family = family_of(family)
    program = run_script.command(env) or f"bash {model_family.run_command}"
    script = script_defaults.environment_defaults(env, Scan(family), (), choice.recipe)
    script = {name: run_script.relative_to_cwd(value) for name, value in script.items()}
    defaults = {
        **model_family.config.DEFAULTS,
        **merged_values(choice.layers(script, choice.compatible_defaults(defaults))),
    }
    parser = RaisingParser(
        prog=program,
        usage=f"{program} [flags]",
        epilog=None if show_all else HELP_EPILOG,
        allow_abbrev=False,
        add_help=False,
        formatter_class=argparse.HelpFormatter if show_all else partial(argparse.HelpFormatter, max_help_position=36),
    )
    parser.add_argument("-h", "--help", action="help", help="show the most common flags, and exit")
    parser.add_argument("--help-all", action="help", help="show every flag, and exit")
    for name, section in all_sections().items():
        options = [option for option in options_of(section) if accepts_option(family, name, option)]
        options = [option for option in options if show_all or option.short]
        if not accepts_model:
            options = [option for option in options if option.name != model_choice.FIELD]
        if options:
            description = (section.__doc__ or "").splitlines()[0].replace("`", "") if show_all else None
            group = parser.add_argument_group(name, description)
        for option in options:
            add = _add_help if show_all else _add_short_help
            add(group, option, defaults.get(option.name, option.shown_default))
    if extra_args_provider is not None:
        extra_args_provider(parser)
    text, variables = parser.format_help(), run_script.variables_text(env)
    if show_all:
        text = f"{text}\n{sources_text()}"
    return f"{text}\n{variables}" if variables else text


def _add_short_help(group: argparse._ArgumentGroup, option: Option, default_value: Any) -> None:
    """Add one line for ``option``: its first flag, its short help, and its default if that is a single word."""
    is_switch = option.value_type == "bool" or not option.flag
    default = (
        "" if is_switch or default_value in ("", None) or " " in str(default_value) else f" (default: {default_value})"
    )
    text = (option.short + default).replace("%", "%%")
    if is_switch:
        flags = [option.flag] if option.flag else list(option.constants)
        group.add_argument(*flags, dest=option.name, action="store_true", help=text)
    else:
        metavar = option.value_type.upper() + (" ..." if option.join else "")
        group.add_argument(option.flag, dest=option.name, metavar=metavar, help=text)


def _add_help(group: argparse._ArgumentGroup, option: Option, default_value: Any) -> None:
    value_flags = [flag for flag in option.flags if flag not in option.constants]
    default = f" (default: {default_value})" if default_value not in ("", None) else ""
    text = (option.help + default).replace("%", "%%")
    if value_flags and option.value_type == "bool":
        group.add_argument(*value_flags, dest=option.name, action="store_true", help=text)
    elif value_flags:
        metavar = "{" + ",".join(option.choices) + "}" if option.choices else option.shown_type.upper()
        group.add_argument(*value_flags, dest=option.name, metavar=metavar, help=text)
    for flag, value in option.constants.items():
        description = f"{option.name} = {value}" + (f": {text}" if not value_flags else "")
        group.add_argument(flag, dest=f"{option.name}_{value}", action="store_true", help=description)


def sources_text() -> str:
    """Format the --help-all section on the sources of a value, in order of precedence."""
    width = max(shutil.get_terminal_size().columns - 2, 40)
    lines = ["sources of a value, the strongest first:"]
    for rank, source in enumerate(SOURCES, 1):
        text = f"{rank}. {source.name}: {source.description}"
        if source.overrides and source.overrides != Source.overrides:
            text += f". It overrides {source.overrides}"
        if source.conflict and source.conflict != Source.conflict:
            text += f". If a source above differs: {source.conflict}"
        lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="     ")
    lines += textwrap.wrap(
        "docs/flags.md has this list as a table; docs/other_flags.md lists flags of other trainers.", width
    )
    return "\n".join(lines) + "\n"
