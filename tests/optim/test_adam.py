"""AdamW with states in bf16: the plain formula to the bit, every layout, and checkpoints into any other format."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config import parse
from megatron.costs.memory import State
from megatron.errors import ConfigError
from megatron.models import registry
from megatron.mpu.topology import Topology
from megatron.optim import adam, build_optimizer
from megatron.optim.state import load_state, state_of
from megatron.planner.layout import layout_of
from megatron.training.dry_run import plan_rows
from megatron.training.estimates import stage_memory
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import GLOBAL_BATCH, check_fp64, difference, traces
from tests.optim.test_adafactor_layouts import load_and_go_on, save_and_go_on
from tests.optim.test_muon_layouts import state_of as saved_state

BOTH, FLAGS = ("exp_avg", "exp_avg_sq"), "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
LR, DECAY, BETAS, EPS, STEPS = 1e-2, 0.1, (0.9, 0.95), 1e-8, 20


def rounded(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return fp32 numbers as bf16 has them: to nearest, to the even one in the middle."""
    bits = x.view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return kept.astype(np.uint32).view(np.float32)


def formula(w: Any, gradients: list[Any], kept: tuple[str, ...]) -> Any:
    """Return the weights after all steps, in fp32 with one rounding an operation.

    The root is torch's: on some CPUs it is the next number to the nearest one.
    """
    f = np.float32
    w, m, v = w.copy(), np.zeros_like(w), np.zeros_like(w)
    for n, g in enumerate(gradients, 1):
        m = m * f(BETAS[0]) + g * f(1 - BETAS[0])
        v = v * f(BETAS[1]) + (g * g) * f(1 - BETAS[1])
        denominator = torch.from_numpy(v).sqrt().numpy() * f(1 / math.sqrt(1 - BETAS[1] ** n)) + f(EPS)
        w = w * f(1 - LR * DECAY) - m / denominator * f(LR / (1 - BETAS[0] ** n))
        m, v = (rounded(x) if name in kept else x for name, x in zip(BOTH, (m, v), strict=True))
    return w, m, v


def gradients_of(shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator) * 10.0**-n for n in range(4) for _ in range(STEPS // 4)]


@pytest.mark.parametrize("kept", [BOTH, BOTH[:1], BOTH[1:]], ids=str)
@pytest.mark.parametrize("at_once", [2**22, 7])
def test_steps_are_the_formula_to_the_bit(kept: tuple[str, ...], at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "NUMBERS_AT_ONCE", at_once)
    start, gradients = torch.randn((5, 9), generator=torch.Generator().manual_seed(1)), gradients_of((5, 9))
    weight = torch.nn.Parameter(start.clone())
    how: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "betas": BETAS, "epsilon": EPS}
    optimizer = build_optimizer([weight], bf16_states=kept, **how)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    w, m, v = formula(start.numpy(), [each.numpy() for each in gradients], kept)
    state = optimizer.inner.state[optimizer.main_param_of(weight)]
    assert torch.equal(weight, torch.from_numpy(w))
    for name, wanted in zip(BOTH, (m, v), strict=True):
        assert state[name].dtype == (torch.bfloat16 if name in kept else torch.float32)
        assert torch.equal(state[name].float(), torch.from_numpy(wanted)), name


def test_with_wide_states_it_is_torchs_adamw() -> None:
    start = torch.randn((5, 9), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, wanted = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    groups = [[{"params": [p], "weight_decay": DECAY}] for p in (found, wanted)]
    ours = adam.AdamW(groups[0], lr=LR, betas=BETAS, eps=EPS, state_dtypes={})
    theirs = torch.optim.AdamW(groups[1], lr=LR, betas=BETAS, eps=EPS)
    for gradient in gradients_of((5, 9)):
        found.grad = wanted.grad = gradient.double()
        ours.step()
        theirs.step()
    assert (found - wanted).abs().max() <= 1e-15


def test_a_mean_of_squares_in_bf16_cannot_fall_slowly_and_that_is_said() -> None:
    for beta2, has_fallen in ((0.999, False), (0.99, True)):
        weight = torch.nn.Parameter(torch.ones(64))
        optimizer = build_optimizer([weight], betas=(0.9, beta2), bf16_states=BOTH)
        for step in range(120):
            weight.grad = torch.linspace(1, 2, 64) if step < 20 else torch.zeros(64)
            optimizer.step()
            if step == 20:
                before = optimizer.inner.state[weight]["exp_avg_sq"].clone()
        assert bool((optimizer.inner.state[weight]["exp_avg_sq"] < 0.5 * before).all()) == has_fallen
        notes = config_of(f"{FLAGS} --adam-beta2 {beta2}").notes
        assert any("the moment may not decay at all" in note for note in notes) != has_fallen


LINE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 101 --data-path none "
    "--device cpu"
)


