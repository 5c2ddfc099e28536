"""Settings that --load or --resume takes from a checkpoint or Hugging Face folder (the source). No torch.

| setting | if the user does not set it | if the user sets another value |
|---|---|---|
| settings that weights must share (``Config.identity``) | the source's, overriding the recipe's | error, exit code 3 |
| subset of these without effect on shapes (``REFITTED``) | the source's | error; with --finetune the user's |
| the vocabulary size | the source's, except with --resize-vocab | error; with --resize-vocab the user's |
| ``OF_WEIGHTS`` | the source's | the user's |

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
from megatron.arguments.sources import SCHEDULE_REPLACES
from megatron.arguments.translate import CHECKPOINT_SCHEDULE
from megatron.checkpoint import former, remote
from megatron.checkpoint.huggingface.config import (
    CONFIG,
    INDEX,
    WEIGHTS,
    family_by_type,
    read_json,
    saved_config,
    words_of,
)
from megatron.checkpoint.huggingface_args import read_huggingface
from megatron.checkpoint.manifest import CHECKPOINTS, newest_metadata
from megatron.checkpoint.settings_source import OF_WEIGHTS, Source, require_family
from megatron.config import Config
from megatron.config.changed_defaults import describe_kept, kept_settings
from megatron.errors import CheckpointError, marked
from megatron.models.architectures import architecture
from megatron.models.registry import FAMILIES

RUNS = Path("runs")


@marked(is_of_this_rank=False)
def bring(found: Scan, defaults: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Return field -> value of the model settings to take from the source; empty without a source.

    Only fields that the user did not set are returned. A line in ``found.notes`` lists these fields.

    Args:
        found: the values of the command line and --config.
        defaults: field -> value of the run script's recipe; the source overrides it.
        name: name of the run, for --resume.

    Raises:
        CheckpointError: the source's family does not match, its model is unknown, its config.json contradicts its
            tensors, or the user set a value that differs from the source's.
    """
    flags = {**defaults, **found.values}
    path = source_of(flags, name)
    source = None if path is None else read_source(path, found.family, found.values.get("architecture", ""))
    schedule_flags = [flag for flag in CHECKPOINT_SCHEDULE if flag in found.converted]
    if source is None:
        found.ignored |= dict.fromkeys(schedule_flags, "no checkpoint is loaded")
        problem = None if path is None else hub.load_problem(path)
        if problem and not (flags.get("dry_run") or flags.get("load_if_exists")):
            raise CheckpointError(problem)
        if path is not None:
            found.notes.append(f"{path} contains no model yet, so the flags define the model")
        return {}
    _require_fixed(found, source)
    settings = source.sizes()
    if flags.get("resize_vocab"):
        del settings["vocab_size"]
    _require_agreement(found, source, settings, is_anew=bool(flags.get("finetune")))
    brought = {field: value for field, value in settings.items() if field not in found.values}
    found.notes.append(f"model settings of {source.place}: {shlex.join(words_of(brought, source.config))}")
    starts_new_run = flags.get("finetune") or flags.get("load_weights_only")
    if starts_new_run or not source.optimizer:
        found.ignored |= dict.fromkeys(schedule_flags, "no learning-rate schedule is loaded")
    if starts_new_run:
        return brought
    if schedule_flags and source.optimizer:
        _take_schedule(found, source)
    return {**brought, **_keep_settings(found, source, flags)}


SCHEDULE = (
    "lr", "min_lr", "lr_decay_style", "warmup", "lr_warmup_rounding", "lr_warmup_iters", "lr_warmup_samples",
    "lr_decay_iters", "lr_decay_samples", "wsd_decay_fraction", "lr_wsd_decay_iters", "lr_wsd_decay_samples",
    "lr_wsd_decay_style", "weight_decay",
)  # fmt: skip
"""Optimizer fields that ``--use-checkpoint-opt_param-scheduler`` takes from the checkpoint."""


