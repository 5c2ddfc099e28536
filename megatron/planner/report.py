"""Format estimates as tables for the user, or as plain data for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from megatron.log import human_bytes, human_count
from megatron.models.registry import FAMILIES
from megatron.planner.estimate import Estimate, Planner
from megatron.planner.layout import command_lines, config_file_settings
from megatron.planner.machine import ACTUAL_OVER_PLANNED, DATA_SHEETS
from megatron.planner.options import PlanningTask
from megatron.planner.search import DEVICE_PARTS, NEAR_TIE, LayoutChange, Overflow, RankedLayouts

NOT_SET = "add --lr, TRAIN_ITERS, DATA_PATH and TOKENIZER, which default to the values of the sample run"
MAX_REMEDIES = 4
MAX_ROWS = 8
"""Maximum number of rows in the memory table; a longer table is cut to the first two, the fullest and the last."""
FEW_STEPS = 2000
"""Number of steps below which a note recommends a smaller global batch."""
TOKENS_PER_PARAMETER = 20
"""Tokens per parameter of a compute-optimal run (Hoffmann et al. 2022), for runs whose length is not given."""


def ranking(ranked: RankedLayouts, task: PlanningTask) -> Iterator[str]:
    """Yield lines: a table of the ranked layouts, and the number of candidates."""
    has_experts = bool(task.config.model.num_experts)
    rows = [_columns(has_experts)]
    for position, estimate in enumerate(ranked.best, 1):
        layout = estimate.layout
        schedule = "-" if layout.pipe == 1 else layout.schedule + (f" x{layout.chunks}" if layout.chunks > 1 else "")
        rows.append(
            (
                str(position), str(layout.tensor), str(layout.pipe), str(layout.data),
                *([str(layout.expert)] * has_experts), schedule,
                f"{layout.micro_batch_size} x {layout.num_micro_batches}", layout.recompute, str(layout.zero_stage),
                "yes" if layout.sequence_parallel else "no", _format_seconds(estimate.step_s),
                f"{100 * estimate.mfu:.1f} %",
                f"{estimate.tokens_per_s:,.0f}", f"{100 * estimate.bubble:.1f} %", _decimal_bytes(estimate.max_bytes),
                f"{100 * _exposed(estimate) / estimate.step_s:.1f} %",
            )
        )  # fmt: skip
    yield from _table(rows)
    yield (
        f"{ranked.num_candidates:,} candidate layouts, {ranked.num_estimates:,} of them estimated; the best one for "
        f"each tp x pp (within {100 * (NEAR_TIE - 1):.0f} %, the lower ZeRO stage, then less memory); at most "
        f"{_decimal_bytes(task.machine.usable_bytes)} per device"
    )


def _columns(has_experts: bool) -> tuple[str, ...]:
    return (
        "", "tp", "pp", "dp", *(["ep"] * has_experts), "schedule", "micro-batch", "recompute", "ZeRO", "seq par",
        "step", "MFU", "tokens/s", "bubble", "memory", "comm",
    )  # fmt: skip


def details(estimate: Estimate, task: PlanningTask) -> Iterator[str]:
    """Yield lines on one layout: time by activity, communication by type, memory by stage."""
    layout, machine = estimate.layout, task.machine
    yield f"{layout}: {layout.world_size} x {machine.name}, {layout.global_batch_size:,} samples per step"
    yield ""
    duration = ""
    if task.tokens:
        duration = f", {_format_duration(estimate.days(task.tokens))} for {task.tokens:.3g} tokens"
    yield (
        f"step {_format_seconds(estimate.step_s)}, {estimate.tokens_per_s:,.0f} tokens/s, MFU {100 * estimate.mfu:.1f} "
        f"%, bubble {100 * estimate.bubble:.1f} %{duration}"
    )
    if likely_range := likely_mfu(estimate, task):
        min_percent, max_percent = (f"{100 * (times - 1):.0f}" for times in ACTUAL_OVER_PLANNED)
        yield (
            f"published runs with fused attention took {min_percent} to {max_percent} % longer than planned: expect an "
            f"MFU of {100 * likely_range[0]:.1f} to {100 * likely_range[1]:.1f} %"
        )
    shares = [
        f"{name} {100 * value / estimate.step_s:.1f} %" for name, value in estimate.seconds_by_activity.items() if value
    ]
    yield "step time: " + ", ".join(shares)
    yield ""
    rows = [("communication per step", "bytes per rank", "seconds", "hidden")]
    for traffic_type, sent in estimate.traffic.items():
        hidden = f"{100 * sent.hidden_s / sent.seconds:.0f} %" if sent.seconds else "-"
        rows.append((traffic_type, _decimal_bytes(sent.bytes), _format_seconds(sent.seconds), hidden))
    yield from _table(rows)
    yield ""
    yield from _table(
        [("memory per rank", *DEVICE_PARTS, "total", "share"), *_memory_rows(estimate, machine.usable_bytes)]
    )


def memory_report(task: PlanningTask, excess: Overflow | None, remedies: Sequence[LayoutChange]) -> Iterator[str]:
    """Yield lines on memory; if the layout does not fit, they name the largest part and changes that make it fit."""
    usable = task.machine.usable_bytes
    if excess is None:
        yield f"fits into {_decimal_bytes(usable)}"
        return
    yield (
        f"does not fit: stage {excess.stage} needs {_decimal_bytes(excess.needed_bytes)} of {_decimal_bytes(usable)}, "
        f"{_decimal_bytes(excess.excess_bytes)} too much; the largest item is {excess.largest_part}, "
        f"{_decimal_bytes(excess.part_bytes)}"
    )
    if not remedies:
        yield "no change or pair of changes makes it fit: use more devices, a smaller model or a shorter sequence"
        return
    yield "changes that make it fit, fastest first:"
    for remedy in remedies[:MAX_REMEDIES]:
        flags = merge_flags(remedy.changes)
        yield f"  {flags}: {_decimal_bytes(remedy.estimate.max_bytes)}, step {_format_seconds(remedy.estimate.step_s)}"


def merge_flags(changes: Iterable[str]) -> str:
    """Join the flags from ``changes`` in one line; only the last value of a repeated flag is kept."""
    values: dict[str, str] = {}
    for word in " ".join(changes).split():
        if word.startswith("--"):
            name, values[word] = word, ""
        else:
            values[name] += f" {word}"
    return " ".join(name + value for name, value in values.items())


COPY_NAME = "COPY.json"
"""Placeholder in the start command for a copy of a run's config.json. The user edits the copy, not the original."""


