"""ZeRO 2 and 3 with pipelines and with distributed experts, in fp64 against one process (rows E07 and E09).

Every family of layers, schedule and further option of a pipeline occurs with both stages. Bits are compared with ZeRO 1
where the sums have the same order: one micro-batch per step, and no weight that two stages share.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import pytest

from tests.helpers import t5_runs
from tests.helpers.layouts import check_fp64, compare_layout
from tests.helpers.parity_runs import ParityRuns
from tests.parity import bert_runs, hybrid_runs, latent_runs, llama_runs
from tests.parity.test_experts import BALANCED, CAPACITY, DEEPSEEK, EP
from tests.parity.test_schedules import (
    DUAL_PIPE_V,
    INTERLEAVED,
    RECOMPUTE,
    SCHEDULES,
    SPLIT_CHUNKS,
    UNTIED,
    ZB_V,
    ZERO_BUBBLE,
)
from tests.parity.test_zero_parts import check_bitwise

SEQUENCE_PARALLEL = "--sequence-parallel"
STAGES = ("--zero-stage 2", "--zero-stage 3")
FULL_OFFLOAD = "--zero-stage 3 --offload-optimizer --offload-parameters"
CHUNKED_LOSS = "--loss-chunk-tokens 8"
DENSE, MTP = "--clip-grad 0.5", "--clip-grad 0.5 --mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"
MAX_NORM = 1e-11


class Case(NamedTuple):
    """A layout and its options.

    Args:
        model: flags of the model, which the reference has as well.
        grid: (tensor, pipe, data).
        options: flags of the layout.
        gas: micro-batches per step.
        context: context ranks.
    """

    model: str
    grid: tuple[int, int, int]
    options: str
    gas: int = 4
    context: int = 1


def case_id(case: Case) -> str:
    """Return a short name of a case."""
    flags = f"{case.model} {case.options}".replace("--fp64", "").replace("--", "")
    for long, short in ((CAPACITY, "capacity"), (BALANCED, "balanced"), (DEEPSEEK, "deepseek"), (MTP, "mtp")):
        flags = flags.replace(long.replace("--fp64", "").replace("--", ""), short)
    return "-".join([*map(str, case.grid), *flags.split(), f"cp{case.context}" if case.context > 1 else ""]).strip("-")


def pipeline_cases() -> list[Case]:
    """List every schedule with every option, in turn with ZeRO 2 and 3."""
    schedules = (*SCHEDULES, ZB_V, DUAL_PIPE_V)
    options = ("", UNTIED, RECOMPUTE, CHUNKED_LOSS, f"{UNTIED} {CHUNKED_LOSS}")
    return [
        Case(f"{DENSE} {option}".strip(), (1, 2, 2), f"{schedule} {STAGES[(row + column) % 2]}")
        for (row, schedule), (column, option) in product(enumerate(schedules), enumerate(options))
    ]


QUICK = [
    Case(DENSE, (1, 2, 2), f"{SPLIT_CHUNKS} --zero-stage 3"),
    Case(BALANCED, (1, 1, 4), f"{EP} 2 --zero-stage 3", gas=2),
]
SLOW = [
    *(case for case in pipeline_cases() if case not in QUICK),
    *(Case(DENSE, (1, 2, 2), f"{schedule} {FULL_OFFLOAD}") for schedule in ("", ZB_V)),
    *(
        Case(model, grid, f"{options} {stage}", gas, context)
        for model, grid, options, gas, context in (
            (DENSE, (2, 2, 2), SEQUENCE_PARALLEL, 2, 1),
            (DENSE, (1, 2, 1), "", 4, 2),
            (DENSE, (1, 2, 2), f"{ZERO_BUBBLE} --cp-comm-type a2a", 2, 2),
            (f"{DENSE} --num-layers 8", (1, 4, 2), INTERLEAVED, 2, 1),
            (f"{DENSE} {RECOMPUTE} --checkpoint-num-layers 2", (1, 2, 4), "", 1, 1),
            (f"{DENSE} --optimizer muon", (1, 2, 2), "", 2, 1),
            (MTP, (1, 2, 2), "", 4, 1),
            (f"{MTP} {UNTIED} {RECOMPUTE}", (1, 2, 2), ZERO_BUBBLE, 4, 1),
            (MTP, (1, 2, 2), ZB_V, 4, 1),
            (BALANCED, (1, 1, 4), f"{EP} 4", 2, 1),
            (DEEPSEEK, (1, 1, 4), f"{EP} 2 {RECOMPUTE}", 2, 1),
            (DEEPSEEK, (2, 1, 2), f"{EP} 2 {SEQUENCE_PARALLEL}", 2, 1),
            (BALANCED, (2, 1, 4), f"{EP} 2 {SEQUENCE_PARALLEL} --expert-tensor-parallel-size 1", 2, 1),
            (BALANCED, (4, 1, 2), f"{EP} 2 {SEQUENCE_PARALLEL} --expert-tensor-parallel-size 2", 2, 1),
            (CAPACITY, (1, 1, 2), f"{EP} 2", 2, 2),
            (BALANCED, (1, 2, 4), f"{EP} 2 {ZERO_BUBBLE}", 2, 1),
            (f"{BALANCED} --hidden-bias", (1, 2, 4), f"{EP} 2 {INTERLEAVED}", 2, 1),
            (DEEPSEEK, (1, 2, 2), f"{EP} 2 {DUAL_PIPE_V}", 4, 1),
        )
        for stage in STAGES
    ),
    Case(BALANCED, (1, 1, 4), f"{EP} 4 {FULL_OFFLOAD}", gas=2),
    Case(DENSE, (1, 2, 2), f"{ZERO_BUBBLE} --zero-stage 3 --stage3-prefetch-bucket-size 0"),
]


@pytest.mark.parametrize(
    "case", [*(pytest.param(case, id=case_id(case)) for case in QUICK),
             *(pytest.param(case, id=case_id(case), marks=pytest.mark.slow) for case in SLOW)],
)  # fmt: skip
def test_layout_equals_single_process(case: Case) -> None:
    model, options = case.model, case.options
    if "--disable-bias-linear" in model and "--hidden-bias" in model:
        model = model.replace("--disable-bias-linear", "")
    difference = compare_layout(*case.grid, case.gas, f"--fp64 {model}", options, context=case.context)
    check_fp64(difference, MAX_NORM)


FAMILIES: dict[str, tuple[ParityRuns, str]] = {
    "llama": (llama_runs.RUNS, "--clip-grad 0.5 --reset-attention-mask"),
    "bert": (bert_runs.RUNS, "--clip-grad 0.5"),
    **{f"t5 {name}": (t5_runs.RUNS, flags) for name, flags in t5_runs.VARIANTS.items()},
    **{f"hybrid {name}": (runs, hybrid_runs.EXTRA) for name, runs in hybrid_runs.RUNS.items()},
    **{f"latent {name}": (runs, latent_runs.EXTRA) for name, runs in latent_runs.RUNS.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", [STAGES[0], f"{ZERO_BUBBLE} {STAGES[1]}"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pipeline_of_every_family_equals_single_process(family: str, options: str) -> None:
    runs, extra = FAMILIES[family]
    extra = extra if "--fp64" in extra else f"--fp64 {extra}"
    difference = runs.compare_layout(1, 2, 2, extra, 3, options)
    assert difference.loss <= 1e-11 and difference.gradient <= 1e-10, difference.worst_gradient
    assert difference.norm <= MAX_NORM


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("schedule", ["", ZERO_BUBBLE, INTERLEAVED])
@pytest.mark.parametrize("dtype", ["--fp32", "--bf16"])
def test_untied_pipeline_is_bitwise_stage_0_with_one_micro_batch(dtype: str, schedule: str, stage: str) -> None:
    check_bitwise((1, 2, 2), f"{dtype} {UNTIED} {schedule}", stage, steps=6, gas=1)
