"""``--model`` and the checkpoint of --load name the same model, or an error says which to use."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import parse
from megatron.checkpoint.checkpoint_args import load_checkpoint_args
from megatron.config import Config
from megatron.errors import CheckpointError
from tests.checkpoint.test_checkpoint_args import write_folder
from tests.helpers.huggingface_models import make_family_config, save_model

LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "activation": "gated-silu", "untie_embeddings": True
}  # fmt: skip
QWEN3 = {**LLAMA, "qk_norm": "head"}


def parse_args(source: Path, flags: str = "", program: str = "gpt2", recipe: str = "") -> Config:
    argv = ["--load", str(source), *flags.split(), "--seq-length", "8", "--dry-run"]
    env = {"MEGATRON_DEFAULTS": recipe} if recipe else {}
    options: dict[str, Any] = {
        "family": program,
        "accepts_model": True,
        "checkpoint_args": partial(load_checkpoint_args, name="x"),
    }
    return parse(argv, world_size=1, env=env, **options)


def parse_error(source: Path, flags: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        parse_args(source, flags)
    return str(caught.value)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the settings of a Qwen 3, as ``pretrain_llama.py --qk-norm head`` saves it."""
    folder = tmp_path_factory.mktemp("runs") / "qwen3"
    save_model(folder, make_family_config("llama", **QWEN3))
    return folder


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of the same model."""
    return write_folder(
        tmp_path_factory.mktemp("hf") / "qwen3", make_family_config("llama", **QWEN3, layernorm_epsilon=1e-6)
    )


@pytest.mark.parametrize(
    ("flags", "program", "family"),
    [
        ("--model llama", "gpt2", "llama"),
        ("--model qwen3", "gpt2", "llama"),
        ("--model olmo2 --qk-norm head --norm-placement before", "gpt2", "llama"),
        ("", "llama", "llama"),
        ("", "gpt2", "gpt2"),
    ],
)
def test_run_settings_apply_to_matching_model_name(flags: str, program: str, family: str, run_dir: Path) -> None:
    """Without --model the program's own decoder takes them as well."""
    config = parse_args(run_dir, flags, program)
    assert (config.family, config.model.qk_norm, config.model.normalization) == (family, "head", "RMSNorm")


def test_huggingface_folder_matches_its_type_and_family(hf_folder: Path) -> None:
    for flags in ("--model qwen3 --finetune", "--model llama --finetune", "--finetune"):
        config = parse_args(hf_folder, flags)
        assert config.model.qk_norm == "head" and config.model.layernorm_epsilon == 1e-6


@pytest.mark.parametrize("model", ["gpt2 --num-layers 2", "mpt"])
def test_other_family_is_rejected_with_matching_name(model: str, run_dir: Path, hf_folder: Path) -> None:
    """gpt2 is the program's own family, and counts all the same."""
    for folder in (run_dir, hf_folder):
        message = parse_error(folder, f"--model {model}")
        assert str(folder) in message and f"--model {model.split()[0]} selects" in message
        assert "Use --model llama" in message


def test_other_model_type_is_rejected_with_differences(run_dir: Path, hf_folder: Path) -> None:
    message = parse_error(run_dir, "--model olmo2")
    assert "norm_placement before instead of after" in message and "qk_norm head instead of all" in message
    assert "qk_norm" not in parse_error(run_dir, "--model olmo2 --qk-norm head")
    assert "model_type qwen3, but --model is olmo2. Use --model qwen3" in parse_error(hf_folder, "--model olmo2")


def test_checkpoint_overrides_model_of_run_script(run_dir: Path) -> None:
    """A recipe is a default: ``run_mpt.sh --load`` continues with the settings of the checkpoint."""
    config = parse_args(run_dir, recipe="--model mpt")
    assert (config.family, config.model.position_embedding_type) == ("mpt", "rope")
