"""Put what was seen on a GPU into the repository and its pages.

    python -m benchmarks.gpu.publish runs/gpu/gpu-nvidia-h200-2026-11-24.json
    python -m benchmarks.gpu.publish                 # the pages anew, of the results that are in the repository

The file is kept in benchmarks/gpu/seen; the tables of all files there stand between markers in the README and in
docs/accelerators.md, English and Chinese. Results of a dry run or of a CPU are rejected.

Part ``tables`` of ``benchmarks/gpu`` writes the same tables of the results so far at each start.
Texts are English and Chinese, by the key "en" or "zh".
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import FAILED, NOT_RUN, PASSED, SKIPPED, Case, Machine, Part, Skip

WORDS: Mapping[str, Mapping[str, Any]] = {
    "en": {
        PASSED: "passed",
        FAILED: "failed",
        SKIPPED: "skipped",
        NOT_RUN: "not run",
        "seen": ("device", "date", "commit", "torch, CUDA"),
        "speeds": (
            "model",
            "tokens x sequences",
            "step of",
            "ms",
            "tokens/s",
            "MFU",
            "of the sheet",
            "GiB allocated, reserved",
            "memory",
            "planner",
        ),
        "short": ("MFU on", "ours", "ours, compiled", "Hugging Face", "plain loop"),
        "names": {"ours": "ours", "ours-compiled": "ours, compiled", "hf": "Hugging Face", "plain": "plain loop"},
        "nothing on the page": (
            "Nothing yet: every figure and every test of this repository is from a CPU. The code for CUDA and NCCL is "
            "written, but has not run\non a GPU. `bash benchmarks/gpu/run.sh` is the one command that shows it, on any "
            "GPU from 16 GB."
        ),
        "nothing in front": (
            "**Seen on a GPU: nothing yet.** Every figure and test here is from a CPU; the code for CUDA and NCCL is "
            "written, but has not run.\n`bash benchmarks/gpu/run.sh` is [the one command that shows it]"
            "(docs/accelerators.md#what-has-been-seen-on-a-gpu) on any GPU from 16 GB."
        ),
        "in front": "**Seen on** {what} ([all](docs/accelerators.md#what-has-been-seen-on-a-gpu)).",
        "explained": (
            "A step in bf16 without dropout on {device} ({date}, commit {commit}), medians of rounds. MFU is over the "
            'matrix products of the same run\n({products}) and counts half of causal attention; "of the sheet" is over '
            'the data sheet\'s peak. "memory" and "planner" are what `megatron.models`\nand the planner say over what '
            "was measured."
        ),
    },
    "zh": {
        PASSED: "通过",
        FAILED: "失败",
        SKIPPED: "跳过",
        NOT_RUN: "未运行",
        "seen": ("设备", "日期", "提交", "torch、CUDA"),
        "speeds": (
            "模型",
            "词元 x 序列",
            "谁的一步",
            "毫秒",
            "词元/秒",
            "MFU",
            "占标称峰值",
            "已分配、已保留 GiB",
            "内存",
            "规划",
        ),
        "short": ("MFU，设备", "我们的", "我们的，编译", "Hugging Face", "朴素循环"),
        "names": {"ours": "我们的", "ours-compiled": "我们的，编译", "hf": "Hugging Face", "plain": "朴素循环"},
        "nothing on the page": (
            "还没有：本仓库的每一个数字、每一项测试都来自 CPU。CUDA 与 NCCL 的代码已经写好，"
            "但还没有在 GPU 上运行过。只要一条命令就能验证，\n"
            "任何 16 GB 以上的 GPU 都可以：`bash benchmarks/gpu/run.sh`。"
        ),
        "nothing in front": (
            "**在 GPU 上验证过的：还没有。** 这里的所有数字和测试都来自 CPU；CUDA 与 NCCL 的代码已经写好，"
            "但还没有运行过。\n要在 16 GB 以上的任何 GPU 上验证，"
            "[只要一条命令](accelerators.md#在-gpu-上验证过什么)：`bash benchmarks/gpu/run.sh`。"
        ),
        "in front": "**验证过的设备：** {what}（[全部结果](accelerators.md#在-gpu-上验证过什么)）。",
        "explained": (
            "bf16、没有 dropout 的一步，在 {device} 上（{date}，提交 {commit}），取各轮的中位数。"
            "MFU 以同一次运行里的矩阵乘法（{products}）为 1，\n"
            "因果注意力只计一半；“占标称峰值”以厂商标称的峰值为 1。"
            "“内存”和“规划”是 `megatron.models` 和规划工具的估计与实测之比。"
        ),
    },
}


PARTS = ("tests", "train", "layouts", "faults", "speed")
"""Parts with results of their own."""
GIB = 2**30
CONTENDERS = ("ours", "ours-compiled", "hf", "plain")
IN_README = {"devices": 2, "models": 3}
"""Most lines there; the whole is on the page about accelerators."""


def page(seen: Sequence[Mapping[str, Any]], language: str) -> str:
    """Return what the page about accelerators says of results, newest first."""
    words = WORDS[language]
    if not seen:
        return words["nothing on the page"]
    parts = [seen_table(seen, language)]
    for content in with_speeds(seen):
        products = f"{_products(content) / 1e12:.0f} TFLOP/s"
        about = {key: content[key] for key in ("device", "date")} | {"commit": commit_of(content)}
        parts += [words["explained"].format(**about, products=products), speeds_table(content, language)]
    return "\n\n".join(parts)


def front(seen: Sequence[Mapping[str, Any]], language: str) -> str:
    """Return what the README says of results, newest first, in a few lines."""
    words = WORDS[language]
    if not seen:
        return words["nothing in front"]
    lines = [words["in front"].format(what=_describe(content, language)) for content in seen[: IN_README["devices"]]]
    fast = with_speeds(seen)
    return "\n\n".join(["  \n".join(lines), *(short_table(content, language) for content in fast[:1])])


def seen_table(seen: Sequence[Mapping[str, Any]], language: str) -> str:
    """Return a row for each run: device, date, commit, versions, and how many cases of each part ended how."""
    rows = [
        (
            f"{content['num_devices']} x {content['device']}, {content['memory_bytes'] / GIB:.0f} GiB",
            content["date"],
            commit_of(content),
            _versions(content),
            *(counts(content, part, language) for part in PARTS),
        )
        for content in seen
    ]
    return table((*WORDS[language]["seen"], *PARTS), rows)


def speeds_table(content: Mapping[str, Any], language: str) -> str:
    """Return a row for each contender of each case that passed."""
    names = WORDS[language]["names"]
    rows = [
        (
            figures["title"] + layers_of(figures),
            f"{figures['seq_length']} x {figures['batch_size']}",
            names.get(name, name),
            f"{row['ms']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['mfu']:.3f}",
            number(row["mfu_sheet"]),
            f"{row['allocated_bytes'] / GIB:.1f}, {row['reserved_bytes'] / GIB:.1f}",
            number(row.get("memory_ratio"), 2),
            number(row.get("planner_ratio"), 2),
        )
        for figures in timed(content)
        for name, row in figures["contenders"].items()
    ]
    return table(WORDS[language]["speeds"], rows)


def short_table(content: Mapping[str, Any], language: str) -> str:
    """Return the MFU of the first case of each model, a column for each contender."""
    first, *heads = WORDS[language]["short"]
    found: dict[str, Mapping[str, Any]] = {}
    for figures in timed(content):
        found.setdefault(figures["title"], figures)
    rows = [
        (
            f"{title}, {figures['seq_length']} x {figures['batch_size']}",
            *(number(figures["contenders"].get(name, {}).get("mfu")) for name in CONTENDERS),
        )
        for title, figures in list(found.items())[: IN_README["models"]]
    ]
    return table((f"{first} {content['device']}", *heads), rows)


def timed(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the figures of all models that were timed, in the order of their cases."""
    cases = content["parts"].get("speed", {"cases": {}})["cases"].values()
    return [case["figures"] for case in cases if case["status"] == PASSED and "contenders" in case["figures"]]


