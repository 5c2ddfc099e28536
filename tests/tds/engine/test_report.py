"""What "steps_per_print" and "wall_clock_breakdown" write."""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import re
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import logger

import tds
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine

LINE = re.compile(r"steps: (\d+) loss: ([\d.]+) ((?:\w+: [\d.]+ )*)iter time \(s\): [\d.]+ samples/sec: [\d.]+")
TIMES = re.compile(r"time \(ms\)((?: \| \w+: [\d.]+)+)")
PHASES = ["forward", "backward", "reduction", "step", "train_batch"]


class _LogCapture(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _train(rank: int, config: dict[str, Any], verbose: bool) -> tuple[list[str], str, float]:
    tds.quiet(not verbose)
    toy = Toy("chain", config=config)
    engine = make_engine(toy, 2)
    capture = _LogCapture()
    logger.addHandler(capture)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        loss = [engine.train_batch(iter(toy.make_batches())) for _ in range(4)][-1]
    assert not any(timer.event_timers for timer in engine.timers.get_timers().values())
    return capture.lines, printed.getvalue(), float(loss)


def test_steps_per_print_logs_loss_and_speed_on_rank_0() -> None:
    config = {"steps_per_print": 2, "wall_clock_breakdown": False}
    (lines, printed, loss), other_result = run_ranks(2, _train, config, True)
    matches = [match.groups() for line in lines if (match := LINE.search(line))]
    assert matches == [("2", f"{loss:.4f}", ""), ("4", f"{loss:.4f}", "")]
    assert not TIMES.search(printed) and not any(LINE.search(line) for line in other_result[0])
    assert not any(LINE.search(line) for line in run_ranks(2, _train, config, False)[0][0])


@pytest.mark.parametrize(("steps_per_print", "num_lines"), [pytest.param(None, 4, marks=pytest.mark.slow), (2, 2)])
def test_wall_clock_breakdown_prints_phases_when_deepspeed_is_quiet(
    steps_per_print: int | None, num_lines: int
) -> None:
    config = {"wall_clock_breakdown": True} | ({} if steps_per_print is None else {"steps_per_print": steps_per_print})
    (_, printed, _), (_, other_printed, _) = run_ranks(2, _train, config, False)
    lines = TIMES.findall(printed)
    assert len(lines) == num_lines and not TIMES.search(other_printed)
    for line in lines:
        times = {name: float(ms) for name, ms in re.findall(r"(\w+): ([\d.]+)", line)}
        assert list(times) == PHASES
        assert times["forward"] > 0 and times["backward"] > 0 and times["step"] > 0
        assert sum(times[name] for name in PHASES[:-1]) <= times["train_batch"] + 0.1


def _train_and_read_bubble(rank: int, stages: int) -> tuple[list[str], list[float | None]]:
    tds.quiet(False)
    toy = Toy("chain", config={"steps_per_print": 2})
    engine = make_engine(toy, stages)
    capture = _LogCapture()
    logger.addHandler(capture)
    bubbles = []
    for step in range(4):
        engine.train_batch(iter(toy.make_batches()))
        if step in (2, 3):
            bubbles.append(engine.bubble())
    return [line for line in capture.lines if LINE.search(line)], [*bubbles, engine.bubble()]


def test_step_line_shows_bubble_independently_of_program_reads() -> None:
    (lines, bubbles), (other_lines, other_bubbles) = run_ranks(2, _train_and_read_bubble, 2)
    assert len(lines) == 2 and all(re.search(r" bubble: \d+\.\d %$", line) for line in lines) and not other_lines
    assert bubbles == other_bubbles and bubbles[-1] is None and all(0 <= bubble < 1 for bubble in bubbles[:-1])
    ((lines, _),) = run_ranks(1, _train_and_read_bubble, 1)
    assert len(lines) == 2 and not any("bubble" in line for line in lines)


def _train_with_monitor(rank: int, folder: Path, initialize: Any, loss_fn: Any) -> list[str]:
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    toy = Toy("chain", dtype=torch.float32, config={"csv_monitor": monitor, "steps_per_print": 1})
    tds.init_distributed("gloo", verbose=False)
    module = deepspeed.PipelineModule(toy.layer_specs(), num_stages=2, loss_fn=loss_fn or toy.loss_fn)
    engine = make_engine(toy, 2, initialize, module=module)
    capture = _LogCapture()
    tds.quiet(False)
    logger.addHandler(capture)
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in range(2):
            engine.train_batch(iter(toy.make_batches()))
            engine.eval_batch(iter(toy.make_batches()), num_micro_batches=2)
    return capture.lines


def _read_monitor_files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((folder / "job").iterdir())}


def test_monitor_events_match_deepspeed_engine(tmp_path: Path) -> None:
    for name, initialize in (("stock", deepspeed.initialize), ("ours", tds.initialize)):
        run_ranks(2, _train_with_monitor, tmp_path / name, initialize, None)
    stock, ours = _read_monitor_files(tmp_path / "stock"), _read_monitor_files(tmp_path / "ours")
    bubble_rows = ours.pop("Train_Samples_bubble.csv").split()
    assert (
        bubble_rows[0] == "step,bubble"
        and len(bubble_rows) == 3
        and all(0 <= float(row.split(",")[1]) < 1 for row in bubble_rows[1:])
    )
    assert sorted(ours) == [f"Train_Samples_{name}.csv" for name in ("eval_loss", "lr", "train_loss")]
    assert set(ours) <= set(stock)
    for name, text in ours.items():
        stock_rows, our_rows = (list(csv.reader(io.StringIO(content))) for content in (stock[name], text))
        assert stock_rows[0] == our_rows[0] and [row[0] for row in stock_rows] == [row[0] for row in our_rows], name
        values = [[float(row[1]) for row in rows[1:]] for rows in (stock_rows, our_rows)]
        assert values[0] == pytest.approx(values[1], rel=1e-6), name


def _two_losses(output: torch.Tensor, labels: Any) -> dict[str, Any]:
    return {"loss": ((output - labels[0]) ** 2).mean(), "aux": 0.5}


def test_named_losses_are_logged_and_monitored(tmp_path: Path) -> None:
    lines, _ = run_ranks(2, _train_with_monitor, tmp_path, tds.initialize, _two_losses)
    assert [match[3] for line in lines if (match := LINE.search(line))] == ["aux: 0.5000 "] * 2
    files = _read_monitor_files(tmp_path)
    assert files["Train_Samples_aux.csv"].split() == ["step,aux", "12,0.5", "24,0.5"]
    assert files["Train_Samples_eval_aux.csv"].split() == ["step,eval_aux", "12,0.5", "24,0.5"]
