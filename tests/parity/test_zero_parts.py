"""GPT-2 and T5 with ZeRO 2, 3 and offload: bitwise as ZeRO 0, or as one process to rounding (rows E07, E09)."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.mpu.shard import Shard
from megatron.training.parity import Trace
from tests.helpers import t5_runs
from tests.helpers.layouts import check_fp64, compare_layout, split_global_batch, trace_layout
from tests.parity import bert_runs, llama_runs, mpt_runs
from tests.parity.test_zero import slice_within

FULL_OFFLOAD = "--zero-stage 3 --offload-optimizer --offload-parameters"
STAGES = ("--zero-stage 2", "--zero-stage 3", FULL_OFFLOAD)
STEPS = 20
NORM_RTOL = 1e-6
"""Bound for the relative difference of two fp32 norms that are summed in different orders; 4.4e-7 was measured."""


def shard_or_none(inner: Shard, outer: Shard) -> Shard | None:
    """Return ``inner``, or None if it equals ``outer``."""
    return None if inner == outer else inner


def assert_same_bits(plain: list[Trace], sharded: list[Trace]) -> None:
    """Check that losses, gradients and weights are equal, and norms up to the order of summation."""
    for plain_trace, sharded_trace in zip(plain, sharded, strict=True):
        assert plain_trace.losses == sharded_trace.losses and plain_trace.eval_losses == sharded_trace.eval_losses
        assert all(
            abs(x - y) <= NORM_RTOL * x for x, y in zip(plain_trace.grad_norms, sharded_trace.grad_norms, strict=True)
        )
        for full_tensors, sharded_tensors in (
            (plain_trace.weights, sharded_trace.weights),
            (plain_trace.gradients, sharded_trace.gradients),
        ):
            assert full_tensors.keys() == sharded_tensors.keys() and sharded_tensors
            for name, (shard, local_tensor) in sharded_tensors.items():
                full_shard, full_tensor = full_tensors[name]
                inner_shard = shard_or_none(shard, full_shard)
                expected = full_tensor if inner_shard is None else slice_within(inner_shard, full_shard, full_tensor)
                assert expected.equal(local_tensor), name


def check_bitwise(
    layout: tuple[int, int, int], extra: str, zero_flags: str, steps: int = STEPS, gas: int | None = None
) -> None:
    tensor, pipe, data = layout
    # With ZeRO 2 and 3, several micro-batches are summed in another order.
    micro, gas = split_global_batch(data, (2 if pipe > 1 else 1) if gas is None else gas)
    plain, sharded = (
        trace_layout(*layout, micro, gas, f"{extra}{flag}", steps, steps // 2) for flag in ("", f" {zero_flags}")
    )
    assert len(plain[0].losses) == steps and len(plain) == tensor * pipe * data
    assert_same_bits(plain, sharded)


def test_zero_3_offload_is_bitwise_stage_0() -> None:
    check_bitwise((1, 1, 2), "--fp32 --checkpoint-activations", FULL_OFFLOAD, steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("zero_flags", STAGES)
@pytest.mark.parametrize("extra", ["--fp32", "--bf16", "--fp32 --untie-embeddings-and-output-weights"])
@pytest.mark.parametrize("layout", [(1, 1, 2), (2, 1, 2), (1, 1, 4)], ids=str)
def test_losses_gradients_and_weights_are_bitwise_stage_0(
    layout: tuple[int, int, int], extra: str, zero_flags: str
) -> None:
    check_bitwise(layout, extra, zero_flags, STEPS if extra == "--fp32" else 6)


@pytest.mark.slow
@pytest.mark.parametrize("zero_flags", ["--offload-optimizer", "--zero-stage 1 --offload-optimizer"])
@pytest.mark.parametrize("extra", ["--bf16", "--fp32"])
@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 1)], ids=str)
def test_optimizer_offload_is_bitwise_equal(layout: tuple[int, int, int], extra: str, zero_flags: str) -> None:
    check_bitwise(layout, extra, zero_flags)


@pytest.mark.slow
def test_optimizer_offload_in_bf16_pipeline_is_bitwise_equal() -> None:
    check_bitwise((1, 2, 1), "--bf16", "--offload-optimizer", steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    ["--fp32", "--fp32 --checkpoint-activations", "--bf16 --loss-chunk-tokens 8", "--fp32 --sequence-parallel"],
)
@pytest.mark.parametrize("layout", [(1, 1, 2), (2, 1, 2), (1, 1, 4)], ids=str)
def test_prefetched_weights_are_bitwise_equal(layout: tuple[int, int, int], extra: str) -> None:
    """With several micro-batches per step; tests/optim/zero/test_prefetch.py has a faster test."""
    if "sequence" in extra and layout[0] == 1:
        pytest.skip("nothing is sharded over one tensor rank")
    micro_batch_size, gas = split_global_batch(layout[2], 2)
    assert gas > 1
    lines = (f"{extra} --zero-stage 3{prefetch_flag}" for prefetch_flag in (" --stage3-prefetch-bucket-size 0", ""))
    plain, prefetched = (trace_layout(*layout, micro_batch_size, gas, line, 6, 3) for line in lines)
    assert_same_bits(plain, prefetched)
    assert [trace.grad_norms for trace in plain] == [trace.grad_norms for trace in prefetched]


@pytest.mark.slow
@pytest.mark.parametrize("zero_flags", STAGES)
@pytest.mark.parametrize("extra", ["", "--checkpoint-activations --clip-grad 0.5 --layout-independent-dropout"])
@pytest.mark.parametrize("layout", [(1, 1, 2), (2, 1, 2), (1, 1, 4)], ids=str)
def test_fp64_equals_single_process(layout: tuple[int, int, int], extra: str, zero_flags: str) -> None:
    dropout_flags = " --attention-dropout 0.1 --hidden-dropout 0.1" if "dropout" in extra else ""
    check_fp64(compare_layout(*layout, 2, f"--fp64 {extra}{dropout_flags}", zero_flags))


@pytest.mark.slow
@pytest.mark.parametrize("zero_flags", STAGES)
@pytest.mark.parametrize("variant", t5_runs.VARIANTS)
@pytest.mark.parametrize("layout", [(1, 1, 2), (2, 1, 2)], ids=str)
def test_t5_with_unequal_masks_equals_single_process(
    layout: tuple[int, int, int], variant: str, zero_flags: str
) -> None:
    diff = t5_runs.RUNS.compare_layout(*layout, f"--fp64 {t5_runs.VARIANTS[variant]}", 3, zero_flags)
    assert diff.loss <= 1e-11 and diff.gradient <= 1e-10 and diff.norm <= 1e-11, diff.worst_gradient


@pytest.mark.slow
@pytest.mark.parametrize("zero_flags", STAGES)
@pytest.mark.parametrize("runs_module", [llama_runs, mpt_runs, bert_runs], ids=["llama", "mpt", "bert"])
@pytest.mark.parametrize("layout", [(1, 1, 2), (2, 1, 2)], ids=str)
def test_other_families_are_bitwise_stage_0(layout: tuple[int, int, int], runs_module: Any, zero_flags: str) -> None:
    plain, sharded = (
        runs_module.RUNS.trace_layout(*layout, f"--fp32 --clip-grad 0 {flag}", 6, 1, 3) for flag in ("", zero_flags)
    )
    assert_same_bits(plain, sharded)
