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
STEPS = 7
CLONE = ("examples", "megatron", "tds", "tools", "run_gpt2.sh", "pretrain_gpt2.py", "ds_config_gpt2.json")
"""What the commands need of a clone; what they make is theirs."""
FEWER = 4
"""Steps of the training here, in place of the page's."""


def commands() -> Iterator[tuple[int, str]]:
    """Yield (step, what a shell is given) in the order of the page; Python is handed to ``python -``."""
    parts = re.split(r"^## (\d)\. .*$", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    for number, text in zip(map(int, parts[::2]), parts[1::2], strict=True):
        joined = re.sub(r"\\\n\s*", "", text)
        for python, line in re.findall(r"^```python\n(.*?)^```$|^    ([^\n]*)$", joined, re.M | re.S):
            yield number, f"python - <<'PYTHON'\n{python}PYTHON" if python else line


def line_of(step: int, word: str) -> str:
    """Return the one command of ``step`` that holds ``word``."""
    (found,) = [line for number, line in commands() if number == step and word in line]
    return found


class Folder:
    """A folder that looks like a clone. Commands run in it as a person types them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name in CLONE:
            (place / name).symlink_to(ROOT / name)

    def run(self, command: str) -> str:
        """Return what ``command`` prints; it must end with code 0."""
        env = {**os.environ, "PYTHON": sys.executable, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        fewer = re.sub(r"TRAIN_ITERS=\d+", f"TRAIN_ITERS={FEWER}", command)
        done = subprocess.run(
            ["bash", "-c", fewer], cwd=self.place, env=env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return the folder after the steps that come before the training: seconds."""
    made = Folder(tmp_path_factory.mktemp("tutorial"))
    for number, command in commands():
        if number < 4:
            made.run(command)
    return made


def test_every_step_has_something_to_run() -> None:
    assert {number for number, _ in commands()} == set(range(1, STEPS + 1))
    assert "TRAIN_ITERS=" in line_of(5, "run_gpt2.sh")


@pytest.mark.slow
def test_what_the_page_tells_of_the_corpus_is_what_its_tools_print(folder: Folder) -> None:
    (documented,) = re.findall(r"counted ([\d,]+ tokens in \d+ documents)", PAGE.read_text(encoding="utf-8"))
    counted = folder.run(line_of(4, "count_tokens.py"))
    tokens, documents = (number.replace(",", "") for number in re.findall(r"[\d,]+", documented))
    found = re.findall(r"\d+", counted.replace(",", ""))
    assert tokens in found and documents in found, counted
    assert folder.run(line_of(4, "inspect_data.py")).strip()


@pytest.mark.slow
def test_the_tutorial_trains_evaluates_and_writes_text(folder: Folder) -> None:
    trained = folder.run(line_of(5, "run_gpt2.sh"))
    records = read_metrics(folder.place / "runs" / "my-text" / "metrics.jsonl")
    assert max(record["step"] for record in records) == FEWER
    evaluated = folder.run(line_of(6, "--eval-only"))
    first, second = (re.findall(r"\| (test loss .*)", printed) for printed in (trained, evaluated))
    assert len(first) == len(second) == 1 and first == second
    (loss,) = [record["loss"] for record in records if record["kind"] == "test"]
    assert abs(loss - math.log(2048)) < 1  # the page: it starts at ln 2048
    assert "The checkpoint" in folder.run(line_of(6, "tools/generate.py"))


@pytest.mark.slow
def test_the_way_to_hugging_face_and_back(folder: Folder) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")
    if not (folder.place / "runs" / "my-text").is_dir():
        folder.run(line_of(5, "run_gpt2.sh"))
    for number, command in commands():
        if number == STEPS:
            folder.run(command)
