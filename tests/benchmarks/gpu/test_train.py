"""Part ``train`` of the GPU program: each verdict can fail, and the dry form passes."""

from __future__ import annotations

import math
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import train
from benchmarks.gpu.part import Done, Machine, Skip
from tests.benchmarks.gpu.made import dry_machine, made_run, write_metrics

FALLING = [7.0, 6.5, 6.0]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return dry_machine(tmp_path, limit_s=60.0)


def test_losses_within_the_tolerance_pass() -> None:
    told = train.judge_losses(made_run([7.0, 6.51, 6.0]), made_run(FALLING), 0.011)
    assert told == "losses of 3 steps within 0.01, allowed 0.011; 7.000 to 6.000"


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (made_run([7.0, 6.52, 6.0]), "losses of 3 steps within 0.02, allowed 0.011: got 7.00000 6.52000"),
        (made_run([7.0, 6.5, 5.98]), "losses of 3 steps within 0.02"),
        (made_run([7.0, math.nan, 6.0]), "a loss is not finite"),
        (made_run([7.0, 6.5]), "the steps 1 to 2 (2) were run, expected 1 to 3 (3)"),
        (made_run(FALLING, steps=[1, 2, 4]), "the steps 1 to 4 (3) were run, expected 1 to 3 (3)"),
        (made_run(FALLING, num_skipped=1), "1 steps were skipped due to an overflow"),
    ],
)
def test_losses_that_are_not_those_of_the_reference_fail(run: train.Run, told: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(told)):
        train.judge_losses(run, made_run(FALLING), 0.011)


def test_losses_that_do_not_fall_and_runs_without_steps_fail() -> None:
    flat = made_run([7.0, 6.9, 6.8])
    with pytest.raises(AssertionError, match="the loss must decrease by 0.3, got 7.0000 to 6.8000"):
        train.judge_losses(flat, flat, 0.1)
    for judge in (train.worst, train.judge_bits):
        with pytest.raises(AssertionError, match="no step was recorded"):
            judge(made_run([]), made_run([]))


def test_one_bit_of_a_loss_or_a_norm_fails() -> None:
    plain = made_run(FALLING)
    assert train.judge_bits(made_run(FALLING), plain) == "losses and norms of 3 steps bitwise identical"
    for other in (made_run([7.0, math.nextafter(6.5, 7), 6.0]), made_run(FALLING, norm=math.nextafter(1.0, 2))):
        with pytest.raises(AssertionError, match=r"step \d has loss and norm"):
            train.judge_bits(other, plain)
    with pytest.raises(AssertionError, match=re.escape("the steps 1 to 2 (2) were run")):
        train.judge_bits(made_run(FALLING[:2]), plain)


