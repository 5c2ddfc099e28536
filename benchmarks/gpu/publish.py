"""Write GPU results into the pages.

    python -m benchmarks.gpu.publish runs/gpu/gpu-nvidia-h200-2026-11-24.json
    python -m benchmarks.gpu.publish                 # rewrite the pages from the results in the repository

The tool copies the file to benchmarks/gpu/seen and writes the tables of all files there between the markers in
docs/accelerators.md, English and Chinese. Results of a dry run or of a CPU are rejected. Part ``tables`` of
``benchmarks/gpu`` writes the same tables into --out at each start.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import FAILED, NOT_RUN, PASSED, SKIPPED, Case, Machine, Part, Skip

ROOT = Path(__file__).resolve().parents[2]
RESULTS_DIR = Path("benchmarks/gpu/seen")
PAGES = {
    "docs/accelerators.md": (
        "There are no results yet: all figures and tests of this repository come from CPUs. The code for CUDA and NCCL "
        "is written, but has not run\non a GPU. `bash benchmarks/gpu/run.sh` tests it on any GPU with at least 16 GB.",
        "MFU is relative to the matrix products of the same run and counts half of causal attention; `MFU (sheet)` is "
        "relative to the peak in the data sheet. `memory` and `planner` are the estimates of `--dry-run` and of the "
        "planner relative to the measurements.",
    ),
    "docs/zh/accelerators.md": (
        "还没有结果：本仓库的全部数值和测试都来自 CPU。CUDA 与 NCCL 的代码已经写好，"
        "但还没有在 GPU 上运行过。\n`bash benchmarks/gpu/run.sh` 可以在任何 16 GB 以上的 GPU 上验证。",
        "MFU 相对于同一次运行测得的矩阵乘法速度，因果注意力只计一半；`MFU (sheet)` 相对于数据手册的峰值。"
        "`memory` 和 `planner` 是 `--dry-run` 和规划器的估计与实测之比。",
    ),
}
"""Page -> text that is shown if there are no results, and the explanation of the table of speeds."""
BEGIN_MARKER = "<!-- results of GPUs: written by python -m benchmarks.gpu.publish -->"
END_MARKER = "<!-- end of the results of GPUs -->"
PART_NAMES = ("tests", "train", "layouts", "faults", "speed")
GIB = 2**30


def results_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row per run: device, date, commit, versions, and number of cases of each part by status."""
    rows = []
    for content in results:
        counts = []
        for part_name in PART_NAMES:
            cases = content["parts"].get(part_name, {"cases": {}})["cases"].values()
            statuses = [case["status"] for case in cases]
            texts = [f"{statuses.count(s)} {s}" for s in (PASSED, FAILED, SKIPPED, NOT_RUN) if s in statuses]
            counts.append(", ".join(texts) or "-")
        commit, *remark = (content["commit"] or "-").split(maxsplit=1)
        rows.append([
            f"{content['num_devices']} x {content['device']}, {content['memory_bytes'] / GIB:.0f} GiB",
            content["date"],
            " ".join([commit[:7], *remark]),
            f"{content['versions']['torch']}, {content['cuda'] or '-'}",
            *counts,
        ])  # fmt: skip
    return table(["device", "date", "commit", "torch, CUDA", *PART_NAMES], rows)


def speed_table(content: Mapping[str, Any]) -> str:
    """Return a table with a row for each contender of each speed case that passed."""

    def format_value(value: float | None, digits: int = 3) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    rows = []
    for figures in speed_figures(content):
        layers = f" ({figures['sizes']['num_layers']}/32)" if figures["family"] == "llama" else ""
        for name, row in figures["contenders"].items():
            rows.append([
                figures["title"] + layers,
                f"{figures['seq_length']} x {figures['batch_size']}",
                name,
                f"{row['ms']:.1f}",
                f"{row['tokens_per_s']:,.0f}",
                format_value(row["mfu"]),
                format_value(row["mfu_sheet"]),
                f"{row['allocated_bytes'] / GIB:.1f}, {row['reserved_bytes'] / GIB:.1f}",
                format_value(row.get("memory_ratio"), 2),
                format_value(row.get("planner_ratio"), 2),
            ])  # fmt: skip
    headings = ["model", "tokens x sequences", "contender", "ms", "tokens/s", "MFU", "MFU (sheet)"]
    return table([*headings, "GiB allocated, reserved", "memory", "planner"], rows)


def speed_figures(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the figures of the speed cases that passed."""
    cases = content["parts"].get("speed", {"cases": {}})["cases"].values()
    return [case["figures"] for case in cases if case["status"] == PASSED and "contenders" in case["figures"]]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in (headings, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(headings), *lines[1:]])


def page_block(name: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Return the text between the markers of a page; the newest results of each device include a table of speeds."""
    nothing, explanation = PAGES[name]
    if not results:
        return nothing
    sections, devices = [results_table(results)], set()
    for content in results:
        if speed_figures(content) and content["device"] not in devices:
            devices.add(content["device"])
            sections += [f"{content['device']}, {content['date']}. {explanation}", speed_table(content)]
    return "\n\n".join(sections)


def load_results(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return the results in the repository, the newest first."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / RESULTS_DIR).glob("*.json"))]
    return sorted(results, key=lambda content: str(content["date"]), reverse=True)


def replace_block(text: str, block_text: str) -> str:
    """Return a page with ``block_text`` between its markers.

    Raises:
        ValueError: the page does not have both markers once, in order.
    """
    before, begin, remainder = text.partition(BEGIN_MARKER)
    _, end, after = remainder.partition(END_MARKER)
    if not begin or not end or BEGIN_MARKER in remainder or END_MARKER in after:
        raise ValueError(f"a page must contain {BEGIN_MARKER} and after it {END_MARKER}, once each")
    return f"{before}{begin}\n\n{block_text}\n\n{end}{after}"


def find_problem(path: Path) -> str | None:
    """Return the reason why a file does not contain valid GPU results; None if it does."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["is_dry"] or content["kind"] != "cuda":
            return f"results must come from a GPU, not from a dry run or a CPU, got {path}"
        page_block("docs/accelerators.md", [content])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"results must be a file written by benchmarks/gpu/run.sh, got {path}: {type(error).__name__}: {error}"
    return None


def write_tables(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    """Case of the part ``tables``: write the tables of the results so far to a Markdown file in --out."""
    results = machine.results
    if results is None:
        raise Skip("there are no results")
    path = results.path.with_suffix(".md")
    path.write_text(f"{results_table([results.content])}\n\n{speed_table(results.content)}\n", encoding="utf-8")
    models = speed_figures(results.content)
    return f"{len(models)} timed cases in {path.name}", {"timed": len(models)}


PART = Part(
    name="tables",
    description="tables of the results so far",
    cases=lambda machine: [Case("tables", write_tables)],
    budget_s=5.0,  # taken from the other parts, which have half a minute in a step of first.sh
    always_runs=True,
)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Copy the results and write the pages."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.publish",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULTS.json", help="files written by run.sh")
    args = parser.parse_args(argv)
    for path in args.results:
        if problem := find_problem(path):
            parser.error(problem)
    for path in args.results:
        (root / RESULTS_DIR).mkdir(parents=True, exist_ok=True)
        if path.resolve() != (root / RESULTS_DIR / path.name).resolve():
            shutil.copyfile(path, root / RESULTS_DIR / path.name)
    results = load_results(root)
    for name in PAGES:
        path = root / name
        path.write_text(replace_block(path.read_text(encoding="utf-8"), page_block(name, results)), encoding="utf-8")
        print(f"written: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
