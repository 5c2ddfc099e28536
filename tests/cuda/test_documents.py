"""Separate documents on the simulated device: no host reads, and no mask of s x s."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from megatron.ops.document_attention import SHORT
from megatron.ops.flex_attention import BLOCK
from tests.cuda.cases import TENSOR, flags
from tests.cuda.test_matrix import STEADY_READS
from tests.cuda.worker import Case, Worker

SEQ_LENGTH, ROWS = 4 * SHORT, 2
DOCUMENT_FLAGS = (
    f"--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --reset-attention-mask "
    "--attention-dropout 0 --bf16"
)
KERNEL = "torch_attn::_varlen_attn"
CASES = {
    "all": ("llama", "--num-query-groups 2 --reset-position-ids --window-size 300 --checkpoint-activations", (1, (0,))),
    "gpt2": ("gpt2", "", (1, (0,))),
    "stages": ("gpt2", f"{TENSOR['sequence']} --pipe-parallel-size 2", (4, (0, 2))),
}
MASK_CASES = {
    "dropout": ("gpt2", "--attention-dropout 0.1"),
    "small heads": ("gpt2", "--seq-length 64 --num-attention-heads 8"),
}
BLOCK_CASES = {
    "a short sequence": ("gpt2", "--seq-length 64", (1, (0,))),
    "ALiBi": ("mpt", "--window-size 300", (1, (0,))),
    "capped scores": ("gpt2", "--attn-logit-softcapping 20 --num-query-groups 2 --checkpoint-activations", (1, (0,))),
    "fp32": ("gpt2", "--fp32", (1, (0,))),
    "padding": ("bert", "", (1, (0,))),
    "stages": ("mpt", f"{TENSOR['sequence']} --pipe-parallel-size 2", (4, (0, 2))),
}
BLOCKS = -(-SEQ_LENGTH // BLOCK)


def mark_slow_except(first: str, names: Iterable[str]) -> list[Any]:
    """Return the cases; all except ``first`` are marked slow."""
    return [pytest.param(name, id=name, marks=[] if name == first else pytest.mark.slow) for name in names]


def make_case(family: str, extra: str, ranks: tuple[int, tuple[int, ...]]) -> Case:
    document_flags = DOCUMENT_FLAGS.replace("--reset-attention-mask ", "") if family == "bert" else DOCUMENT_FLAGS
    document_flags = document_flags.replace("--bf16", "") if "--fp32" in extra else document_flags
    return Case(family, flags(family, f"{document_flags} {extra}", layers=2), *ranks)


@pytest.mark.parametrize("name", mark_slow_except("all", CASES))
def test_varlen_attention_runs_without_host_reads(worker: Worker, name: str) -> None:
    case = make_case(*CASES[name])
    layers = 2 // len(case.ranks)
    for outcome in worker.run(case):
        step = outcome.phases["step 2"]
        assert not step.blocking and not step.mixed and not outcome.faults
        assert {location: n for location, n in step.reads.items() if n > STEADY_READS.get(location, 0)} == {}
        num_runs = 2 if "checkpoint" in CASES[name][1] else 1
        assert step.launches[KERNEL] == case.gas * layers * num_runs
        assert step.launches[f"{KERNEL}_backward"] == case.gas * layers
        assert step.launches["scatter_"] == case.gas, "one plan for all layers of a stage"
        assert 0 < step.largest_mask <= ROWS * SEQ_LENGTH * 2 * SHORT, (
            "only short documents have a mask, limited to nearby keys"
        )


@pytest.mark.parametrize("name", mark_slow_except("ALiBi", BLOCK_CASES))
def test_unsupported_cases_use_block_attention_without_mask(worker: Worker, name: str) -> None:
    case = make_case(*BLOCK_CASES[name])
    layers = 2 // len(case.ranks)
    num_runs = 2 if "checkpoint" in BLOCK_CASES[name][1] else 1
    for outcome in worker.run(case):
        step = outcome.phases["step 2"]
        assert not step.blocking and not step.mixed and not outcome.faults and not step.masks
        assert {location: n for location, n in step.reads.items() if n > STEADY_READS.get(location, 0)} == {}
        assert len(step.block_mask_sizes) == case.gas * layers * num_runs and not step.launches[KERNEL]
        assert step.launches["argsort"] + step.launches["sort"] == 2 * case.gas, "one plan for all layers of a stage"
        assert max(step.block_mask_sizes) <= ROWS * 4 * (BLOCKS**2 + BLOCKS)


@pytest.mark.parametrize("name", mark_slow_except("dropout", MASK_CASES))
def test_cases_without_kernel_use_dense_mask(worker: Worker, name: str) -> None:
    family, extra = MASK_CASES[name]
    (outcome,) = worker.run(make_case(family, f"{extra} --num-layers 1", (1, (0,)))._replace(runs_all_phases=False))
    step = outcome.phases["step 2"]
    assert step.masks and not step.launches[KERNEL] and not step.block_mask_sizes
