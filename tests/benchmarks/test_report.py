"""The bars compare what they say they compare, and unequal losses end a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.pipe.model import Case, Contender
from benchmarks.pipeline import Record, UnequalError, bars, check_losses, draw, fastest, ratio, table

CASE = Case(name="toy", bar=0.93)


def record(name: str, kind: str, seconds: list[float], cut: str = "5+3", **more: object) -> Record:
    contender = Contender(name=name, kind=kind, schedule=str(more.pop("schedule", "1f1b")))
    held = Record(contender, cut, [[s, s] for s in seconds], [1.0] * len(seconds), [3.0, 2.0, 1.0])
    for key, value in more.items():
        setattr(held, key, value)
    return held


def records() -> dict[str, Record]:
    each = [
        record("side by side", "side by side", [2.0, 4.0, 2.0], ""),
        record("stock 5+3", "stock", [1.2, 2.4, 1.2], first_stage_bytes=(10, 90)),
        record("dualpipev", "dualpipev", [1.1, 2.2, 1.1], "1+2+2+3"),
        record("torch 5+3", "torch", [1.15, 2.3, 1.15]),
        record("torch 4+4", "torch", [1.5, 3.0, 1.5], "4+4"),
        record("ours 1f1b 5+3", "ours", [1.15, 2.3, 1.15], first_stage_bytes=(10, 91)),
        record("ours zb-h1 5+3", "ours", [1.05, 2.1, 1.05], schedule="zb-h1", measured_to_simulated=[1.02, 1.2, 1.04]),
    ]
    return {r.contender.name: r for r in each}


def test_ratios_are_medians_within_rounds_and_side_by_side_counts_both() -> None:
    found = records()
    side = found["side by side"]
    assert side.speed(CASE) == pytest.approx(CASE.tokens)  # two processes of half a speed each
    assert ratio(CASE, found["ours zb-h1 5+3"], side) == pytest.approx(1 / 1.05)
    assert fastest(CASE, found.values(), "torch") is found["torch 5+3"]
    assert fastest(CASE, found.values(), "nobody") is None


def test_bars_are_met_or_not_by_the_right_pairs() -> None:
    got = {(bar.bar, bar.is_limit): bar for bar in bars(CASE, records())}
    told = {bar: each for (bar, is_limit), each in got.items() if not is_limit}
    assert told[0.98].ratio == pytest.approx(1.0) and "torch 5+3" in told[0.98].told
    assert told[1.04].ratio == pytest.approx(1.1 / 1.05) and "dualpipev" in told[1.04].told
    assert told[1.05].ratio == pytest.approx(1.15 / 1.05) and told[1.05].is_met
    assert told[0.93].ratio == pytest.approx(1 / 1.05) and told[0.93].is_met
    memory, simulated = got[1.0, True], got[0.05, True]
    assert memory.ratio == pytest.approx(1.01) and not memory.is_met and str(memory).startswith("NOT MET")
    assert simulated.ratio == pytest.approx(0.04) and simulated.is_met
    assert told[0.99].ratio == pytest.approx(1 / 1.04) and not told[0.99].is_met


def test_the_best_simulated_is_at_the_speed_of_the_turns() -> None:
    slower = record("ours gpipe 5+3", "ours", [1.3, 2.6, 1.3], schedule="gpipe", measured_to_simulated=[1.3])
    (bar,) = (each for each in bars(CASE, records() | {"gpipe": slower}) if "best that is simulated" in each.told)
    assert bar.ratio == pytest.approx((1 / 1.05) / (1 / 1.3 * 1.3)) and "(gpipe)" in bar.told


def test_the_balance_is_that_of_our_best_cut_in_one_piece_a_stage() -> None:
    chunks = record("ours interleaved", "ours", [1.0, 2.0, 1.0], stage_s=[1.0, 3.0])
    chunks.contender = replace(chunks.contender, chunks=2)
    found = records() | {chunks.contender.name: chunks}
    found["ours zb-h1 5+3"].stage_s, found["ours 1f1b 5+3"].stage_s = [2.0, 2.05], [1.0, 2.0]
    assert not any("apart" in bar.told for bar in bars(CASE, found))
    (balance,) = (bar for bar in bars(replace(CASE, balance=0.03), found) if "apart" in bar.told)
    assert "zb-h1" in balance.told and balance.ratio == pytest.approx(0.025) and balance.is_met


def test_unequal_losses_end_a_run() -> None:
    found = records()
    assert check_losses(found.values(), CASE.loss_tolerance) == 0.0
    found["torch 5+3"].losses[2] += 2e-5
    with pytest.raises(UnequalError, match=r"step 2 .* 'torch 5\+3'"):
        check_losses(found.values(), CASE.loss_tolerance)
    found["torch 5+3"].losses[2] = float("nan")
    with pytest.raises(UnequalError):
        check_losses(found.values(), CASE.loss_tolerance)


def test_table_and_picture_name_every_contender(tmp_path) -> None:
    lines = table(CASE, records()).splitlines()[2:]
    assert [line[:34].strip() for line in lines][:3] == ["side by side", "ours zb-h1 5+3", "dualpipev"]  # by speed
    assert {line[:34].strip() for line in lines} == set(records())
    assert lines[1].split()[-2:] == ["1.040", "1.000000"]
    draw({CASE: records()}, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 1000
