"""parse: command line to Config; --help and --help-all."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

from megatron import accelerators
from megatron.arguments import (
    config_file,
    deepspeed_json,
    flag_values,
    model_choice,
    other_programs,
    run_script,
    translate,
)
from megatron.arguments.flag_values import all_sections, config_from_values, options_in, scan, takes
from megatron.arguments.model_choice import ModelChoice
from megatron.arguments.scan import Scan
from megatron.arguments.shadowed_flags import shadowed_fields
from megatron.arguments.validate import device_problems, find_problems, notes_of
from megatron.config.config import Config
from megatron.config.option import Option, options_of
from megatron.errors import marked, raise_all
from megatron.models.registry import family_of

# Parsers of argparse whose errors are a line, without the usage in front of it.


class OneLineParser(argparse.ArgumentParser):
    """Ends with code 2 and one line, without the usage in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


class RaisingParser(argparse.ArgumentParser):
    """Raises ValueError with that line, for a caller who has more to say."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


# ``parse``: the one way from a command line to a Config.

ExtraArgs = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
CheckpointArgs = Callable[[Scan, Mapping[str, Any]], dict[str, Any]]

SOURCES = (
    "A value comes from its flag, else from the file of --config, else from the JSON of --deepspeed_config, else from "
    "the flags in the environment variable MEGATRON_DEFAULTS (the run script's recipe), else it is the default; sizes "
    "of the model that neither a flag nor the file gives come from what --load or --resume names; "
    "a flag and the JSON that differ are an error, except that flags win for the optimizer's numbers and the JSON for "
    "the loss scale. docs/other_flags.md lists the flags of other trainers."
)
REST = "--help-all lists every flag. docs/other_flags.md lists which flags of Megatron-LM are accepted."


def parse(
    argv: Sequence[str] | None = None,
    *,
    world_size: int,
    env: Mapping[str, str] | None = None,
    extra_args_provider: ExtraArgs | None = None,
    defaults: Mapping[str, Any] | None = None,
    has_gpu: bool | None = None,
    family: str = "gpt2",
    accepts_model: bool = False,
    checkpoint_args: CheckpointArgs | None = None,
) -> Config:
    """Return the checked Config of a command line; no process group, no torch.

    Args:
        argv: words after the program's name; None: those of this process.
        world_size: ranks of the job.
        env: environment: LOCAL_RANK, and MEGATRON_DEFAULTS and MEGATRON_VARIABLES of a run script.
        extra_args_provider: Megatron's hook: adds a user's own flags to an argparse parser.
        defaults: field -> value that replaces our default, as a user's ``pretrain`` call gives it.
        has_gpu: whether a GPU can be used; None: not known here, ``check_device`` is called later.
        family: family that the script trains, one of ``registry.FAMILIES``; flags of others are rejected.
        accepts_model: ``--model`` may name another decoder than ``family``.
        checkpoint_args: ``checkpoint.checkpoint_args.bring``, which reads sizes that nobody gave from what --load
            names; None: they are the defaults.

    Raises:
        ConfigError: all problems at once, numbered.
        CheckpointError: of ``checkpoint_args``.
        ValueError: there is no such family.
        SystemExit: after ``--help`` or ``--help-all``.
    """
    family_of(family)
    words = list(sys.argv[1:] if argv is None else argv)
    env = os.environ if env is None else env
    choice = model_choice.choose(words, env, family) if accepts_model else ModelChoice(family=family, program=family)
    family = choice.family
    extra_parser, extra_flags = _extra_parser(extra_args_provider, family, accepts_model=accepts_model)
    if asked := {"-h", "--help", "--help-all"} & set(words):
        text = help_text(
            extra_args_provider,
            family,
            defaults or {},
            is_whole="--help-all" in asked,
            env=env,
            choice=choice,
            accepts_model=accepts_model,
        )
        sys.stdout.write(text)
        raise SystemExit(0)
    found = scan(words, extra_flags, family)
    from_file = config_file.take(found, extra_flags)
    choice.replace_file(found, from_file.places)
    if choice.problem:
        found.problems.append(choice.problem)
        found.values.pop(model_choice.FIELD, None)
    of_program = other_programs.defaults_of(found, defaults or {})
    of_program = flag_values.of_script(choice.taken(of_program), found)
    of_environment = flag_values.of_environment(env, found, extra_flags, choice.recipe)
    if not accepts_model:
        given = {**of_environment, **({} if from_file.is_of_run else found.values)}
        found.problems += [model_choice.NOT_ACCEPTED] if given.get(model_choice.FIELD) else []
    defaults = from_file.weaker(choice.merge(of_program, of_environment), found)
    if choice.source == model_choice.COMMAND_LINE:  # also where the configuration of a run leaves no other defaults
        defaults = {**defaults, **choice.settings}
    translate.skip_train(found, defaults)
    json = from_file.deepspeed or _read_json(found, defaults)
    if from_file.json:
        if json:
            found.problems.append(
                "the file of --config has keys of DeepSpeed's JSON, got --deepspeed_config too. Leave one out"
            )
        json = from_file.json
    stated = {} if from_file.deepspeed else json  # that of a repeated run has said its part already
    found.implied = deepspeed_json.implied_values(stated, {**defaults, **found.values})
    if checkpoint_args is not None and {"load", "resume"} & (defaults.keys() | found.values.keys()):
        defaults = {**defaults, **checkpoint_args(found, defaults)}
    extra = _extra_values(extra_parser, found)
    values = deepspeed_json.resolve(found, stated, world_size, defaults, from_file.places)
    limits = translate.lengths(found, values, world_size)
    translate.what_holds(found, values, family)
    from_file.drop_settings_of_run(found)
    own = _add_local_rank(values, env)
    config = config_from_values(
        values,
        family=family,
        deepspeed=json,
        extra=extra,
        given=tuple(name for name in found.values if not (from_file.is_of_run and name in from_file.places)),
        repeated=tuple(found.repeated),
        ignored=dict(found.ignored),
        dropped=found.drop_unknown() if values.get("ignore_unknown_flags") else {},
    )
    config = replace(
        config,
        batch=replace(config.batch, **limits),
        precision=replace(config.precision, excluded=deepspeed_json.excluded(json)),
    )
    config = replace(config, shadowed=_shadowed(config, found))
    if config.run.strict_flags:
        without_effect = {**found.ignored, **config.shadowed}
        found.problems += [f"{name} is rejected by --strict-flags: {why}" for name, why in without_effect.items()]
    problems = own + found.problems + _plugin_problems(env) + find_problems(config, world_size)
    problems += model_choice.problems_of(choice, config)
    if has_gpu is not None:
        problems += device_problems(config, has_gpu)
    with marked(is_of_this_rank=bool(own)):
        raise_all(flag_values.with_variables(flag_values.with_typed_flags(problems, found), env))
    return _with_notes(config, [*found.notes, *other_programs.notes(config, found)], world_size)


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
    """Return the text of --help: by section a line for each flag that has a ``short`` and acts in ``family``.

    Args:
        is_whole: return that of --help-all: every flag that acts in ``family``, with all there is to say.
        env: environment of a run script, whose defaults and variables are shown.
        choice: the model of ``--model``, of ``family``.
        accepts_model: show ``--model``.
    """
    choice = choice or ModelChoice(family=family, program=family)
    trained = family_of(family)
    program = run_script.command(env) or f"bash {trained.run_command}"
    of_script = flag_values.of_environment(env, Scan(family), (), choice.recipe)
    of_script = {name: run_script.shown(value) for name, value in of_script.items()}
    defaults = {**trained.config.DEFAULTS, **choice.merge(choice.taken(defaults), of_script)}
    parser = RaisingParser(
        prog=program,
        usage=f"{program} [flags]",
        epilog=SOURCES if is_whole else REST,
        allow_abbrev=False,
        add_help=False,
        formatter_class=argparse.HelpFormatter if is_whole else partial(argparse.HelpFormatter, max_help_position=36),
    )
    parser.add_argument("-h", "--help", action="help", help="show the flags that people set, and exit")
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
    return f"{text}\n{variables}" if variables else text


def _add_short_help(group: argparse._ArgumentGroup, option: Option, shown: Any) -> None:
    """Add one line: the first name alone, and the default where it is one word."""
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


def _extra_parser(
    provider: ExtraArgs | None, family: str, *, accepts_model: bool
) -> tuple[argparse.ArgumentParser, list[str]]:
    parser = RaisingParser(add_help=False, allow_abbrev=False)
    if provider is not None:
        provider(parser)
    flags = [flag for action in parser._actions for flag in action.option_strings]
    ours = {flag for option in options_in(family) for flag in option.flags}
    ours -= set() if accepts_model else {model_choice.FLAG}
    taken = sorted(ours & set(flags))
    raise_all([f"extra_args_provider must not add a flag that exists, got {flag}. Rename it" for flag in taken])
    return parser, flags


def _extra_values(parser: argparse.ArgumentParser, found: Scan) -> dict[str, Any]:
    try:
        return vars(parser.parse_args(found.rest))
    except (ValueError, argparse.ArgumentError) as error:
        found.problems.append(f"flags of extra_args_provider: {error}")
        return {}


def _plugin_problems(env: Mapping[str, str]) -> list[str]:
    """Import the plug-ins that the environment names; return what went wrong."""
    try:
        accelerators.load(env)
    except ValueError as error:
        return [str(error)]
    return []


def _read_json(found: Scan, defaults: Mapping[str, Any]) -> dict[str, Any]:
    path = found.values.get("deepspeed_config", defaults.get("deepspeed_config"))
    if path is None:
        return {}
    json, problems, neutral = deepspeed_json.read(path)
    found.problems += problems
    found.ignored |= neutral
    unknown = [key for key, reason in neutral.items() if reason == deepspeed_json.UNKNOWN]
    found.notes += [f"{path}: unknown key {key} has no effect" for key in unknown]
    return json


def _shadowed(config: Config, found: Scan) -> dict[str, str]:
    """Return flag as typed -> reason for each flag without effect that is not listed as ignored already."""
    named = {found.spelling.get(name, _flag_of(name)): why for name, why in shadowed_fields(config)}
    return {name: why for name, why in named.items() if name not in found.ignored}


def _flag_of(field: str) -> str:
    return next(option.flag for _, option in flag_values.all_options() if option.name == field)


def _add_local_rank(values: dict[str, Any], env: Mapping[str, str]) -> list[str]:
    """Take the device index of the environment; return what is wrong with it, which other ranks do not see."""
    given, launched = values.get("local_rank"), env.get("LOCAL_RANK", "")
    if not launched.isdecimal():
        return []
    values["local_rank"] = int(launched)
    if given in (None, int(launched)):
        return []
    return [f"--local_rank must agree with LOCAL_RANK, got {given} and {launched}. Leave the flag out"]


def _with_notes(config: Config, said: list[str], world_size: int) -> Config:
    repeated = [f"{flag} was given more than once; the last value holds" for flag in config.repeated]
    return replace(config, notes=tuple(said + repeated + notes_of(config, world_size)))
