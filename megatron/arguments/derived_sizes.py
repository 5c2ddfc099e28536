"""Sizes that follow from others: micro-batch and accumulation from the global batch, layers from a pattern, chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.arguments.scan import Scan
from megatron.config.batch import BatchConfig
from megatron.config.batch_rampup import SCHEDULE_FLAG, schedule_entries
from megatron.config.layer_types import PIPELINE_BOUND, parse_pattern
from megatron.config.model import ModelConfig
from megatron.config.pipeline_layout import FLAG as LAYOUT_FLAG
from megatron.models.registry import FAMILIES

GLOBAL_BATCH_FIELD = "requested_global_batch_size"


JSON_KEYS = {
    GLOBAL_BATCH_FIELD: "train_batch_size",
    "batch_size": "train_micro_batch_size_per_gpu",
    "gas": "gradient_accumulation_steps",
}
"""Field -> key of DeepSpeed's JSON."""


def resolve_batch_size(
    scanned: Scan, explicit: Mapping[str, Any], defaults: Mapping[str, Any], world_size: int
) -> dict[str, Any]:
    """Derive sizes from the global batch size, as field -> value; contradictions are added to ``scanned.problems``.

    global batch = micro-batch x gas x replicas. "Stated" means set by a flag or the JSON, not by a default:

    * If all three sizes are stated, they must agree.
    * If one of micro-batch size and gas is stated, the other one is computed.
    * If neither is stated, the micro-batch size is the largest that divides the batch and does not exceed its default.
    * If only the JSON states a global batch, gas is 1, as in DeepSpeed.
    * A global batch that is only a default is dropped if gas is stated.

    Args:
        explicit: field -> value of flags and JSON.
        defaults: field -> value of the sources of defaults.
    """
    derived = _last_scheduled_size(scanned, {**defaults, **explicit}) if GLOBAL_BATCH_FIELD not in explicit else {}
    explicit = {**explicit, **derived}
    merged = {**defaults, **explicit}
    total, t, p = (
        merged.get(GLOBAL_BATCH_FIELD),
        merged.get("model_parallel_size", 1),
        max(merged.get("pipe_parallel_size", 1), 1),
    )
    c = merged.get("context_parallel_size", 1)
    if not total or c < 1 or world_size % (t * p * c):
        return {}
    if GLOBAL_BATCH_FIELD not in explicit and "gas" in explicit:
        return {GLOBAL_BATCH_FIELD: 0}
    d = world_size // (t * p * c)
    replicas = f"dp = world {world_size} / (tp {t} x pp {p}{f' x cp {c}' if c > 1 else ''})"
    micro, gas = explicit.get("batch_size"), explicit.get("gas")
    if micro and gas:
        if total != micro * gas * d:
            scanned.problems.append(_disagreement(scanned, total, micro, gas, d, replicas))
        return {}
    known = [("micro", micro)] if micro else [("gas", gas)] if gas else []
    product = (micro or gas or 1) * d
    if total % product:
        names = " x ".join([*(name for name, _ in known), "dp"])
        terms = " x ".join(f"{name} {size}" for name, size in [*known, ("dp", d)])
        fix = _origin(scanned, "batch_size" if micro else "gas") + " or the global batch" if known else "it"
        scanned.problems.append(
            f"train_batch_size must be a multiple of {names}, got {total} and {terms} = {product}; {replicas}. "
            f"Change {fix}"
        )
        return {}
    if known:
        return {"gas" if micro else "batch_size": total // product}
    if (
        GLOBAL_BATCH_FIELD in explicit and GLOBAL_BATCH_FIELD not in scanned.values
    ):  # from the JSON, where a missing accumulation means 1
        return {"batch_size": total // d, "gas": 1}
    samples, max_micro = total // d, defaults.get("batch_size", BatchConfig().batch_size)
    size = max(size for size in range(1, min(max_micro, samples) + 1) if samples % size == 0)
    default_pair = (max_micro, defaults.get("gas", BatchConfig().gas))
    if (size, samples // size) != default_pair:
        scanned.notes.append(
            f"a global batch of {total} on {d} replica{'' if d == 1 else 's'} becomes --batch-size {size} x --gas "
            f"{samples // size} instead of {default_pair[0]} x {default_pair[1]}; set one of the two to change this"
        )
    return {"batch_size": size, "gas": samples // size}


def _last_scheduled_size(scanned: Scan, values: Mapping[str, Any]) -> dict[str, int]:
    """Return the global batch of --step-batch-size-schedule as field -> value, as if a flag had set it.

    Invalid schedules are reported by the checks of the configuration.
    """
    text = values.get("step_batch_size_schedule")
    try:
        size = 0 if text is None else schedule_entries(text)[-1][1]
    except ValueError:
        return {}
    if not size:
        return {}
    scanned.values[GLOBAL_BATCH_FIELD], scanned.spelling[GLOBAL_BATCH_FIELD] = size, f"{SCHEDULE_FLAG} {text}"
    return {GLOBAL_BATCH_FIELD: size}


def _disagreement(scanned: Scan, total: int, micro: int, gas: int, d: int, replicas: str) -> str:
    product = micro * gas * d
    return (
        f"train_batch_size {total} != micro {micro} x gas {gas} x dp {d} = {product}; {replicas}. "
        f'Set train_batch_size to {product} or "auto", or change {_origin(scanned, "batch_size")} or '
        f"{_origin(scanned, 'gas')}"
    )


def _origin(scanned: Scan, name: str) -> str:
    return scanned.spelling.get(name, JSON_KEYS[name])


_CHUNK_FLAGS = {
    "pipeline_chunks": "--pipeline-chunks",
    "layers_per_chunk": "--num-layers-per-virtual-pipeline-stage",
    "partition_method": "--partition-method",
}


def resolve_layer_pattern(scanned: Scan, explicit: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of layers and the pipeline layout of --hybrid-layer-pattern, and the pattern without bounds.

    The bounds ``|`` have no effect without a pipeline. A contradiction is added to ``scanned.problems``; an invalid
    pattern is reported by ``megatron.config.recurrent``.

    Args:
        explicit: field -> value of flags and JSON.
        defaults: field -> value of the sources of defaults.
    """
    merged = {**defaults, **explicit}
    pattern = merged.get("hybrid_layer_pattern", "")
    try:
        letters = parse_pattern(pattern)
    except ValueError:
        return {}
    values: dict[str, Any] = {"hybrid_layer_pattern": letters}
    if "num_layers" not in explicit:
        values["num_layers"] = len(letters)
    num_stages = merged.get("pipe_parallel_size", 1)
    if PIPELINE_BOUND in pattern and num_stages > 1:
        chunks = pattern.split(PIPELINE_BOUND)
        if merged.get("pipeline_layout"):
            scanned.problems.append(
                f"{LAYOUT_FLAG} cannot be combined with | in --hybrid-layer-pattern, got {merged['pipeline_layout']!r} "
                f"and {pattern!r}. Remove one of them"
            )
        elif flags := [flag for name, flag in _CHUNK_FLAGS.items() if name in explicit]:
            scanned.problems.append(
                f"| in --hybrid-layer-pattern determines the chunks, got {pattern!r} and {', '.join(flags)}. Remove "
                "one of them"
            )
        elif len(chunks) % num_stages or not all(chunks[1:-1]):
            scanned.problems.append(
                "--hybrid-layer-pattern must have layers between any two | and a multiple of --pipe-parallel-size "
                f"chunks, got {pattern!r} with {len(chunks)} chunks and {num_stages}. Move the |, or remove them"
            )
        else:
            values["pipeline_layout"] = f"E{PIPELINE_BOUND.join('t' * len(chunk) for chunk in chunks)}L"
    return values


FLAG = "--num-layers-per-virtual-pipeline-stage"


def resolve_chunks(scanned: Scan, explicit: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Derive the chunk count from the layers per chunk, as field -> value, or {} if it is not derived.

    chunks = layers / (stages x layers per chunk). For an encoder-decoder, the layers on both sides are added. A
    contradiction is added to ``scanned.problems``.

    Args:
        explicit: field -> value of flags and JSON.
        defaults: field -> value of the sources of defaults.
    """
    merged = {**defaults, **explicit}
    size, stages = merged.get("layers_per_chunk"), merged.get("pipe_parallel_size", 0)
    if not size or stages < 2 or ("layers_per_chunk" not in explicit and "pipeline_chunks" in explicit):
        return {}
    layers = merged.get("num_layers", ModelConfig().num_layers)
    name = "--num-layers"
    if sides := FAMILIES[scanned.family].config.SIDES:
        layers = sum(merged.get(side) or layers for side in sides)
        name = "the layers of both sides"
    if layers % (stages * size):
        scanned.problems.append(
            f"{name} must be a multiple of --pipe-parallel-size x {FLAG}, got {layers} and {stages} x {size} = "
            f"{stages * size}. Change one of them, or use --pipeline-chunks, which supports any number of layers"
        )
        return {}
    chunks = layers // (stages * size)
    if explicit.get("pipeline_chunks", chunks) != chunks:
        scanned.problems.append(
            f"{FLAG} and --pipeline-chunks must agree, got {layers} layers / ({stages} stages x {size}) = {chunks} and "
            f"{explicit['pipeline_chunks']}. Remove one of them"
        )
    return {"pipeline_chunks": chunks}


EMBEDDING_FLAG, LOSS_FLAG = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"


def resolve_accounted_layout(scanned: Scan, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layout of a pipeline that has fewer layers than chunks, as field -> value, or {} if it is not needed.

    Megatron counts the embedding, the loss, or both as layers, so that the first or the last chunk can be without
    layers. If every chunk has a layer, the partition method balances the stages instead.
    """
    counted = [flag for flag in (EMBEDDING_FLAG, LOSS_FLAG) if flag in scanned.converted]
    layers, stages = values.get("num_layers", ModelConfig().num_layers), values.get("pipe_parallel_size", 1)
    num_chunks = stages * max(values.get("pipeline_chunks", 1), 1)
    per_chunk, rest = divmod(layers + len(counted), max(num_chunks, 1))
    if stages < 2 or layers >= num_chunks or rest or values.get("pipeline_layout"):
        scanned.ignored |= dict.fromkeys(counted, "--partition-method balances the stages by cost")
        return {}
    letters = ["E"] * (EMBEDDING_FLAG in counted) + ["t"] * layers + ["L"] * (LOSS_FLAG in counted)
    chunks = ["".join(letters[start : start + per_chunk]) for start in range(0, len(letters), per_chunk)]
    if EMBEDDING_FLAG not in counted:
        chunks[0] = f"E{chunks[0]}"
    if LOSS_FLAG not in counted:
        chunks[-1] += "L"
    return {"pipeline_layout": PIPELINE_BOUND.join(chunks), "pipeline_chunks": 1, "layers_per_chunk": 0}
