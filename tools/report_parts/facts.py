"""A line about each run: how far it came, how good it is, how fast it was."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from megatron.log import human_bytes, human_count, human_time
from tools.report_parts.columns import number
from tools.report_parts.folder import RunFolder
from tools.report_parts.markup import Html, html, table, tag
from tools.report_parts.words import bilingual

HEAD = ("run", "state", "model", "ranks", "steps", "loss", "validation", "test", "tokens", "time", "tokens/s", "MFU",
        "memory", "skipped", "starts")  # fmt: skip


def summary(runs: Sequence[RunFolder]) -> Html:
    """Return the table of all runs; a click on a row hides its curves."""
    return table(
        [*map(bilingual, HEAD)], [[_swatch(index, run), *facts(run)] for index, run in enumerate(runs)], class_="runs"
    )


def facts(run: RunFolder) -> list[str]:
    """Return the cells of a run behind its name; "" where nothing is known."""
    train = run.of_kind("train")
    last = train[-1] if train else {}
    memory = [v for v in map(number, _dictionary(last.get("memory_bytes")).values()) if v is not None]
    valid = [loss for record in run.of_kind("valid") if (loss := number(record.get("loss"))) is not None]
    tested = run.of_kind("test") or run.evaluations
    test = [loss for record in tested if (loss := number(record.get("loss"))) is not None]
    return [
        bilingual(*state(run)),
        _model(run),
        _layout(run),
        f"{last.get('step', 0):,}",
        _format(last.get("loss"), ".4f"),
        _validation(valid),
        f"{test[-1]:.4f}" if test else "",
        human_count(tokens) if (tokens := number(last.get("tokens"))) is not None else "",
        human_time(_seconds(run, train)) if train else "",
        _format(_median(train, "tokens_per_s"), ",.0f"),
        f"{100 * mfu:.1f} %" if (mfu := _median(train, "mfu")) is not None else "",
        human_bytes(max(memory)) if memory else "",
        str(last.get("skipped", "")),
        str(len(run.starts) or ""),
    ]


def _validation(losses: Sequence[float]) -> str:
    if not losses:
        return ""
    best = min(losses)
    return f"{losses[-1]:.4f}" + (f" (best {best:.4f})" if best < losses[-1] else "")


def state(run: RunFolder) -> tuple[str, ...]:
    """Say how far the run came: a text and its values, for ``bilingual``."""
    train, total = run.of_kind("train"), number(run.setting("batch", "train_iters"))
    if not train:
        return ("evaluated" if run.of_kind("test") or run.evaluations else "no record",)
    step = train[-1]["step"]
    if number(train[-1].get("loss")) is None:
        return "loss not finite at step {}", f"{step:,}"
    if total is None or step >= total:
        return ("finished",) if total is not None else ("at step {}", f"{step:,}")
    return "at step {} of {}", f"{step:,}", f"{total:,.0f}"


def _swatch(index: int, run: RunFolder) -> Html:
    box = tag("input", type="checkbox", checked=True, data_run=index)
    return tag("label", Html(box.replace("</input>", "")), tag("i", class_="swatch", data_run=index), html(run.name))


def _model(run: RunFolder) -> str:
    layers, hidden = run.setting("model", "num_layers"), run.setting("model", "hidden_size")
    family = run.config.get("family", "")
    if family == "t5":
        layers = f"{run.setting('t5', 'enc_layers')} + {run.setting('t5', 'dec_layers')}"
    return f"{family}, {layers} layers, hidden {hidden}" if layers is not None else str(family)


def _layout(run: RunFolder) -> str:
    ranks = run.versions.get("world_size")
    pipe, tensor = run.setting("parallel", "pipe_parallel_size"), run.setting("parallel", "model_parallel_size")
    if not isinstance(ranks, int) or not isinstance(pipe, int) or not isinstance(tensor, int):
        return str(ranks or "")
    stages = max(pipe, 1)
    return f"{ranks} = {stages} x {ranks // (stages * max(tensor, 1))} x {tensor}"


def _seconds(run: RunFolder, train: Sequence[dict[str, Any]]) -> float:
    """Return the time from the first start to the last record; without their times that of the steps."""
    ended = number(train[-1].get("time"))
    began = next((number(start.get("time")) for start in run.starts), None)
    if ended is not None and began is not None:
        return train[-1]["time"] - run.starts[0]["time"]
    before, seconds = 0, 0.0
    for record in train:
        seconds += (number(record.get("step_s")) or 0.0) * (record["step"] - before)
        before = record["step"]
    return seconds


def _median(train: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [value for record in train if (value := number(record.get(name))) is not None]
    return statistics.median(values) if values else None


def _format(value: Any, form: str) -> str:
    found = number(value)
    return "" if found is None else format(found, form)


def _dictionary(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
