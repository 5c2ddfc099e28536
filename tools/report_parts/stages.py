"""The stages of a run: what they hold, and what they did in a step; its slowest operators; its evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.log import human_bytes, human_count
from tools.report_parts.columns import number
from tools.report_parts.folder import RunFolder
from tools.report_parts.markup import Html, table, tag

HEAD = ("stage", "layers", "parameters on a rank", "memory", "before the model", "estimated", "work in a step", "idle",
        "")  # fmt: skip
ABOUT = (
    "Memory is the most that a rank has held: on a GPU of torch's allocator, on a CPU the resident size of the whole "
    "process. So it holds what was there before the model (Python, torch, libraries), which the estimate of the model "
    "and its training leaves out."
)
MOST_OPERATORS = 20


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
    return tag("div", tag("p", ABOUT), table(HEAD, found))


def evaluation_table(run: RunFolder) -> Html | None:
    """Return what --eval-only has found in this folder; None where it has not been used."""
    rows = []
    for each in run.evaluations:
        loss, perplexity = (number(each.get(name)) for name in ("loss", "perplexity"))
        losses = each.get("losses")
        rows.append([
            str(each["step"]),
            each.get("checkpoint", ""),
            f"{loss:.4f}" if loss is not None else "",
            f"{perplexity:.2f}" if perplexity is not None else "",
            ", ".join(f"{name} {value:.4f}" for name, value in losses.items() if number(value) is not None)
            if isinstance(losses, dict)
            else "",
        ])  # fmt: skip
    return table(("step", "checkpoint", "test loss", "perplexity", "by corpus"), rows) if rows else None


def operator_table(run: RunFolder) -> Html | None:
    """Return the operators that take longest, of the run's --profile; None without one."""
    found = run.operators.get("operators")
    if not isinstance(found, list) or not found:
        return None
    runs = (number(run.operators.get("steps")) or 1) * (number(run.operators.get("ranks")) or 1)
    operators = [each for each in found if isinstance(each, dict)]
    times = [name for name in ("device_us", "host_us") if any(number(each.get(name)) for each in operators)]
    head = ["operator", *[f"{name.removesuffix('_us')} ms" for name in times], "", "calls"]
    longest = max((number(each.get(times[0])) or 0 for each in operators), default=0) if times else 0
    rows = []
    for each in operators[:MOST_OPERATORS]:
        cells = [f"{(number(each.get(name)) or 0) / 1e3 / runs:,.3f}" for name in times]
        share = (number(each.get(times[0])) or 0) / longest if longest else 0
        rows.append([each.get("name"), *cells, _bar(share), f"{(number(each.get('calls')) or 0) / runs:,.1f}"])
    told = f"Own time of one step of one rank, the mean over {run.operators.get('steps')} steps and "
    told += f"{run.operators.get('ranks')} ranks. Traces: {run.path / 'profile'}"
    return tag("div", tag("p", told), table(head, rows))


def _row(name: str, row: Mapping[str, Any], memory: float | None, work_s: float | None, step_s: float | None) -> list:
    parameters, estimated = number(row.get("parameters")), number(row.get("estimated_bytes"))
    before = number(row.get("before_bytes"))
    idle = max(1 - work_s / step_s, 0.0) if work_s is not None and step_s else None
    return [
        name,
        row.get("layers", ""),
        human_count(parameters) if parameters is not None else "",
        human_bytes(memory) if memory is not None else "",
        human_bytes(before) if before is not None else "",
        human_bytes(estimated) if estimated is not None else "",
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
