"""Adam's states in 8 bits: the rounding of torchao's format, updates, checkpoints, bytes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.config import parse
from megatron.errors import ConfigError
from megatron.models import registry
from megatron.optim import quantized_state
from megatron.optim.adam import CHUNK_NUMEL, AdamW
from tests.helpers.harness import run_ranks
from tests.helpers.whole import random_tensor
from tests.optim.test_adafactor_layouts import load_and_continue, save_and_continue
from tests.optim.test_muon_layouts import read_checkpoint

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
NEEDS_TORCHAO = [
    pytest.mark.slow, pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed (extra [torchao])")
]  # fmt: skip
needs_torchao = pytest.mark.parametrize("is_installed", [pytest.param(True, marks=NEEDS_TORCHAO)])
FLAGS = "--exp-avg-dtype 8bit --exp-avg-sq-dtype 8bit"
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "state_dtypes": {}}
WORDS = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --batch-size "
    "1 --gas 1 --vocab-size 128 --hidden-bias --data-path none --device cpu"
)


def config_of(flags: str) -> Any:
    return parse([*WORDS.split(), *flags.split()], world_size=1)


def test_missing_torchao_is_an_error_with_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    quantized_state._import_format.cache_clear()
    with pytest.raises(ConfigError, match="need the package torchao: .* Install it .pip install torchao., or use bf16"):
        AdamW([{"params": [nn.Parameter(torch.ones(2))]}], **SETTINGS, quantized=("exp_avg",))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{FLAGS} --optimizer sgd", "--exp-avg-dtype, --exp-avg-sq-dtype applies to AdamW only, got --optimizer sgd"),
        (f"{FLAGS} --offload-optimizer --cpu-adam deepspeed", "is supported with --cpu-adam torch only"),
        (f"{FLAGS} --checkpoint-format deepspeed", "got --exp-avg-dtype 8bit and --exp-avg-sq-dtype 8bit. Use"),
    ],
)
def test_unsupported_combinations_are_rejected(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(flags)


def test_formula_counts_codes_and_scales() -> None:
    """In bf16: a main param with 4 bytes, and two states with 1 + 4 / 256 instead of 4 each."""
    costs = registry.costs_of(config_of("--bf16"))
    args: dict[str, Any] = {"micro_batch_size": 1, "dtype": "bf16"}
    (fp32,), (both,), (mixed,) = (
        costs.memory_per_stage([0, 6], **args, num_bf16_states=num_bf16, num_8bit_states=num_8bit)
        for num_bf16, num_8bit in ((0, 0), (0, 2), (1, 1))
    )
    assert fp32.optimizer == 12 * costs.num_parameters
    assert both.optimizer == costs.num_parameters * 6 + -(-costs.num_parameters * 8 // 256)
    assert mixed.optimizer == costs.num_parameters * 7 + -(-costs.num_parameters * 4 // 256)


@needs_torchao
@pytest.mark.parametrize("is_signed", [True, False])
def test_rounding_is_close_and_idempotent(is_installed: bool, is_signed: bool) -> None:
    """The largest element of each block is exact; the map has 64 (signed) or 128 values between 0.1 and 1."""
    main_param = torch.zeros(8, 1024)
    values = random_tensor(1, 8, 1024).float() * torch.logspace(-12, 3, 8).unsqueeze(1)
    values = values if is_signed else values.square()
    values[2, :256] = 0.0
    values[3, :256] = -3.0 if is_signed else 3.0
    state = quantized_state.zeros(main_param, is_signed=is_signed)
    assert not quantized_state.load(state).any()
    quantized_state.store(state, values)
    loaded = quantized_state.load(state)
    assert torch.equal(loaded, state.dequantize()), "torchao reads the same values"
    blocks, rounded = values.view(-1, 256), loaded.view(-1, 256)
    largest = blocks.abs().amax(1, keepdim=True)
    assert torch.equal(rounded.abs().amax(1, keepdim=True), largest)
    step = 0.9 / (64 if is_signed else 128)
    assert ((rounded - blocks).abs() <= 0.501 * step * largest).all()
    codes, scale = state.codes.clone(), state.scale.clone()
    quantized_state.store(state, loaded)
    assert torch.equal(state.codes, codes) and torch.equal(state.scale, scale)
    assert state.codes.nbytes + state.scale.nbytes == 8 * 1024 * (1 + 4 / 256)


@needs_torchao
def test_update_uses_unrounded_moments(is_installed: bool) -> None:
    """The first update is that of torch's AdamW; later ones start from rounded moments. Small tensors keep fp32."""
    sizes = [CHUNK_NUMEL + 512, 4096, 4097, 64]
    weights = [nn.Parameter(random_tensor(seed, size).float()) for seed, size in enumerate(sizes)]
    expected = [nn.Parameter(weight.detach().clone()) for weight in weights]
    optimizer = AdamW([{"params": weights}], **SETTINGS, quantized=("exp_avg", "exp_avg_sq"))
    reference = torch.optim.AdamW(expected, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(3):
        for idx, (weight, other) in enumerate(zip(weights, expected, strict=True)):
            weight.grad = random_tensor(10 * step + idx + 7, *weight.shape).float()
            other.grad = weight.grad.clone()
        optimizer.step()
        reference.step()
        for weight, other, size in zip(weights, expected, sizes, strict=True):
            is_exact = step == 0 or size in (4097, 64)
            difference = (weight - other).abs()
            assert difference.max() <= 1e-6 if is_exact else difference.mean() <= 1e-3
    assert [quantized_state.is_quantized(optimizer.state[weight]["exp_avg"]) for weight in weights] == [True] * 2 + [
        False
    ] * 2


RUN = f"--fp32 --hidden-size 64 --weight-decay 0.01 {FLAGS}"


@needs_torchao
@pytest.mark.parametrize(
    ("data", "extra"),
    [(1, ""), (2, "--zero-stage 1"), (2, "--zero-stage 2"), (2, "--zero-stage 3"), (1, "--optimizer muon")],
)
def test_resumed_run_is_bitwise_identical(is_installed: bool, data: int, extra: str, tmp_path: Path) -> None:
    run_args = "gpt2", 1, data, f"{RUN} --hidden-dropout 0.1 {extra}", tmp_path
    uninterrupted = run_ranks(data, save_and_continue, *run_args)
    saved = read_checkpoint(tmp_path)
    assert saved["optimizer/exp_avg/embedding.word.weight"].dtype == torch.float32
    resumed = run_ranks(data, load_and_continue, *run_args)
    for (losses, weights), (losses_again, weights_again) in zip(uninterrupted, resumed, strict=True):
        assert losses_again == losses
        assert all(torch.equal(weights_again[name], weight) for name, weight in weights.items())


@needs_torchao
def test_zero_1_is_bitwise_zero_0(is_installed: bool, tmp_path: Path) -> None:
    """With rows of 256 elements, the shards consist of the blocks of the full weights."""
    run = RUN.replace("--hidden-size 64", "--hidden-size 256")
    losses = [
        run_ranks(2, save_and_continue, "gpt2", 1, 2, f"{run} --zero-stage {stage}", tmp_path / str(stage))[0][0]
        for stage in (0, 1)
    ]
    assert losses[0] == losses[1]


@needs_torchao
def test_checkpoint_loads_into_other_layouts_and_dtypes(is_installed: bool, tmp_path: Path) -> None:
    """States in 8 bits on two replicas continue in fp32 on one, and the reverse."""
    fp32 = RUN.replace(FLAGS, "")
    for saved, loaded in (((2, f"{RUN} --zero-stage 1"), (1, fp32)), ((1, fp32), (2, RUN))):
        folder = tmp_path / str(saved[0])
        ((losses, _), *_) = run_ranks(saved[0], save_and_continue, "gpt2", 1, *saved, folder)
        for again, _ in run_ranks(loaded[0], load_and_continue, "gpt2", 1, *loaded, folder):
            first, expected = float.fromhex(again[0]), float.fromhex(losses[0])
            assert abs(first - expected) <= 1e-5, "the first loss does not depend on the states"
            assert abs(float.fromhex(again[1]) - float.fromhex(losses[1])) <= 1e-3
