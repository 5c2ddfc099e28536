"""Part ``train`` of the GPU program: each verdict can fail, and the dry form passes."""

from __future__ import annotations

import math
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import train, train_run
from benchmarks.gpu.part import CompletedCommand, Machine, Skip
from tests.benchmarks.gpu.made import make_dry_machine, make_run, write_metrics

FALLING = [7.0, 6.5, 6.0]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return make_dry_machine(tmp_path, limit_s=60.0)


def test_losses_within_tolerance_pass() -> None:
    expected = train.judge_losses(make_run([7.0, 6.51, 6.0]), make_run(FALLING), 0.011)
    assert expected == "losses of 3 steps within 0.01, allowed 0.011; 7.000 to 6.000"


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (make_run([7.0, 6.52, 6.0]), "losses of 3 steps within 0.02, allowed 0.011: got 7.00000 6.52000"),
        (make_run([7.0, 6.5, 5.98]), "losses of 3 steps within 0.02"),
        (make_run([7.0, math.nan, 6.0]), "a loss is not finite"),
        (make_run([7.0, 6.5]), "the steps 1 to 2 (2) were run, expected 1 to 3 (3)"),
        (make_run(FALLING, steps=[1, 2, 4]), "the steps 1 to 4 (3) were run, expected 1 to 3 (3)"),
        (make_run(FALLING, num_skipped=1), "1 steps were skipped due to an overflow"),
    ],
)
def test_losses_beyond_tolerance_fail(run: train_run.Run, expected: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(expected)):
        train.judge_losses(run, make_run(FALLING), 0.011)


def test_constant_losses_and_empty_runs_fail() -> None:
    flat = make_run([7.0, 6.9, 6.8])
    with pytest.raises(AssertionError, match="the loss must decrease by 0.3, got 7.0000 to 6.8000"):
        train.judge_losses(flat, flat, 0.1)
    for judge in (train.max_loss_difference, train.judge_bits):
        with pytest.raises(AssertionError, match="no step was recorded"):
            judge(make_run([]), make_run([]))


def test_one_bit_difference_fails() -> None:
    plain = make_run(FALLING)
    assert train.judge_bits(make_run(FALLING), plain) == "losses and norms of 3 steps bitwise identical"
    for other in (make_run([7.0, math.nextafter(6.5, 7), 6.0]), make_run(FALLING, norm=math.nextafter(1.0, 2))):
        with pytest.raises(AssertionError, match=r"step \d has loss and norm"):
            train.judge_bits(other, plain)
    with pytest.raises(AssertionError, match=re.escape("the steps 1 to 2 (2) were run")):
        train.judge_bits(make_run(FALLING[:2]), plain)


@pytest.mark.parametrize("code", [1, 3, -1])
def test_different_checkpoints_fail(code: int, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        train_run, "run_python", lambda _, *words: commands.append(words) or CompletedCommand(0, "", 1.0)
    )
    train_run.judge_weights(machine, Path("one"), Path("other"))
    assert commands[0][1:] == ("one", "--compare", "other") and Path(commands[0][0]).exists()
    monkeypatch.setattr(train_run, "run_python", lambda *_: CompletedCommand(code, "verdict: 2 tensors differ", 1.0))
    with pytest.raises(AssertionError, match=rf"not compared \(code {code}\): verdict: 2 tensors differ"):
        train_run.judge_weights(machine, Path("one"), Path("other"))


def test_read_run_reads_missing_losses_as_nan(tmp_path: Path) -> None:
    write_metrics(tmp_path, [7.0, None])
    run = train.read_run(tmp_path)
    assert run.steps == (1, 2) and run.losses[0] == 7.0 and math.isnan(run.losses[1])
    assert train.last_step(tmp_path) == 2 and train.last_step(tmp_path / "none") == 0


def test_cases_cover_every_family_and_dtype(machine: Machine) -> None:
    names = [case.name for case in train.cases(machine)]
    assert len(set(names)) == len(names)
    assert {f"{family} {dtype}" for family in train.SCRIPTS for dtype in ("fp32", "bf16", "fp16")} < set(names)
    assert all((train_run.ROOT / script).exists() for script in train.SCRIPTS.values())
    with pytest.raises(Skip, match="fp16 needs a GPU"):
        train.on_device(machine, "gpt2", "fp16")


def test_documented_tolerances_match_code() -> None:
    rows = dict(re.findall(r"^\| (\w+) \| ([\de.-]+) \|", train.__doc__ or "", re.MULTILINE))
    assert {name: float(text) for name, text in rows.items()} == train.TOLERANCES


