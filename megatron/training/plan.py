"""What a configuration means on a grid of ranks: the rows of the start table, by arithmetic alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron import cost
from megatron.config import Config
from megatron.errors import ConfigError
from megatron.mpu.topology import Topology
from megatron.stages import AUTO, bubble, by_default, candidates, in_flight, pieces_on
from megatron.tokenizer import build as build_tokenizer
from megatron.training.screen import Screen, human_bytes, human_count

Forecast = Callable[[int, int, str, int, Sequence[float] | None], float]


def with_tokenizer(config: Config) -> tuple[Any, Config]:
    """Return the tokenizer, where one is named, and the configuration with its vocabulary."""
    data = config.data
    if not (data.tokenizer_path or data.vocab_file):
        return None, config if config.model.vocab_size is None else config.with_vocab(config.model.vocab_size)
    tokenizer = build_tokenizer(
        data.tokenizer_type, vocab_file=data.vocab_file, merge_file=data.merge_file, tokenizer_path=data.tokenizer_path
    )
    return tokenizer, config.with_vocab(tokenizer.vocab_size)


def dry_run(config: Config, world_size: int) -> None:
    """Print the start table of a run on ``world_size`` ranks, without forming it. Rank 0 speaks."""
    if os.environ.get("RANK", "0") != "0":
        return
    _, config = with_tokenizer(config)
    if config.model.vocab_size is None:
        raise ConfigError("--dry-run reckons with a vocabulary: give --tokenizer-path or --vocab-size")
    parallel = config.parallel
    topology = Topology.of_world(world_size, parallel.model_parallel_size, parallel.num_stages)
    bounds = cost.stage_bounds(config.model, config.batch.seq_length, topology.pipe, parallel.chunks)
    dtype = config.precision.dtype or "the device's default"
    screen = Screen("plain", config.batch.train_iters)
    screen.table("Plan (nothing was started)", plan_rows(config, topology, bounds, dtype))


def is_gpt2(config: Config, counted: Sequence[int]) -> bool:
    """Return whether a model of ``counted[0]`` parameters is the GPT-2 of ``config``: then its costs are known."""
    return config.model.vocab_size is not None and counted[0] == cost.num_parameters(config.model)


def plan_rows(
    config: Config,
    topology: Topology,
    bounds: Sequence[int],
    dtype: str,
    counted: Sequence[int] | None = None,
    forecast: Forecast | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield name and text of each row.

    Args:
        bounds: of the pieces, in layers as the pipeline counts them; with chunks a stage has several pieces.
        counted: parameters of the whole model, then of one rank of each stage; None for GPT-2 before it is built.
        forecast: gives the bubble as ``megatron.stages.bubble`` does; None: by its closed forms.
    """
    batch, d = config.batch, topology.data
    yield "layout", f"{topology.world_size} ranks = pipe {topology.pipe} x data {d} x tensor {topology.tensor}"
    known = counted is None or is_gpt2(config, counted)
    if counted is None or known:
        yield from _gpt2_rows(config, topology, bounds, dtype)
    else:
        yield from _own_model_rows(config, counted, bounds)
    yield (
        "tokens per step",
        f"{batch.global_batch_size(d) * batch.seq_length:,} = sequence {batch.seq_length} x micro-batch "
        f"{batch.batch_size} x {batch.gas} micro-batches x {d} replicas",
    )
    if topology.pipe > 1:
        yield from _pipeline_rows(config, topology.pipe, bounds, forecast, known)
    yield "precision", f"{dtype}, gradient norm clipped at {config.optimizer.clip_grad or 'nothing'}"
    yield "data", f"{config.data.data_path}, split {config.data.split}" if config.data.data_path else "the script's own"


