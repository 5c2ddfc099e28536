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
from tests.helpers.model_samples import fill_weights, make_batch, make_parallel_context, small_model_args
from tests.helpers.whole import group_of_all_ranks

RULES = [
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


@pytest.mark.parametrize("row", RULES, ids=[row[0] for row in RULES])
def test_loss_scale_follows_rules_and_skipped_steps_change_nothing(row):
    """Overflows are real: a gradient of 2 to the 16 is no number of fp16 at any scale."""
    _, power, window, hysteresis, floor, steps, expected, is_fatal = row
    weight = torch.nn.Parameter(torch.zeros(3))
    scaler = GradScaler(2.0**power, True, window, hysteresis, floor)
    build = partial(torch.optim.SGD, lr=1.0)
    optimizer = MixedPrecisionOptimizer([{"params": [weight]}], build, dtype=torch.float16, scaler=scaler)
    scales, num_updates = [], 0
    for step_idx, step in enumerate(steps):
        scales.append(optimizer.loss_scale)
        factor = torch.tensor(2.0**-20 if step == "." else 2.0**16)
        (weight.float() * factor).sum().mul(optimizer.loss_scale).backward()
        if is_fatal and step_idx == len(steps) - 1:
            with pytest.raises(NumericsError, match="overflow at the smallest loss scale"):
                optimizer.step()
        else:
            optimizer.step()
            assert optimizer.overflow == (step == "x")
        num_updates += step == "."
        assert torch.equal(optimizer.main_param_of(weight), torch.full((3,), -num_updates * 2.0**-20))
    assert scales == [2.0**log for log in expected]


def test_overflow_at_fixed_scale_error_names_flag():
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


def test_bf16_micro_batch_gradients_accumulate_in_fp32():
    """Sums in bf16 stop growing where the next gradient is below half of their last bit."""
    model = fill_weights(DecoderModel(small_model_args(num_layers=1), make_parallel_context(group_of_all_ranks(0, 1))))
    fp64_sums = {p: torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()}
    bf16_sums = {p: torch.zeros_like(p, dtype=torch.bfloat16) for p in model.parameters()}

    def add(parameter):
        fp64_sums[parameter] += parameter.grad
        bf16_sums[parameter] += parameter.grad

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(add)  # ahead of the optimizer's own
    groups = [{"params": list(model.parameters())}]
    optimizer = MixedPrecisionOptimizer(groups, partial(torch.optim.SGD, lr=1.0), dtype=torch.bfloat16)
    for seed in range(256):
        model(**vars(make_batch(seed=seed)))[0].backward()

    def worst_error(get_sum):
        return max(((get_sum(p) - fp64_sum).norm() / fp64_sum.norm()).item() for p, fp64_sum in fp64_sums.items())

    assert worst_error(optimizer.gradient_of) < 1e-6  # observed 1e-7
    assert worst_error(bf16_sums.get) > 1e-2  # what would be lost
