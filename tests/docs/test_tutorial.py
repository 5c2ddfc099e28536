"""docs/tutorial_corpus.md runs as it stands: its commands, in a folder where a clone would be, with fewer steps."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.training.callbacks.metrics_writer import read_metrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial_corpus.md"
NUM_PAGE_STEPS = 7
CLONED_PATHS = ("examples", "megatron", "tds", "tools", "run_gpt2.sh", "pretrain_gpt2.py", "ds_config_gpt2.json")
"""What the commands need of a clone; what they make is theirs."""
NUM_TRAIN_STEPS = 4
"""Steps of the training here, in place of the page's."""


def iter_commands() -> Iterator[tuple[int, str]]:
    """Yield (step, what a shell is given) in the order of the page; Python is handed to ``python -``."""
    sections = re.split(r"^## (\d)\. .*$", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    for step, text in zip(map(int, sections[::2]), sections[1::2], strict=True):
        joined_text = re.sub(r"\\\n\s*", "", text)
        for python, line in re.findall(r"^```python\n(.*?)^```$|^    ([^\n]*)$", joined_text, re.M | re.S):
            yield step, f"python - <<'PYTHON'\n{python}PYTHON" if python else line


def find_command(step: int, word: str) -> str:
    """Return the one command of ``step`` that holds ``word``."""
    (command,) = [line for line_step, line in iter_commands() if line_step == step and word in line]
    return command


class ClonedFolder:
    """A folder that looks like a clone. Commands run in it as a person types them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in CLONED_PATHS:
            (path / name).symlink_to(ROOT / name)

    def run(self, command: str) -> str:
        """Return what ``command`` prints; it must end with code 0."""
        env = {**os.environ, "PYTHON": sys.executable, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        shortened = re.sub(r"TRAIN_ITERS=\d+", f"TRAIN_ITERS={NUM_TRAIN_STEPS}", command)
        result = subprocess.run(
            ["bash", "-c", shortened], cwd=self.path, env=env, capture_output=True, text=True, timeout=200
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ClonedFolder:
    """Return the folder after the steps that come before the training: seconds."""
    clone = ClonedFolder(tmp_path_factory.mktemp("tutorial"))
    for step, command in iter_commands():
        if step < 4:
            clone.run(command)
    return clone


def test_every_step_has_command() -> None:
    assert {step for step, _ in iter_commands()} == set(range(1, NUM_PAGE_STEPS + 1))
    assert "TRAIN_ITERS=" in find_command(5, "run_gpt2.sh")


@pytest.mark.slow
def test_documented_corpus_counts_equal_tool_output(folder: ClonedFolder) -> None:
    (documented,) = re.findall(r"counted ([\d,]+ tokens in \d+ documents)", PAGE.read_text(encoding="utf-8"))
    counted = folder.run(find_command(4, "count_tokens.py"))
    tokens, documents = (digits.replace(",", "") for digits in re.findall(r"[\d,]+", documented))
    printed_numbers = re.findall(r"\d+", counted.replace(",", ""))
    assert tokens in printed_numbers and documents in printed_numbers, counted
    assert folder.run(find_command(4, "inspect_data.py")).strip()


@pytest.mark.slow
def test_tutorial_trains_evaluates_and_generates(folder: ClonedFolder) -> None:
    trained = folder.run(find_command(5, "run_gpt2.sh"))
    records = read_metrics(folder.path / "runs" / "my-text" / "metrics.jsonl")
    assert max(record["step"] for record in records) == NUM_TRAIN_STEPS
    evaluated = folder.run(find_command(6, "--eval-only"))
    first, second = (re.findall(r"\| (test loss .*)", printed) for printed in (trained, evaluated))
    assert len(first) == len(second) == 1 and first == second
    (loss,) = [record["loss"] for record in records if record["kind"] == "test"]
    assert abs(loss - math.log(2048)) < 1  # the page: it starts at ln 2048
    assert "The checkpoint" in folder.run(find_command(6, "tools/generate.py"))


@pytest.mark.slow
def test_tutorial_exports_and_imports_hugging_face(folder: ClonedFolder) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")
    if not (folder.path / "runs" / "my-text").is_dir():
        folder.run(find_command(5, "run_gpt2.sh"))
    for step, command in iter_commands():
        if step == NUM_PAGE_STEPS:
            folder.run(command)
