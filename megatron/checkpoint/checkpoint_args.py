"""Settings that --load or --resume bring, next to those that the user gives (no torch).

| setting | nobody gave it | given and another |
|---|---|---|
| what weights must share (``Config.identity``) | the source's, ahead of the run script's recipe | an error, code 3 |
| of these, what fits other weights as well (``REFITTED``) | the same | with --finetune the given one |
| the vocabulary | the same, but with --resize-vocab | with --resize-vocab the given one |
| ``OF_WEIGHTS`` | the same | the given one |

A name given by ``--model`` must agree with the source: a family with that of the source, a model type with that of a
Hugging Face folder or with the settings of a run. Without ``--model`` any decoder takes the settings of the source.

A run that is continued also keeps the settings of ``config.changed_defaults`` with which it was started.
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
    """Return the sizes of the source that the flags name, as far as nobody gave them; none where there is no source.

    What was brought goes to ``found.notes``.

    Args:
        found: what the command line and --config say.
        defaults: field -> value of the recipe; the source wins over it.
        name: of the run, for --resume.

    Raises:
        CheckpointError: the source is of another family or of an unknown model, or contradicts itself; or a given size
            differs.
    """
    flags = {**defaults, **found.values}
    path = source_of(flags, name)
    source = None if path is None else read_source(path, found.family, found.values.get("architecture", ""))
    asked = [flag for flag in CHECKPOINT_SCHEDULE if flag in found.converted]
    if source is None:
        found.ignored |= dict.fromkeys(asked, "no checkpoint is loaded")
        problem = None if path is None else hub.load_problem(path)
        if problem and not (flags.get("dry_run") or flags.get("load_if_exists")):
            raise CheckpointError(problem)
        if path is not None:
            found.notes.append(f"{path} holds no model yet, so the sizes are those of the flags")
        return {}
    _require_fixed(found, source)
    sizes = source.sizes()
    if flags.get("resize_vocab"):
        del sizes["vocab_size"]
    _require_agreement(found, source, sizes, is_anew=bool(flags.get("finetune")))
    brought = {field: value for field, value in sizes.items() if field not in found.values}
    found.notes.append(f"sizes of {source.place}: {shlex.join(words_of(brought, source.config))}")
    starts_new_run = flags.get("finetune") or flags.get("load_weights_only")
    if starts_new_run or not source.optimizer:
        found.ignored |= dict.fromkeys(asked, "no learning-rate schedule is loaded")
    if starts_new_run:
        return brought
    if asked and source.optimizer:
        _take_schedule(found, source)
    return {**brought, **_keep_settings(found, source, flags)}


SCHEDULE = (
    "lr", "min_lr", "lr_decay_style", "warmup", "lr_warmup_rounding", "lr_warmup_iters", "lr_warmup_samples",
    "lr_decay_iters", "lr_decay_samples", "wsd_decay_fraction", "lr_wsd_decay_iters", "lr_wsd_decay_samples",
    "lr_wsd_decay_style", "weight_decay",
)  # fmt: skip
"""Fields of the optimizer that ``--use-checkpoint-opt_param-scheduler`` takes from the checkpoint."""


def _take_schedule(found: Scan, source: Source) -> None:
    """Set ``found.schedule``, and move the flags that it replaces to the ignored flags.

    Source: Megatron-LM, core/optimizer_param_scheduler.py, ``OptimizerParamScheduler.load_state_dict``.
    """
    saved = {name: source.optimizer[name] for name in SCHEDULE if name in source.optimizer}
    for length in ("decay", "warmup"):
        if saved.get(f"lr_{length}_samples") is not None:  # the number of steps was derived from it
            saved[f"lr_{length}_iters"] = None
    for flag in ("--lr-decay-tokens", "--lr-warmup-tokens"):
        if found.converted.pop(flag, None) is not None:
            found.ignored[flag] = SCHEDULE_REPLACES
    for name in SCHEDULE:
        given, typed = found.values.pop(name, None), found.spelling.pop(name, None)
        if typed is not None and name in saved and given != saved[name]:
            found.ignored[typed] = SCHEDULE_REPLACES
    for name in ("lr_decay_iters", "lr_decay_samples"):  # for ``translate.lengths``
        if saved.get(name) is not None:
            found.values[name], found.spelling[name] = saved[name], f"{name} {saved[name]} of {source.place}"
    found.schedule = saved
    options = {option.name: option for _, option in all_options()}
    changed = {name: value for name, value in saved.items() if value is not None and value != options[name].default}
    listed = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in changed.items())
    found.notes.append(f"learning-rate schedule of {source.place}: {listed}")


def _keep_settings(found: Scan, source: Source, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the run keeps although their default has changed; one line reports them."""
    given = {**found.values, **found.schedule}
    implied = {name: source.optimizer[name] for name in found.implied if name in source.optimizer}
    kept = {name: value for name, value in {**implied, **source.kept}.items() if name not in given}
    defaults = {**{option.name: option.default for _, option in all_options()}, **found.implied, **flags}
    if changed := list(describe_kept(kept, defaults, source.optimizer.get("optimizer"))):
        found.notes.append(f"settings of {source.place} that this run keeps: {', '.join(changed)}")
    return kept


