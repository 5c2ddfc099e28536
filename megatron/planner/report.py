"""Format estimates as tables for the user, or as plain data for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from megatron.log import human_bytes, human_count
from megatron.models.registry import FAMILIES
from megatron.planner.estimate import Estimate, Planner
from megatron.planner.layout import file_settings, lines
from megatron.planner.machine import SHEETS, SLOWER
from megatron.planner.options import Question
from megatron.planner.search import NEAR_TIE, PARTS, LayoutChange, Overflow, RankedLayouts

NOT_SET = "add --lr, TRAIN_ITERS, DATA_PATH and TOKENIZER, which default to the values of the sample run"
SHOWN_REMEDIES = 4
MOST_ROWS = 8
"""Maximum number of rows in the memory table; a longer table is cut to the first two, the fullest and the last."""
FEW_STEPS = 2000
"""Number of steps below which a note recommends a smaller global batch."""
TOKENS_PER_PARAMETER = 20
"""Tokens per parameter of a compute-optimal run (Hoffmann et al. 2022), for runs whose length is not given."""


def ranking(found: RankedLayouts, question: Question) -> Iterator[str]:
    """Yield the table of the ranked layouts."""
    has_experts = bool(question.config.model.num_experts)
    rows = [_columns(has_experts)]
    for position, estimate in enumerate(found.best, 1):
        layout = estimate.layout
        schedule = "-" if layout.pipe == 1 else layout.schedule + (f" x{layout.chunks}" if layout.chunks > 1 else "")
        rows.append(
            (
                str(position), str(layout.tensor), str(layout.pipe), str(layout.data),
                *([str(layout.expert)] * has_experts), schedule,
                f"{layout.micro_batch_size} x {layout.num_micro_batches}", layout.recompute, str(layout.zero_stage),
                "yes" if layout.sequence_parallel else "no", _seconds(estimate.step_s), f"{100 * estimate.mfu:.1f} %",
                f"{estimate.tokens_per_s:,.0f}", f"{100 * estimate.bubble:.1f} %", _decimal_bytes(estimate.most_bytes),
                f"{100 * _exposed(estimate) / estimate.step_s:.1f} %",
            )
        )  # fmt: skip
    yield from _table(rows)
    yield (
        f"{found.num_candidates:,} candidate layouts, {found.num_estimates:,} of them estimated; the best one for each "
        f"tp x pp (within {100 * (NEAR_TIE - 1):.0f} %, the lower ZeRO stage, then less memory); at most "
        f"{_decimal_bytes(question.machine.usable_bytes)} per device"
    )


def _columns(has_experts: bool) -> tuple[str, ...]:
    return (
        "", "tp", "pp", "dp", *(["ep"] * has_experts), "schedule", "micro-batch", "recompute", "ZeRO", "seq par",
        "step", "MFU", "tokens/s", "bubble", "memory", "comm",
    )  # fmt: skip


def details(found: Estimate, question: Question) -> Iterator[str]:
    """Yield the report of one layout: time by activity, communication by type, memory by stage."""
    layout, machine = found.layout, question.machine
    yield f"{layout}: {layout.world_size} x {machine.name}, {layout.global_batch_size:,} samples per step"
    yield ""
    duration = ""
    if question.tokens:
        duration = f", {_duration(found.days(question.tokens))} for {question.tokens:.3g} tokens"
    yield (
        f"step {_seconds(found.step_s)}, {found.tokens_per_s:,.0f} tokens/s, MFU {100 * found.mfu:.1f} %, bubble "
        f"{100 * found.bubble:.1f} %{duration}"
    )
    if likely_range := likely_mfu(found, question):
        min_percent, max_percent = (f"{100 * (times - 1):.0f}" for times in SLOWER)
        yield (
            f"published runs with fused attention took {min_percent} to {max_percent} % longer than planned: expect an "
            f"MFU of {100 * likely_range[0]:.1f} to {100 * likely_range[1]:.1f} %"
        )
    shares = [f"{name} {100 * value / found.step_s:.1f} %" for name, value in found.parts.items() if value]
    yield "step time: " + ", ".join(shares)
    yield ""
    rows = [("communication per step", "bytes per rank", "seconds", "hidden")]
    for traffic_type, sent in found.traffic.items():
        hidden = f"{100 * sent.hidden_s / sent.seconds:.0f} %" if sent.seconds else "-"
        rows.append((traffic_type, _decimal_bytes(sent.bytes), _seconds(sent.seconds), hidden))
    yield from _table(rows)
    yield ""
    yield from _table([("memory per rank", *PARTS, "total", "share"), *_memory_rows(found, machine.usable_bytes)])


def fitting(question: Question, over: Overflow | None, found: Sequence[LayoutChange]) -> Iterator[str]:
    """Yield the report on memory: whether the layout fits, otherwise its largest part and changes that make it fit."""
    usable = question.machine.usable_bytes
    if over is None:
        yield f"fits into {_decimal_bytes(usable)}"
        return
    yield (
        f"does not fit: stage {over.stage} needs {_decimal_bytes(over.needed)} of {_decimal_bytes(usable)}, "
        f"{_decimal_bytes(over.over)} too much; the largest item is {over.part}, {_decimal_bytes(over.part_bytes)}"
    )
    if not found:
        yield "no change or pair of changes makes it fit: use more devices, a smaller model or a shorter sequence"
        return
    yield "changes that make it fit, fastest first:"
    for remedy in found[:SHOWN_REMEDIES]:
        flags = together(remedy.changes)
        yield f"  {flags}: {_decimal_bytes(remedy.found.most_bytes)}, step {_seconds(remedy.found.step_s)}"


def together(changes: Iterable[str]) -> str:
    """Join the flags of ``changes`` in one line; of repeated flags, only the last value is kept."""
    values: dict[str, str] = {}
    for word in " ".join(changes).split():
        if word.startswith("--"):
            name, values[word] = word, ""
        else:
            values[name] += f" {word}"
    return " ".join(name + value for name, value in values.items())


COPY = "COPY.json"
"""Placeholder in the start command for a copy of a run's config.json. The user edits the copy, not the original."""


