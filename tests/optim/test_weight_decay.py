"""The weight decay: its course over a run, and the parameter groups that follow it."""

from __future__ import annotations

import pytest
import torch

from megatron.config import parse
from megatron.errors import ConfigError
from megatron.optim.param_groups import build_optimizer
from megatron.optim.param_rates import ParamRate
from megatron.optim.weight_decay import WeightDecaySchedule, set_weight_decay

STYLE = "--weight-decay-incr-style"
MODEL_FLAGS = "--vocab-size 8 --num-layers 1 --hidden-size 8 --num-attention-heads 1 --data-path none"


@pytest.mark.parametrize(("style", "quarter"), [("linear", 0.125), ("cosine", 0.1 + 0.1 * (1 - 0.5**0.5) / 2)])
def test_decay_follows_style_and_stays_at_its_end(style: str, quarter: float) -> None:
    schedule = WeightDecaySchedule(0.1, 0.2, style, 40)
    decays = [schedule.after(n) for n in (0, 10, 20, 40, 41)]
    assert decays == pytest.approx([0.1, quarter, 0.15, 0.2, 0.2], rel=1e-12)


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_schedule_sets_decay_of_matrices_only(name: str) -> None:
    matrix, bias, named = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,), (2, 2)))
    rates = {named: ParamRate(weight_decay=0.7)}
    optimizer = build_optimizer([matrix, bias, named], name=name, weight_decay=0.3, rates=rates)
    set_weight_decay(optimizer, 0.05)
    decays = {group["params"][0]: group["weight_decay"] for group in optimizer.inner.param_groups}
    expected = {matrix: 0.05, bias: 0.0, named: 0.7}
    assert decays == {optimizer.main_param_of(parameter): decay for parameter, decay in expected.items()}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (f"{STYLE} linear --start-weight-decay 0.1", "needs --start-weight-decay and --end-weight-decay, got --start"),
        ("--end-weight-decay 0.1", "--end-weight-decay 0.1 needs --weight-decay-incr-style linear or cosine"),
        ("--lr 1e-3 --lr-warmup-init 2e-3", "--lr-warmup-init must not exceed --lr, got 0.002 and 0.001"),
    ],
)
def test_incomplete_schedule_is_rejected(flags: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse(f"{MODEL_FLAGS} {flags}".split(), world_size=1, env={})
