"""Hybrid decoders generate the same tokens in every layout: those of a plain loop over one process's model."""

from __future__ import annotations

import pytest

from tests.generate.test_gpt2 import MODEL, generate_on_rank, plain_loop
from tests.helpers.harness import run_ranks

SIZES = (
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 6 "
    "--mamba-num-heads 8 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 4"
)
MODELS = {
    "gated delta net": "--experimental-attention-variant gated_delta_net --linear-attention-freq 2",
    "kimi": "--experimental-attention-variant kimi_delta --linear-attention-freq [1,0,1,1] --linear-num-value-heads 2 "
    "--linear-value-head-dim 8",
    "parallel heads": "--experimental-attention-variant parallel_mamba2",
    "mamba": "--experimental-attention-variant mamba2 --linear-attention-freq [1,1,0,1]",
}
QUICK = [("gated delta net", (1, 2, 1)), ("parallel heads", (2, 1, 1))]
CASES = [(name, layout) for name in MODELS for layout in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 4, 1)]]


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=f"{case[0]}-{case[1]}") for case in CASES],
)
def test_every_layout_equals_plain_loop(name: str, layout: tuple[int, int, int]) -> None:
    extra = f"--fp64 {MODEL} {SIZES} {MODELS[name]}"
    world_size = layout[0] * layout[1] * layout[2]
    (expected,) = run_ranks(1, plain_loop, extra, None)
    assert len({token for row in expected for token in row}) > 10
    assert run_ranks(world_size, generate_on_rank, *layout, extra, None) == [expected] * world_size
