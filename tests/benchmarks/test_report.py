"""The bars of the pipeline benchmark compare the right contenders, and unequal losses raise an error."""

from __future__ import annotations

import pytest

from benchmarks.pipe.model import Case, Contender
from benchmarks.pipeline import Record, bars, check_losses, fastest, rows_of, table

CASE = Case(name="toy", bar=0.93)


def make_record(name: str, seconds: list[float], partition: str = "5+3", num_bytes: int = 0) -> Record:
    contender_type = "side by side" if name == "side by side" else name.split()[0]
    schedule = name.split()[1] if contender_type == "ours" else "1f1b"
    contender = Contender(name=name, kind=contender_type, schedule=schedule, split_text=partition)
    return Record(contender, [[s, s] for s in seconds], [1.0] * len(seconds), [3.0, 2.0, 1.0], num_bytes)


def make_records() -> dict[str, Record]:
    by_name = [
        make_record("side by side", [2.0, 4.0, 2.0], ""),
        make_record("stock 1f1b 5+3", [1.2, 2.4, 1.2], num_bytes=100),
        make_record("torch 1f1b 5+3", [1.15, 2.3, 1.15]),
        make_record("torch 1f1b 4+4", [1.5, 3.0, 1.5], "4+4"),
        make_record("ours 1f1b 5+3", [1.15, 2.3, 1.15], num_bytes=101),
        make_record("ours zb-h1 5+3", [1.05, 2.1, 1.05]),
    ]
    return {entry.contender.name: entry for entry in by_name}


def test_side_by_side_speed_counts_both_processes() -> None:
    by_name = make_records()
    assert by_name["side by side"].speed(CASE) == pytest.approx(CASE.tokens)  # two processes at half speed
    assert fastest(CASE, by_name, "torch") is by_name["torch 1f1b 5+3"]
    assert fastest(CASE, by_name, "alone") is None


def test_bars_compare_named_contenders() -> None:
    by_name = list(bars(CASE, make_records()))
    by_bound = {bar.at_least: bar for bar in by_name if bar.at_least is not None}
    ratios = {bound: bar.quartiles[1] for bound, bar in by_bound.items()}
    assert ratios == pytest.approx({1.04: 1.2 / 1.05, 1.05: 1.15 / 1.05, 0.93: 1 / 1.05, 0.98: 1.0})
    assert all(bar.is_met for bar in by_bound.values())
    (memory,) = (bar for bar in by_name if bar.at_most is not None)
    assert memory.quartiles[1] == pytest.approx(1.01) and not memory.is_met and "NOT MET" in memory.text


def test_unequal_losses_raise() -> None:
    by_name = make_records()
    check_losses(by_name)
    by_name["torch 1f1b 5+3"].losses[2] += 2e-5
    with pytest.raises(RuntimeError, match="losses of step 2 must agree"):
        check_losses(by_name)
    by_name["torch 1f1b 5+3"].losses[2] = float("nan")
    with pytest.raises(RuntimeError):
        check_losses(by_name)


def test_table_is_sorted_by_speed() -> None:
    lines = table(CASE, rows_of(CASE, make_records())).splitlines()[2:]
    assert [line[:34].strip() for line in lines][:2] == ["side by side", "ours zb-h1 5+3"]
    assert {line[:34].strip() for line in lines} == set(make_records())
