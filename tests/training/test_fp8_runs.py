"""Runs with --fp8-format: they resume to the bit, also from runs with another recipe, and need a device with FP8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron import device
from megatron.config import Config, ModelConfig, PrecisionConfig
from megatron.costs.memory import mixed_peak
from megatron.errors import ConfigError
from megatron.mpu.fp8 import ROWWISE, use_fp8
from megatron.mpu.groups import SINGLE
from megatron.training import device_setup, setup
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.compatibility import changed_settings
from megatron.training.kernel_rows import fp8_rows
from tests.helpers.runs import make_flags, train_ranks

FLAGS = "--bf16 --fp8-format e4m3 --hidden-size 64 --train-iters 4 --eval-iters 0 --attention-dropout 0"
PRECISION = PrecisionConfig(dtype="bf16", fp8_format="e4m3")


def train(corpus: Path, folder: Path, flags: str, num_ranks: int = 1, exit_code: int = 0) -> None:
    codes, _ = train_ranks(num_ranks, make_flags(corpus, folder, f"{FLAGS} {flags}"))
    assert codes == [exit_code] * num_ranks


def read_steps(folder: Path) -> list[tuple[float, float]]:
    records = read_metrics(folder / "metrics.jsonl")
    return [(record["loss"], record["grad_norm"]) for record in records if record["kind"] == "train"]


@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [
        ("", 1),
        pytest.param("--fp8-recipe blockwise", 1, marks=pytest.mark.slow),
        pytest.param("--model-parallel-size 2 --sequence-parallel", 2, marks=pytest.mark.slow),
        pytest.param("--pipe-parallel-size 2 --pipeline-schedule zb-h1", 2, marks=pytest.mark.slow),
        pytest.param("--zero-stage 3 --gas 1", 2, marks=pytest.mark.slow),
        pytest.param("--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32", 1, marks=pytest.mark.slow),
    ],
)
def test_run_resumes_to_the_bit(flags: str, num_ranks: int, corpus: Path, tmp_path: Path) -> None:
    train(corpus, tmp_path / "plain", flags, num_ranks)
    train(corpus, tmp_path / "run", f"{flags} --exit-interval 2", num_ranks, exit_code=75)
    train(corpus, tmp_path / "run", f"{flags} --resume", num_ranks)
    assert read_steps(tmp_path / "run") == read_steps(tmp_path / "plain")


@pytest.mark.slow
def test_run_resumes_in_another_layout_within_rounding(corpus: Path, tmp_path: Path) -> None:
    train(corpus, tmp_path / "plain", "")
    train(corpus, tmp_path / "run", "--model-parallel-size 2 --exit-interval 2", 2, exit_code=75)
    train(corpus, tmp_path / "run", "--pipe-parallel-size 2 --resume", 2)
    for step, plain in zip(read_steps(tmp_path / "run"), read_steps(tmp_path / "plain"), strict=True):
        assert step == pytest.approx(plain, rel=0.01)


@pytest.mark.slow
def test_engine_of_deepspeed_has_products_in_fp8(corpus: Path, tmp_path: Path) -> None:
    """DeepSpeed's engine runs the same layers: the first loss is that of our engine."""
    train(corpus, tmp_path / "ours", "")
    train(corpus, tmp_path / "deepspeed", "--checkpoint-format deepspeed")
    assert read_steps(tmp_path / "deepspeed")[0][0] == read_steps(tmp_path / "ours")[0][0]


def test_changed_recipe_is_reported() -> None:
    saved = Config(precision=PRECISION).to_dict()
    now = Config(precision=PrecisionConfig(dtype="bf16", fp8_format="e4m3", fp8_recipe="blockwise"))
    assert list(changed_settings(saved, now)) == ["fp8_recipe: saved rowwise, now blockwise"]
    assert list(changed_settings(saved, Config(precision=PrecisionConfig(dtype="bf16")))) == [
        "fp8_format: saved e4m3, now None"
    ]


@pytest.mark.parametrize(
    ("capability", "num_experts", "error"),
    [
        ((8, 9), 0, None),
        ((9, 0), 8, None),
        ((10, 0), 0, None),
        ((10, 0), 8, r"of experts need a GPU of NVIDIA with compute capability 9\.x .*on a GPU \(10\.0\)"),
        ((12, 0), 8, r"of experts need a GPU of NVIDIA with compute capability 9\.x"),
        ((8, 0), 0, r"8\.9 or more, got --fp8-format e4m3 on a GPU \(8\.0\)\. Remove --fp8-format"),
        ((8, 9), 8, r"of experts need a GPU of NVIDIA with compute capability 9\.x"),
        (None, 0, r"on a GPU \(no\)"),
    ],
)
def test_devices_without_fp8_are_rejected(
    capability: tuple[int, int] | None, num_experts: int, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "compute_capability", lambda _: capability)
    monkeypatch.setattr(device, "default_precision", lambda _: "bf16")
    monkeypatch.setattr(device, "name", lambda _: "a GPU")
    monkeypatch.setattr(device_setup, "check_fused_kernels", lambda *_: None)
    config = Config(precision=PRECISION, model=ModelConfig(num_experts=num_experts))
    if error is None:
        device_setup.check_device_fits(config, "cuda")
        return
    with pytest.raises(ConfigError, match=error):
        device_setup.check_device_fits(config, "cuda")


def test_plugin_devices_have_no_fp8() -> None:
    message = device_setup.fp8_device_problem(Config(precision=PRECISION), "xpu")
    assert (
        message is not None and "supported on CPUs and CUDA devices, got --fp8-format e4m3 and --device xpu" in message
    )
    assert device_setup.fp8_device_problem(Config(precision=PRECISION), "cpu") is None


def test_model_without_products_in_fp8_is_rejected() -> None:
    class World:
        @staticmethod
        def any_rank(flags: list[bool]) -> list[bool]:
            return flags

    module, config = torch.nn.Linear(16, 16), Config(precision=PRECISION)
    with pytest.raises(ConfigError, match="--fp8-format needs layers with products in FP8"):
        setup.check_fp8(config, module, World())  # type: ignore[arg-type]
    use_fp8(module.weight, ROWWISE, SINGLE, None)
    setup.check_fp8(config, module, World())  # type: ignore[arg-type]


def test_start_table_names_the_layers_in_fp8() -> None:
    model = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=64, max_position_embeddings=64)
    precision = PrecisionConfig(dtype="bf16", fp8_format="e4m3", first_last_layers_bf16=True)
    ((name, text),) = fp8_rows(Config(precision=precision, model=model), "cuda", is_known_model=True)
    assert name == "FP8"
    assert text.startswith("e4m3, rowwise, layers 1 to 2, ")
    assert text.endswith("% of the FLOPs, by kernels that have not been run on a GPU yet")
    ((_, text),) = fp8_rows(Config(precision=precision, model=model), "cpu", is_known_model=False)
    assert text == "e4m3, rowwise, layers 1 to 2, emulated in fp32"
    assert not list(fp8_rows(Config(model=model), "cpu", is_known_model=True))


def test_peak_weighs_the_shares_of_both_formats() -> None:
    assert mixed_peak(1000.0, 0.0) == 1000.0
    assert mixed_peak(1000.0, 1.0) == 2000.0
    assert mixed_peak(1000.0, 0.5) == pytest.approx(1000 / 0.75)
