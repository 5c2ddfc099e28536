"""The stages of a run: what they hold, and what they did in a step; its slowest operators; its evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.log import human_bytes, human_count
from tools.report_parts.columns import number
from tools.report_parts.folder import RunFolder
from tools.report_parts.markup import Html, table, tag
from tools.report_parts.words import bilingual

HEAD = ("stage", "layers", "parameters on a rank", "memory", "work in a step", "idle")
PARTS = ("weights", "gathered", "gradients", "optimizer", "activations", "logits", "buffers")
"""Of the planner's estimate, those that lie on the device; they add up to it."""
COMPARED = ("estimated", "before the model", "measured", "measured - before - estimated")
ABOUT = (
    "Estimated is what the planner counts for the model and its training on one rank: the columns to its left add up "
    "to it. Measured is the most that a rank has held: on a GPU of torch's allocator, on a CPU the resident size of "
    "the whole process.",
    "So they differ by what was there before the model (Python, torch, libraries) and by the last column. Above 0 it "
    "is what the estimate leaves out: temporary tensors within an operator, memory that the allocator keeps for reuse, "
    "threads, files and data that are read ahead. Below 0 not all that is counted was held at one time, or it took "
    "memory that was free already.",
)
MOST_OPERATORS = 20
SPLITS = {"valid": "validation", "test": "test"}


def stage_table(run: RunFolder) -> Html | None:
    """Return the table of a run's stages with the numbers of its last record; None where nothing is known."""
    train = run.of_kind("train")
    last = train[-1] if train else {}
    memory, work = _by_stage(last, "memory_bytes"), _by_stage(last, "work_s")
    step_s = number(last.get("step_s"))
    rows = {f"stage {row.get('stage')}": row for row in run.stages if isinstance(row, dict)}
    names = list(dict.fromkeys([*rows, *memory, *work]))
    if not names:
        return None
    found = [_row(name, rows.get(name, {}), memory.get(name), work.get(name), step_s) for name in names]
    return table([*map(bilingual, HEAD), ""], found)


def memory_table(run: RunFolder) -> Html | None:
    """Return the planner's estimate by its parts beside what was measured; None where either is not known."""
    train = run.of_kind("train")
    measured, rows = _by_stage(train[-1] if train else {}, "memory_bytes"), []
    stages = [each for each in run.stages if isinstance(each, dict)]
    used = [name for name in PARTS if any(_parts(stage).get(name) for stage in stages)]
    for stage in stages:
        estimated, before = number(stage.get("estimated_bytes")), number(stage.get("before_bytes"))
        held = measured.get(f"stage {stage.get('stage')}")
        if estimated is None or held is None:
            continue
        rest = held - before - estimated if before is not None else None
        values = [*(_parts(stage).get(name) for name in used), estimated, before, held]
        rows.append([bilingual("stage {}", stage.get("stage")), *map(_bytes, values), _signed(rest)])
    told = [tag("p", bilingual(text)) for text in ABOUT]
    return tag("div", *told, table([*map(bilingual, ("stage", *used, *COMPARED))], rows)) if rows else None


def _parts(stage: Mapping[str, Any]) -> dict[str, float]:
    return _by_stage(stage, "estimated_parts")


def _bytes(value: float | None) -> str:
    return human_bytes(value) if value is not None else ""


def _signed(value: float | None) -> str:
    return ("-" if value < 0 else "+") + human_bytes(abs(value)) if value is not None else ""


def evaluation_table(run: RunFolder) -> Html | None:
    """Return the evaluations of the run, then what --eval-only has found in this folder; None without one."""
    rows = []
    for each in [*run.of_kind("valid"), *run.of_kind("test"), *run.evaluations]:
        loss, perplexity = (number(each.get(name)) for name in ("loss", "perplexity"))
        losses = each.get("losses")
        rows.append([
            f"{each['step']:,}",
            bilingual(SPLITS[each["kind"]]) if each["kind"] in SPLITS else each["kind"],
            f"{loss:.4f}" if loss is not None else "",
            f"{perplexity:.2f}" if perplexity is not None else "",
            ", ".join(f"{name} {value:.4f}" for name, value in losses.items() if number(value) is not None)
            if isinstance(losses, dict)
            else "",
            each.get("checkpoint", ""),
        ])  # fmt: skip
    head = ("step", "split", "loss", "perplexity", "by corpus", "checkpoint")
    return table([*map(bilingual, head)], rows) if rows else None


def operator_table(run: RunFolder) -> Html | None:
    """Return the operators that take longest, of the run's --profile; None without one."""
    found = run.operators.get("operators")
    if not isinstance(found, list) or not found:
        return None
    runs = (number(run.operators.get("steps")) or 1) * (number(run.operators.get("ranks")) or 1)
    operators = [each for each in found if isinstance(each, dict)]
    times = [name for name in ("device_us", "host_us") if any(number(each.get(name)) for each in operators)]
    units = [bilingual("{} ms", bilingual(name.removesuffix("_us"))) for name in times]
    head = [bilingual("operator"), *units, "", bilingual("calls")]
    longest = max((number(each.get(times[0])) or 0 for each in operators), default=0) if times else 0
    rows = []
    for each in operators[:MOST_OPERATORS]:
        cells = [f"{(number(each.get(name)) or 0) / 1e3 / runs:,.3f}" for name in times]
        share = (number(each.get(times[0])) or 0) / longest if longest else 0
        rows.append([each.get("name"), *cells, _bar(share), f"{(number(each.get('calls')) or 0) / runs:,.1f}"])
    text = "Own time of one step of one rank, the mean over {} steps and {} ranks. Traces: {}"
    told = bilingual(text, run.operators.get("steps"), run.operators.get("ranks"), run.path / "profile")
    return tag("div", tag("p", told), table(head, rows))


def _row(name: str, row: Mapping[str, Any], memory: float | None, work_s: float | None, step_s: float | None) -> list:
    parameters = number(row.get("parameters"))
    idle = max(1 - work_s / step_s, 0.0) if work_s is not None and step_s else None
    return [
        bilingual("stage {}", name.removeprefix("stage ")),
        row.get("layers", ""),
        human_count(parameters) if parameters is not None else "",
        _bytes(memory),
        f"{1e3 * work_s:,.1f} ms" if work_s is not None else "",
        f"{100 * idle:.1f} %" if idle is not None else "",
        _bar(1 - idle) if idle is not None else "",
    ]


def _bar(share: float) -> Html:
    return tag("span", tag("i", style=f"width:{100 * min(max(share, 0), 1):.1f}%"), class_="bar")


def _by_stage(record: Mapping[str, Any], name: str) -> dict[str, float]:
    values = record.get(name)
    if not isinstance(values, dict):
        return {}
    return {stage: value for stage, each in values.items() if (value := number(each)) is not None}
