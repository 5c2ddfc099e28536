"""Sizes that nobody gave come from what --load or --resume names: a Hugging Face folder or a run; no torch."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from megatron import hub, object_store
from megatron.arguments.flag_values import all_options
from megatron.arguments.scan import Scan
from megatron.arguments.translate import CHECKPOINT_SCHEDULE
from megatron.checkpoint import former, remote
from megatron.checkpoint.huggingface.config import (
    CONFIG,
    INDEX,
    WEIGHTS,
    config_from_huggingface,
    copies,
    family_by_type,
    format_of,
    full_names,
    missing_file,
    missing_head,
    read_json,
    saved_config,
    uses_index,
    words_of,
)
from megatron.checkpoint.manifest import CHECKPOINTS, newest_state
from megatron.config import Config
from megatron.config.changed_defaults import describe_kept, kept_settings
from megatron.errors import CheckpointError, marked
from megatron.models.common.huggingface import NOTHING
from megatron.models.registry import FAMILIES, costs_of, is_common_decoder

# Which settings a source brings, and what becomes of those that the user gives too.
#
# | setting | nobody gave it | given and another |
# |---|---|---|
# | what weights must share (``Config.identity``) | the source's, ahead of the run script's recipe | an error, code 3 |
# | of these, what fits other weights as well (``REFITTED``) | the same | with --finetune the given one |
# | the vocabulary | the same, but with --resize-vocab | with --resize-vocab the given one |
# | ``OF_WEIGHTS`` | the same | the given one |
#
# A run that is continued also keeps the settings of ``config.changed_defaults`` with which it was started.

OF_WEIGHTS = ("max_position_embeddings", "layernorm_epsilon", "apply_residual_connection_post_layernorm")
"""Fields of the model with which weights were trained, beside those that they must share."""
RUNS = Path("runs")


@dataclass(frozen=True)
class Source:
    """What a folder says of its model.

    Args:
        place: the file that says it.
        stated: the fields that it says; of a run of an earlier version fewer than the model has.
        kept: field -> value of the settings that a continued run keeps (``config.changed_defaults``).
        optimizer: field -> value of the optimizer section of a run; empty for a Hugging Face folder.
    """

    place: Path | str
    config: Config
    stated: Container[str]
    kept: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    def sizes(self) -> dict[str, Any]:
        """Return field -> value of what the source brings."""
        flat = {**vars(self.config.model), **vars(self.config.own)}
        names = dict.fromkeys([*self.config.identity(), *OF_WEIGHTS])
        return {name: flat[name] for name in names if name in flat and name in self.stated}


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
    source = None if path is None else read_source(path, found.family)
    asked = [flag for flag in CHECKPOINT_SCHEDULE if flag in found.converted]
    if source is None:
        found.ignored |= dict.fromkeys(asked, "no checkpoint is loaded")
        problem = None if path is None else hub.load_problem(path)
        if problem and not (flags.get("dry_run") or flags.get("load_if_exists")):
            raise CheckpointError(problem)
        if path is not None:
            found.notes.append(f"{path} holds no model yet, so the sizes are those of the flags")
        return {}
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
    schedule = _take_schedule(found, source) if asked and source.optimizer else {}
    return {**brought, **_keep_settings(found, source, flags), **schedule}


SCHEDULE = (
    "lr", "min_lr", "lr_decay_style", "warmup", "lr_warmup_rounding", "lr_warmup_iters", "lr_warmup_samples",
    "lr_decay_iters", "lr_decay_samples", "wsd_decay_fraction", "lr_wsd_decay_iters", "lr_wsd_decay_samples",
    "lr_wsd_decay_style", "weight_decay",
)  # fmt: skip
"""Fields of the optimizer that ``--use-checkpoint-opt_param-scheduler`` takes from the checkpoint."""


def _take_schedule(found: Scan, source: Source) -> dict[str, Any]:
    """Return the schedule of the checkpoint and remove the flags of the command line that it replaces.

    Source: Megatron-LM, core/optimizer_param_scheduler.py, ``OptimizerParamScheduler.load_state_dict``.
    """
    saved = {name: source.optimizer[name] for name in SCHEDULE if name in source.optimizer}
    for length in ("decay", "warmup"):
        if saved.get(f"lr_{length}_samples") is not None:  # the number of steps was derived from it
            saved[f"lr_{length}_iters"] = None
    reason = "the schedule of the checkpoint replaces it"
    for flag in ("--lr-decay-tokens", "--lr-warmup-tokens"):
        if found.converted.pop(flag, None) is not None:
            found.ignored[flag] = reason
    for name in SCHEDULE:
        given, typed = found.values.pop(name, None), found.spelling.pop(name, None)
        if typed is not None and name in saved and given != saved[name]:
            found.ignored[typed] = reason
    for name in ("lr_decay_iters", "lr_decay_samples"):
        if saved.get(name) is not None:
            found.values[name], found.spelling[name] = saved[name], f"{name} {saved[name]} of {source.place}"
    options = {option.name: option for _, option in all_options()}
    changed = {name: value for name, value in saved.items() if value is not None and value != options[name].default}
    listed = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in changed.items())
    found.notes.append(f"learning-rate schedule of {source.place}: {listed}")
    return {name: value for name, value in saved.items() if name not in found.values}


def _keep_settings(found: Scan, source: Source, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the run keeps although their default has changed; one line reports them."""
    implied = {name: source.optimizer[name] for name in found.implied if name in source.optimizer}
    kept = {name: value for name, value in {**implied, **source.kept}.items() if name not in found.values}
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


