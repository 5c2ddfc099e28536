"""QK-clip in every layout: the largest logits, losses and weights of one process, in fp64.

The threshold is near the median of the heads' largest logits in the first step.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import pretrain_gpt2
from tests.helpers import layouts
from tests.helpers.layouts import LAYOUTS, check_fp64
from tests.helpers.parity_runs import ParityRuns
from tests.parity import extras_runs, hybrid_runs, latent_runs
from tests.parity.llama_runs import RUNS as LLAMA
from tests.parity.mpt_runs import RUNS as MPT
from tests.parity.test_schedules import DUAL_PIPE_V, INTERLEAVED, SCHEDULES, ZB_V, ZERO_BUBBLE

SLOW = pytest.mark.slow
CLIP = "--fp64 --clip-grad 0.5 --qk-clip --qk-clip-alpha 0.3 --qk-clip-threshold"
DOCUMENTS = "--reset-attention-mask --reset-position-ids"
MTP = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"
RECOMPUTE, SELECTIVE = "--checkpoint-activations", "--recompute-granularity selective"
SEQUENCE_PARALLEL, A2A = "--sequence-parallel", "--cp-comm-type a2a"
GPT2 = ParityRuns(
    family="gpt2", script=pretrain_gpt2, model_flags=tuple(layouts.MODEL_FLAGS), vocab_size=layouts.VOCAB, gas=2
)
MODELS = {
    "gpt2": (GPT2, f"{CLIP} 1.1"),
    "gpt2-documents": (GPT2, f"{CLIP} 1.1 --reset-attention-mask"),
    "llama": (LLAMA, f"{CLIP} 1.2 {DOCUMENTS}"),
    "llama-one-document": (LLAMA, f"{CLIP} 1.2"),
    "bound": (LLAMA, f"{CLIP} 2 {DOCUMENTS} --qk-clip-bound"),
    "gated": (LLAMA, f"{CLIP} 1.3 {DOCUMENTS} --attention-output-gate --window-size 5"),
    "mtp": (LLAMA, f"{CLIP} 1.2 {DOCUMENTS} {MTP}"),
    "mpt": (MPT, f"{CLIP} 1.1"),
    "latents-experts": (latent_runs.RUNS["experts"], f"{CLIP} 0.6 {DOCUMENTS}"),
    "latents-dense": (latent_runs.RUNS["dense"], f"{CLIP} 1 {DOCUMENTS}"),
    "gpt_oss": (extras_runs.RUNS["gpt_oss"], f"{CLIP} 1.7 {DOCUMENTS}"),
    "mimo": (extras_runs.RUNS["mimo"], f"{CLIP} 1.4 {DOCUMENTS}"),
    "kimi_linear": (hybrid_runs.RUNS["kimi_linear"], f"{CLIP} 1.1 --reset-attention-mask"),
    "falcon_h1": (hybrid_runs.RUNS["falcon_h1"], f"{CLIP} 0.9 {DOCUMENTS}"),
    "mixed": (hybrid_runs.RUNS["mixed"], f"{CLIP} 1.7 {DOCUMENTS}"),
}
GRIDS = [
    ((2, 1, 1, 1), ""),
    ((2, 1, 1, 1), f"{SEQUENCE_PARALLEL} {RECOMPUTE}"),
    ((1, 2, 1, 1), ZERO_BUBBLE),
    ((1, 1, 2, 1), "--zero-stage 1"),
    ((1, 1, 2, 1), "--zero-stage 2"),
    ((1, 1, 2, 1), f"--zero-stage 3 {SELECTIVE}"),
    ((1, 1, 1, 2), ""),
    ((1, 1, 1, 2), f"{A2A} {SELECTIVE}"),
    ((2, 1, 1, 2), SEQUENCE_PARALLEL),
    ((1, 2, 1, 2), RECOMPUTE),
    ((2, 2, 2, 1), f"{SEQUENCE_PARALLEL} --zero-stage 1"),
    ((1, 2, 2, 1), "--zero-stage 2"),
    ((1, 2, 2, 1), f"--zero-stage 3 {RECOMPUTE}"),
]
"""(tensor, pipe, data, context) and options."""
QUICK_CASES = [
    ("llama", (1, 1, 1, 2), ""),
    ("latents-dense", (2, 1, 1, 1), ""),
]
CASES = [
    (model, *grid)
    for (model_idx, model), (grid_idx, grid) in product(enumerate(MODELS), enumerate(GRIDS))
    if (model_idx + grid_idx) % 3 == 0 or (model, *grid) in QUICK_CASES
]
"""A third of the combinations: each model in three or four grids, each grid with five models."""


def case_name(flags: str) -> str:
    """Return a short name of a model or of options."""
    return flags.replace("--", "").replace(" ", "-") or "plain"


def check(model: str, grid: tuple[int, int, int, int], options: str, extra: str = "", **kwargs: Any) -> None:
    """Compare three steps in a layout with those of one process."""
    tensor, pipe, data, context = grid
    runs, flags = MODELS[model]
    difference = runs.compare_layout(tensor, pipe, data, f"{flags} {extra}", 3, options, context=context, **kwargs)
    check_fp64(difference)
    assert difference.weight <= 1e-9  # AdamW's division amplifies rounding


@pytest.mark.parametrize(
    ("model", "grid", "options"),
    [pytest.param(*case, marks=() if case in QUICK_CASES else SLOW) for case in CASES],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else case_name(value),
)
def test_every_grid_equals_single_process(model: str, grid: tuple[int, int, int, int], options: str) -> None:
    check(model, grid, options)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_muon_equals_single_process(layout: tuple[int, int, int]) -> None:
    check("llama", (*layout, 1), "--zero-stage 1" if layout[2] > 1 else "", "--optimizer muon")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES, ZB_V, DUAL_PIPE_V])
def test_every_schedule_equals_single_process(schedule: str) -> None:
    check("mtp", (1, 2, 1, 1), schedule, gas=4)


@pytest.mark.slow
@pytest.mark.parametrize("gas", [1, 4, 8])
def test_number_of_micro_batches_does_not_change_training(gas: int) -> None:
    check("llama", (1, 1, 1, 1), "", gas=gas)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "options"),
    [
        ((1, 1, 2, 1), "--zero-stage 1 --offload-optimizer"),
        ((1, 1, 2, 1), "--zero-stage 3 --offload-optimizer --offload-parameters"),
        ((2, 2, 1, 1), f"{INTERLEAVED} {RECOMPUTE}"),
        ((1, 1, 1, 4), ""),
        ((2, 2, 1, 2), f"{SEQUENCE_PARALLEL} --zero-stage 1"),
    ],
)
def test_options_equal_single_process(grid: tuple[int, int, int, int], options: str) -> None:
    check("gpt2", grid, options)


@pytest.mark.slow
def test_dropout_equals_single_process() -> None:
    dropout = "--attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
    check("gpt2", (2, 1, 1, 2), SEQUENCE_PARALLEL, dropout)


@pytest.mark.parametrize("model", [pytest.param(model, marks=() if model == "llama" else SLOW) for model in MODELS])
def test_clipping_changes_training(model: str) -> None:
    """Otherwise the comparisons above would also pass without clipping."""
    runs, flags = MODELS[model]
    clipped, plain = (runs.trace_layout(1, 1, 1, extra, 3)[0] for extra in (flags, f"{flags} --qk-clip-threshold 1e9"))
    assert clipped.losses[0] == plain.losses[0]
    assert abs(clipped.losses[2] - plain.losses[2]) > 1e-6


@pytest.mark.slow
def test_bf16_weights_are_the_rounded_main_params() -> None:
    runs: ParityRuns = LLAMA
    flags = "--bf16 --qk-clip --qk-clip-threshold 1"
    plain, sharded = (runs.trace_layout(1, 1, 2, f"{flags} {zero}", 3) for zero in ("", "--zero-stage 1"))
    assert plain[0].losses == sharded[0].losses
    assert abs(plain[0].losses[2] - runs.trace_layout(1, 1, 1, flags.replace("bf16", "fp32"), 3)[0].losses[2]) < 0.02