def start_command(estimate: Estimate, task: PlanningTask) -> Iterator[str]:
    """Yield lines: a shell command that starts the layout, or the settings to write to the --config file."""
    if task.config_file is not None:
        settings, unset = config_file_settings(estimate.layout)
        path = COPY_NAME if task.is_of_run else task.config_file
        yield f"write to {f'a copy of {task.config_file}' if task.is_of_run else path}:"
        yield from (f"  {name}: {value}" for name, value in settings.items())
        if removed := sorted(field.replace("_", "-") for field in task.file_fields & unset):
            yield f"remove from it: {', '.join(removed)}"
        ranks_per_node = min(task.machine.devices_per_node, estimate.layout.world_size)
        script = FAMILIES[task.config.family].run_command
        yield "start it with:"
        yield (
            f"  GPUS_PER_NODE={ranks_per_node} NNODES={estimate.layout.world_size // ranks_per_node} bash "
            f"{script} --config {path}"
        )
        return
    yield f"start it with ({NOT_SET}):"
    yield from (f"  {line}" for line in command_lines(task.config, estimate.layout, task.machine.devices_per_node))


def summary(task: PlanningTask, planner: Planner) -> Iterator[str]:
    """Yield lines on the model, machine and batch, and on the assumed settings."""
    machine, costs = task.machine, planner.costs
    active = ""
    if task.config.model.num_experts:
        active = f" in total, {_format_parameters(costs.num_active_parameters)} active,"
    yield (
        f"{task.config.family} of {_format_parameters(costs.num_parameters)} parameters{active} on "
        f"{task.search_spec.world_size:,} x {machine.name} ({machine.devices_per_node} per node), "
        f"{task.search_spec.global_batch_size:,} samples per step"
    )
    if active:
        yield "experts are assumed evenly loaded: an expert with twice the tokens saves and computes twice as much"
    if task.assumed:
        yield f"assumed: {' '.join(task.assumed)}"
        yield from _few_steps(task, costs.num_parameters)
    if machine.notes:
        yield f"machine: {machine.notes}"
    if task.config.parallel.compile:
        yield (
            "--compile: the savings from fewer memory passes and fewer kernels are not modelled, so steps are shorter "
            "than estimated; the missing overlap of tensor-parallel all-reduces is modelled"
        )