def _own_model_rows(config: Config, counted: Sequence[int], bounds: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield the rows of a model of which nothing is known but its parameters and the bounds of its pieces."""
    yield "model", f"{human_count(counted[0])} parameters"
    stages = len(counted) - 1
    for stage, held in enumerate(counted[1:]):
        layers = f"layers {layers_text(bounds, stages, stage)}, " if stages > 1 else ""
        kept = f"; {_kept_text(config, bounds, stages, stage)}" if stages > 1 else ""
        yield f"stage {stage}", f"{layers}{human_count(held)} parameters on each rank{kept}"


def _gpt2_rows(config: Config, topology: Topology, bounds: Sequence[int], dtype: str) -> Iterator[tuple[str, str]]:
    model = config.model
    yield (
        "model",
        f"{human_count(cost.num_parameters(model))} parameters: {model.num_layers} layers, hidden {model.hidden_size}, "
        f"{model.num_attention_heads} heads, feed-forward {model.ff_hidden_size}, vocabulary {model.vocab_size}",
    )
    yield from _stage_rows(config, topology, bounds, dtype)


def _stage_rows(config: Config, topology: Topology, bounds: Sequence[int], dtype: str) -> Iterator[tuple[str, str]]:
    model, batch, stages = config.model, config.batch, topology.pipe
    memory = cost.memory_per_stage(
        model,
        bounds,
        seq_length=batch.seq_length,
        micro_batch_size=batch.batch_size,
        num_micro_batches=batch.gas,
        tensor=topology.tensor,
        dtype=dtype if dtype in cost.BYTES else "fp32",
        optimizer=config.optimizer.optimizer,
        checkpoint_activations=config.parallel.checkpoint_activations,
        **_schedule(config, bounds, stages),
    )
    held = cost.stage_parameters(model, bounds, topology.tensor, stages)
    for stage in range(stages):
        kept = f"; {_kept_text(config, bounds, stages, stage)}" if stages > 1 else ""
        yield (
            f"stage {stage}",
            f"layers {layers_text(bounds, stages, stage)} of {model.num_layers + 3}, {human_count(held[stage])} "
            f"parameters and about {human_bytes(memory[stage].total)} on each rank{kept}",
        )


def _pipeline_rows(
    config: Config, stages: int, bounds: Sequence[int], forecast: Forecast | None, is_known: bool
) -> Iterator[tuple[str, str]]:
    """Yield the schedule and the share of a step in which stages will idle."""
    schedule, chunks = _schedule(config, bounds, stages).values()
    m, method = config.batch.gas, config.parallel.partition_method
    each = f", {chunks} chunks on each stage" if chunks > 1 else ""
    yield "pipeline", f"schedule {schedule}{each}"
    if forecast is None and method != "balanced":
        yield "partition", f"--partition-method {method} cuts at the start; the stages above are the balanced ones"
    costs = cost.piece_costs(config.model, bounds, config.batch.seq_length) if is_known else None
    idle_share, about = forecast or bubble, "" if forecast else "about "
    told = []
    for name in candidates(schedule, chunks):
        idle, at_best = (100 * idle_share(stages, m, name, chunks, given) for given in (costs, None))
        what = (
            f"{about}{idle:.1f} % expected, {at_best:.1f} % with equal stages"
            if is_known
            else (f"{at_best:.1f} % with equal stages")
        )
        told.append(f"{name}: {what}" if schedule == AUTO else what)
    note = " (fewer micro-batches than stages: raise --gas)" if m < stages else ""
    yield "pipeline bubble", "; ".join(told) + note


def _schedule(config: Config, bounds: Sequence[int], stages: int) -> dict[str, Any]:
    """Return the schedule's name, and the chunks as they were built: a script may have its own."""
    chunks = (len(bounds) - 1) // stages
    return {"schedule": config.parallel.pipeline_schedule or by_default(chunks), "chunks": chunks}


def layers_text(bounds: Sequence[int], stages: int, stage: int) -> str:
    """Return the layers of a stage in words, the pieces of its chunks in their order: "0-2 and 6-8"."""
    pieces = pieces_on(bounds, stages, stage)
    return " and ".join(str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in pieces)


def _kept_text(config: Config, bounds: Sequence[int], stages: int, stage: int) -> str:
    schedule, chunks = _schedule(config, bounds, stages).values()
    kept = in_flight(stages, config.batch.gas, schedule, chunks, stage)
    whole = f"{config.batch.gas} x {chunks} forwards" if chunks > 1 else f"{config.batch.gas} micro-batches"
    return f"keeps the activations of {kept} of {whole}"
