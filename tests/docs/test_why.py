"""docs/why.md: the tests and the output that its commands refer to are real."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from megatron import data
from tests.helpers.runs import TOKENIZER, write_corpus

ROOT = Path(__file__).resolve().parents[2]
ENGLISH = (ROOT / "docs" / "why.md").read_text(encoding="utf-8")


def read_commands(text: str) -> list[str]:
    return re.findall(r"^    (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), flags=re.M)


def test_tests_named_in_commands_exist() -> None:
    test_ids = [
        word for line in read_commands(ENGLISH) if " -m pytest " in line for word in shlex.split(line) if "::" in word
    ]
    assert test_ids
    for word in test_ids:
        file, _, test = word.partition("::")
        assert f"\ndef {test}(" in (ROOT / file).read_text(encoding="utf-8"), word


def test_lock_file_has_no_source_packages() -> None:
    [line] = [line for line in read_commands(ENGLISH) if line.startswith("grep ")]
    result = subprocess.run(shlex.split(line), cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert result.stdout == "0\n" and "\n```\n0\n```\n" in ENGLISH


def test_opening_corpus_creates_no_files(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    train, _, _ = data.build_train_valid_test(
        data.BlendPaths(data_path=str(prefix), split="90,5,5"), seq_length=16, seed=1, vocab_size=10**6
    )
    assert len(train[0]) == 17 and TOKENIZER.is_file()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
