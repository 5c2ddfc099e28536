"""The loss scale of fp16 as one table, and sums of gradients of bf16 over many micro-batches.

The rule: it starts at 2 to the power of ``--initial-scale-power``; a step whose gradients overflow is skipped; such
step number ``--hysteresis`` halves it and so does each one after that, down to ``--min-scale``; after
``--loss-scale-window`` good steps in a row it doubles, and the hysteresis is whole again. An overflow at the smallest
scale ends the run, and so does one at a fixed scale (``--loss-scale``).
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron.errors import NumericsError
from megatron.models.common.decoder import DecoderModel
from megatron.optim import GradScaler, MixedPrecisionOptimizer
from tests.helpers.model_samples import batch_of, filled, place_of, small_sizes
from tests.helpers.whole import whole_world

TABLE = [
    # power, window, hysteresis, floor, steps (. good, x overflow), log2 of the scale that each step ran with, ends
    ("starts at the power", 16, 4, 2, 1.0, ".", [16], False),
    ("doubles after a window", 4, 3, 1, 1.0, ".......", [4, 4, 4, 5, 5, 5, 6], False),
    ("halves at an overflow", 4, 3, 1, 1.0, "x.x.", [4, 3, 3, 2], False),
    ("begins the window anew", 4, 3, 1, 1.0, "..x....", [4, 4, 4, 3, 3, 3, 4], False),
    ("waits for the hysteresis", 4, 9, 3, 1.0, "xx.x.xx.", [4, 4, 4, 4, 3, 3, 2, 1], False),
    ("a window makes it whole", 4, 2, 2, 1.0, "x..x.xx.", [4, 4, 4, 5, 5, 5, 4, 3], False),
    ("stops at the floor and ends", 2, 9, 1, 2.0, "xx", [2, 1], True),
    ("hysteresis counts there too", 1, 9, 2, 1.0, "xxx", [1, 1, 0], True),
]


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
def test_the_scale_follows_its_rule_and_a_skipped_step_changes_nothing(row):
    """Overflows are real: a gradient of 2 to the 16 is no number of fp16 at any scale."""
    _, power, window, hysteresis, floor, steps, wanted, ends = row
    weight = torch.nn.Parameter(torch.zeros(3))
    scaler = GradScaler(2.0**power, True, window, hysteresis, floor)
    build = partial(torch.optim.SGD, lr=1.0)
    optimizer = MixedPrecisionOptimizer([{"params": [weight]}], build, dtype=torch.float16, scaler=scaler)
    seen, updates = [], 0
    for number, step in enumerate(steps):
        seen.append(optimizer.loss_scale)
        factor = torch.tensor(2.0**-20 if step == "." else 2.0**16)
        (weight.float() * factor).sum().mul(optimizer.loss_scale).backward()
        if ends and number == len(steps) - 1:
            with pytest.raises(NumericsError, match="overflow at the smallest loss scale"):
                optimizer.step()
        else:
            optimizer.step()
            assert optimizer.overflow == (step == "x")
        updates += step == "."
        assert torch.equal(optimizer.main_param_of(weight), torch.full((3,), -updates * 2.0**-20))
    assert seen == [2.0**log for log in wanted]


def test_an_overflow_at_a_fixed_scale_says_which_flag_to_change():
    weight = torch.nn.Parameter(torch.zeros(3))
    build = partial(torch.optim.SGD, lr=1.0)
    optimizer = MixedPrecisionOptimizer(
        [{"params": [weight]}], build, dtype=torch.float16, scaler=GradScaler(scale=2.0**16)
    )
    (weight.float() * 1.5).sum().mul(optimizer.loss_scale).backward()
    with pytest.raises(
        NumericsError, match=r"overflow at the fixed --loss-scale 65536.*Lower --loss-scale, or omit it"
    ):
        optimizer.step()
    assert torch.equal(weight, torch.zeros(3, dtype=torch.float16))


def test_bf16_gradients_of_256_micro_batches_are_summed_in_fp32():
    """Sums in bf16 stop growing where the next gradient is below half of their last bit."""
    model = filled(DecoderModel(small_sizes(num_layers=1), place_of(whole_world(0, 1))))
    exact = {p: torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()}
    narrow = {p: torch.zeros_like(p, dtype=torch.bfloat16) for p in model.parameters()}

    def add(parameter):
        exact[parameter] += parameter.grad
        narrow[parameter] += parameter.grad

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(add)  # ahead of the optimizer's own
    groups = [{"params": list(model.parameters())}]
    optimizer = MixedPrecisionOptimizer(groups, partial(torch.optim.SGD, lr=1.0), dtype=torch.bfloat16)
    for seed in range(256):
        model(**vars(batch_of(seed=seed)))[0].backward()

    def worst(sums):
        return max(((sums(p) - wide).norm() / wide.norm()).item() for p, wide in exact.items())

    assert worst(optimizer.gradient_of) < 1e-6  # observed 1e-7
    assert worst(narrow.get) > 1e-2  # what would be lost
