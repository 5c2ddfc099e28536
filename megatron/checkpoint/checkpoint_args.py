"""Settings that --load or --resume takes from a checkpoint or Hugging Face folder (the source). No torch.

| setting | if the user does not set it | if the user sets another value |
|---|---|---|
| settings that must match the weights (``Config.identity``) | the source's; overrides the recipe | error, exit code 3 |
| subset of these without effect on shapes (``REFITTED``) | the source's | error; with --finetune the user's |
| the vocabulary size | the source's, except with --resize-vocab | error; with --resize-vocab the user's |
| ``INHERITED_FIELDS`` | the source's | the user's |

``--model`` must agree with the source. If its value is a family, it must be the source's family. If it is a model type,
it must be the model type of the Hugging Face folder, or match the settings of the run. Without ``--model``, a source of
any common decoder family is accepted.

A resumed run also keeps its original values of the settings in ``config.changed_defaults``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron import hub, object_store
from megatron.arguments.flag_values import all_options
from megatron.arguments.scan import Scan
from megatron.arguments.sources import REPLACED_BY_SCHEDULE
from megatron.arguments.translate import CHECKPOINT_SCHEDULE
from megatron.checkpoint import former, remote
from megatron.checkpoint.huggingface.config import (
    CONFIG,
    INDEX,
    WEIGHTS,
    family_by_type,
    flag_words,
    read_json,
    saved_config,
)
from megatron.checkpoint.huggingface_args import read_huggingface
from megatron.checkpoint.manifest import CHECKPOINTS, newest_metadata
from megatron.checkpoint.settings_source import INHERITED_FIELDS, SettingsSource, check_family
from megatron.checkpoint.torch_dist.folder import find_iteration
from megatron.checkpoint.torch_dist.settings import FAMILY, read_torch_dist
from megatron.config import Config
from megatron.config.changed_defaults import describe_saved_settings, saved_settings
from megatron.errors import CheckpointError, marked
from megatron.models.architectures import find_architecture
from megatron.models.registry import FAMILIES

RUNS_DIR = Path("runs")


@marked(is_of_this_rank=False)
def load_checkpoint_args(scanned: Scan, defaults: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Read the model settings that the source determines as field -> value; empty without a source.

    Only fields that the user did not set are returned. A line in ``scanned.notes`` lists these fields.

    Args:
        scanned: values from the command line and --config.
        defaults: field -> value of the run script's recipe; the source overrides it.
        name: run name, for --resume.

    Raises:
        CheckpointError: the source's family does not match, its model is unknown, its config.json contradicts its
            tensors, or the user set a value that differs from the source's.
    """
    flags = {**defaults, **scanned.values}
    path = find_source(flags, name)
    source = None if path is None else read_source(path, scanned.family, scanned.values.get("architecture", ""))
    schedule_flags = [flag for flag in CHECKPOINT_SCHEDULE if flag in scanned.converted]
    if source is None:
        scanned.ignored |= dict.fromkeys(schedule_flags, "no checkpoint is loaded")
        problem = None if path is None else hub.load_problem(path)
        if problem and not (flags.get("dry_run") or flags.get("load_if_exists")):
            raise CheckpointError(problem)
        if path is not None:
            scanned.notes.append(f"{path} contains no model yet, so the flags define the model")
        return {}
    _check_fixed_settings(scanned, source)
    settings = source.model_settings()
    if flags.get("resize_vocab"):
        del settings["vocab_size"]
    _check_user_values(scanned, source, settings, is_finetune=bool(flags.get("finetune")))
    inherited = {field: value for field, value in settings.items() if field not in scanned.values}
    scanned.notes.append(f"model settings of {source.path}: {shlex.join(flag_words(inherited, source.config))}")
    starts_new_run = flags.get("finetune") or flags.get("load_weights_only")
    if starts_new_run or not source.optimizer:
        scanned.ignored |= dict.fromkeys(schedule_flags, "no learning-rate schedule is loaded")
    if starts_new_run:
        return inherited
    if source.missing_features:
        scanned.notes.append(f"{source.path}: this run continues without {'; '.join(source.missing_features)}")
    if schedule_flags and source.optimizer:
        _apply_saved_schedule(scanned, source)
    return {**inherited, **_retained_settings(scanned, source, flags)}


