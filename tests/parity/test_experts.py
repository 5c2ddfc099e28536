"""Models with experts in every layout: the losses, those of the balance too, and every gradient of one process.

The router's bias, its shares of the batch before and its weights move in each step, so that a choice that differs in
one layout shows in the losses of the next.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.layouts import check_fp64, difference

SIZES = "--fp64 --disable-bias-linear --clip-grad 0.5 --num-experts 4 --moe-ffn-hidden-size 24"
BALANCED = f"{SIZES} --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 --eod-mask-loss"
DEEPSEEK = (
    f"{SIZES} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
    "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --moe-layer-freq [0,1,1,1] "
    "--moe-aux-loss-coeff 0.05"
)
CAPACITY = f"{BALANCED} --moe-expert-capacity-factor 0.8"
POSITION = f"{CAPACITY} --moe-token-drop-policy position"
SLOW = pytest.mark.slow
CUT, RECOMPUTED, ZERO = "--sequence-parallel", "--checkpoint-activations", "--zero-stage"
LAYOUTS = [
    (BALANCED, (2, 1, 2), CUT, 1),
    (DEEPSEEK, (1, 2, 2), RECOMPUTED, 1),
    (CAPACITY, (2, 1, 1), CUT, 2),
    *(
        pytest.param(*each, marks=SLOW)
        for each in (
            (BALANCED, (2, 1, 1), "", 1),
            (BALANCED, (1, 1, 2), "", 1),
            (BALANCED, (1, 4, 1), "", 1),
            (BALANCED, (1, 2, 1), "--pipeline-schedule gpipe", 1),
            (BALANCED, (1, 2, 1), "--pipeline-schedule zb-h1", 1),
            (BALANCED, (1, 2, 2), "--pipeline-chunks 2", 1),
            (BALANCED, (2, 2, 1), f"{CUT} {RECOMPUTED}", 1),
            (BALANCED, (1, 1, 4), f"{ZERO} 1", 1),
            (BALANCED, (1, 1, 2), f"{ZERO} 2", 1),
            (BALANCED, (1, 1, 2), f"{ZERO} 3", 1),
            (BALANCED, (1, 1, 2), f"{ZERO} 3 {RECOMPUTED}", 1),
            (DEEPSEEK, (2, 2, 1), CUT, 1),
            (DEEPSEEK, (2, 1, 2), f"{CUT} {ZERO} 1", 1),
            (DEEPSEEK, (1, 1, 1), "--cp-comm-type a2a", 2),
            (DEEPSEEK, (1, 2, 1), "", 2),
            (CAPACITY, (1, 2, 2), "", 1),
            (POSITION, (2, 1, 1), CUT, 2),
            (POSITION, (1, 1, 2), "", 1),
            (BALANCED, (2, 1, 2), "--optimizer muon", 1),
        )
    ),
]  # fmt: skip


NAMES = {BALANCED: "balanced", DEEPSEEK: "deepseek", CAPACITY: "capacity", POSITION: "position"}


def name_of(case: Any) -> str:
    """Return a short name of a case, such as ``balanced-2-1-2-cut-1``."""
    model, layout, extra, context = getattr(case, "values", case)
    words = extra.replace(CUT, "cut").replace(RECOMPUTED, "recomputed").replace("--", "").split()
    return "-".join([NAMES[model], *map(str, layout), *words, str(context)])


@pytest.mark.parametrize(("model", "layout", "extra", "context"), LAYOUTS, ids=map(name_of, LAYOUTS))
def test_every_layout_is_one_process(model: str, layout: tuple[int, int, int], extra: str, context: int) -> None:
    tensor, pipe, data = layout
    if "muon" in extra:
        model, extra = f"{model} {extra}", ""
    check_fp64(difference(tensor, pipe, data, 2, model, extra, context=context))


@pytest.mark.parametrize("gas", [4, pytest.param(1, marks=SLOW)])
def test_the_number_of_micro_batches_changes_nothing(gas: int) -> None:
    """The balance loss is that of the global batch, and capacity that of a sample."""
    for model in (CAPACITY, DEEPSEEK):
        found = difference(1, 2 if gas == 4 else 1, 1, gas, model)
        check_fp64(found)
