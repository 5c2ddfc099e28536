"""Documents kept apart on the device without CUDA: by lengths that no host reads, with no mask of s x s."""

from __future__ import annotations

import pytest

from megatron.ops.document_attention import SHORT
from tests.cuda.cases import TENSOR, flags
from tests.cuda.test_matrix import STEADY
from tests.cuda.worker import Case, Worker

LENGTH, ROWS = 4 * SHORT, 2
APART = f"--seq-length {LENGTH} --max-position-embeddings {LENGTH} --reset-attention-mask --attention-dropout 0 --bf16"
KERNEL = "torch_attn::_varlen_attn"
CASES = {
    "gpt2": ("gpt2", "", (1, (0,))),
    "gpt2, packed": ("gpt2", "--packing best-fit", (1, (0,))),
    "llama": ("llama", "--num-query-groups 2 --reset-position-ids", (1, (0,))),
    "window": ("llama", "--window-size 300 --checkpoint-activations", (1, (0,))),
    "stages": ("gpt2", f"{TENSOR['sequence']} --pipe-parallel-size 2", (4, (0, 2))),
}


def case_of(family: str, extra: str, ranks: tuple[int, tuple[int, ...]]) -> Case:
    return Case(family, flags(family, f"{APART} {extra}", layers=2), *ranks)


@pytest.mark.parametrize("name", CASES)
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


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("gpt2", "--attention-dropout 0.1"),
        ("mpt", ""),
        ("gpt2", "--attn-logit-softcapping 20"),
        ("gpt2", "--seq-length 64"),
    ],
    ids=["dropout", "ALiBi", "capped scores", "a short sequence"],
)
def test_what_flash_attention_lacks_keeps_the_mask(worker: Worker, family: str, extra: str) -> None:
    (seen,) = worker.run(case_of(family, f"{extra} --num-layers 1", (1, (0,)))._replace(is_whole=False))
    assert not seen.phases["step 2"].launches[KERNEL]
