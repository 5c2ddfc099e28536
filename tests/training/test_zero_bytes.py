"""The counted bytes of each rank under ZeRO and offload equal the formulas of the start table."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import pretrain_gpt2
from megatron.checkpoint import named_parameters
from megatron.config import parse
from megatron.costs.memory import EIGHT_BIT_BYTES, Zero
from megatron.models import registry
from megatron.optim import quantized_state
from megatron.training import global_vars, initialize
from megatron.training.estimates import zero_settings
from megatron.training.mock_data import mock_tokenizer
from megatron.training.setup import build_weights, make_streams
from tests.helpers.harness import run_ranks

VOCAB_SIZE = 128
BASE_FLAGS = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --batch-size "
    f"1 --gas 1 --vocab-size {VOCAB_SIZE} --hidden-bias --data-path none --device cpu"
)
"""Sizes whose shards are full vectors of 16 elements on 2 replicas, so that the formulas hold to the byte."""
OFFLOAD_BOTH = "--offload-optimizer --offload-parameters"
NO_PREFETCH = "--stage3-prefetch-bucket-size 0"
CASES = [
    f"--{dtype} --zero-stage {stage} {offload_flags}".strip()
    for dtype in ("bf16", "fp32")
    for stage in range(4)
    for offload_flags in (
        "",
        "--offload-optimizer",
        *(("--offload-parameters", OFFLOAD_BOTH, NO_PREFETCH) if stage == 3 else ()),
    )
]
CASES += [
    f"--optimizer muon {case}" for case in ("--bf16 --zero-stage 0", "--bf16 --zero-stage 1", "--fp32 --zero-stage 3")
]


BF16_STATE_FLAGS = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
CASES += [
    f"--bf16 --zero-stage 1 {BF16_STATE_FLAGS}", f"--fp32 {BF16_STATE_FLAGS}",
    f"--bf16 {BF16_STATE_FLAGS} --offload-optimizer",
    "--bf16 --zero-stage 2 --exp-avg-dtype bf16", f"--optimizer muon --bf16 {BF16_STATE_FLAGS}",
    "--optimizer muon --fp32 --zero-stage 3 --exp-avg-sq-dtype bf16",
]  # fmt: skip


def count_new_bytes(tensors: Any, seen: set[int]) -> int:
    """Return the bytes of the storages of ``tensors`` that are not in ``seen``, and add them to it."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    new_storages = {address: num_bytes for address, num_bytes in storages.items() if address not in seen and num_bytes}
    seen |= set(new_storages)
    return sum(new_storages.values())


