"""The tool that makes the sample data as a user starts it, from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megatron.data import IndexedDataset

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def start(tool: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / tool), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, env={**os.environ})


def test_sample_data_is_made_once_and_again_when_a_text_changes(tmp_path: Path) -> None:
    for name, text in {
        "corpus/en/a.txt": "Title\n\nText.",
        "library/b.py": "x = 1\n",
        "library/test/c.py": "no",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    arguments = [
        "--output",
        "out",
        "--corpus",
        "corpus",
        "--library",
        "library",
        "--vocab-size",
        "260",
        "--workers",
        "1",
    ]
    first = start("make_sample_data.py", tmp_path, *arguments)
    assert first.returncode == 0 and "2 documents" in first.stderr, first.stderr
    assert "up to date" in start("make_sample_data.py", tmp_path, *arguments).stderr
    (tmp_path / "library/d.py").write_text("y = 2\n")
    assert "3 documents" in start("make_sample_data.py", tmp_path, *arguments).stderr
    assert IndexedDataset(tmp_path / "out/gpt2_text_document").num_documents == 3
