"""What a configuration means on a grid of ranks: the rows of the start table, by arithmetic alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from megatron import cost
from megatron.config import Config
from megatron.errors import ConfigError
from megatron.mpu.topology import Topology
from megatron.tokenizer import build as build_tokenizer
from megatron.training.screen import Screen, human_bytes, human_count


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
    bounds = cost.stage_bounds(config.model, config.batch.seq_length, topology.pipe)
    dtype = config.precision.dtype or "the device's default"
    screen = Screen("plain", config.batch.train_iters)
    screen.table("Plan (nothing was started)", plan_rows(config, topology, bounds, dtype))


def is_gpt2(config: Config, counted: Sequence[int]) -> bool:
    """Return whether a model of ``counted[0]`` parameters is the GPT-2 of ``config``: then its costs are known."""
    return config.model.vocab_size is not None and counted[0] == cost.num_parameters(config.model)


def plan_rows(
    config: Config, topology: Topology, bounds: Sequence[int], dtype: str, counted: Sequence[int] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield name and text of each row.

    Args:
        bounds: of the stages, in layers as the pipeline counts them.
        counted: parameters of the whole model, then of one rank of each stage; None for GPT-2 before it is built.
    """
    batch, d = config.batch, topology.data
    yield "layout", f"{topology.world_size} ranks = pipe {topology.pipe} x data {d} x tensor {topology.tensor}"
    if counted is None or is_gpt2(config, counted):
        yield from _gpt2_rows(config, topology, bounds, dtype)
    else:
        yield from _own_model_rows(counted, bounds)
    yield (
        "tokens per step",
        f"{batch.global_batch_size(d) * batch.seq_length:,} = sequence {batch.seq_length} x micro-batch "
        f"{batch.batch_size} x {batch.gas} micro-batches x {d} replicas",
    )
    if topology.pipe > 1:
        note = " (fewer micro-batches than stages: raise --gas)" if batch.gas < topology.pipe else ""
        yield "pipeline bubble", f"{100 * cost.bubble(topology.pipe, batch.gas):.1f} % for equal stages{note}"
    yield "precision", f"{dtype}, gradient norm clipped at {config.optimizer.clip_grad or 'nothing'}"
    yield "data", f"{config.data.data_path}, split {config.data.split}" if config.data.data_path else "the script's own"


def _own_model_rows(counted: Sequence[int], bounds: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield the rows of a model of which nothing is known but its parameters and the bounds of its stages."""
    yield "model", f"{human_count(counted[0])} parameters"
    for stage, held in enumerate(counted[1:]):
        layers = f"layers {bounds[stage]}-{bounds[stage + 1] - 1}, " if len(counted) > 2 else ""
        yield f"stage {stage}", f"{layers}{human_count(held)} parameters on each rank"


def _gpt2_rows(config: Config, topology: Topology, bounds: Sequence[int], dtype: str) -> Iterator[tuple[str, str]]:
    model = config.model
    yield (
        "model",
        f"{human_count(cost.num_parameters(model))} parameters: {model.num_layers} layers, hidden {model.hidden_size}, "
        f"{model.num_attention_heads} heads, feed-forward {model.ff_hidden_size}, vocabulary {model.vocab_size}",
    )
    yield from _stage_rows(config, topology, bounds, dtype)


def _stage_rows(config: Config, topology: Topology, bounds: Sequence[int], dtype: str) -> Iterator[tuple[str, str]]:
    model, batch = config.model, config.batch
    num_units = model.num_layers + 3
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
    )
    held = cost.stage_parameters(model, bounds, topology.tensor)
    for stage in range(topology.pipe):
        yield (
            f"stage {stage}",
            f"layers {bounds[stage]}-{bounds[stage + 1] - 1} of {num_units}, {human_count(held[stage])} parameters "
            f"and about {human_bytes(memory[stage].total)} on each rank",
        )