@pytest.mark.parametrize(("dtype", "difference", "is_passing"), [("fp32", 0.001, False), ("bf16", 0.001, True)])
def test_each_dtype_has_its_tolerance(
    dtype: str, difference: float, is_passing: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(train, "on_device", lambda *_: make_run([7.0, 6.5 + difference, 6.0]))
    monkeypatch.setattr(train, "reference", lambda *_: make_run(FALLING))
    if is_passing:
        assert train.matches_cpu(machine, tmp_path, family="gpt2", number_format=dtype)[1]["allowed"] > difference
        return
    with pytest.raises(AssertionError, match="losses of 3 steps within 0.001"):
        train.matches_cpu(machine, tmp_path, family="gpt2", number_format=dtype)


def test_slow_families_have_smaller_required_drop(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.is_dry = False
    for name in ("on_device", "reference"):
        monkeypatch.setattr(train, name, lambda *_: make_run([7.7, 7.6, 7.5]))
    assert train.matches_cpu(machine, tmp_path, family="bert", number_format="fp32")[1]["worst"] == 0
    with pytest.raises(AssertionError, match="the loss must decrease by 0.3"):
        train.matches_cpu(machine, tmp_path, family="mpt", number_format="fp32")


FAKE_SCRIPT = """
import json, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--save") + 1])
row = {{"kind": "train", "loss": 7.0, "grad_norm": 1.0, "skipped": 0}}
def leave(*_):
    {leave}
signal.signal(signal.SIGTERM, leave)
(folder / "metrics.jsonl").write_text("".join(json.dumps(row | {{"step": s}}) + "\\n" for s in range(1, {done} + 1)))
time.sleep(60)
"""


def run_cut_off(
    machine: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch, exit_code_line: str, num_steps: int = 20
) -> tuple[str, dict[str, Any]]:
    """Return what ``cut_off`` shows of a script that says of these steps that they are done, and leaves so."""
    script = folder / "script.py"
    script.write_text(FAKE_SCRIPT.format(leave=exit_code_line, done=num_steps))
    monkeypatch.setitem(train.SCRIPTS, "gpt2", str(script))
    monkeypatch.setattr(train, "limit_s", lambda _: 0.2 if exit_code_line == "pass" else 60.0)
    return train.interrupted(machine, folder, signal_number=signal.SIGTERM, code=75, is_due=train.has_begun)


@pytest.mark.parametrize(
    ("exit_code_line", "num_steps", "expected"),
    [
        ("sys.exit(1)", 20, "ended with code 1, not 75"),
        ("sys.exit(0)", 20, "ended with code 0, not 75"),
        ("pass", 20, "did not end within 0 s"),
        ("sys.exit(75)", 80, "all 80 steps were run before SIGTERM arrived"),
    ],
)
def test_wrong_exit_code_or_late_stop_fails(
    exit_code_line: str,
    num_steps: int,
    expected: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(train, "train", lambda *_: None)  # nothing goes on behind it
    monkeypatch.setattr(train, "uninterrupted_run", lambda _: make_run([7.0] * 80))
    with pytest.raises(AssertionError, match=re.escape(expected)):
        run_cut_off(machine, tmp_path, monkeypatch, exit_code_line, num_steps)


def test_resumed_run_with_missing_steps_fails(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(train, "train", lambda *_: None)  # goes on no further than it came
    monkeypatch.setattr(train, "uninterrupted_run", lambda _: make_run([7.0] * 80))
    with pytest.raises(AssertionError, match=re.escape("the steps 1 to 20 (20) were run, expected 1 to 80 (80)")):
        run_cut_off(machine, tmp_path, monkeypatch, "sys.exit(75)")


def test_ended_or_silent_script_raises(tmp_path: Path) -> None:
    for code, limit_s, expected in (
        ("print('gone'); exit(3)", 60.0, "ended with 3 before step 1: gone"),
        ("import time; time.sleep(9)", 0.1, "timed out before step 1"),
    ):
        live = train.start_in_background(
            make_dry_machine(tmp_path, limit_s), [sys.executable, "-c", code], tmp_path / "log"
        )
        with pytest.raises(AssertionError, match=expected):
            live.wait_until(lambda: False, "step 1")
        live.close()
        assert live.process.poll() is not None


def list_case_names(skipped_suffixes: tuple[str, ...] = ("fp16",)) -> list[str]:
    return [
        case.name for case in train.cases(make_dry_machine(Path("none"))) if not case.name.endswith(skipped_suffixes)
    ]


@pytest.fixture(scope="module")
def shared_machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return make_dry_machine(tmp_path_factory.mktemp("gpu"))


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", list_case_names())
def test_dry_run_passes(name: str, shared_machine: Machine, tmp_path: Path) -> None:
    (case,) = [case for case in train.cases(shared_machine) if case.name == name]
    shared_machine.deadline = make_dry_machine(tmp_path).deadline
    text, figures = case.run(shared_machine, tmp_path)
    assert "allowed" in figures or "bitwise identical" in text