@pytest.mark.parametrize("code", [1, 3, -1])
def test_checkpoints_that_differ_fail(code: int, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(train, "python", lambda _, *words: asked.append(words) or Done(0, "", 1.0))
    train.judge_weights(machine, Path("one"), Path("other"))
    assert asked[0][1:] == ("one", "--compare", "other") and Path(asked[0][0]).exists()
    monkeypatch.setattr(train, "python", lambda *_: Done(code, "verdict: 2 tensors differ", 1.0))
    with pytest.raises(AssertionError, match=rf"not compared \(code {code}\): verdict: 2 tensors differ"):
        train.judge_weights(machine, Path("one"), Path("other"))


def test_a_runs_records_are_read_with_losses_that_are_no_numbers(tmp_path: Path) -> None:
    write_metrics(tmp_path, [7.0, None])
    run = train.read_run(tmp_path)
    assert run.steps == (1, 2) and run.losses[0] == 7.0 and math.isnan(run.losses[1])
    assert train.last_step(tmp_path) == 2 and train.last_step(tmp_path / "none") == 0


def test_cases_are_those_of_every_family_in_every_format(machine: Machine) -> None:
    names = [case.name for case in train.cases(machine)]
    assert len(set(names)) == len(names)
    assert {f"{family} {form}" for family in train.SCRIPTS for form in ("fp32", "bf16", "fp16")} < set(names)
    assert all((train.ROOT / script).exists() for script in train.SCRIPTS.values())
    with pytest.raises(Skip, match="fp16 needs a GPU"):
        train.on_device(machine, "gpt2", "fp16")


def test_the_table_has_the_tolerances_that_are_used() -> None:
    rows = dict(re.findall(r"^\| (\w+) \| ([\de.-]+) \|", train.__doc__ or "", re.MULTILINE))
    assert {name: float(text) for name, text in rows.items()} == train.TOLERANCES


@pytest.mark.parametrize(("form", "apart", "passes"), [("fp32", 0.001, False), ("bf16", 0.001, True)])
def test_each_format_has_its_own_tolerance(
    form: str, apart: float, passes: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(train, "on_device", lambda *_: made_run([7.0, 6.5 + apart, 6.0]))
    monkeypatch.setattr(train, "reference", lambda *_: made_run(FALLING))
    if passes:
        assert train.as_reference(machine, tmp_path, family="gpt2", number_format=form)[1]["allowed"] > apart
        return
    with pytest.raises(AssertionError, match="losses of 3 steps within 0.001"):
        train.as_reference(machine, tmp_path, family="gpt2", number_format=form)


def test_a_family_that_learns_slowly_need_fall_by_less(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.is_dry = False
    for name in ("on_device", "reference"):
        monkeypatch.setattr(train, name, lambda *_: made_run([7.7, 7.6, 7.5]))
    assert train.as_reference(machine, tmp_path, family="bert", number_format="fp32")[1]["worst"] == 0
    with pytest.raises(AssertionError, match="the loss must decrease by 0.3"):
        train.as_reference(machine, tmp_path, family="mpt", number_format="fp32")


STAND_IN = """
import json, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--save") + 1])
row = {{"kind": "train", "loss": 7.0, "grad_norm": 1.0, "skipped": 0}}
def leave(*_):
    {leave}
signal.signal(signal.SIGTERM, leave)
(folder / "metrics.jsonl").write_text("".join(json.dumps(row | {{"step": s}}) + "\\n" for s in range(1, {done} + 1)))
time.sleep(60)
"""


def cut_with(
    machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch, leave: str, done: int = 20
) -> tuple[str, dict[str, Any]]:
    """Return what ``cut_off`` shows of a script that says of these steps that they are done, and leaves so."""
    script = folder / "script.py"
    script.write_text(STAND_IN.format(leave=leave, done=done))
    monkeypatch.setitem(train.SCRIPTS, "gpt2", str(script))
    monkeypatch.setattr(train, "limit_s", lambda _: 0.2 if leave == "pass" else 60.0)
    return train.cut_off(machine, folder, number=signal.SIGTERM, code=75, is_due=train.is_under_way)


@pytest.mark.parametrize(
    ("leave", "done", "told"),
    [
        ("sys.exit(1)", 20, "ended with code 1, not 75"),
        ("sys.exit(0)", 20, "ended with code 0, not 75"),
        ("pass", 20, "did not end within 0 s"),
        ("sys.exit(75)", 80, "all 80 steps were run before SIGTERM arrived"),
    ],
)
def test_a_stop_with_another_code_or_too_late_fails(
    leave: str, done: int, told: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(train, "train", lambda *_: None)  # nothing goes on behind it
    monkeypatch.setattr(train, "whole", lambda _: made_run([7.0] * 80))
    with pytest.raises(AssertionError, match=re.escape(told)):
        cut_with(machine, tmp_path, monkeypatch, leave, done)


def test_a_resumed_run_that_is_another_fails(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(train, "train", lambda *_: None)  # goes on no further than it came
    monkeypatch.setattr(train, "whole", lambda _: made_run([7.0] * 80))
    with pytest.raises(AssertionError, match=re.escape("the steps 1 to 20 (20) were run, expected 1 to 80 (80)")):
        cut_with(machine, tmp_path, monkeypatch, "sys.exit(75)")


def test_a_script_that_ends_or_says_nothing_is_no_live_run(tmp_path: Path) -> None:
    for code, limit_s, told in (
        ("print('gone'); exit(3)", 60.0, "ended with 3 before step 1: gone"),
        ("import time; time.sleep(9)", 0.1, "timed out before step 1"),
    ):
        live = train.begin(dry_machine(tmp_path, limit_s), [sys.executable, "-c", code], tmp_path / "log")
        with pytest.raises(AssertionError, match=told):
            live.wait_until(lambda: False, "step 1")
        live.close()
        assert live.process.poll() is not None


def names_of(skipped: tuple[str, ...] = ("fp16",)) -> list[str]:
    return [case.name for case in train.cases(dry_machine(Path("none"))) if not case.name.endswith(skipped)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return dry_machine(tmp_path_factory.mktemp("gpu"))


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", names_of())
def test_the_dry_form_passes(name: str, shared: Machine, tmp_path: Path) -> None:
    (case,) = [case for case in train.cases(shared) if case.name == name]
    shared.end = dry_machine(tmp_path).end
    text, figures = case.run(shared, tmp_path)
    assert "allowed" in figures or "bitwise identical" in text
