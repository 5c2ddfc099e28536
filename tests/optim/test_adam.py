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
from tests.helpers.layouts import GLOBAL_BATCH, check_fp64, compare_layout, trace_layout
from tests.optim.test_adafactor_layouts import load_and_continue, save_and_continue
from tests.optim.test_muon_layouts import read_checkpoint as saved_state

MOMENTS, BF16_FLAGS = ("exp_avg", "exp_avg_sq"), "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
LR, DECAY, BETAS, EPS, STEPS = 1e-2, 0.1, (0.9, 0.95), 1e-8, 20


def round_to_bf16(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return fp32 numbers as bf16 has them: to nearest, to the even one in the middle."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded_bits = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return rounded_bits.astype(np.uint32).view(np.float32)


def adamw_reference(w: Any, gradients: list[Any], bf16_states: tuple[str, ...]) -> Any:
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
        m, v = (round_to_bf16(x) if name in bf16_states else x for name, x in zip(MOMENTS, (m, v), strict=True))
    return w, m, v


def gradients_of(shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator) * 10.0**-n for n in range(4) for _ in range(STEPS // 4)]


@pytest.mark.parametrize("bf16_states", [MOMENTS, MOMENTS[:1], MOMENTS[1:]], ids=str)
@pytest.mark.parametrize("chunk_numel", [2**22, 7])
def test_bf16_steps_match_formula_bitwise(
    bf16_states: tuple[str, ...], chunk_numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam, "CHUNK_NUMEL", chunk_numel)
    start, gradients = torch.randn((5, 9), generator=torch.Generator().manual_seed(1)), gradients_of((5, 9))
    weight = torch.nn.Parameter(start.clone())
    settings: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "betas": BETAS, "epsilon": EPS}
    optimizer = build_optimizer([weight], bf16_states=bf16_states, **settings)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    w, m, v = adamw_reference(start.numpy(), [grad.numpy() for grad in gradients], bf16_states)
    state = optimizer.inner.state[optimizer.main_param_of(weight)]
    assert torch.equal(weight, torch.from_numpy(w))
    for name, expected in zip(MOMENTS, (m, v), strict=True):
        assert state[name].dtype == (torch.bfloat16 if name in bf16_states else torch.float32)
        assert torch.equal(state[name].float(), torch.from_numpy(expected)), name


def test_fp32_states_match_torch_adamw() -> None:
    start = torch.randn((5, 9), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight, reference_weight = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    groups = [[{"params": [p], "weight_decay": DECAY}] for p in (weight, reference_weight)]
    optimizer = adam.AdamW(groups[0], lr=LR, betas=BETAS, eps=EPS, state_dtypes={})
    reference = torch.optim.AdamW(groups[1], lr=LR, betas=BETAS, eps=EPS)
    for gradient in gradients_of((5, 9)):
        weight.grad = reference_weight.grad = gradient.double()
        optimizer.step()
        reference.step()
    assert (weight - reference_weight).abs().max() <= 1e-15


def test_large_beta2_in_bf16_stalls_second_moment_and_warns() -> None:
    for beta2, has_fallen in ((0.999, False), (0.99, True)):
        weight = torch.nn.Parameter(torch.ones(64))
        optimizer = build_optimizer([weight], betas=(0.9, beta2), bf16_states=MOMENTS)
        for step in range(120):
            weight.grad = torch.linspace(1, 2, 64) if step < 20 else torch.zeros(64)
            optimizer.step()
            if step == 20:
                before = optimizer.inner.state[weight]["exp_avg_sq"].clone()
        assert bool((optimizer.inner.state[weight]["exp_avg_sq"] < 0.5 * before).all()) == has_fallen
        notes = config_of(f"{BF16_FLAGS} --adam-beta2 {beta2}").notes
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
        (
            f"{BF16_FLAGS} --optimizer sgd".replace("--adam-beta2 0.95", ""),
            "applies to AdamW only, got --optimizer sgd",
        ),
        (f"{BF16_FLAGS} --offload-optimizer --cpu-adam deepspeed", "got --cpu-adam deepspeed, whose states are fp32"),
        ("--exp-avg-dtype fp8", "--exp-avg-dtype must be one of fp32, bf16"),
    ],
)
def test_unsupported_combinations_are_rejected(extra: str, text: str) -> None:
    with pytest.raises(ConfigError) as excinfo:
        config_of(extra)
    assert text in str(excinfo.value)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_planner_and_startup_table_count_2_bytes_per_bf16_state(dtype: str, optimizer: str) -> None:
    fp32_config, config = (
        config_of(f"--{dtype} --optimizer {optimizer}"),
        config_of(f"--{dtype} --optimizer {optimizer} {BF16_FLAGS}"),
    )
    assert layout_of(config, 1).num_bf16_states == 2 and layout_of(fp32_config, 1).num_bf16_states == 0
    costs = registry.costs_of(config)
    settings = {"micro_batch_size": 1, "dtype": dtype, "optimizer": optimizer}
    memory = [
        costs.memory_per_stage([0, 5], num_bf16_states=num_bf16_states, **settings)[0].optimizer
        for num_bf16_states in (0, 1, 2)
    ]
    num_muon_weights = sum(matrix.weights for matrix in costs.stage_matrices([0, 5])[0]) if optimizer == "muon" else 0
    assert [memory[0] - entry for entry in memory] == [
        2 * num_bf16_states * (costs.num_parameters - num_muon_weights) for num_bf16_states in range(3)
    ]
    assert State.for_optimizer(dtype, "sgd", 2) == State.for_optimizer(dtype, "sgd")
    stages = [stage_memory(entry, Topology(1, 1, 1), [0, 5], dtype)[0].optimizer for entry in (fp32_config, config)]
    assert stages == [memory[0], memory[2]]
    rows = dict(plan_rows(config, Topology(1, 1, 1), [0, 5], dtype))
    assert rows["AdamW's states"].startswith("exp_avg and exp_avg_sq in bf16")
    assert "AdamW's states" not in dict(plan_rows(fp32_config, Topology(1, 1, 1), [0, 5], dtype))