def _few_steps(task: PlanningTask, num_parameters: int) -> Iterator[str]:
    """Yield a note if the assumed global batch results in few steps."""
    batch = task.search_spec.global_batch_size
    if f"--global-batch-size {batch}" not in task.assumed:
        return
    tokens = task.tokens or TOKENS_PER_PARAMETER * num_parameters
    length = f"{tokens:.3g} tokens" if task.tokens else f"{TOKENS_PER_PARAMETER} tokens per parameter"
    tokens_per_step = batch * task.config.tokens_per_sample
    if tokens / tokens_per_step < FEW_STEPS:
        yield (
            f"note: {length} are only {tokens / tokens_per_step:,.0f} steps of {batch:,} samples "
            f"({human_count(tokens_per_step)} tokens). Models of this size are usually trained "
            "with smaller batches: set --global-batch-size"
        )


def as_data(estimate: Estimate, task: PlanningTask) -> dict[str, Any]:
    """Convert an estimate to plain data for --json."""
    earlier_names = {"overlap_grad_reduce": "overlaps_sums"}  # key that readers of earlier versions expect
    layout = {earlier_names.get(name, name): value for name, value in asdict(estimate.layout).items()}
    return {
        "layout": layout,
        "step_s": estimate.step_s,
        "parts_s": dict(estimate.seconds_by_activity),
        "bubble": estimate.bubble,
        "tokens_per_s": estimate.tokens_per_s,
        "mfu": estimate.mfu,
        "likely_mfu": likely_mfu(estimate, task),
        "days": estimate.days(task.tokens) if task.tokens else None,
        "communication": {traffic_type: asdict(sent) for traffic_type, sent in estimate.traffic.items()},
        "bounds": list(estimate.bounds),
        "memory": [{**asdict(stage), "total": stage.total} for stage in estimate.memory],
        "lines": command_lines(task.config, estimate.layout, task.machine.devices_per_node),
    }


def likely_mfu(estimate: Estimate, task: PlanningTask) -> tuple[float, float] | None:
    """Return the (lowest, highest) MFU to expect from published runs, for GPUs in ``DATA_SHEETS``; otherwise None."""
    return (
        (estimate.mfu / ACTUAL_OVER_PLANNED[1], estimate.mfu / ACTUAL_OVER_PLANNED[0])
        if task.machine.name in DATA_SHEETS
        else None
    )


def _memory_rows(estimate: Estimate, usable: int) -> Iterator[tuple[str, ...]]:
    """Yield one row per group of consecutive stages with equal memory."""
    runs = [
        (memory, [n for n, _ in group]) for memory, group in groupby(enumerate(estimate.memory), lambda pair: pair[1])
    ]
    fullest = max(runs, key=lambda run: run[0].total)
    for position, (memory, stages) in enumerate(runs):
        if len(runs) > MAX_ROWS and 1 < position < len(runs) - 1 and stages != fullest[1]:
            continue
        name = f"stage {stages[0]}" + (f"-{stages[-1]}" if len(stages) > 1 else "")
        cells = [_decimal_bytes(getattr(memory, field)) for field in DEVICE_PARTS]
        yield name, *cells, _decimal_bytes(memory.total), f"{100 * memory.total / usable:.0f} %"


def _exposed(estimate: Estimate) -> float:
    return sum(sent.exposed_s for sent in estimate.traffic.values())


def _decimal_bytes(value: float) -> str:
    """Format bytes in MB, GB or TB."""
    return human_bytes(value, units=("MB", "GB", "TB")) if value else "0"


def _format_parameters(num_parameters: float) -> str:
    """Format a parameter count in billions, or in millions below 0.1 billion."""
    return f"{num_parameters / 1e9:,.2f} B" if num_parameters >= 1e8 else f"{num_parameters / 1e6:,.1f} M"


def _format_duration(num_days: float) -> str:
    """Format a duration in days, hours or minutes."""
    if num_days >= 1:
        return f"{num_days:,.1f} days"
    hours = 24 * num_days
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"


def _format_seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip()