SCHEDULE_FIELDS = (
    "lr", "min_lr", "lr_decay_style", "warmup", "lr_warmup_rounding", "lr_step_offset", "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_decay_iters", "lr_decay_samples", "wsd_decay_fraction", "lr_wsd_decay_iters", "lr_wsd_decay_samples",
    "lr_wsd_decay_style", "lr_warmup_init", "weight_decay", "weight_decay_incr_style", "start_weight_decay",
    "end_weight_decay",
)  # fmt: skip
"""Optimizer fields that ``--use-checkpoint-opt_param-scheduler`` takes from the checkpoint."""


def _apply_saved_schedule(scanned: Scan, source: SettingsSource) -> None:
    """Set ``scanned.schedule`` to the source's schedule, and mark flags with other values as ignored.

    Source: Megatron-LM, core/optimizer_param_scheduler.py, ``OptimizerParamScheduler.load_state_dict``.
    """
    saved = {name: source.optimizer[name] for name in SCHEDULE_FIELDS if name in source.optimizer}
    for length in ("decay", "warmup"):
        if saved.get(f"lr_{length}_samples") is not None:  # the saved step count was derived from the samples
            saved[f"lr_{length}_iters"] = None
    for flag in ("--lr-decay-tokens", "--lr-warmup-tokens"):
        if scanned.converted.pop(flag, None) is not None:
            scanned.ignored[flag] = REPLACED_BY_SCHEDULE
    for name in SCHEDULE_FIELDS:
        flag_value, spelling = scanned.values.pop(name, None), scanned.spelling.pop(name, None)
        if spelling is not None and name in saved and flag_value != saved[name]:
            scanned.ignored[spelling] = REPLACED_BY_SCHEDULE
    for name in ("lr_decay_iters", "lr_decay_samples"):  # read by ``translate.resolve_lengths``
        if saved.get(name) is not None:
            scanned.values[name], scanned.spelling[name] = saved[name], f"{name} {saved[name]} of {source.path}"
    scanned.schedule = saved
    options = {option.name: option for _, option in all_options()}
    changed = {name: value for name, value in saved.items() if value is not None and value != options[name].default}
    description = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in changed.items())
    scanned.notes.append(f"learning-rate schedule of {source.path}: {description}")