def with_speeds(seen: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return of each device the first results that have times."""
    found: dict[str, Mapping[str, Any]] = {}
    for content in seen:
        if timed(content):
            found.setdefault(content["device"], content)
    return list(found.values())


def counts(content: Mapping[str, Any], part: str, language: str) -> str:
    """Return how many cases of a part passed, failed, were skipped or not run; "-" where it was not started."""
    cases = content["parts"].get(part, {"cases": {}})["cases"].values()
    ends = [case["status"] for case in cases]
    words = WORDS[language]
    told = [f"{ends.count(end)} {words[end]}" for end in (PASSED, FAILED, SKIPPED, NOT_RUN) if end in ends]
    return ", ".join(told) or "-"


def commit_of(content: Mapping[str, Any]) -> str:
    """Return the commit, short."""
    commit, *more = (content["commit"] or "-").split(maxsplit=1)
    return " ".join([commit[:7], *more])


def layers_of(figures: Mapping[str, Any]) -> str:
    """Return in words how much of a model a slice has."""
    return f" ({figures['sizes']['num_layers']}/32)" if figures["family"] == "llama" else ""


def number(value: float | None, digits: int = 3) -> str:
    """Return a number for a cell, "-" for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


def _describe(content: Mapping[str, Any], language: str) -> str:
    parts = "; ".join(_of_parts(content, language))
    about = f"{content['device']} ({content['date']}, {commit_of(content)}, torch {_versions(content)})"
    return f"{about}: {parts}"


def _of_parts(content: Mapping[str, Any], language: str) -> Iterator[str]:
    for part in PARTS:
        told = counts(content, part, language)
        if told != "-":
            yield f"{part} {told}"


def _versions(content: Mapping[str, Any]) -> str:
    return f"{content['versions']['torch']}, {content['cuda'] or '-'}"


def _products(content: Mapping[str, Any]) -> float:
    """Return the best rate of matrix products of the cases."""
    return max(figures["product_flops"] for figures in timed(content))


def cases(machine: Machine) -> list[Case]:
    """Return the only case."""
    return [Case("tables", write_tables)]


def write_tables(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    """Write the tables into --out."""
    results = machine.results
    if results is None:
        raise Skip("there are no results")
    text = seen_table([results.content], "en") + "\n"
    if models := timed(results.content):
        text += "\n" + speeds_table(results.content, "en") + "\n"
    path = results.path.with_suffix(".md")
    path.write_text(text, encoding="utf-8")
    return f"{len(models)} timed cases in {path.name}", {"timed": len(models)}


PART = Part(
    name="tables",
    about="the tables of the results so far",
    cases=cases,
    budget_s=20.0,
    is_always=True,
)


ROOT = Path(__file__).resolve().parents[2]
SEEN = Path("benchmarks/gpu/seen")
BEGIN = "<!-- results of GPUs: written by python -m benchmarks.gpu.publish -->"
END = "<!-- end of the results of GPUs -->"
PAGES = {
    "README.md": (front, "en"),
    "docs/zh/README.md": (front, "zh"),
    "docs/accelerators.md": (page, "en"),
    "docs/zh/accelerators.md": (page, "zh"),
}


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Do what the command line asks."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.publish",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULTS.json", help="files that run.sh has written")
    args = parser.parse_args(argv)
    for path in args.results:
        if problem := problem_of(path):
            parser.error(problem)
    for path in args.results:
        (root / SEEN).mkdir(parents=True, exist_ok=True)
        if path.resolve() != (root / SEEN / path.name).resolve():
            shutil.copyfile(path, root / SEEN / path.name)
    for name in written(root):
        print(f"written: {name}")
    return 0


def problem_of(path: Path) -> str | None:
    """Return why these results are none of a GPU."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["is_dry"] or content["kind"] != "cuda":
            return f"results must be of a GPU, got a dry run or a CPU's: {path}"
        page([content], "en")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"results must be a file that benchmarks/gpu/run.sh wrote, got {path}: {type(error).__name__}: {error}"
    return None


def seen(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return the results that are in the repository, the newest first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / SEEN).glob("*.json"))]
    return sorted(found, key=lambda content: str(content["date"]), reverse=True)


def block(name: str, results: Sequence[dict[str, Any]]) -> str:
    """Return what stands between the markers of a page."""
    make, language = PAGES[name]
    return make(results, language)


def with_block(text: str, made: str) -> str:
    """Return a page with ``made`` between its markers.

    Raises:
        ValueError: it does not have both once, in order.
    """
    before, begin, rest = text.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"a page must have {BEGIN} and after it {END} once each")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


def written(root: Path = ROOT) -> list[str]:
    """Write the pages; return their names."""
    results = seen(root)
    for name in PAGES:
        path = root / name
        path.write_text(with_block(path.read_text(encoding="utf-8"), block(name, results)), encoding="utf-8")
    return list(PAGES)


if __name__ == "__main__":
    sys.exit(main())
