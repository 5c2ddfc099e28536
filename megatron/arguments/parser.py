"""``parse``, which builds a ``Config`` from the command line and the other sources of values."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron import accelerators
from megatron.arguments import deepspeed_json, messages, model_choice, other_programs, translate
from megatron.arguments.collect import CheckpointArgs, collect
from megatron.arguments.derived_sizes import (
    resolve_accounted_layout,
    resolve_batch_size,
    resolve_chunks,
    resolve_layer_pattern,
)
from megatron.arguments.extra_flags import ExtraArgs, ExtraFlags
from megatron.arguments.flag_values import all_options, config_from_values
from megatron.arguments.help import HELP_FLAGS, help_text
from megatron.arguments.model_choice import ModelChoice
from megatron.arguments.scan import Scan
from megatron.arguments.shadowed_flags import shadowed_fields
from megatron.arguments.sources import merge
from megatron.arguments.validate import device_problems, find_problems, notes_of
from megatron.config.config import Config
from megatron.errors import marked, raise_all
from megatron.models.registry import family_of


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
    """Parse and check a command line. Needs neither a process group nor torch.

    ``sources.SOURCES`` lists the sources of a value in order of precedence.

    Args:
        argv: words after the program's name; None for ``sys.argv[1:]``.
        world_size: number of ranks of the job.
        env: environment with LOCAL_RANK, and with MEGATRON_DEFAULTS and MEGATRON_VARIABLES of a run script.
        extra_args_provider: Megatron's hook, which adds a user's own flags to an argparse parser.
        defaults: field -> value that replaces our default, as passed to a user's ``pretrain`` call.
        has_gpu: True if a GPU can be used; None if unknown, in which case ``check_device`` must be called later.
        family: family that the script trains, one of ``registry.FAMILIES``; flags of other families are rejected.
        accepts_model: ``--model`` may name a decoder other than ``family``.
        checkpoint_args: ``checkpoint.checkpoint_args.load_checkpoint_args``, which reads the values of --load and
            --resume; None to read no checkpoint.

    Raises:
        ConfigError: all problems at once, numbered.
        CheckpointError: raised by ``checkpoint_args``.
        ValueError: the family does not exist.
        SystemExit: after ``--help`` or ``--help-all``.
    """
    family_of(family)
    words = list(sys.argv[1:] if argv is None else argv)
    env = os.environ if env is None else env
    choice = (
        model_choice.choose_model(words, env, family) if accepts_model else ModelChoice(family=family, program=family)
    )
    extras = ExtraFlags(extra_args_provider, choice.family, accepts_model=accepts_model)
    if help_flags := HELP_FLAGS & set(words):
        text = help_text(
            extra_args_provider,
            choice.family,
            defaults or {},
            show_all="--help-all" in help_flags,
            env=env,
            choice=choice,
            accepts_model=accepts_model,
        )
        sys.stdout.write(text)
        raise SystemExit(0)

    # Collect the values of all sources, and merge them.
    collected = collect(
        words, env, choice, extras, defaults or {}, accepts_model=accepts_model, checkpoint_args=checkpoint_args
    )
    scanned, json = collected.scanned, collected.json
    settings = merge(collected.layers, scanned)
    explicit = {name: setting.value for name, setting in settings.items() if not setting.source.is_default}
    implicit = {name: setting.value for name, setting in settings.items() if setting.source.is_default}

    # Derive the sizes and lengths that follow from others.
    derived = resolve_batch_size(scanned, explicit, implicit, world_size)
    derived |= resolve_layer_pattern(scanned, explicit, implicit)
    derived |= resolve_chunks(scanned, {**explicit, **derived}, implicit)
    derived |= resolve_accounted_layout(scanned, {**implicit, **explicit, **derived})
    values = {**implicit, **explicit, **derived}
    limits = translate.resolve_lengths(scanned, values, world_size)
    translate.resolve_dependent_settings(scanned, values, choice.family)
    if collected.is_run_config:
        scanned.drop_ignored_of_file()
    rank_problems = _add_local_rank(values, env)
    config = config_from_values(
        values,
        family=choice.family,
        deepspeed=json,
        extra=collected.extra,
        explicit_fields=tuple(
            name for name in scanned.values if not (collected.is_run_config and name in scanned.from_file)
        ),
        repeated=tuple(scanned.repeated),
        ignored=dict(scanned.ignored),
        dropped=scanned.drop_unknown() if values.get("ignore_unknown_flags") else {},
    )
    config = replace(
        config,
        batch=replace(config.batch, **limits),
        precision=replace(config.precision, excluded=deepspeed_json.disabled_dtypes(json)),
    )
    config = replace(config, shadowed=_shadowed_flags(config, scanned))

    # Check all sections, and raise all problems at once.
    if config.run.strict_flags:
        without_effect = {**scanned.ignored, **config.shadowed}
        scanned.problems += [
            f"{name} is rejected by --strict-flags: {reason}" for name, reason in without_effect.items()
        ]
    problems = rank_problems + scanned.problems + _plugin_problems(env) + find_problems(config, world_size)
    problems += model_choice.missing_size_problems(choice, config)
    if has_gpu is not None:
        problems += device_problems(config, has_gpu)
    with marked(is_of_this_rank=bool(rank_problems)):
        raise_all(messages.with_variables(messages.with_typed_flags(problems, scanned), env))
    return _with_notes(config, [*scanned.notes, *other_programs.notes(config, scanned)], world_size)


def _plugin_problems(env: Mapping[str, str]) -> list[str]:
    """Import the plug-ins that the environment names, and return the problems."""
    try:
        accelerators.load(env)
    except ValueError as error:
        return [str(error)]
    return []


def _shadowed_flags(config: Config, scanned: Scan) -> dict[str, str]:
    """Map shadowed flags as typed to reasons, without the flags in ``scanned.ignored``."""
    reason_of_flag = {scanned.spelling.get(name, _flag_of(name)): reason for name, reason in shadowed_fields(config)}
    return {name: reason for name, reason in reason_of_flag.items() if name not in scanned.ignored}


def _flag_of(field: str) -> str:
    return next(option.flag for _, option in all_options() if option.name == field)


def _add_local_rank(values: dict[str, Any], env: Mapping[str, str]) -> list[str]:
    """Set the device index from LOCAL_RANK, and return the problems, which may differ between ranks."""
    flag_value, launcher_value = values.get("local_rank"), env.get("LOCAL_RANK", "")
    if not launcher_value.isdecimal():
        return []
    values["local_rank"] = int(launcher_value)
    if flag_value in (None, int(launcher_value)):
        return []
    return [f"--local_rank must agree with LOCAL_RANK, got {flag_value} and {launcher_value}. Remove the flag"]


def _with_notes(config: Config, notes: list[str], world_size: int) -> Config:
    repeated = [f"{flag} was given more than once; the last value is used" for flag in config.repeated]
    return replace(config, notes=tuple(notes + repeated + notes_of(config, world_size)))