def _retained_settings(scanned: Scan, source: SettingsSource, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Select the settings, as field -> value, that a resumed run keeps although their defaults have changed.

    A note lists the values that differ from the current defaults.
    """
    user_settings = {**scanned.values, **scanned.schedule}
    implied = {name: source.optimizer[name] for name in scanned.implied if name in source.optimizer}
    retained = {name: value for name, value in {**implied, **source.retained}.items() if name not in user_settings}
    defaults = {**{option.name: option.default for _, option in all_options()}, **scanned.implied, **flags}
    if changed := list(describe_saved_settings(retained, defaults, source.optimizer.get("optimizer"))):
        scanned.notes.append(f"settings of {source.path} that this run keeps: {', '.join(changed)}")
    return retained


def find_source(flags: Mapping[str, Any], name: str) -> Path | str | None:
    """Find the source that the flags (field -> value) name; None if the run starts from scratch.

    With --resume only, the source is the one that an earlier start of this job chose, or the newest run of this name.
    """
    if flags.get("load"):
        return object_store.path_or_name(flags["load"])
    if not flags.get("resume"):
        return None
    if flags.get("save"):
        return Path(flags["save"])
    choice_file = RUNS_DIR / ".by-launch" / (os.environ.get("MEGATRON_RUN_ID") or "-")
    if choice_file.is_file():
        _, *chosen_lines = choice_file.read_text().splitlines()
        return Path(chosen_lines[0]) if chosen_lines else None
    saved = {
        run: [*(run / CHECKPOINTS).glob("step-*"), *run.glob("global_step*")] for run in RUNS_DIR.glob(f"{name}-*")
    }
    mtimes = {run: max(path.stat().st_mtime for path in paths) for run, paths in saved.items() if paths}
    return max(mtimes, key=lambda run: mtimes[run], default=None)


def read_source(path: Path | str, family: str, model: str = "") -> SettingsSource | None:
    """Read the model settings in ``path``: a run folder, a checkpoint, or another program's folder.

    The other programs are Hugging Face's and Megatron-LM's (``torch_dist``).

    Returns None if ``path`` has no model, or its family is not supported.

    Args:
        model: value of ``--model``, which the source must agree with; empty without the flag.

    Raises:
        CheckpointError: the model is not of ``family``; or a Hugging Face folder has an unknown model, a missing file,
            or a config.json that contradicts the tensors.
    """
    if isinstance(path, Path) and is_huggingface(path):
        return read_huggingface(path, family, model)
    if isinstance(path, Path) and (iteration := find_iteration(path)) is not None:
        return read_torch_dist(iteration, family, model)
    newest = newest_metadata(path) if isinstance(path, Path) else remote.newest_metadata(path)
    if newest is None:
        return None
    settings_file, state = newest
    try:
        config = saved_config(state)
    except CheckpointError:
        return None
    check_family(config.family, family, f"{settings_file}: family {config.family}", model)
    settings = former.convert_settings(state["config"])
    stated_fields = {name for section in settings.values() if isinstance(section, dict) for name in section}
    return SettingsSource(
        settings_file, config, stated_fields, saved_settings(state["config"]), settings.get("optimizer", {})
    )


def is_huggingface(path: Path) -> bool:
    """Return True for a Hugging Face folder, even if its model is not supported."""
    if not (path / CONFIG).is_file():
        return False
    has_tensors = any((path / name).is_file() for name in (WEIGHTS, INDEX))
    return has_tensors or read_json(path, CONFIG).get("model_type") is not None


def detect_family(path: Path) -> str | None:
    """Detect the family of the model in ``path``; None without a model of a supported family."""
    if is_huggingface(path):
        return family_by_type().get(read_json(path, CONFIG).get("model_type", ""))
    if find_iteration(path) is not None:
        return FAMILY
    newest = newest_metadata(path)
    config = newest[1].get("config") if newest else None
    family = config.get("family") if isinstance(config, dict) else None
    return family if family in FAMILIES else None


def _check_fixed_settings(scanned: Scan, source: SettingsSource) -> None:
    """Check that the source has the fixed settings for the model type in ``--model``.

    ``_check_user_values`` checks the settings given on the command line.

    Raises:
        CheckpointError: lists the settings that differ.
    """
    model_type = find_architecture(scanned.values.get("architecture", ""))
    fixed = {} if model_type is None else model_type.fixed
    saved = source.model_settings()
    differing = [
        f"{name} {saved[name]} instead of {value}"
        for name, value in fixed.items()
        if name in saved and name not in scanned.values and saved[name] != value
    ]
    if differing:
        raise CheckpointError(
            f"{source.path} does not match --model {scanned.values['architecture']}: {', '.join(differing)}. "
            "Omit --model to continue with the settings of the checkpoint, or choose another folder"
        )


def _check_user_values(
    scanned: Scan, source: SettingsSource, settings: Mapping[str, Any], *, is_finetune: bool
) -> None:
    """Check that the values given by the user agree with the source.

    Args:
        is_finetune: --finetune is given, so ``REFITTED`` settings may differ.

    Raises:
        CheckpointError: lists every setting that differs, with both values and where each comes from.
    """
    refitted, sides = source.config.refitted, source.config.family_config.SIDES
    free_fields = {*INHERITED_FIELDS} - {*source.config.identity()} | ({*refitted} if is_finetune else set())
    differing = {
        name: value
        for name, value in settings.items()
        if name in scanned.values
        and name not in free_fields
        and not _is_equivalent(source.config, name, scanned.values[name], value)
    }
    num_layers = scanned.values.get("num_layers")  # default for the layers of a T5's encoder and decoder
    differing_sides = [
        f"{settings.get(side)} of {side}"
        for side in sides
        if side not in scanned.values and settings.get(side) != num_layers
    ]
    if sides and num_layers is not None and differing_sides:
        differing["num_layers"] = ", ".join(differing_sides)
    if not differing:
        return
    fixes = ["Omit these flags to use the values of the checkpoint"]
    if not is_finetune and any(name in refitted for name in differing):
        fixes.append("add --finetune, which starts a new run and allows other values of settings such as --rotary-base")
    if is_finetune and "vocab_size" in differing:
        fixes.append("add --resize-vocab, which allows another vocabulary size")
    table = "\n".join(
        f"  {name}: saved {value}, now {scanned.values[name]} ({scanned.spelling.get(name, 'set by the user')})"
        for name, value in differing.items()
    )
    raise CheckpointError(
        f"the model settings must match the checkpoint, {len(differing)} differ from {source.path}:\n{table}\n"
        f"{', or '.join(fixes)}"
    )


def _is_equivalent(config: Config, name: str, user_value: Any, saved_value: Any) -> bool:
    """Return True if both values mean the same setting; some settings accept two spellings of a value."""
    section = config.model if hasattr(config.model, name) else config.family_config
    return bool(getattr(replace(section, **{name: user_value}), name) == saved_value)
