"""Names of the Hugging Face Hub in place of a folder: the message has the command that downloads the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron import hub


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B", "google/gemma-3-1b-pt"])
def test_load_problem_shows_download_command(name: str) -> None:
    text = hub.load_problem(name) or ""
    target = f"models/{name.partition('/')[2]}"
    assert text.startswith(f"--load must name a folder, got {name}, which is not a folder")
    assert f"`hf download {name} --local-dir {target}`" in text and text.endswith(f"use {target}")
    assert hub.advice(Path(name)) in text


@pytest.mark.parametrize(
    "path",
    [
        "runs/gpt2",
        "models/Qwen3-0.6B",
        "/data/Qwen3",
        "./a/b",
        "../a/b",
        "a",
        "a/b/c",
        "s3://a/b",
        "x/t.json",
        "my-x/y",
    ],
)
def test_paths_are_not_hub_names(path: str) -> None:
    assert hub.load_problem(path) is None and hub.advice(path) == ""


def test_existing_folders_are_not_hub_names(folder: Path) -> None:
    (folder / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert not hub.is_name("Qwen/Qwen3-0.6B")
    assert not hub.is_name("Qwen/Qwen3-4B"), "the user has a folder of that name: a mistyped path"
