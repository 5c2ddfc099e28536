"""docs/migration.md: what it says of each flag is what the command line does with it."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from megatron.arguments.deepspeed_keys import KNOWN
from megatron.arguments.flags_doc import classify
from tds.deprecated_paths import _FINDER

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    ROOT / "docs" / "migration.md": ("Flags", "DeepSpeed's JSON", "Former import paths", "Former names"),
    ROOT / "docs" / "zh" / "migration.md": ("参数", "DeepSpeed 的 JSON", "旧的导入路径", "旧的名字"),
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
    assert len(named) > 130 and len(set(named)) == len(named)
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
    assert len(documented) > 10 and documented <= set(KNOWN)


def test_both_pages_say_the_same_of_each_flag() -> None:
    english, chinese = (rows(page, headings[0]) for page, headings in PAGES.items())
    assert [cells[0] for cells in english] == [cells[0] for cells in chinese]
    assert [WORDS.get(cells[1], cells[1]) for cells in english] == [WORDS.get(cells[1], cells[1]) for cells in chinese]


@every_page
def test_former_paths_are_all_that_are_forwarded_and_their_new_places_are_there(page: Path) -> None:
    table = rows(page, PAGES[page][2])
    modules = [re.findall(r"`((?:megatron|tds)(?:\.\w+)*)`", cells[1]) for cells in table]
    missing = [name for names in modules for name in names if importlib.util.find_spec(name) is None]
    assert missing == [] and all(modules)
    former = {cells[0].strip("`"): names for cells, names in zip(table, modules, strict=True)}
    assert _FINDER.homes.keys() <= former.keys()
    for path, homes in _FINDER.homes.items():
        assert former[path] == list(dict.fromkeys(home.partition(":")[0] for home in homes))


@every_page
def test_former_names_are_all_that_packages_look_up(page: Path) -> None:
    documented = {
        cells[0].strip("`"): [re.findall(r"`(\w+)`", cell) for cell in cells[1:]]
        for cells in rows(page, PAGES[page][3])
    }
    sources = [path for path in (ROOT / "megatron").glob("*/__init__.py") if "_FORMER" in path.read_text("utf-8")]
    assert documented.keys() == {f"megatron.{path.parent.name}" for path in sources}
    for package, (before, now) in documented.items():
        former = importlib.import_module(package)._FORMER
        renamed = {name: full.rpartition(".")[2] for name, full in former.items() if not full.endswith(f".{name}")}
        assert dict(zip(before, now, strict=True)) == renamed, package