def pasted(found: Estimate, question: Question) -> Iterator[str]:
    """Yield a shell command that starts the layout, or the settings to write to the --config file."""
    if question.config_file is not None:
        settings, unset = file_settings(found.layout)
        path = COPY if question.is_of_run else question.config_file
        yield f"write to {f'a copy of {question.config_file}' if question.is_of_run else path}:"
        yield from (f"  {name}: {value}" for name, value in settings.items())
        if removed := sorted(field.replace("_", "-") for field in question.file_fields & unset):
            yield f"remove from it: {', '.join(removed)}"
        on_node = min(question.machine.devices_per_node, found.layout.world_size)
        script = FAMILIES[question.config.family].run_command
        yield "start it with:"
        yield f"  GPUS_PER_NODE={on_node} NNODES={found.layout.world_size // on_node} bash {script} --config {path}"
        return
    yield f"start it with ({NOT_SET}):"
    yield from (f"  {line}" for line in lines(question.config, found.layout, question.machine.devices_per_node))


def opening(question: Question, planner: Planner) -> Iterator[str]:
    """Yield a description of the model, machine and batch, and the assumed settings."""
    machine, costs = question.machine, planner.costs
    active = ""
    if question.config.model.num_experts:
        active = f" in total, {_parameters(costs.num_active_parameters)} active,"
    yield (
        f"{question.config.family} of {_parameters(costs.num_parameters)} parameters{active} on "
        f"{question.wanted.world_size:,} x {machine.name} ({machine.devices_per_node} per node), "
        f"{question.wanted.global_batch_size:,} samples per step"
    )
    if active:
        yield "experts are assumed to have an even load: one with twice the tokens saves and computes twice as much"
    if question.assumed:
        yield f"assumed: {' '.join(question.assumed)}"
        yield from _few_steps(question, costs.num_parameters)
    if machine.notes:
        yield f"machine: {machine.notes}"
    if question.config.parallel.compile:
        yield (
            "--compile: the savings from fewer memory passes and fewer kernels are not modelled, so steps are shorter "
            "than estimated; the missing overlap of tensor-parallel all-reduces is modelled"
        )


