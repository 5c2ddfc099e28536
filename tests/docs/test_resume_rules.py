"""The tables of what may differ at a resume, and of what a start goes on with, say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.config import CheckpointConfig, Config
from megatron.training.compatibility import MAY, MUST, RULES, WARNED, Rule
from megatron.training.restore_options import RestoreOptions
from megatron.training.run_folder import _chosen

ROOT = Path(__file__).resolve().parents[2]
ENGLISH = ROOT / "docs" / "checkpoints.md"
CHINESE = ROOT / "docs" / "zh" / "checkpoints.md"
VERDICTS = {"必须一致": MUST, "警告": WARNED, "可以改变": MAY}
FLAG = r"--[a-z][\w-]*\*?"


def what_of(rule: Rule) -> str:
    """Return the first cell of a rule as the page has it, with every flag by its full name."""
    muon = "momentum nesterov num-ns-steps scale-mode extra-scale-factor split-qkv split-qkv-heads".split()
    named = rule.what.replace("--adam-*", "--adam-beta1, --adam-beta2, --adam-eps")
    return named.replace("--muon-*", ", ".join(f"--muon-{name}" for name in muon))


def table(page: Path, heading: str, number: int = 0) -> list[list[str]]:
    """Return the cells of a table under ``heading``, without its first two rows."""
    text = page.read_text(encoding="utf-8")
    section = text[text.index(f"\n## {heading}\n") :].split("\n## ")[1]
    rows = re.findall(r"(?:^\|.*\|\n)+", section, flags=re.M)[number].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_the_table_of_what_may_differ_is_that_of_the_code() -> None:
    rows = table(ENGLISH, "What may differ")
    assert [(what, verdict) for what, verdict, _ in rows] == [(what_of(rule), rule.verdict) for rule in RULES]
    for (_, _, meaning), rule in zip(rows, RULES, strict=True):
        assert set(re.findall(FLAG, rule.meaning)) <= set(re.findall(FLAG, meaning))


def test_the_chinese_table_of_what_may_differ_has_the_same_rows() -> None:
    rows = table(CHINESE, "什么可以不同")
    assert [VERDICTS[verdict] for _, verdict, _ in rows] == [rule.verdict for rule in RULES]
    for (what, _, meaning), rule in zip(rows, RULES, strict=True):
        assert re.findall(FLAG, what) == re.findall(FLAG, what_of(rule))
        assert set(re.findall(FLAG, rule.meaning)) <= set(re.findall(FLAG, meaning))


TAKEN = {"taken": True, "new": False, "取用": True, "新的": False}


@pytest.mark.parametrize("page, heading", [(ENGLISH, "Going on"), (CHINESE, "继续训练")])
def test_the_table_of_what_is_taken_is_that_of_the_code(page: Path, heading: str) -> None:
    rows = table(page, heading, 1)
    assert len(rows) == 5
    for flags, counters, optimizer, generators in rows:
        fields = [flag[2:].replace("-", "_") for flag in re.findall(FLAG, flags)]
        given = {field: True for field in fields if field not in ("load", "resume")}
        taken = RestoreOptions.of(CheckpointConfig(load="runs/x", **given))
        assert taken.counters is TAKEN.get(counters, False)
        assert (taken.optimizer, taken.generators) == (TAKEN[optimizer], TAKEN[generators])


@pytest.mark.parametrize(
    "load, flags, goes_on_in_place",
    [
        ("run", {}, True),
        ("run", {"eval_only": True}, True),
        ("run", {"finetune": True}, False),
        ("run/checkpoints", {}, False),
        ("run/checkpoints/step-00000002", {}, False),
        ("run/checkpoints/step-00000002", {"eval_only": True}, False),
    ],
)
def test_a_run_folder_goes_on_in_itself_and_anything_else_in_a_new_one(
    load: str, flags: dict[str, bool], goes_on_in_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of going on: which run folder each row has."""
    monkeypatch.chdir(tmp_path)
    one = Path("run") / CHECKPOINTS / "step-00000002"
    one.mkdir(parents=True)
    (one / "manifest.json").write_text("{}")
    found = _chosen(Config(checkpoint=CheckpointConfig(load=load, **flags)), "gpt2").folder
    assert (found == Path("run")) is goes_on_in_place
    assert goes_on_in_place or found.parent == Path("runs")
