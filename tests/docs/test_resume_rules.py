"""The tables of what may differ at a resume, and of what a start goes on with, say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.config import CheckpointConfig, Config
from megatron.training.compatibility import MAY_CHANGE, MUST_MATCH, RULES, WARNED, Rule
from megatron.training.restore_options import RestoreOptions
from megatron.training.run_folder import _choose_paths

ROOT = Path(__file__).resolve().parents[2]
ENGLISH = ROOT / "docs" / "checkpoints.md"
CHINESE = ROOT / "docs" / "zh" / "checkpoints.md"
VERDICTS = {"必须一致": MUST_MATCH, "警告": WARNED, "可以改变": MAY_CHANGE}
FLAG = r"--[a-z][\w-]*\*?"


def format_rule_subject(rule: Rule) -> str:
    """Return the first cell of a rule as the page has it, with every flag by its full name."""
    muon = (
        "momentum nesterov num-ns-steps coefficient-type fp32-matmul-prec scale-mode extra-scale-factor split-qkv "
        "split-qkv-heads"
    ).split()
    subject = rule.description.replace("--adam-*", "--adam-beta1, --adam-beta2, --adam-eps")
    return subject.replace("--muon-*", ", ".join(f"--muon-{name}" for name in muon))


def read_table(page: Path, heading: str, table_idx: int = 0) -> list[list[str]]:
    """Return the cells of a table under ``heading``, without its first two rows."""
    text = page.read_text(encoding="utf-8")
    section = text[text.index(f"\n## {heading}\n") :].split("\n## ")[1]
    rows = re.findall(r"(?:^\|.*\|\n)+", section, flags=re.M)[table_idx].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_compatibility_table_matches_rules() -> None:
    rows = read_table(ENGLISH, "Settings that may differ at a resume")
    assert [(subject, verdict) for subject, verdict, _ in rows] == [
        (format_rule_subject(rule), rule.verdict) for rule in RULES
    ]
    for (_, _, meaning), rule in zip(rows, RULES, strict=True):
        assert set(re.findall(FLAG, rule.meaning)) <= set(re.findall(FLAG, meaning))


def test_chinese_compatibility_table_matches_rules() -> None:
    rows = read_table(CHINESE, "续训时哪些设置可以不同")
    assert [VERDICTS[verdict] for _, verdict, _ in rows] == [rule.verdict for rule in RULES]
    for (subject, _, meaning), rule in zip(rows, RULES, strict=True):
        assert re.findall(FLAG, subject) == re.findall(FLAG, format_rule_subject(rule))
        assert set(re.findall(FLAG, rule.meaning)) <= set(re.findall(FLAG, meaning))


RESTORED_WORDS = {"restored": True, "new": False, "恢复": True, "重置": False}


@pytest.mark.parametrize("page, heading", [(ENGLISH, "Resume, load, fine-tune"), (CHINESE, "续训")])
def test_restore_table_matches_options(page: Path, heading: str) -> None:
    rows = read_table(page, heading, 1)
    assert len(rows) == 5
    for flags, counters, optimizer, generators in rows:
        fields = [flag[2:].replace("-", "_") for flag in re.findall(FLAG, flags)]
        field_values = {field: True for field in fields if field not in ("load", "resume")}
        options = RestoreOptions.from_flags(CheckpointConfig(load="runs/x", **field_values))
        assert options.counters is RESTORED_WORDS.get(counters, False)
        assert (options.optimizer, options.generators) == (RESTORED_WORDS[optimizer], RESTORED_WORDS[generators])


@pytest.mark.parametrize(
    "load, flags, resumes_in_place",
    [
        ("run", {}, True),
        ("run", {"eval_only": True}, True),
        ("run", {"finetune": True}, False),
        ("run/checkpoints", {}, False),
        ("run/checkpoints/step-00000002", {}, False),
        ("run/checkpoints/step-00000002", {"eval_only": True}, False),
    ],
)
def test_only_run_folder_resumes_in_place(
    load: str, flags: dict[str, bool], resumes_in_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folder of each row of the table in "Resume, load, fine-tune"."""
    monkeypatch.chdir(tmp_path)
    checkpoint = Path("run") / CHECKPOINTS / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    chosen_folder = _choose_paths(Config(checkpoint=CheckpointConfig(load=load, **flags)), "gpt2").folder
    assert (chosen_folder == Path("run")) is resumes_in_place
    assert resumes_in_place or chosen_folder.parent == Path("runs")
