"""tools/average.py: means and moving averages by hand, in any layout, loaded by the other tools; what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.arguments import config_from_values
from megatron.checkpoint import TensorRecord, save
from megatron.checkpoint.one_process import open_folder, read_weights
from megatron.config import Config
from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard
from tests.helpers.huggingface_models import save_model
from tests.helpers.small_corpora import make_tokenizer
from tools import average, convert_hf, generate, inspect_checkpoint

STEPS = (7, 9, 12)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints, the first saved by two tensor ranks, with optimizer states."""
    folder = tmp_path_factory.mktemp("run")
    save_model(folder, make_config(folder), num_ranks=2)
    first = open_folder(folder)
    weights = read_weights(first)
    for seed, step in enumerate(STEPS[1:], 1):
        add_checkpoint(
            folder, step, {name: perturb(name, tensor, seed) for name, tensor in weights.items()}, first.metadata
        )
    return folder


def make_config(folder: Path, num_layers: int = 4) -> Config:
    """Return the configuration of a small model whose tokenizer lies in ``folder``."""
    model_values = {
        "num_layers": num_layers,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 48,
    }
    tokenizer = {"vocab_size": make_tokenizer(folder).vocab_size, "tokenizer_path": str(folder / "t.json")}
    return config_from_values({**model_values, **tokenizer}, family="gpt2")


def add_checkpoint(folder: Path, step: int, weights: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
    named = {f"weights/{name}": tensor for name, tensor in weights.items()}
    named |= {f"optimizer/exp_avg/{name}": tensor for name, tensor in weights.items()}
    records = [TensorRecord(name, tensor, Shard(tuple(tensor.shape))) for name, tensor in named.items()]
    progress = {"step": step, "updates": step, "samples_consumed": 2 * step, "tokens_consumed": 32 * step}
    save(folder / "checkpoints", step, records, {**state, "progress": progress, "optimizer_steps": step}, SINGLE)


def perturb(name: str, tensor: torch.Tensor, seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed + len(name))
    return tensor + 0.1 * torch.randn(tensor.shape, generator=rng)


def run_average(monkeypatch: pytest.MonkeyPatch, *args: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["average.py", *map(str, args)])
    return average.main()


def read_all_weights(run_dir: Path) -> list[dict[str, torch.Tensor]]:
    return [read_weights(open_folder(run_dir / "checkpoints" / f"step-{step:08d}")) for step in STEPS]


@pytest.mark.parametrize(
    ("flags", "coefficients"),
    [
        pytest.param("--last 3", (1 / 3, 1 / 3, 1 / 3), marks=pytest.mark.slow),
        pytest.param("--last 2", (0, 1 / 2, 1 / 2), marks=pytest.mark.slow),
        pytest.param("--steps 12 7", (1 / 2, 0, 1 / 2), marks=pytest.mark.slow),
        ("--last 3 --ema 0.75", (0.75**2, 0.75 * 0.25, 0.25)),
    ],
)
def test_average_equals_manual_average(
    run_dir: Path, flags: str, coefficients: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_average(monkeypatch, run_dir, *flags.split(), "--output", tmp_path / "mean") == 0
    averaged, saved = open_folder(tmp_path / "mean"), read_all_weights(run_dir)
    weights = read_weights(averaged)
    assert weights.keys() == saved[0].keys()
    for name, tensor in weights.items():
        expected = sum(
            coefficient * checkpoint_weights[name].double()
            for coefficient, checkpoint_weights in zip(coefficients, saved, strict=True)
        )
        assert tensor.dtype == torch.float32
        assert torch.allclose(tensor.double(), expected, rtol=6e-8, atol=0)  # half of the last bit of fp32
    assert (averaged.path.name, averaged.metadata["progress"]["step"]) == ("step-00000012", 12)
    assert averaged.metadata["optimizer"].startswith("none (") and averaged.metadata["optimizer_steps"] == 0
    assert not [name for name in averaged.names() if not name.startswith("weights/")]


def test_mean_is_rounded_once(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the sum in fp64 over the number; sums in fp32 would differ in some bits."""
    assert run_average(monkeypatch, run_dir, "--last", 3, "--output", tmp_path / "mean") == 0
    weights, (a, b, c) = read_weights(open_folder(tmp_path / "mean")), read_all_weights(run_dir)
    assert all(
        torch.equal(tensor, ((a[name].double() + b[name].double() + c[name].double()) / 3).float())
        for name, tensor in weights.items()
    )
    assert any(not torch.equal(tensor, (a[name] + b[name] + c[name]) / 3) for name, tensor in weights.items())


@pytest.mark.slow
def test_average_of_runs_is_loaded_by_tools(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = run_dir / "checkpoints" / "step-00000009"
    assert run_average(monkeypatch, run_dir, other, "--output", tmp_path / "soup") == 0
    _, b, c = read_all_weights(run_dir)
    weights = read_weights(open_folder(tmp_path / "soup"))
    assert all(
        torch.equal(tensor, ((c[name].double() + b[name].double()) / 2).float()) for name, tensor in weights.items()
    )
    capsys.readouterr()
    args = ["--load", str(tmp_path / "soup"), "--prompt", "the lamp", "--max-new-tokens", "3", "--json"]
    generate.run(generate.parse_args("", args), {})
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 3
    monkeypatch.setattr(sys, "argv", ["convert_hf.py", "export", "--load", args[1], "--output", str(tmp_path / "hf")])
    assert convert_hf.main() == 0
    monkeypatch.setattr(sys, "argv", ["inspect_checkpoint.py", args[1]])
    assert inspect_checkpoint.main() == 0


@pytest.mark.parametrize(
    ("flags", "code", "problem"),
    [
        ("", 2, "a single run requires either --last K or --steps A B C, got neither"),
        ("--last 2 --steps 7 9", 2, "got --last and --steps"),
        ("--last 1", 2, "--last must be at least 2, got 1"),
        ("--steps 7 7", 2, "at least 2 steps, got 7 7"),
        ("--last 2 --ema 1", 2, "--ema must be above 0 and below 1, got 1"),
        ("--last 4", 3, "--last 4 exceeds .*: step-00000007, step-00000009, step-00000012"),
        ("--steps 7 8", 3, "--steps 8: not found in .*: 7, 9, 12"),
    ],
)
def test_average_rejects_invalid_checkpoint_selection(
    run_dir: Path, flags: str, code: int, problem: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run_average(monkeypatch, run_dir, *flags.split(), "--output", tmp_path / "mean") == code
    assert re.search(problem, capsys.readouterr().err)
    assert not (tmp_path / "mean").exists()


def test_average_rejects_different_models(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "other", make_config(tmp_path, num_layers=2))
    assert run_average(monkeypatch, run_dir, tmp_path / "other", "--output", tmp_path / "mean") == 3
    assert "\n  num_layers: saved 4, now 2" in capsys.readouterr().err
    first = open_folder(run_dir)
    incomplete_weights = dict(list(read_weights(first).items())[1:])
    add_checkpoint(tmp_path / "less", 3, incomplete_weights, first.metadata)
    assert run_average(monkeypatch, run_dir, tmp_path / "less", "--output", tmp_path / "mean") == 3
    assert "differ in: weights/" in capsys.readouterr().err
    add_checkpoint(tmp_path / "words", 3, read_weights(first), {**first.metadata, "tokenizer": "another"})
    assert run_average(monkeypatch, run_dir, tmp_path / "words", "--output", tmp_path / "mean") == 3
    assert "same tokenizer" in capsys.readouterr().err