def count_cases(rank: int, cases: list[str]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Return, for each case, the bytes counted after a backward and an update, and the bytes of the formulas."""
    return [count_case(case) for case in cases]


def count_case(case: str) -> tuple[dict[str, int], dict[str, int]]:
    config = parse([*BASE_FLAGS.split(), *case.split()], world_size=2).with_vocab(VOCAB_SIZE)
    world = initialize.start(config)
    streams = make_streams(config, world)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    module, optimizer = build_weights(config, world, streams, pretrain_gpt2.model_provider)
    optimizer.store.shard_weights(module)
    gathered_bytes = record_gathered_bytes(optimizer)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    for _ in range(2):  # the moments exist from the second step on
        loss, _ = module(tokens, tokens, None, tokens, torch.ones(1, 16))
        loss.backward()
        optimizer.end_micro_batch()
        parameters = [parameter for _, parameter in named_parameters(module)]
        gradient_bytes = count_new_bytes([gradient for _, gradient in optimizer.gradients()], set())
        optimizer.step()
    seen: set[int] = set()
    weight_bytes = count_new_bytes(map(optimizer.store.persistent_storage, parameters), seen)
    entries = [v for state in optimizer.inner.state.values() for key, v in state.items() if key != "step"]
    states = [tensor for v in entries for tensor in ((v.codes, v.scale) if quantized_state.is_quantized(v) else (v,))]
    optimizer_bytes = count_new_bytes([*map(optimizer.main_param_of, parameters), *states], seen)
    optimizer_config = config.optimizer
    counted = {
        "weights": 0 if optimizer_config.offload_parameters else weight_bytes,
        "gradients": gradient_bytes,
        "optimizer": 0 if optimizer_config.offload_optimizer else optimizer_bytes,
        "gathered": max(gathered_bytes, default=0),
        "host": weight_bytes * optimizer_config.offload_parameters
        + optimizer_bytes * optimizer_config.offload_optimizer,
    }
    memory_args: dict[str, Any] = {
        "micro_batch_size": 1,
        "dtype": config.precision.dtype,
        "zero": zero_settings(config, 2),
    }
    memory_args["optimizer"] = config.optimizer.optimizer
    memory_args["num_bf16_states"] = len(config.optimizer.bf16_states)
    memory_args["num_8bit_states"] = len(config.optimizer.quantized_states)
    (memory,) = registry.costs_of(config).memory_per_stage([0, 6], **memory_args)
    expected = {name: getattr(memory, name) for name in counted}
    if num_quantized := len(config.optimizer.quantized_states):  # small main params have states in fp32
        main_params = map(optimizer.main_param_of, parameters)
        num_small = sum(m.numel() for m in main_params if not quantized_state.can_be_quantized(m))
        expected["optimizer"] += round(num_small * num_quantized * (4 - EIGHT_BIT_BYTES))
    return counted, expected


def record_gathered_bytes(optimizer: Any) -> list[int]:
    """Return a list to which each gather of ZeRO 3 appends the bytes of gathered and prefetched full weights."""
    gathered_bytes: list[int] = []
    if optimizer.store.units is not None:
        original_gather = optimizer.store.units._gather

        def gather_and_record(unit: Any) -> None:
            original_gather(unit)
            units, order = optimizer.store.units.units, optimizer.store.units._order
            pending_bytes = sum(piece.parameter.nbytes for pending in order._prefetched for piece in pending.bucket)
            held_bytes = sum(
                full_weight.untyped_storage().nbytes() for unit in units for full_weight in unit._full.values()
            )
            gathered_bytes.append(held_bytes + pending_bytes)

        optimizer.store.units._gather = gather_and_record
    return gathered_bytes


def test_counted_bytes_equal_memory_formulas(pytestconfig: pytest.Config) -> None:
    """The short run has every fourth case."""
    cases = CASES if pytestconfig.getoption("--all") else CASES[::4]
    for rank_counts in run_ranks(2, count_cases, cases):
        for case, (counted, expected) in zip(cases, rank_counts, strict=True):
            assert counted == expected, case


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed (extra [torchao])")
@pytest.mark.parametrize("case", ["--bf16 --zero-stage 0", "--fp32 --zero-stage 1", "--bf16 --zero-stage 3"])
def test_counted_bytes_of_8_bit_states(case: str) -> None:
    """The formula counts the states of small parameters (biases and norms) in 8 bits, which ``count_case`` corrects."""
    flags = f"{case} --exp-avg-dtype 8bit --exp-avg-sq-dtype 8bit"
    for ((counted, expected),) in run_ranks(2, count_cases, [flags]):
        assert abs(counted.pop("optimizer") - expected.pop("optimizer")) <= 2, "the formula rounds up"
        assert counted == expected


@pytest.mark.parametrize(
    ("dtype", "zero_stage", "bytes_per_parameter"),
    [("bf16", 2, 2 + 16 / 4), ("bf16", 3, 18 / 4), ("fp32", 2, 4 + 12 / 4), ("fp32", 3, 16 / 4), ("bf16", 1, 6 + 3)],
)
def test_memory_formulas_equal_documented_bytes_per_parameter(
    dtype: str, zero_stage: int, bytes_per_parameter: float
) -> None:
    config = parse([*BASE_FLAGS.split(), f"--{dtype}"], world_size=1).with_vocab(VOCAB_SIZE)
    costs = registry.costs_of(config)
    (memory,) = costs.memory_per_stage([0, 6], micro_batch_size=1, dtype=dtype, zero=Zero(zero_stage, 4))
    stored_bytes = memory.weights + memory.gradients + memory.optimizer
    assert abs(stored_bytes - bytes_per_parameter * costs.num_parameters) <= 3
