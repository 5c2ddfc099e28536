"""The tables of GPU results have the figures of the results, and publish writes them into the pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import publish
from benchmarks.gpu.part import Machine, Results, run_part
from tests.benchmarks.gpu.samples import GIB, make_results

RESULTS_FILE = "gpu-nvidia-made-up-1-2026-12-01.json"


def make_machine(tmp_path: Path, content: dict[str, Any]) -> Machine:
    stored_results = Results(tmp_path / RESULTS_FILE, {})
    stored_results.content = content
    return Machine(
        "cuda", "NVIDIA Made-up 1", False, 1, 139 * GIB, 16, tmp_path / "work", tmp_path, results=stored_results
    )


def parse_table(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a copy of the pages."""
    for name in publish.PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((publish.ROOT / name).read_bytes())
    return tmp_path


def test_device_table_counts_cases_per_part() -> None:
    head, _, row = parse_table(publish.results_table([make_results()]))
    assert head[4:] == list(publish.PART_NAMES)
    assert row[:4] == ["1 x NVIDIA Made-up 1, 139 GiB", "2026-12-01", "0123456", "2.11.0, 13.0"]
    assert row[4:] == ["2 passed, 1 failed, 1 skipped", "-", "-", "-", "5 passed, 1 failed"]


def test_speed_table_has_row_per_contender_and_model() -> None:
    rows = parse_table(publish.speed_table(make_results()))[2:]
    assert [(row[0], row[2]) for row in rows] == [
        ("GPT-2 1.3B", "ours"),
        ("GPT-2 1.3B", "ours-compiled"),
        ("GPT-2 1.3B", "hf"),
        ("GPT-2 1.3B", "plain"),
        ("T5-base", "ours"),
        ("T5-base", "hf"),
        ("LLaMA 7B, a slice (5/32)", "ours"),
        ("LLaMA 7B, a slice (5/32)", "hf"),
        ("GPT-2 125M", "ours"),
    ]
    assert rows[0][1:2] + rows[0][3:] == [
        *("1024 x 8", "300.0", "54,613", "0.510", "0.400", "48.0, 50.0", "0.97", "1.04"),
    ]
    assert rows[2][-2:] == ["-", "-"], "there are no estimates for other contenders"


def test_tables_part_runs_at_each_start(tmp_path: Path) -> None:
    machine = make_machine(tmp_path, make_results())
    lines: list[str] = []
    for _ in range(2):
        assert machine.results is not None
        run_part(publish.PART, machine, machine.results, print_line=lines.append)
    assert sum("passed   tables: tables" in line for line in lines) == 2
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_file()) == [
        RESULTS_FILE,
        f"{RESULTS_FILE[:-5]}.md",
    ]
    assert "| GPT-2 1.3B | 1024 x 8 | ours |" in (tmp_path / f"{RESULTS_FILE[:-5]}.md").read_text()


def test_publish_updates_all_pages(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    files = tmp_path_factory.mktemp("results")
    (files / RESULTS_FILE).write_text(json.dumps(make_results()))
    older = make_results(date="2026-11-30", device="NVIDIA Older", parts={"tests": make_results()["parts"]["tests"]})
    (files / "gpu-older.json").write_text(json.dumps(older))
    assert publish.main([str(files / RESULTS_FILE), str(files / "gpu-older.json")], root) == 0
    published = {name: (root / name).read_text("utf-8") for name in publish.PAGES}
    assert publish.main([], root) == 0
    for name, text in published.items():
        assert (root / name).read_text("utf-8") == text, "a second time changes nothing"
        assert publish.replace_block(text, publish.page_block(name, publish.load_results(root))) == text
        assert re.findall(r"NVIDIA \w+", text[text.index(publish.BEGIN_MARKER) :])[0] == "NVIDIA Made", (
            "the newest is first"
        )
        assert "NVIDIA Older" in text and "0.510" in text


@pytest.mark.parametrize("changes", [{"is_dry": True}, {"kind": "cpu"}, {"parts": 3}])
def test_publish_rejects_results_without_gpu(root: Path, changes: dict[str, Any]) -> None:
    (root / "given.json").write_text(json.dumps(make_results(**changes)))
    before = {name: (root / name).read_bytes() for name in publish.PAGES}
    with pytest.raises(SystemExit) as ended:
        publish.main([str(root / "given.json")], root)
    assert ended.value.code == 2 and not (root / publish.RESULTS_DIR).exists()
    assert before == {name: (root / name).read_bytes() for name in publish.PAGES}


def test_page_must_have_markers_once() -> None:
    page = f"a\n{publish.BEGIN_MARKER}\nold\n{publish.END_MARKER}\nb\n"
    assert publish.replace_block(page, "new") == f"a\n{publish.BEGIN_MARKER}\n\nnew\n\n{publish.END_MARKER}\nb\n"
    for invalid_page in ("a", publish.BEGIN_MARKER, f"{publish.END_MARKER}{publish.BEGIN_MARKER}", page + page):
        with pytest.raises(ValueError, match="once each"):
            publish.replace_block(invalid_page, "new")
