"""docs/why.md: each complaint has its thread, a command that is there, and what it printed."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron import data
from tests.helpers.runs import TOKENIZER, write_corpus

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/why.md", "docs/zh/why.md")
THREAD = re.compile(r"\[[^\]]*#\d+\]\(https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+\)")
ENGLISH = (ROOT / PAGES[0]).read_text(encoding="utf-8")


def sections(text: str) -> list[str]:
    return text.split("\n## ")[1:]


def commands(text: str) -> list[str]:
    return re.findall(r"^    (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), flags=re.M)


@pytest.mark.parametrize("page", PAGES)
def test_each_complaint_has_a_thread_a_command_and_what_it_printed(page: str) -> None:
    found = sections((ROOT / page).read_text(encoding="utf-8"))
    assert len(found) == 11
    for section in found:
        title = section.splitlines()[0]
        assert THREAD.search(section), title
        assert commands(section), title
        assert "\n```\n" in section or "\n| 8 | 7.5512783334970335 |" in section, title


def test_both_pages_have_the_same_threads_commands_and_prints() -> None:
    chinese = (ROOT / PAGES[1]).read_text(encoding="utf-8")
    assert THREAD.findall(chinese) == THREAD.findall(ENGLISH)
    assert commands(chinese) == commands(ENGLISH)


def test_every_test_that_a_command_names_is_there() -> None:
    named = [word for line in commands(ENGLISH) if " -m pytest " in line for word in shlex.split(line) if "::" in word]
    assert len(named) == 6
    for word in named:
        file, _, test = word.partition("::")
        assert f"\ndef {test}(" in (ROOT / file).read_text(encoding="utf-8"), word


def test_the_lock_file_has_no_package_that_must_be_compiled() -> None:
    [line] = [line for line in commands(ENGLISH) if line.startswith("grep ")]
    done = subprocess.run(shlex.split(line), cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.stdout == "0\n" and "\n```\n0\n```\n" in ENGLISH


def test_opening_a_corpus_leaves_no_file_beside_it(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    train, _, _ = data.build_train_valid_test(
        data.BlendPaths(data_path=str(prefix), split="90,5,5"), seq_length=16, seed=1, vocab_size=10**6
    )
    assert len(train[0]) == 17 and TOKENIZER.is_file()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
