"""``--model`` and the checkpoint of --load name the same model, or an error says which to use."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import parse
from megatron.checkpoint.checkpoint_args import bring
from megatron.config import Config
from megatron.errors import CheckpointError
from tests.checkpoint.test_checkpoint_args import write
from tests.helpers.huggingface_models import config_of, save_model

LLAMA = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "activation": "gated-silu", "untie_embeddings": True
}  # fmt: skip
QWEN3 = {**LLAMA, "qk_norm": "head"}


def read(source: Path, words: str = "", program: str = "gpt2", recipe: str = "") -> Config:
    argv = ["--load", str(source), *words.split(), "--seq-length", "8", "--dry-run"]
    env = {"MEGATRON_DEFAULTS": recipe} if recipe else {}
    how: dict[str, Any] = {"family": program, "accepts_model": True, "checkpoint_args": partial(bring, name="x")}
    return parse(argv, world_size=1, env=env, **how)


def error_of(source: Path, words: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(source, words)
    return str(caught.value)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the settings of a Qwen 3, as ``pretrain_llama.py --qk-norm head`` saves it."""
    folder = tmp_path_factory.mktemp("runs") / "qwen3"
    save_model(folder, config_of("llama", **QWEN3))
    return folder


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of the same model."""
    return write(tmp_path_factory.mktemp("hf") / "qwen3", config_of("llama", **QWEN3, layernorm_epsilon=1e-6))


@pytest.mark.parametrize(
    ("words", "program", "family"),
    [
        ("--model llama", "gpt2", "llama"),
        ("--model qwen3", "gpt2", "llama"),
        ("--model olmo2 --qk-norm head --norm-placement before", "gpt2", "llama"),
        ("", "llama", "llama"),
        ("", "gpt2", "gpt2"),
    ],
)
def test_a_run_brings_its_settings_to_a_model_that_it_agrees_with(
    words: str, program: str, family: str, run: Path
) -> None:
    """Without --model the program's own decoder takes them as well."""
    config = read(run, words, program)
    assert (config.family, config.model.qk_norm, config.model.normalization) == (family, "head", "RMSNorm")


def test_a_folder_of_hugging_face_agrees_with_its_type_and_its_family(theirs: Path) -> None:
    for words in ("--model qwen3 --finetune", "--model llama --finetune", "--finetune"):
        config = read(theirs, words)
        assert config.model.qk_norm == "head" and config.model.layernorm_epsilon == 1e-6


@pytest.mark.parametrize("model", ["gpt2 --num-layers 2", "mpt"])
def test_another_family_is_named(model: str, run: Path, theirs: Path) -> None:
    """gpt2 is the program's own family, and counts all the same."""
    for folder in (run, theirs):
        message = error_of(folder, f"--model {model}")
        assert str(folder) in message and f"--model {model.split()[0]} selects" in message
        assert "Use --model llama" in message


def test_another_model_type_is_named(run: Path, theirs: Path) -> None:
    message = error_of(run, "--model olmo2")
    assert "norm_placement before instead of after" in message and "qk_norm head instead of all" in message
    assert "qk_norm" not in error_of(run, "--model olmo2 --qk-norm head")
    assert "model_type qwen3, but --model is olmo2. Use --model qwen3" in error_of(theirs, "--model olmo2")


def test_the_model_of_a_run_script_yields_to_the_checkpoint(run: Path) -> None:
    """A recipe is a default: ``run_mpt.sh --load`` continues with the settings of the checkpoint."""
    config = read(run, recipe="--model mpt")
    assert (config.family, config.model.position_embedding_type) == ("mpt", "rope")
