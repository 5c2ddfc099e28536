"""The outputs of tools/plan.py on the pages, and the figures taken from them, are what it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tools import plan

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = re.findall(
    r"^    python tools/plan\.py ([^\n]*)\n\n```\n(.*?)^```$",
    (DOCS / "planner.md").read_text("utf-8"),
    flags=re.M | re.S,
)
"""Flags and output of each example; the Chinese page has the same (tests/docs/test_docs.py)."""
NAMES = ("best layouts", "one layout that does not fit", "experts")


def run_planner(command_line: str, capsys: pytest.CaptureFixture[str]) -> str:
    plan.main(shlex.split(command_line, comments=True))
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "example_idx",
    [pytest.param(n, marks=pytest.mark.slow if name == "best layouts" else ()) for n, name in enumerate(NAMES)],
    ids=NAMES,
)
def test_documented_output_equals_planner_output(example_idx: int, capsys: pytest.CaptureFixture[str]) -> None:
    command_line, output = EXAMPLES[example_idx]
    assert run_planner(command_line, capsys).strip() == output.strip()


def test_every_documented_output_has_command() -> None:
    text = (DOCS / "planner.md").read_text("utf-8")
    assert len(EXAMPLES) == len(NAMES) == len(re.findall(r"^```\n.*?^```$", text, flags=re.M | re.S))


def parse_figures(output: str) -> set[str]:
    """Return the GB of a rank's memory and of its tensor messages, and the step, as a page tells them."""
    (memory,) = re.findall(r"stage 0 .* ([\d.]+) GB +\d+ %", output)
    (sent,) = re.findall(r"tensor +([\d.]+) GB", output)
    (step,) = re.findall(r"^step ([\d.]+) m?s,", output, flags=re.M)
    return {f"{float(memory):.1f}", f"{float(sent):.1f}", step}


@pytest.mark.parametrize("page", ["parallelism.md", "zh/parallelism.md"])
def test_sequence_parallel_cost_equals_planner(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / page).read_text("utf-8")
    (command_line,) = re.findall(r"^    python tools/plan\.py (.* --sequence-parallel)$", text, flags=re.M)
    expected = set()
    for gpu in ("a100-80g", "l40s"):
        for flags in (command_line, command_line.removesuffix(" --sequence-parallel")):
            expected |= parse_figures(run_planner(flags.replace("a100-80g", gpu), capsys))
    documented = set(re.findall(r"\d+(?:\.\d+)?", text.split(command_line)[1].split("\n\n")[1]))
    assert len(expected) == 8 and expected <= documented