def _take_schedule(found: Scan, source: Source) -> None:
    """Set ``found.schedule`` to the source's schedule, and mark flags with other values as ignored.

    Source: Megatron-LM, core/optimizer_param_scheduler.py, ``OptimizerParamScheduler.load_state_dict``.
    """
    saved = {name: source.optimizer[name] for name in SCHEDULE if name in source.optimizer}
    for length in ("decay", "warmup"):
        if saved.get(f"lr_{length}_samples") is not None:  # the saved number of steps was derived from the samples
            saved[f"lr_{length}_iters"] = None
    for flag in ("--lr-decay-tokens", "--lr-warmup-tokens"):
        if found.converted.pop(flag, None) is not None:
            found.ignored[flag] = SCHEDULE_REPLACES
    for name in SCHEDULE:
        flag_value, spelling = found.values.pop(name, None), found.spelling.pop(name, None)
        if spelling is not None and name in saved and flag_value != saved[name]:
            found.ignored[spelling] = SCHEDULE_REPLACES
    for name in ("lr_decay_iters", "lr_decay_samples"):  # read by ``translate.lengths``
        if saved.get(name) is not None:
            found.values[name], found.spelling[name] = saved[name], f"{name} {saved[name]} of {source.place}"
    found.schedule = saved
    options = {option.name: option for _, option in all_options()}
    changed = {name: value for name, value in saved.items() if value is not None and value != options[name].default}
    listed = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in changed.items())
    found.notes.append(f"learning-rate schedule of {source.place}: {listed}")


