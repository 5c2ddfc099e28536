"""Multi-token prediction in every layout: the losses and gradients of one process, in fp64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.helpers.layouts import check_fp64, compare_layout
from tests.helpers.parity_runs import ParityRuns
from tests.parity.llama_runs import RUNS as LLAMA
from tests.parity.modern_runs import RUNS as MODERN
from tests.parity.test_schedules import DUAL_PIPE_V, INTERLEAVED, SCHEDULES, ZB_V, ZERO_BUBBLE
from tests.parity.test_zero import assert_same_bits

SLOW = pytest.mark.slow
MTP = "--fp64 --clip-grad 0.5 --mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"
DOCUMENTS = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 "
    "--moe-layer-freq [0,1,0,1]"
)
TIED, RECOMPUTE = "--tie-embeddings-and-output-weights", "--checkpoint-activations"
SEQUENCE_PARALLEL = "--sequence-parallel"
MODELS = {
    "llama": (LLAMA, f"{MTP} {DOCUMENTS}"),
    "tied": (LLAMA, f"{MTP} {TIED} --z-loss 0.01"),
    "experts": (LLAMA, f"{MTP} {DOCUMENTS} {EXPERTS}"),
    "gemma": (MODERN["gemma"], f"{MTP} {DOCUMENTS}"),
}
GRIDS = [
    (tensor, pipe, context, expert)
    for tensor, pipe, context, expert in product((1, 2), repeat=4)
    if (tensor, pipe, context, expert) != (1, 1, 1, 1)
]
"""(tensor, pipe, context, expert) of 2 to 8 ranks; experts need as many data x context ranks."""
CASES = [
    (model, grid, options)
    for model in MODELS
    for grid in GRIDS
    for options in ("", *([SEQUENCE_PARALLEL] if grid[0] == 2 else []))
    if (model == "experts" or grid[3] == 1) and (model != "gemma" or grid[2] == 1)
]
QUICK_CASES = [
    ("llama", (2, 2, 1, 1), SEQUENCE_PARALLEL),  # the untied embedding has a copy on the last stage
    ("experts", (1, 1, 2, 2), ""),  # future tokens are on the other rank
]


def compare_grid(runs: ParityRuns, grid: tuple[int, int, int, int], extra: str, options: str, **kwargs: Any) -> None:
    """Compare three steps in a layout with those of one process."""
    tensor, pipe, context, expert = grid
    data = 2 if expert > context else 1
    expert_flags = f"--expert-model-parallel-size {expert}" if expert > 1 else ""
    check_fp64(
        runs.compare_layout(tensor, pipe, data, extra, 3, f"{options} {expert_flags}", context=context, **kwargs)
    )


@pytest.mark.parametrize(
    ("model", "grid", "options"),
    [pytest.param(*case, marks=() if case in QUICK_CASES else SLOW) for case in CASES],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else value.replace("--", "") or "plain",
)
def test_every_grid_equals_single_process(model: str, grid: tuple[int, int, int, int], options: str) -> None:
    runs, extra = MODELS[model]
    compare_grid(runs, grid, extra, options)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        pytest.param(schedule, options, marks=() if (schedule, options) == (ZB_V, RECOMPUTE) else SLOW)
        for schedule in (*SCHEDULES, ZB_V, DUAL_PIPE_V)
        for options in ("", RECOMPUTE, TIED)
    ],
)
def test_every_schedule_equals_single_process(schedule: str, options: str) -> None:
    """In the V placement, the first stage has the first and the last layers, and one copy of the embedding."""
    tied = TIED if options == TIED else ""
    compare_grid(LLAMA, (1, 2, 1, 1), f"{MTP} {DOCUMENTS} {tied}", f"{schedule} {options.replace(TIED, '')}", gas=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options", "context"),
    [
        ((1, 1, 2), "--zero-stage 1", 1),
        ((1, 1, 2), "--zero-stage 2", 1),
        ((1, 1, 2), "--zero-stage 3", 1),
        ((1, 1, 2), f"--zero-stage 3 {RECOMPUTE}", 1),
        ((2, 1, 2), f"--zero-stage 3 {SEQUENCE_PARALLEL} {RECOMPUTE}", 1),
        ((1, 2, 2), f"--zero-stage 1 {ZERO_BUBBLE}", 1),
        ((2, 2, 2), f"--zero-stage 1 {SEQUENCE_PARALLEL} {INTERLEAVED} {RECOMPUTE}", 1),
        ((1, 1, 1), "--cp-comm-type a2a", 2),
        ((1, 2, 1), f"--loss-chunk-tokens 5 {RECOMPUTE}", 2),
        ((2, 1, 1), f"--loss-chunk-tokens 5 {SEQUENCE_PARALLEL}", 1),
        ((2, 2, 1), f"{RECOMPUTE} --partition-activations --contigious-checkpointing", 1),
        ((2, 2, 1), f"--gradient-accumulation-fusion {SEQUENCE_PARALLEL}", 1),
        ((1, 2, 1), "--pipeline-model-parallel-layout Ett|ttmmL", 1),
        ((1, 2, 1), "--pipeline-model-parallel-layout Et|t|tt|mmL", 1),
        ((1, 4, 1), "", 1),  # one layer on each stage
        ((1, 1, 4), "", 1),
        ((1, 1, 1), "", 4),
    ],
    ids=lambda value: str(value).replace("--", "").replace(" ", "-"),
)
def test_options_equal_single_process(layout: tuple[int, int, int], options: str, context: int) -> None:
    check_fp64(LLAMA.compare_layout(*layout, f"{MTP} {DOCUMENTS}", 3, options, context=context))


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(1, 2, 1), (2, 2, 1), (1, 1, 2)])
@pytest.mark.parametrize("extra", ["", "--untie-embeddings-and-output-weights"])
def test_gpt2_equals_single_process(grid: tuple[int, int, int], extra: str) -> None:
    """Learned positions are only on the first stage."""
    check_fp64(compare_layout(*grid, 2, f"{MTP} {extra}"))


@pytest.mark.parametrize("gas", [8, pytest.param(1, marks=SLOW), pytest.param(16, marks=SLOW)])
def test_number_of_micro_batches_does_not_change_training(gas: int) -> None:
    """A micro-batch has its own number of targets, which must not weigh its loss."""
    check_fp64(LLAMA.compare_layout(1, 1, 1, f"{MTP} {DOCUMENTS}", 3, gas=gas))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["", ZB_V])
def test_dropout_equals_single_process(schedule: str) -> None:
    dropout = "--attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
    compare_grid(LLAMA, (2, 2, 1, 1), f"{MTP} {DOCUMENTS} {dropout}", f"{SEQUENCE_PARALLEL} {RECOMPUTE} {schedule}")


@pytest.mark.slow
def test_mean_over_micro_batches_equals_single_process() -> None:
    """--loss-average micro-batch divides the multi-token prediction losses, too, by the tokens of the main loss."""
    check_fp64(LLAMA.compare_layout(2, 2, 1, f"{MTP} --loss-average micro-batch", 3, SEQUENCE_PARALLEL))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 1, 2), (2, 1, 2)])
def test_zero_1_is_bitwise_zero_0(layout: tuple[int, int, int]) -> None:
    plain, sharded = (
        LLAMA.trace_layout(*layout, f"{MTP.replace('fp64', 'fp32')} {zero}", 4) for zero in ("", "--zero-stage 1")
    )
    assert_same_bits(plain, sharded)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 2)])
def test_evaluation_is_that_of_the_main_loss_in_every_layout(layout: tuple[int, int, int, int]) -> None:
    tensor, pipe, data, context = layout
    extra = f"{MTP} {DOCUMENTS}"
    expected = LLAMA.trace_layout(1, 1, 1, extra, 3, eval_every=1)[0]
    assert len(expected.other_losses) == 6 and len(expected.eval_losses) == 3
    for trace in LLAMA.trace_layout(tensor, pipe, data, extra, 3, eval_every=1, context=context):
        assert trace.eval_losses == pytest.approx(expected.eval_losses, abs=1e-12, rel=0)
        assert trace.losses == pytest.approx(expected.losses, abs=1e-12, rel=0)
    factor_0 = LLAMA.trace_layout(1, 1, 1, f"{extra} --mtp-loss-scaling-factor 0", 1, eval_every=1)[0]
    without = LLAMA.trace_layout(1, 1, 1, f"{extra} --mtp-num-layers 0", 1, eval_every=1)[0]
    assert factor_0.losses == without.losses and factor_0.eval_losses == without.eval_losses
