"""Documents kept apart on the device without CUDA: by lengths that no host reads, with no mask of s x s."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from megatron.ops.document_attention import SHORT
from megatron.ops.flex_attention import BLOCK
from tests.cuda.cases import TENSOR, flags
from tests.cuda.test_matrix import STEADY
from tests.cuda.worker import Case, Worker

LENGTH, ROWS = 4 * SHORT, 2
APART = f"--seq-length {LENGTH} --max-position-embeddings {LENGTH} --reset-attention-mask --attention-dropout 0 --bf16"
KERNEL = "torch_attn::_varlen_attn"
CASES = {
    "all": ("llama", "--num-query-groups 2 --reset-position-ids --window-size 300 --checkpoint-activations", (1, (0,))),
    "gpt2": ("gpt2", "", (1, (0,))),
    "stages": ("gpt2", f"{TENSOR['sequence']} --pipe-parallel-size 2", (4, (0, 2))),
}
KEPT = {
    "dropout": ("gpt2", "--attention-dropout 0.1"),
    "small heads": ("gpt2", "--seq-length 64 --num-attention-heads 8"),
}
BY_BLOCKS = {
    "a short sequence": ("gpt2", "--seq-length 64", (1, (0,))),
    "ALiBi": ("mpt", "--window-size 300", (1, (0,))),
    "capped scores": ("gpt2", "--attn-logit-softcapping 20 --num-query-groups 2 --checkpoint-activations", (1, (0,))),
    "fp32": ("gpt2", "--fp32", (1, (0,))),
    "padding": ("bert", "", (1, (0,))),
    "stages": ("mpt", f"{TENSOR['sequence']} --pipe-parallel-size 2", (4, (0, 2))),
}
BLOCKS = -(-LENGTH // BLOCK)


def slow_but(first: str, names: Iterable[str]) -> list[Any]:
    """Return the cases, all but one of them slow."""
    return [pytest.param(name, id=name, marks=[] if name == first else pytest.mark.slow) for name in names]


def case_of(family: str, extra: str, ranks: tuple[int, tuple[int, ...]]) -> Case:
    apart = APART.replace("--reset-attention-mask ", "") if family == "bert" else APART
    apart = apart.replace("--bf16", "") if "--fp32" in extra else apart
    return Case(family, flags(family, f"{apart} {extra}", layers=2), *ranks)


@pytest.mark.parametrize("name", slow_but("all", CASES))
def test_attention_goes_by_length_and_the_host_reads_none(worker: Worker, name: str) -> None:
    case = case_of(*CASES[name])
    layers = 2 // len(case.ranks)
    for seen in worker.run(case):
        step = seen.phases["step 2"]
        assert not step.blocking and not step.mixed and not seen.faults
        assert {what: n for what, n in step.reads.items() if n > STEADY.get(what, 0)} == {}
        runs = 2 if "checkpoint" in CASES[name][1] else 1
        assert step.launches[KERNEL] == case.gas * layers * runs
        assert step.launches[f"{KERNEL}_backward"] == case.gas * layers
        assert step.launches["scatter_"] == case.gas, "one plan for all layers of a stage"
        assert 0 < step.largest_mask <= ROWS * LENGTH * 2 * SHORT, "only short documents have one, of the keys close by"


@pytest.mark.parametrize("name", slow_but("ALiBi", BY_BLOCKS))
def test_what_flash_attention_lacks_goes_by_blocks_without_a_mask(worker: Worker, name: str) -> None:
    case = case_of(*BY_BLOCKS[name])
    layers = 2 // len(case.ranks)
    runs = 2 if "checkpoint" in BY_BLOCKS[name][1] else 1
    for seen in worker.run(case):
        step = seen.phases["step 2"]
        assert not step.blocking and not step.mixed and not seen.faults and not step.masks
        assert {what: n for what, n in step.reads.items() if n > STEADY.get(what, 0)} == {}
        assert len(step.by_blocks) == case.gas * layers * runs and not step.launches[KERNEL]
        assert step.launches["argsort"] + step.launches["sort"] == 2 * case.gas, "one plan for all layers of a stage"
        assert max(step.by_blocks) <= ROWS * 4 * (BLOCKS**2 + BLOCKS)


@pytest.mark.parametrize("name", slow_but("dropout", KEPT))
def test_what_no_kernel_has_keeps_the_mask(worker: Worker, name: str) -> None:
    family, extra = KEPT[name]
    (seen,) = worker.run(case_of(family, f"{extra} --num-layers 1", (1, (0,)))._replace(is_whole=False))
    step = seen.phases["step 2"]
    assert step.masks and not step.launches[KERNEL] and not step.by_blocks