def _keep_settings(found: Scan, source: Source, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return field -> value of the settings that a resumed run keeps although their defaults have changed.

    A note lists the values that differ from the current defaults.
    """
    user_settings = {**found.values, **found.schedule}
    implied = {name: source.optimizer[name] for name in found.implied if name in source.optimizer}
    kept = {name: value for name, value in {**implied, **source.kept}.items() if name not in user_settings}
    defaults = {**{option.name: option.default for _, option in all_options()}, **found.implied, **flags}
    if changed := list(describe_kept(kept, defaults, source.optimizer.get("optimizer"))):
        found.notes.append(f"settings of {source.place} that this run keeps: {', '.join(changed)}")
    return kept


def source_of(flags: Mapping[str, Any], name: str) -> Path | str | None:
    """Return the source that the flags (field -> value) name; None if the run starts from scratch.

    With --resume only, the source is the one that an earlier start of this job chose, or the newest run of this name.
    """
    if flags.get("load"):
        return object_store.path_or_name(flags["load"])
    if not flags.get("resume"):
        return None
    if flags.get("save"):
        return Path(flags["save"])
    choice_file = RUNS / ".by-launch" / (os.environ.get("MEGATRON_RUN_ID") or "-")
    if choice_file.is_file():
        _, *chosen = choice_file.read_text().splitlines()
        return Path(chosen[0]) if chosen else None
    saved = {run: [*(run / CHECKPOINTS).glob("step-*"), *run.glob("global_step*")] for run in RUNS.glob(f"{name}-*")}
    times = {run: max(path.stat().st_mtime for path in paths) for run, paths in saved.items() if paths}
    return max(times, key=lambda run: times[run], default=None)


def read_source(path: Path | str, family: str, model: str = "") -> Source | None:
    """Return the settings of the model in ``path``: a Hugging Face folder, a run folder or a checkpoint.

    Returns None if ``path`` has no model, or a model of a family that is not supported.

    Args:
        model: value of ``--model``, which the source must agree with; empty without the flag.

    Raises:
        CheckpointError: the model is not of ``family``; or a Hugging Face folder has an unknown model, a missing file,
            or a config.json that contradicts the tensors.
    """
    if isinstance(path, Path) and is_huggingface(path):
        return read_huggingface(path, family, model)
    newest = newest_metadata(path) if isinstance(path, Path) else remote.newest_metadata(path)
    if newest is None:
        return None
    settings_file, state = newest
    try:
        config = saved_config(state)
    except CheckpointError:
        return None
    require_family(config.family, family, f"{settings_file}: family {config.family}", model)
    settings = former.settings(state["config"])
    stated = {name for section in settings.values() if isinstance(section, dict) for name in section}
    return Source(settings_file, config, stated, kept_settings(state["config"]), settings.get("optimizer", {}))


def is_huggingface(path: Path) -> bool:
    """Return True if ``path`` is a Hugging Face folder, even if its model is not supported."""
    if not (path / CONFIG).is_file():
        return False
    has_tensors = any((path / name).is_file() for name in (WEIGHTS, INDEX))
    return has_tensors or read_json(path, CONFIG).get("model_type") is not None


def family_in(path: Path) -> str | None:
    """Return the family of the model in ``path``; None without a model of a supported family."""
    if is_huggingface(path):
        return family_by_type().get(read_json(path, CONFIG).get("model_type", ""))
    newest = newest_metadata(path)
    config = newest[1].get("config") if newest else None
    family = config.get("family") if isinstance(config, dict) else None
    return family if family in FAMILIES else None


def _require_fixed(found: Scan, source: Source) -> None:
    """Check that the source has the settings that are fixed for the model type given by ``--model``.

    ``_require_agreement`` checks the settings given on the command line.

    Raises:
        CheckpointError: lists the settings that differ.
    """
    model_type = architecture(found.values.get("architecture", ""))
    fixed = {} if model_type is None else model_type.fixed
    saved = source.sizes()
    differing = [
        f"{name} {saved[name]} instead of {value}"
        for name, value in fixed.items()
        if name in saved and name not in found.values and saved[name] != value
    ]
    if differing:
        raise CheckpointError(
            f"{source.place} does not match --model {found.values['architecture']}: {', '.join(differing)}. "
            "Omit --model to continue with the settings of the checkpoint, or choose another folder"
        )


def _require_agreement(found: Scan, source: Source, sizes: Mapping[str, Any], *, is_anew: bool) -> None:
    """Check that the values given by the user agree with the source.

    Args:
        is_anew: --finetune is given, so ``REFITTED`` settings may differ.

    Raises:
        CheckpointError: lists every setting that differs, with both values and where each comes from.
    """
    refitted, sides = source.config.refitted, source.config.own.SIDES
    free = {*OF_WEIGHTS} - {*source.config.identity()} | ({*refitted} if is_anew else set())
    differing = {
        name: value
        for name, value in sizes.items()
        if name in found.values and name not in free and not _is_same(source.config, name, found.values[name], value)
    }
    num_layers = found.values.get("num_layers")  # default for the layers of a T5's encoder and decoder
    other_sides = [
        f"{sizes.get(side)} of {side}" for side in sides if side not in found.values and sizes.get(side) != num_layers
    ]
    if sides and num_layers is not None and other_sides:
        differing["num_layers"] = ", ".join(other_sides)
    if not differing:
        return
    fixes = ["Omit these flags to use the values of the checkpoint"]
    if not is_anew and any(name in refitted for name in differing):
        fixes.append("add --finetune, which starts a new run and allows other values of settings such as --rotary-base")
    if is_anew and "vocab_size" in differing:
        fixes.append("add --resize-vocab, which allows another vocabulary size")
    table = "\n".join(
        f"  {name}: saved {value}, now {found.values[name]} ({found.spelling.get(name, 'set by the user')})"
        for name, value in differing.items()
    )
    raise CheckpointError(
        f"the model settings must match the checkpoint, {len(differing)} differ from {source.place}:\n{table}\n"
        f"{', or '.join(fixes)}"
    )


def _is_same(config: Config, name: str, given: Any, value: Any) -> bool:
    """Return True if ``given`` is equivalent to ``value``; some settings accept two spellings of a value."""
    section = config.model if hasattr(config.model, name) else config.own
    return bool(getattr(replace(section, **{name: given}), name) == value)