def test_torch_state_loads_into_either_format() -> None:
    """As checkpoints in DeepSpeed's layout hold it."""
    pairs = []
    for bf16_states in (MOMENTS, ()):
        weight = torch.nn.Parameter(torch.ones(3, 4))
        optimizer = build_optimizer([weight], bf16_states=bf16_states)
        weight.grad = torch.linspace(0.1, 0.7, 12).view(3, 4)
        optimizer.step()
        pairs.append((weight, optimizer))
    (bf16_weight, bf16_optimizer), (fp32_weight, fp32_optimizer) = pairs
    saved = [{**state_of(source), "state": {0: dict(source.inner.state[p])}} for p, source in pairs]
    load_state(bf16_optimizer, saved[1])
    load_state(fp32_optimizer, saved[0])
    for name in MOMENTS:
        assert bf16_optimizer.inner.state[bf16_weight][name].dtype == torch.bfloat16
        assert torch.equal(bf16_optimizer.inner.state[bf16_weight][name], saved[1]["state"][0][name].bfloat16())
        assert torch.equal(fp32_optimizer.inner.state[fp32_weight][name], saved[0]["state"][0][name].float())


LAYOUTS = [
    (1, 1, 2, "--zero-stage 1"), (2, 2, 1, ""), (1, 1, 2, "--zero-stage 3"), (2, 1, 2, "--zero-stage 1"), (1, 2, 2, ""),
    (1, 1, 2, "--zero-stage 2 --offload-optimizer"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data", "extra"), LAYOUTS)
def test_every_layout_matches_single_process_losses(tensor: int, pipe: int, data: int, extra: str) -> None:
    """Its sibling in the short run is in tests/optim/test_param_rates.py."""
    check_fp64(compare_layout(tensor, pipe, data, 4, f"--fp64 {BF16_FLAGS}", extra, steps=3))


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["--zero-stage 2", "--zero-stage 3", "--zero-stage 1 --offload-optimizer"])
def test_sharded_states_match_full_weights_bitwise(extra: str) -> None:
    """With one micro-batch a step all stages of ZeRO have the same gradients."""
    layout, bf16_flags = (1, 1, 2, GLOBAL_BATCH // 2, 1), f"--fp32 {BF16_FLAGS}"
    full_weights = trace_layout(*layout, bf16_flags, steps=4)[0].weights
    for rank in trace_layout(*layout, f"{bf16_flags} {extra}", steps=4):
        for name, (shard, local_weight) in rank.weights.items():
            assert torch.equal(local_weight, shard.narrow(full_weights[name][1])), name


def resume_with_state_formats(rank: int, data: int, bf16_folder: Path, fp32_folder: Path) -> list[Any]:
    """Return what runs end with that go on with states of either format, saved in either, and what was saved."""
    layout, bf16_flags, zero_flags = ("gpt2", 1, data), f"--fp32 --hidden-dropout 0.1 {BF16_FLAGS}", "--zero-stage 1"
    fp32_flags = "--fp32 --hidden-dropout 0.1 --adam-beta2 0.95"
    uninterrupted = save_and_continue(rank, *layout, f"{bf16_flags} {zero_flags}", bf16_folder)
    resumed = load_and_continue(rank, *layout, f"{bf16_flags} {zero_flags}", bf16_folder)
    widened = load_and_continue(rank, *layout, f"{fp32_flags} --zero-stage 3", bf16_folder)
    fp32_run = save_and_continue(rank, *layout, fp32_flags, fp32_folder)
    narrowed = load_and_continue(rank, *layout, f"{bf16_flags} {zero_flags}", fp32_folder)
    return [result[0] for result in (uninterrupted, resumed, widened, fp32_run, narrowed)]


@pytest.mark.slow
@pytest.mark.parametrize("data", [1, 2])
def test_resume_is_bitwise_and_converts_state_formats(data: int, tmp_path: Path) -> None:
    """Its sibling in the short run is in tests/optim/test_param_rates.py."""
    folders = tmp_path / "low", tmp_path / "wide"
    for uninterrupted, resumed, widened, fp32_run, narrowed in run_ranks(
        data, resume_with_state_formats, data, *folders
    ):
        assert resumed == uninterrupted
        first, second = (float.fromhex(losses[0]) for losses in (widened, uninterrupted))
        assert first == pytest.approx(second, rel=1e-6), "the step behind the load has the same weights"
        first, second = (float.fromhex(losses[0]) for losses in (narrowed, fp32_run))
        assert first == pytest.approx(second, rel=1e-6)
        assert float.fromhex(narrowed[1]) == pytest.approx(float.fromhex(fp32_run[1]), rel=1e-3)
    bf16_state, fp32_state = saved_state(tmp_path / "low"), saved_state(tmp_path / "wide")
    dtypes = {name.split("/")[1]: value.dtype for name, value in bf16_state.items() if name.startswith("optimizer/")}
    assert dtypes == dict.fromkeys(MOMENTS, torch.bfloat16)
    assert {value.dtype for name, value in fp32_state.items()} == {torch.float32}
