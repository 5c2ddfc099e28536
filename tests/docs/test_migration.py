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


def read_table_rows(page: Path, heading: str) -> list[list[str]]:
    """Return the cells of the tables under ``heading``, without the first two rows of each."""
    text = page.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| .*$", re.sub(r"^\|.*\n\|---.*$", "", text, flags=re.M), flags=re.M)
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def classify_flag(flag: str) -> tuple[str, str]:
    """Return "same", "ignored", "converted", "rejected" or the flag of which it is an alias; and the reason."""
    classification, about = classify(flag)
    if classification == "alias":
        return about.removeprefix("of ").strip("`"), ""
    return {"ours": "same", "by-value": "ignored", "dense-only": "ignored"}.get(classification, classification), about


@every_page
def test_flag_table_matches_classification(page: Path) -> None:
    table = read_table_rows(page, PAGES[page][0])
    documented_flags = [flag for cells in table for flag in re.findall(FLAG, cells[0])]
    assert documented_flags and len(set(documented_flags)) == len(documented_flags)
    for foreign_cell, our_cell, *_ in table:
        flags, our_flags = re.findall(FLAG, foreign_cell), re.findall(FLAG, our_cell)
        expected = our_flags if len(our_flags) == len(flags) else (our_flags or [WORDS[our_cell]]) * len(flags)
        assert [classify_flag(flag)[0] for flag in flags] == expected, foreign_cell


@every_page
def test_documented_alternatives_match_errors(page: Path) -> None:
    for foreign_cell, our_cell, about in read_table_rows(page, PAGES[page][0]):
        if WORDS.get(our_cell) == "rejected":
            reasons = " ".join(classify_flag(flag)[1] for flag in re.findall(FLAG, foreign_cell))
            documented = set(re.findall(FLAG, re.sub(r"`--[\w-]+ \d`", "", about)))
            assert documented <= set(re.findall(FLAG, reasons)), foreign_cell


@every_page
def test_documented_json_keys_are_known(page: Path) -> None:
    documented = {key for cells in read_table_rows(page, PAGES[page][1]) for key in re.findall(r"`(\w+)`", cells[0])}
    assert documented and documented <= set(KNOWN)
