"""What each rank holds under ZeRO and offload, in counted tensors, is what the formulas of the start table say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pretrain_gpt2
from megatron.checkpoint import named_parameters
from megatron.config import parse
from megatron.costs.memory import Zero
from megatron.models import registry
from megatron.training import global_vars, initialize
from megatron.training.estimates import zero_of
from megatron.training.mock_data import mock_tokenizer
from megatron.training.setup import build_weights, make_streams
from tests.helpers.harness import run_ranks

VOCAB = 128
LINE = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --batch-size "
    f"1 --gas 1 --vocab-size {VOCAB} --hidden-bias --data-path none --device cpu"
)
"""Sizes whose parts are whole vectors of 16 numbers on 2 replicas, so that formulas hold to the byte."""
BOTH = "--offload-optimizer --offload-parameters"
AS_NEEDED = "--stage3-prefetch-bucket-size 0"
CASES = [
    f"--{dtype} --zero-stage {stage} {away}".strip()
    for dtype in ("bf16", "fp32")
    for stage in range(4)
    for away in ("", "--offload-optimizer", *(("--offload-parameters", BOTH, AS_NEEDED) if stage == 3 else ()))
]
CASES += [
    f"--optimizer muon {case}" for case in ("--bf16 --zero-stage 0", "--bf16 --zero-stage 1", "--fp32 --zero-stage 3")
]


BF16_STATES = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
CASES += [
    f"--bf16 --zero-stage 1 {BF16_STATES}", f"--fp32 {BF16_STATES}", f"--bf16 {BF16_STATES} --offload-optimizer",
    "--bf16 --zero-stage 2 --exp-avg-dtype bf16", f"--optimizer muon --bf16 {BF16_STATES}",
    "--optimizer muon --fp32 --zero-stage 3 --exp-avg-sq-dtype bf16",
]  # fmt: skip


def bytes_of(tensors: Any, seen: set[int]) -> int:
    """Return the bytes of memory behind ``tensors`` that is not ``seen`` yet."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    found = {place: size for place, size in storages.items() if place not in seen and size}
    seen |= set(found)
    return sum(found.values())


def count(rank: int, cases: list[str]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Return for each case the bytes counted after a backward and an update, and those of the formulas."""
    return [count_one(case) for case in cases]


def count_one(case: str) -> tuple[dict[str, int], dict[str, int]]:
    config = parse([*LINE.split(), *case.split()], world_size=2).with_vocab(VOCAB)
    here = initialize.start(config)
    streams = make_streams(config, here)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    module, optimizer = build_weights(config, here, streams, pretrain_gpt2.model_provider)
    optimizer.store.shard_weights(module)
    most = watch_gathered(optimizer)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    for _ in range(2):  # the second time there are moments
        loss, _ = module(tokens, tokens, None, tokens, torch.ones(1, 16))
        loss.backward()
        optimizer.end_micro_batch()
        parameters = [parameter for _, parameter in named_parameters(module)]
        gradients = bytes_of([gradient for _, gradient in optimizer.gradients()], set())
        optimizer.step()
    seen: set[int] = set()
    weights = bytes_of(map(optimizer.store.persistent_storage, parameters), seen)
    states = [v for state in optimizer.inner.state.values() for key, v in state.items() if key != "step"]
    optimizers = bytes_of([*map(optimizer.main_param_of, parameters), *states], seen)
    away = config.optimizer
    found = {
        "weights": 0 if away.offload_parameters else weights,
        "gradients": gradients,
        "optimizer": 0 if away.offload_optimizer else optimizers,
        "gathered": max(most, default=0),
        "host": weights * away.offload_parameters + optimizers * away.offload_optimizer,
    }
    settings: dict[str, Any] = {"micro_batch_size": 1, "dtype": config.precision.dtype, "zero": zero_of(config, 2)}
    settings["optimizer"] = config.optimizer.optimizer
    settings["num_bf16_states"] = len(config.optimizer.bf16_states)
    (memory,) = registry.costs_of(config).memory_per_stage([0, 6], **settings)
    return found, {name: getattr(memory, name) for name in found}


def watch_gathered(optimizer: Any) -> list[int]:
    """Return a list that gets the bytes of whole weights, here or on their way, whenever ZeRO 3 has gathered some."""
    found: list[int] = []
    if optimizer.store.units is not None:
        gather = optimizer.store.units._gather

        def gather_and_note(unit: Any) -> None:
            gather(unit)
            units, order = optimizer.store.units.units, optimizer.store.units._order
            ahead = sum(piece.parameter.nbytes for gather in order._ahead for piece in gather.bucket)
            here = sum(whole.untyped_storage().nbytes() for unit in units for whole in unit._full.values())
            found.append(here + ahead)

        optimizer.store.units._gather = gather_and_note
    return found


def test_counted_bytes_of_a_rank_are_those_of_the_formulas(pytestconfig: pytest.Config) -> None:
    """Of every fourth case in the short run."""
    cases = CASES if pytestconfig.getoption("--all") else CASES[::4]
    for rank in run_ranks(2, count, cases):
        for case, (found, expected) in zip(cases, rank, strict=True):
            assert found == expected, case


@pytest.mark.parametrize(
    ("dtype", "stage", "of_parameter"),
    [("bf16", 2, 2 + 16 / 4), ("bf16", 3, 18 / 4), ("fp32", 2, 4 + 12 / 4), ("fp32", 3, 16 / 4), ("bf16", 1, 6 + 3)],
)
def test_the_formulas_are_those_of_the_documents(dtype: str, stage: int, of_parameter: float) -> None:
    config = parse([*LINE.split(), f"--{dtype}"], world_size=1).with_vocab(VOCAB)
    costs = registry.costs_of(config)
    (memory,) = costs.memory_per_stage([0, 6], micro_batch_size=1, dtype=dtype, zero=Zero(stage, 4))
    held = memory.weights + memory.gradients + memory.optimizer
    assert abs(held - of_parameter * costs.num_parameters) <= 3
