"""What "steps_per_print" and "wall_clock_breakdown" write."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from typing import Any

import pytest
from deepspeed.utils import logger

import tds
from tests.harness import run_ranks
from tests.tds.toys import Toy, make_engine

LINE = re.compile(r"steps: (\d+) loss: ([\d.]+) iter time \(s\): [\d.]+ samples/sec: [\d.]+")
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
    assert found == [("2", f"{loss:.4f}"), ("4", f"{loss:.4f}")]
    assert not TIMES.search(printed) and not any(LINE.search(line) for line in other[0])
    assert not any(LINE.search(line) for line in run_ranks(2, _train, config, False)[0][0])


@pytest.mark.parametrize(("every", "number"), [(None, 4), (2, 2)])
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
