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


def said(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    plan.main(shlex.split(words, comments=True))
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=pytest.mark.slow if name == "best layouts" else ()) for n, name in enumerate(NAMES)],
    ids=NAMES,
)
def test_the_page_has_what_the_planner_prints(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    words, output = EXAMPLES[number]
    assert said(words, capsys).strip() == output.strip()


def test_every_output_of_the_page_has_its_command() -> None:
    text = (DOCS / "planner.md").read_text("utf-8")
    assert len(EXAMPLES) == len(NAMES) == len(re.findall(r"^```\n.*?^```$", text, flags=re.M | re.S))


def figures(output: str) -> set[str]:
    """Return the GB of a rank's memory and of its tensor messages, and the step, as a page tells them."""
    (memory,) = re.findall(r"stage 0 .* ([\d.]+) GB +\d+ %", output)
    (sent,) = re.findall(r"tensor +([\d.]+) GB", output)
    (step,) = re.findall(r"^step ([\d.]+) m?s,", output, flags=re.M)
    return {f"{float(memory):.1f}", f"{float(sent):.1f}", step}


@pytest.mark.parametrize("page", ["parallelism.md", "zh/parallelism.md"])
def test_the_price_of_sequence_parallelism_is_the_planners(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / page).read_text("utf-8")
    (words,) = re.findall(r"^    python tools/plan\.py (.* --sequence-parallel)$", text, flags=re.M)
    wanted = set()
    for gpu in ("a100-80g", "l40s"):
        for flags in (words, words.removesuffix(" --sequence-parallel")):
            wanted |= figures(said(flags.replace("a100-80g", gpu), capsys))
    documented = set(re.findall(r"\d+(?:\.\d+)?", text.split(words)[1].split("\n\n")[1]))
    assert len(wanted) == 8 and wanted <= documented