def read_source(path: Path | str, family: str) -> Source | None:
    """Return what ``path``, a Hugging Face folder, a run folder or a checkpoint, says of its model.

    Returns None where it holds none, or one that no family of ours describes.

    Raises:
        CheckpointError: it is not of ``family``; or of a Hugging Face folder an unknown model, a missing file, or
            sizes that contradict the tensors.
    """
    if isinstance(path, Path) and is_huggingface(path):
        return _read_huggingface(path, family)
    newest = newest_state(path) if isinstance(path, Path) else remote.newest_state(path)
    if newest is None:
        return None
    place, state = newest
    try:
        config = saved_config(state)
    except CheckpointError:
        return None
    _require_family(config.family, family, f"{place}: family {config.family}")
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
    newest = newest_state(path)
    config = newest[1].get("config") if newest else None
    family = config.get("family") if isinstance(config, dict) else None
    return family if family in FAMILIES else None


def _require_family(family: str, wanted: str, said: str) -> None:
    if family != wanted and not (is_common_decoder(family) and is_common_decoder(wanted)):
        raise CheckpointError(
            f"{said} is {FAMILIES[family].title}, and this program trains {FAMILIES[wanted].title}. Use "
            f"{FAMILIES[family].program}, or name another folder with --load"
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


# Hugging Face folders: config.json, and the headers of the safetensors files, which must say the same.


def _read_huggingface(path: Path, family: str) -> Source:
    theirs, known = read_json(path, CONFIG), family_by_type()
    kind = theirs.get("model_type")
    if kind not in known:
        raise CheckpointError(
            f"{path / CONFIG}: model_type must be one of {', '.join(known)}, got {kind!r}. Its architecture is not here"
        )
    _require_family(known[kind], family, f"{path / CONFIG}: model_type {kind}")
    try:
        config = config_from_huggingface(theirs)
    except CheckpointError as error:
        raise CheckpointError(f"{path / CONFIG}: {error}") from error
    tensors = read_headers(path)
    config = _with_biases(config, tensors)
    if not _fits(config, tensors):
        raise CheckpointError(_misfit(path, theirs, config, tensors))
    fields = {option.name for _, option in all_options()}
    return Source(path / CONFIG, config, fields)


@dataclass(frozen=True)
class Header:
    """Where a tensor lies: ``start`` and ``stop`` in bytes of ``file``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_headers(folder: Path) -> dict[str, Header]:
    """Return name -> header of every tensor of a Hugging Face folder; of the tensors themselves nothing is read.

    Raises:
        CheckpointError: a file is missing, cut off, no safetensors, or lacks what the index says.
    """
    if not uses_index(folder):
        return _header_of(folder, WEIGHTS)
    index = read_json(folder, INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(Path(str(name)).name == name for name in index.values()):
        raise CheckpointError(
            f"{folder / INDEX} is not an index of safetensors: weight_map must say which file of the folder has which "
            "tensor"
        )
    held = {name: _header_of(folder, name) for name in sorted(set(index.values()))}
    if missing := sorted(key for key, name in index.items() if key not in held[name]):
        raise CheckpointError(f"{folder}: the files lack what the index says they hold: {', '.join(missing)}")
    return {key: held[name][key] for key, name in index.items()}


def _header_of(folder: Path, name: str) -> dict[str, Header]:
    path = folder / name
    if not path.exists():
        raise missing_file(folder, name)
    try:
        with open(path, "rb") as file:
            length, size = int.from_bytes(file.read(8), "little"), path.stat().st_size
            if not 0 < length <= size - 8:
                raise ValueError("the file is shorter than its header")
            said = json.loads(file.read(length))
        found = {
            key: Header(path, one["dtype"], tuple(one["shape"]), *(8 + length + at for at in one["data_offsets"]))
            for key, one in said.items()
            if key != "__metadata__"
        }
        end = max((header.stop for header in found.values()), default=8 + length)
        if end != size:
            raise ValueError(f"it has {size} bytes, and {end} by its header")
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


def _with_biases(config: Config, tensors: Mapping[str, Header]) -> Config:
    """Return ``config`` as it is, or with biases where it says that there are none and some are not zero."""
    biases = format_of(config).biases
    if config.model.hidden_bias or biases is NOTHING:
        return config
    names = full_names(tensors, config)
    has_biases = any(_is_set(tensors[name]) for full, name in names.items() if biases.fullmatch(full))
    return replace(config, model=replace(config.model, hidden_bias=has_biases))


def _is_set(header: Header) -> bool:
    """Tell whether a tensor has a number that is neither 0 nor -0."""
    with open(header.file, "rb") as file:
        file.seek(header.start)
        data = file.read(header.stop - header.start)
    width = max(len(data) // max(prod(header.shape), 1), 1)
    signs = data[width - 1 :: width]  # little-endian: the byte with the sign is the last of each number
    return bool(signs.strip(b"\0\x80")) or any(data[at::width].strip(b"\0") for at in range(width - 1))


def _fits(config: Config, tensors: Mapping[str, Header]) -> bool:
    """Tell whether names and numbers of the tensors are those of the model."""
    expected, found = _expected(config), _found(config, tensors)
    word = format_of(config).word
    if expected != found.keys() or len(found[word].shape) != 2:
        return False
    if found[word].shape != (config.model.vocab_size, config.model.hidden_size):
        return False
    whole = replace(config, model=replace(config.model, make_vocab_size_divisible_by=1))
    return bool(sum(prod(header.shape) for header in found.values()) == costs_of(whole).num_parameters)


def _expected(config: Config) -> set[str]:
    hf_format = format_of(config)
    return {name for recipe in hf_format.recipes(config).values() for name in recipe.names} - {*copies(config)}


def _found(config: Config, tensors: Mapping[str, Header]) -> dict[str, Header]:
    """Return the tensors that count by their full names: no copies, no biases that a model of ours lacks."""
    hf_format, expected = format_of(config), _expected(config)
    found = {full: tensors[name] for full, name in full_names(tensors, config).items()}
    if hf_format.ties_missing_head and hf_format.head in expected and hf_format.word in found:
        found.setdefault(hf_format.head, found[hf_format.word])
    return {
        full: header
        for full, header in found.items()
        if full not in copies(config) and (full in expected or not hf_format.biases.fullmatch(full))
    }


def _misfit(path: Path, theirs: Mapping[str, Any], config: Config, tensors: Mapping[str, Header]) -> str:
    """Return what is told of a folder whose config.json is not of its tensors: the key that would mend it, or names."""
    mended = dict(_mended(theirs, config, tensors))
    if mended:
        got = ", ".join(f"{key} {theirs[key]}" for key in mended)
        fitting = " or ".join(f"{key} {other}" for key, other in mended.items())
        return (
            f"{path / CONFIG}: the sizes must be those of the tensors, got {got}, and the tensors are those of "
            f"{fitting}. Fetch the folder again, or correct the key"
        )
    expected, found = _expected(config), _found(config, tensors)
    problems = [f"{name}: missing" for name in sorted(expected - found.keys())]
    problems += [f"{name}: no such tensor in this model" for name in sorted(found.keys() - expected)]
    shapes = [f"{name} {list(header.shape)} in {header.file.name}" for name, header in found.items()]
    what = "; ".join(problems[:8] or [f"the shapes {', '.join(shapes[:8])}"])
    more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
    advice = missing_head(expected - found.keys(), config) or ". Fetch the folder again"
    return f"{path / CONFIG} does not describe the tensors of its folder: {what}{more}{advice}"


def _mended(theirs: Mapping[str, Any], config: Config, tensors: Mapping[str, Header]) -> Iterator[tuple[str, int]]:
    """Yield the keys of config.json of which another value alone makes it fit, and that value."""
    for key, value in theirs.items():
        if type(value) is not int or key.endswith("_id"):
            continue
        for other in sorted(_sizes_in(tensors, config) - {value}):
            try:
                is_it = _fits(_with_biases(config_from_huggingface({**theirs, key: other}), tensors), tensors)
            except CheckpointError:
                continue
            if is_it:
                yield key, other
                break


def _sizes_in(tensors: Mapping[str, Header], config: Config) -> set[int]:
    """Return the numbers that a size may be: lengths of tensors, of their parts by head, and numbers of layers."""
    lengths = {length for header in tensors.values() for length in header.shape}
    heads = {config.model.kv_hidden_size, config.model.num_attention_heads}
    parts = {length // head for length in lengths for head in heads if head and length % head == 0}
    layers: dict[str, int] = {}
    for name in tensors:
        words = name.split(".")
        number = next((at for at, word in enumerate(words) if word.isdecimal()), None)
        if number is not None:
            kind = ".".join(words[:number])
            layers[kind] = max(layers.get(kind, 0), int(words[number]) + 1)
    return lengths | parts | {*layers.values()}