def config_of(extra: str) -> Any:
    return parse(f"{LINE} {extra}".split(), world_size=1).with_vocab(101)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (f"{FLAGS} --optimizer sgd".replace("--adam-beta2 0.95", ""), "applies to AdamW only, got --optimizer sgd"),
        (f"{FLAGS} --offload-optimizer --cpu-adam deepspeed", "got --cpu-adam deepspeed, whose states are fp32"),
        ("--exp-avg-dtype fp8", "--exp-avg-dtype must be one of fp32, bf16"),
    ],
)
def test_what_cannot_be_is_refused(extra: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(extra)
    assert text in str(refused.value)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_planner_and_start_table_count_two_bytes_a_state(dtype: str, optimizer: str) -> None:
    wide, config = (
        config_of(f"--{dtype} --optimizer {optimizer}"),
        config_of(f"--{dtype} --optimizer {optimizer} {FLAGS}"),
    )
    assert layout_of(config, 1).num_bf16_states == 2 and layout_of(wide, 1).num_bf16_states == 0
    costs = registry.costs_of(config)
    how = {"micro_batch_size": 1, "dtype": dtype, "optimizer": optimizer}
    memory = [costs.memory_per_stage([0, 5], num_bf16_states=number, **how)[0].optimizer for number in (0, 1, 2)]
    moved = sum(one.weights for one in costs.stage_matrices([0, 5])[0]) if optimizer == "muon" else 0
    assert [memory[0] - each for each in memory] == [2 * number * (costs.num_parameters - moved) for number in range(3)]
    assert State.of(dtype, "sgd", 2) == State.of(dtype, "sgd")
    stages = [stage_memory(each, Topology(1, 1, 1), [0, 5], dtype)[0].optimizer for each in (wide, config)]
    assert stages == [memory[0], memory[2]]
    rows = dict(plan_rows(config, Topology(1, 1, 1), [0, 5], dtype))
    assert rows["AdamW's states"].startswith("exp_avg and exp_avg_sq in bf16")
    assert "AdamW's states" not in dict(plan_rows(wide, Topology(1, 1, 1), [0, 5], dtype))


def test_a_state_of_torchs_form_goes_into_either_format() -> None:
    """As checkpoints in DeepSpeed's layout hold it."""
    made = []
    for kept in (BOTH, ()):
        weight = torch.nn.Parameter(torch.ones(3, 4))
        optimizer = build_optimizer([weight], bf16_states=kept)
        weight.grad = torch.linspace(0.1, 0.7, 12).view(3, 4)
        optimizer.step()
        made.append((weight, optimizer))
    (narrow, low), (wide, high) = made
    saved = [{**state_of(each), "state": {0: dict(each.inner.state[p])}} for p, each in made]
    load_state(low, saved[1])
    load_state(high, saved[0])
    for name in BOTH:
        assert low.inner.state[narrow][name].dtype == torch.bfloat16
        assert torch.equal(low.inner.state[narrow][name], saved[1]["state"][0][name].bfloat16())
        assert torch.equal(high.inner.state[wide][name], saved[0]["state"][0][name].float())


LAYOUTS = [
    (1, 1, 2, "--zero-stage 1"), (2, 2, 1, ""), (1, 1, 2, "--zero-stage 3"), (2, 1, 2, "--zero-stage 1"), (1, 2, 2, ""),
    (1, 1, 2, "--zero-stage 2 --offload-optimizer"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data", "extra"), LAYOUTS)
def test_every_layout_has_the_losses_of_one_process(tensor: int, pipe: int, data: int, extra: str) -> None:
    """Its sibling in the short run is in tests/optim/test_param_rates.py."""
    check_fp64(difference(tensor, pipe, data, 4, f"--fp64 {FLAGS}", extra, steps=3))


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["--zero-stage 2", "--zero-stage 3", "--zero-stage 1 --offload-optimizer"])
def test_parts_have_the_bits_of_whole_weights(extra: str) -> None:
    """With one micro-batch a step all stages of ZeRO have the same gradients."""
    given, low = (1, 1, 2, GLOBAL_BATCH // 2, 1), f"--fp32 {FLAGS}"
    whole = traces(*given, low, steps=4)[0].weights
    for rank in traces(*given, f"{low} {extra}", steps=4):
        for name, (shard, part) in rank.weights.items():
            assert torch.equal(part, shard.cut(whole[name][1])), name


def go_on(rank: int, data: int, folder: Path, wide: Path) -> list[Any]:
    """Return what runs end with that go on with states of either format, saved in either, and what was saved."""
    given, low, zero = ("gpt2", 1, data), f"--fp32 --hidden-dropout 0.1 {FLAGS}", "--zero-stage 1"
    plain = "--fp32 --hidden-dropout 0.1 --adam-beta2 0.95"
    whole = save_and_go_on(rank, *given, f"{low} {zero}", folder)
    again = load_and_go_on(rank, *given, f"{low} {zero}", folder)
    widened = load_and_go_on(rank, *given, f"{plain} --zero-stage 3", folder)
    other = save_and_go_on(rank, *given, plain, wide)
    narrowed = load_and_go_on(rank, *given, f"{low} {zero}", wide)
    return [each[0] for each in (whole, again, widened, other, narrowed)]


@pytest.mark.slow
@pytest.mark.parametrize("data", [1, 2])
def test_a_resumed_run_is_the_same_to_the_bit_and_either_format_takes_the_others_states(
    data: int, tmp_path: Path
) -> None:
    """Its sibling in the short run is in tests/optim/test_param_rates.py."""
    folders = tmp_path / "low", tmp_path / "wide"
    for whole, again, widened, other, narrowed in run_ranks(data, go_on, data, *folders):
        assert again == whole
        first, second = (float.fromhex(each[0]) for each in (widened, whole))
        assert first == pytest.approx(second, rel=1e-6), "the step behind the load has the same weights"
        first, second = (float.fromhex(each[0]) for each in (narrowed, other))
        assert first == pytest.approx(second, rel=1e-6)
        assert float.fromhex(narrowed[1]) == pytest.approx(float.fromhex(other[1]), rel=1e-3)
    low, wide = saved_state(tmp_path / "low"), saved_state(tmp_path / "wide")
    kinds = {name.split("/")[1]: value.dtype for name, value in low.items() if name.startswith("optimizer/")}
    assert kinds == dict.fromkeys(BOTH, torch.bfloat16)
    assert {value.dtype for name, value in wide.items()} == {torch.float32}
