"""Megatron's types of load balancing in every layout: losses, gradients and weights of one process."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.training.parity import compare
from tests.helpers.layouts import check_fp64, split_global_batch, trace_layout, trace_one_process

FLAGS = (
    "--fp64 --disable-bias-linear --clip-grad 0.5 --num-experts 4 --moe-ffn-hidden-size 24 --eod-mask-loss "
    "--moe-router-load-balancing-type"
)
SEQUENCE, GLOBAL = f"{FLAGS} seq_aux_loss --moe-aux-loss-coeff 0.1", f"{FLAGS} global_aux_loss --moe-aux-loss-coeff 0.1"
SEVERAL = f"{FLAGS} aux_loss seq_aux_loss --moe-aux-loss-coeff 0.2 0.1"
ALL_TYPES = f"{FLAGS} global_aux_loss seq_aux_loss aux_loss --moe-aux-loss-coeff 0.1 0.05 0.2 --moe-z-loss-coeff 0.01"
SINKHORN = f"{FLAGS} sinkhorn --init-method-std 0.2"
TOP_1 = f"{SINKHORN} --moe-router-topk 1"
CUT, RECOMPUTED, EP = "--sequence-parallel", "--checkpoint-activations", "--expert-model-parallel-size"
SIGMOID = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
CASES = [
    (SEQUENCE, (2, 1, 1), 2, CUT),
    (GLOBAL, (1, 2, 1), 1, RECOMPUTED),
    (SEVERAL, (1, 1, 2), 1, f"{EP} 2 --zero-stage 1"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (SEQUENCE, (1, 2, 2), 1, f"{EP} 2"),
            (SEQUENCE, (1, 1, 2), 2, f"{RECOMPUTED} {SIGMOID}"),
            (SEQUENCE, (2, 2, 1), 1, f"{CUT} --loss-average micro-batch"),
            (GLOBAL, (2, 1, 1), 2, CUT),
            (GLOBAL, (1, 2, 2), 1, f"{EP} 2 --pipeline-schedule zb-h1"),
            (GLOBAL, (1, 2, 2), 1, "--pipeline-chunks 2 --zero-stage 1"),
            (SEVERAL, (2, 1, 1), 2, f"{CUT} {RECOMPUTED}"),
            (SEVERAL, (1, 2, 2), 1, f"{EP} 2 --pipeline-schedule zb-h1"),
            (ALL_TYPES, (2, 1, 1), 2, CUT),
            (ALL_TYPES, (1, 2, 2), 1, f"{RECOMPUTED} --zero-stage 3"),
            (SINKHORN, (2, 1, 2), 1, f"{CUT} {EP} 2"),
            (SINKHORN, (1, 2, 1), 2, ""),
            (TOP_1, (2, 1, 1), 2, f"{CUT} {RECOMPUTED}"),
            (TOP_1, (1, 1, 2), 1, "--zero-stage 3"),
        )
    ),
]


NAMES = {
    SEQUENCE: "sequence",
    GLOBAL: "global",
    SEVERAL: "several",
    ALL_TYPES: "all",
    SINKHORN: "sinkhorn",
    TOP_1: "top-1",
}


def case_id(case: Any) -> str:
    """Return the name of the type; of a slow case with its layout and flags."""
    model, layout, context, extra = getattr(case, "values", case)
    words = [*map(str, (*layout, context)), *extra.replace("--", "").split()] if hasattr(case, "values") else []
    return "-".join([NAMES[model], *words])


@pytest.mark.parametrize(("model", "layout", "context", "extra"), CASES, ids=map(case_id, CASES))
def test_every_layout_equals_single_process(model: str, layout: tuple[int, int, int], context: int, extra: str) -> None:
    """One process has the micro-batches of the replicas; for global_aux_loss one micro-batch of all replicas."""
    tensor, pipe, data = layout
    gas = 1 if "global" in model and data > 1 else 2
    model, schedule = (f"{model} {extra}", "") if "micro-batch" in extra or SIGMOID in extra else (model, extra)
    num_micro_batches = gas if "global" in model else data * gas
    reference = trace_one_process(*split_global_batch(1, num_micro_batches), model.replace(CUT, ""))
    ranks = trace_layout(tensor, pipe, data, *split_global_batch(data, gas), f"{model} {schedule}", context=context)
    check_fp64(compare(reference, ranks))
