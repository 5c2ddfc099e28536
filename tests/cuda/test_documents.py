"""Documents kept apart on the device without CUDA: by lengths that no host reads, with no mask of s x s."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from megatron.ops.document_attention import SHORT
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
    "a short sequence": ("gpt2", "--seq-length 64"),
    "dropout": ("gpt2", "--attention-dropout 0.1"),
    "ALiBi": ("mpt", ""),
    "capped scores": ("gpt2", "--attn-logit-softcapping 20"),
}


def slow_but(first: str, names: Iterable[str]) -> list[Any]:
    """Return the cases, all but one of them slow."""
    return [pytest.param(name, id=name, marks=[] if name == first else pytest.mark.slow) for name in names]


def case_of(family: str, extra: str, ranks: tuple[int, tuple[int, ...]]) -> Case:
    return Case(family, flags(family, f"{APART} {extra}", layers=2), *ranks)


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


@pytest.mark.parametrize("name", slow_but("a short sequence", KEPT))
def test_what_flash_attention_lacks_keeps_the_mask(worker: Worker, name: str) -> None:
    family, extra = KEPT[name]
    (seen,) = worker.run(case_of(family, f"{extra} --num-layers 1", (1, (0,)))._replace(is_whole=False))
    assert not seen.phases["step 2"].launches[KERNEL]
