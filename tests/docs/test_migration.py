"""docs/migration.md: what it says of each flag is what the command line does with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.arguments.deepspeed_keys import KNOWN
from megatron.arguments.flags_doc import classify

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    ROOT / "docs" / "migration.md": ("Flags", "DeepSpeed's JSON"),
    ROOT / "docs" / "zh" / "migration.md": ("参数", "DeepSpeed 的 JSON"),
}
WORDS = {
    "the same": "same",
    "相同": "same",
    "ignored": "ignored",
    "忽略": "ignored",
    "converted": "converted",
    "换算": "converted",
    "rejected": "rejected",
    "拒绝": "rejected",
}
FLAG = r"--[a-z][\w-]*"

every_page = pytest.mark.parametrize("page", PAGES, ids=["english", "chinese"])


def rows(page: Path, heading: str) -> list[list[str]]:
    """Return the cells of the tables under ``heading``, without the first two rows of each."""
    text = page.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| .*$", re.sub(r"^\|.*\n\|---.*$", "", text, flags=re.M), flags=re.M)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def class_of(flag: str) -> tuple[str, str]:
    """Return "same", "ignored", "converted", "rejected" or the flag of which it is an alias; and the reason."""
    kind, about = classify(flag)
    if kind == "alias":
        return about.removeprefix("of ").strip("`"), ""
    return {"ours": "same", "by-value": "ignored", "dense-only": "ignored"}.get(kind, kind), about


@every_page
def test_each_flag_is_what_the_command_line_makes_of_it(page: Path) -> None:
    table = rows(page, PAGES[page][0])
    named = [flag for cells in table for flag in re.findall(FLAG, cells[0])]
    assert named and len(set(named)) == len(named)
    for theirs, here, *_ in table:
        flags, ours = re.findall(FLAG, theirs), re.findall(FLAG, here)
        wanted = ours if len(ours) == len(flags) else (ours or [WORDS[here]]) * len(flags)
        assert [class_of(flag)[0] for flag in flags] == wanted, theirs


@every_page
def test_the_page_names_the_alternatives_that_the_error_names(page: Path) -> None:
    for theirs, here, about in rows(page, PAGES[page][0]):
        if WORDS.get(here) == "rejected":
            reasons = " ".join(class_of(flag)[1] for flag in re.findall(FLAG, theirs))
            documented = set(re.findall(FLAG, re.sub(r"`--[\w-]+ \d`", "", about)))
            assert documented <= set(re.findall(FLAG, reasons)), theirs


@every_page
def test_the_keys_of_the_json_are_known(page: Path) -> None:
    documented = {key for cells in rows(page, PAGES[page][1]) for key in re.findall(r"`(\w+)`", cells[0])}
    assert documented and documented <= set(KNOWN)
