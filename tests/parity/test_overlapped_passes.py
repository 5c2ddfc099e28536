"""Forwards beside backwards of other micro-batches: the losses, gradients and weights of passes in turn, to the bit."""

from __future__ import annotations

import pytest
import torch

from megatron.training.parity import Trace
from tests.helpers.layouts import batches, check_fp64, difference, traces

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
MIXED = "--disable-bias-linear --clip-grad 0.5 --num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1"
CUT_EXPERTS = "--expert-model-parallel-size 2"
EXPERTS = f"{MIXED} {CUT_EXPERTS}"
BESIDE = "--overlap-forward-backward"
CUT = "--sequence-parallel"
CHUNKS, ZB_V, DUAL_PIPE_V = "--pipeline-chunks 2", "--pipeline-schedule zb-v", "--pipeline-schedule dualpipev"


def bits(ranks: list[Trace]) -> list[torch.Tensor]:
    """Return all numbers of a run: each rank's losses, norms, last gradients and weights."""
    return [
        tensor
        for trace in ranks
        for tensor in (
            torch.tensor([*trace.losses, *trace.grad_norms]),
            *(gradient for _, gradient in trace.gradients.values()),
            *(weight for _, weight in trace.weights.values()),
        )
    ]


def test_experts_and_their_exchanges_beside_each_other_train_the_model_of_one_process() -> None:
    switches = f"{CUT_EXPERTS} --overlap-moe-expert-parallel-comm {DUAL_PIPE_V}"
    check_fp64(difference(1, 2, 2, 4, f"--fp64 {MIXED}", schedule=switches))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "gas", "extra", "schedule"),
    [
        ((1, 2, 1), 8, DROPOUT, ""),
        ((2, 2, 1), 8, "", ""),
        ((2, 2, 1), 8, CUT, CHUNKS),
        ((2, 2, 1), 8, f"{DROPOUT} {CUT} --layout-independent-dropout", DUAL_PIPE_V),
        ((2, 2, 1), 4, "", ZB_V),
        ((1, 2, 2), 8, EXPERTS, ""),
        ((1, 2, 2), 8, EXPERTS, CHUNKS),
        ((1, 2, 2), 8, f"{EXPERTS} --zero-stage 1", DUAL_PIPE_V),
        ((1, 2, 2), 4, EXPERTS, ZB_V),
        ((1, 2, 2), 4, f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias", CHUNKS),
        ((1, 4, 1), 8, f"--num-layers 8 {DROPOUT}", CHUNKS),
        ((1, 4, 1), 16, "", ""),
    ],
)
def test_pairs_train_as_passes_in_turn_to_the_bit(
    grid: tuple[int, int, int], gas: int, extra: str, schedule: str
) -> None:
    tensor, pipe, data = grid
    sizes = (tensor, pipe, data, *batches(data, gas))
    beside, in_turn = (traces(*sizes, f"--fp64 {extra} {schedule} {switch}") for switch in (BESIDE, ""))
    wanted, got = bits(in_turn), bits(beside)
    assert len(got) == len(wanted) > 20
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@pytest.mark.slow
def test_attention_over_context_ranks_beside_a_backward_trains_as_in_turn_to_the_bit() -> None:
    for kind in ("all_gather", "a2a"):
        extra = f"--fp64 --cp-comm-type {kind}"
        beside, in_turn = (traces(1, 2, 1, 2, 8, f"{extra} {switch}", context=2) for switch in (BESIDE, ""))
        assert all(map(torch.equal, bits(beside), bits(in_turn)))
