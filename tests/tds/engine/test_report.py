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
PARTS = ["forward", "backward", "reduction", "step", "train_batch"]


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _train(rank: int, config: dict[str, Any], verbose: bool) -> tuple[list[str], str, float]:
    tds.quiet(not verbose)
    toy = Toy("chain", config=config)
    engine = make_engine(toy, 2)
    heard = _Heard()
    logger.addHandler(heard)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        loss = [engine.train_batch(iter(toy.batches())) for _ in range(4)][-1]
    assert not any(timer.event_timers for timer in engine.timers.get_timers().values())
    return heard.lines, printed.getvalue(), float(loss)


def test_steps_per_print_tells_loss_and_speed_on_rank_0_where_deepspeed_is_heard() -> None:
    config = {"steps_per_print": 2, "wall_clock_breakdown": False}
    (lines, printed, loss), other = run_ranks(2, _train, config, True)
    found = [match.groups() for line in lines if (match := LINE.search(line))]
    assert found == [("2", f"{loss:.4f}", ""), ("4", f"{loss:.4f}", "")]
    assert not TIMES.search(printed) and not any(LINE.search(line) for line in other[0])
    assert not any(LINE.search(line) for line in run_ranks(2, _train, config, False)[0][0])


@pytest.mark.parametrize(("every", "number"), [pytest.param(None, 4, marks=pytest.mark.slow), (2, 2)])
def test_wall_clock_breakdown_prints_the_parts_of_a_step_though_deepspeed_is_quiet(
    every: int | None, number: int
) -> None:
    config = {"wall_clock_breakdown": True} | ({} if every is None else {"steps_per_print": every})
    (_, printed, _), (_, other, _) = run_ranks(2, _train, config, False)
    lines = TIMES.findall(printed)
    assert len(lines) == number and not TIMES.search(other)
    for line in lines:
        parts = {name: float(ms) for name, ms in re.findall(r"(\w+): ([\d.]+)", line)}
        assert list(parts) == PARTS
        assert parts["forward"] > 0 and parts["backward"] > 0 and parts["step"] > 0
        assert sum(parts[name] for name in PARTS[:-1]) <= parts["train_batch"] + 0.1


def _ask(rank: int, stages: int) -> tuple[list[str], list[float | None]]:
    tds.quiet(False)
    toy = Toy("chain", config={"steps_per_print": 2})
    engine = make_engine(toy, stages)
    heard = _Heard()
    logger.addHandler(heard)
    asked = []
    for step in range(4):
        engine.train_batch(iter(toy.batches()))
        if step in (2, 3):
            asked.append(engine.bubble())
    return [line for line in heard.lines if LINE.search(line)], [*asked, engine.bubble()]


def test_the_line_has_the_bubble_and_takes_no_step_from_a_program_that_asks_itself() -> None:
    (lines, asked), (others, same) = run_ranks(2, _ask, 2)
    assert len(lines) == 2 and all(re.search(r" bubble: \d+\.\d %$", line) for line in lines) and not others
    assert asked == same and asked[-1] is None and all(0 <= share < 1 for share in asked[:-1])
    ((lines, _),) = run_ranks(1, _ask, 1)
    assert len(lines) == 2 and not any("bubble" in line for line in lines)


def _watch(rank: int, folder: Path, initialize: Any, loss_fn: Any) -> list[str]:
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    toy = Toy("chain", dtype=torch.float32, config={"csv_monitor": monitor, "steps_per_print": 1})
    tds.init_distributed("gloo", verbose=False)
    module = deepspeed.PipelineModule(toy.specs(), num_stages=2, loss_fn=loss_fn or toy.loss_fn)
    engine = make_engine(toy, 2, initialize, module=module)
    heard = _Heard()
    tds.quiet(False)
    logger.addHandler(heard)
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in range(2):
            engine.train_batch(iter(toy.batches()))
            engine.eval_batch(iter(toy.batches()), num_micro_batches=2)
    return heard.lines


def _files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((folder / "job").iterdir())}


def test_monitors_get_what_deepspeeds_engine_writes(tmp_path: Path) -> None:
    for name, initialize in (("stock", deepspeed.initialize), ("ours", tds.initialize)):
        run_ranks(2, _watch, tmp_path / name, initialize, None)
    stock, ours = _files(tmp_path / "stock"), _files(tmp_path / "ours")
    own = ours.pop("Train_Samples_bubble.csv").split()
    assert own[0] == "step,bubble" and len(own) == 3 and all(0 <= float(row.split(",")[1]) < 1 for row in own[1:])
    assert sorted(ours) == [f"Train_Samples_{name}.csv" for name in ("eval_loss", "lr", "train_loss")]
    assert set(ours) <= set(stock)
    for name, text in ours.items():
        one, two = (list(csv.reader(io.StringIO(each))) for each in (stock[name], text))
        assert one[0] == two[0] and [row[0] for row in one] == [row[0] for row in two], name
        values = [[float(row[1]) for row in rows[1:]] for rows in (one, two)]
        assert values[0] == pytest.approx(values[1], rel=1e-6), name


def _two_losses(output: torch.Tensor, labels: Any) -> dict[str, Any]:
    return {"loss": ((output - labels[0]) ** 2).mean(), "aux": 0.5}


def test_named_losses_are_in_the_line_and_in_the_monitors(tmp_path: Path) -> None:
    lines, _ = run_ranks(2, _watch, tmp_path, tds.initialize, _two_losses)
    assert [match[3] for line in lines if (match := LINE.search(line))] == ["aux: 0.5000 "] * 2
    files = _files(tmp_path)
    assert files["Train_Samples_aux.csv"].split() == ["step,aux", "12,0.5", "24,0.5"]
    assert files["Train_Samples_eval_aux.csv"].split() == ["step,eval_aux", "12,0.5", "24,0.5"]