def source_of(flags: Mapping[str, Any], name: str) -> Path | str | None:
    """Return what a start goes on from, by field -> value; None where it begins from scratch.

    With --resume alone it is the newest run of this name, or what an earlier start of this job has chosen.
    """
    if flags.get("load"):
        return object_store.path_or_name(flags["load"])
    if not flags.get("resume"):
        return None
    if flags.get("save"):
        return Path(flags["save"])
    note = RUNS / ".by-launch" / (os.environ.get("MEGATRON_RUN_ID") or "-")
    if note.is_file():
        _, *chosen = note.read_text().splitlines()
        return Path(chosen[0]) if chosen else None
    saved = {run: [*(run / CHECKPOINTS).glob("step-*"), *run.glob("global_step*")] for run in RUNS.glob(f"{name}-*")}
    times = {run: max(path.stat().st_mtime for path in paths) for run, paths in saved.items() if paths}
    return max(times, key=lambda run: times[run], default=None)


def read_source(path: Path | str, family: str, model: str = "") -> Source | None:
    """Return what ``path``, a Hugging Face folder, a run folder or a checkpoint, says of its model.

    Returns None where it holds none, or one that no family of ours describes.

    Args:
        model: value of ``--model``, which the source must agree with; empty without the flag.

    Raises:
        CheckpointError: it is not of ``family``; or of a Hugging Face folder an unknown model, a missing file, or
            sizes that contradict the tensors.
    """
    if isinstance(path, Path) and is_huggingface(path):
        return read_huggingface(path, family, model)
    newest = newest_metadata(path) if isinstance(path, Path) else remote.newest_metadata(path)
    if newest is None:
        return None
    place, state = newest
    try:
        config = saved_config(state)
    except CheckpointError:
        return None
    require_family(config.family, family, f"{place}: family {config.family}", model)
    settings = former.settings(state["config"])
    stated = {name for section in settings.values() if isinstance(section, dict) for name in section}
    return Source(place, config, stated, kept_settings(state["config"]), settings.get("optimizer", {}))


def is_huggingface(path: Path) -> bool:
    """Tell whether ``path`` is a folder of Hugging Face's, also of a model that we do not have."""
    if not (path / CONFIG).is_file():
        return False
    has_tensors = any((path / name).is_file() for name in (WEIGHTS, INDEX))
    return has_tensors or read_json(path, CONFIG).get("model_type") is not None


def family_in(path: Path) -> str | None:
    """Return the family of the model that ``path`` holds; None where it holds none of ours."""
    if is_huggingface(path):
        return family_by_type().get(read_json(path, CONFIG).get("model_type", ""))
    newest = newest_metadata(path)
    config = newest[1].get("config") if newest else None
    family = config.get("family") if isinstance(config, dict) else None
    return family if family in FAMILIES else None


def _require_fixed(found: Scan, source: Source) -> None:
    """Check that the source has the settings that every model of the type of ``--model`` has.

    A setting that the command line gives is compared by ``_require_agreement``.

    Raises:
        CheckpointError: listing the settings that differ.
    """
    named = architecture(found.values.get("architecture", ""))
    fixed = {} if named is None else named.fixed
    saved = source.sizes()
    differing = [
        f"{name} {saved[name]} instead of {value}"
        for name, value in fixed.items()
        if name in saved and name not in found.values and saved[name] != value
    ]
    if differing:
        raise CheckpointError(
            f"{source.place} does not hold a model of --model {found.values['architecture']}: {', '.join(differing)}. "
            "Leave --model out to continue with the settings of the checkpoint, or name another folder"
        )


def _require_agreement(found: Scan, source: Source, sizes: Mapping[str, Any], *, is_anew: bool) -> None:
    """Check that what was given is what the source says.

    Raises:
        CheckpointError: listing every size that differs, with both values and both places.
    """
    refitted, sides = source.config.refitted, source.config.own.SIDES
    free = {*OF_WEIGHTS} - {*source.config.identity()} | ({*refitted} if is_anew else set())
    differing = {
        name: value
        for name, value in sizes.items()
        if name in found.values and name not in free and not _is_same(source.config, name, found.values[name], value)
    }
    given = found.values.get("num_layers")  # stands for the layers of a side that nobody gave
    other = [f"{sizes.get(side)} of {side}" for side in sides if side not in found.values and sizes.get(side) != given]
    if sides and given is not None and other:
        differing["num_layers"] = ", ".join(other)
    if not differing:
        return
    cures = ["Leave them out: what nobody gives comes from the checkpoint"]
    if not is_anew and any(name in refitted for name in differing):
        cures.append("add --finetune, which starts anew from the weights with others of --rotary-base and its like")
    if is_anew and "vocab_size" in differing:
        cures.append("add --resize-vocab, which takes tables of another size")
    table = "\n".join(
        f"  {name}: saved {value}, now {found.values[name]} ({found.spelling.get(name, 'given')})"
        for name, value in differing.items()
    )
    raise CheckpointError(
        f"sizes must be those of the checkpoint, {len(differing)} differ from {source.place}:\n{table}\n"
        f"{', or '.join(cures)}"
    )


def _is_same(config: Config, name: str, given: Any, value: Any) -> bool:
    """Tell whether ``given`` means ``value``: a setting may have two words."""
    section = config.model if hasattr(config.model, name) else config.own
    return bool(getattr(replace(section, **{name: given}), name) == value)