def _few_steps(question: Question, num_parameters: int) -> Iterator[str]:
    """Yield a note if the assumed global batch results in few steps."""
    batch = question.wanted.global_batch_size
    if f"--global-batch-size {batch}" not in question.assumed:
        return
    tokens = question.tokens or TOKENS_PER_PARAMETER * num_parameters
    length = f"{tokens:.3g} tokens" if question.tokens else f"{TOKENS_PER_PARAMETER} tokens per parameter"
    tokens_per_step = batch * question.config.tokens_per_sample
    if tokens / tokens_per_step < FEW_STEPS:
        yield (
            f"note: {length} are only {tokens / tokens_per_step:,.0f} steps of {batch:,} samples "
            f"({human_count(tokens_per_step)} tokens). Models of this size are usually trained "
            "with smaller batches: set --global-batch-size"
        )


def as_data(found: Estimate, question: Question) -> dict[str, Any]:
    """Return an estimate as plain data for --json."""
    earlier_names = {"overlap_grad_reduce": "overlaps_sums"}  # key that readers of earlier versions expect
    layout = {earlier_names.get(name, name): value for name, value in asdict(found.layout).items()}
    return {
        "layout": layout,
        "step_s": found.step_s,
        "parts_s": dict(found.parts),
        "bubble": found.bubble,
        "tokens_per_s": found.tokens_per_s,
        "mfu": found.mfu,
        "likely_mfu": likely_mfu(found, question),
        "days": found.days(question.tokens) if question.tokens else None,
        "communication": {traffic_type: asdict(sent) for traffic_type, sent in found.traffic.items()},
        "bounds": list(found.bounds),
        "memory": [{**asdict(stage), "total": stage.total} for stage in found.memory],
        "lines": lines(question.config, found.layout, question.machine.devices_per_node),
    }


def likely_mfu(found: Estimate, question: Question) -> tuple[float, float] | None:
    """Return the (lowest, highest) MFU to expect from published runs, for GPUs in ``SHEETS``; otherwise None."""
    return (found.mfu / SLOWER[1], found.mfu / SLOWER[0]) if question.machine.name in SHEETS else None


def _memory_rows(found: Estimate, usable: int) -> Iterator[tuple[str, ...]]:
    """Yield one row per group of consecutive stages with equal memory."""
    runs = [(memory, [n for n, _ in group]) for memory, group in groupby(enumerate(found.memory), lambda pair: pair[1])]
    fullest = max(runs, key=lambda run: run[0].total)
    for position, (memory, stages) in enumerate(runs):
        if len(runs) > MOST_ROWS and 1 < position < len(runs) - 1 and stages != fullest[1]:
            continue
        name = f"stage {stages[0]}" + (f"-{stages[-1]}" if len(stages) > 1 else "")
        sizes = [_decimal_bytes(getattr(memory, part)) for part in PARTS]
        yield name, *sizes, _decimal_bytes(memory.total), f"{100 * memory.total / usable:.0f} %"


def _exposed(found: Estimate) -> float:
    return sum(sent.exposed_s for sent in found.traffic.values())


def _decimal_bytes(value: float) -> str:
    """Format a number of bytes in MB, GB or TB."""
    return human_bytes(value, units=("MB", "GB", "TB")) if value else "0"


def _parameters(number: float) -> str:
    """Format a number of parameters in billions, or in millions below 0.1 billion."""
    return f"{number / 1e9:,.2f} B" if number >= 1e8 else f"{number / 1e6:,.1f} M"


def _duration(days: float) -> str:
    """Format a duration in days, hours or minutes."""
    if days >= 1:
        return f"{days:,.1f} days"
    hours = 24 * days
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip()
