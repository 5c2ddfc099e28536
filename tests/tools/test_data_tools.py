"""The tool that makes the sample data as a user starts it, from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megatron.data import IndexedDataset
from tools.make_sample_data import with_words_apart

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def start(tool: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / tool), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, env={**os.environ})


def test_sample_data_is_made_once_and_again_when_the_stories_change(tmp_path: Path) -> None:
    arguments = ["--output", "out", "--vocab-size", "400", "--workers", "1", "--number"]
    first = start("make_sample_data.py", tmp_path, *arguments, "20")
    assert first.returncode == 0 and "20 documents" in first.stderr, first.stderr
    made = (tmp_path / "out/gpt2_text_document.bin").read_bytes()
    assert "up to date" in start("make_sample_data.py", tmp_path, *arguments, "20").stderr
    assert "22 documents" in start("make_sample_data.py", tmp_path, *arguments, "22").stderr
    assert IndexedDataset(tmp_path / "out/gpt2_text_document").num_documents == 22
    assert "20 documents" in start("make_sample_data.py", tmp_path, *arguments, "20").stderr
    assert (tmp_path / "out/gpt2_text_document.bin").read_bytes() == made


def test_a_chinese_name_is_a_word_of_the_vocabulary() -> None:
    assert with_words_apart("旺旺有一个红色的球。") == "\n旺旺\n有一个\n红色的球\n。"
    assert with_words_apart("Max had a red ball.") == "Max had a red ball."
