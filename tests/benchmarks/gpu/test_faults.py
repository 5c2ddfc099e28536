"""Part ``faults`` of the GPU program: each verdict can fail, and the dry form passes."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import faults, train_run
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.part import TIMED_OUT, CompletedCommand, Machine, Skip
from tests.benchmarks.gpu.made import make_dry_machine, make_run

READ = "wait in tds/loss_reduction.py:read"
OOM = (
    "rank 0 (stage 0, tensor 0, data 0) failed: out of memory: could not allocate 2.50 GiB, at step 1, forward of "
    "micro-batch 0 (CUDA out of memory. Tried to allocate 2.50 GiB). Lower --batch-size, add --checkpoint-activations"
)
SHARED = (
    "each rank must have a separate GPU, got several ranks on one:\n  GPU-1a at 0000:01:00 of host: "
    "rank 0 (LOCAL_RANK=0); rank 1 (LOCAL_RANK=0)\nStart as many ranks"
)
NO_DEVICE = "LOCAL_RANK must be below the number of cuda devices that this process sees, got 1 and 1. Start"
DEAD = "rank 1 (pid 7) was ended by SIGKILL at step 4"
ENDED = "rank 0 failed: NumericsError: step 5 (samples 16-19): the loss must be finite. Here micro-batch 0 gave such"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_dry_run_of_one_case_passes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name = "gpt2 waits of the host --fp32"
    assert main(["--device", "cpu", "--out", str(tmp_path), "faults", "--only", name]) == 0
    (file,) = tmp_path.glob("gpu-cpu-*.json")
    (verdict,) = json.loads(file.read_text())["parts"]["faults"]["cases"].values()
    assert verdict["figures"] == {"places": {"tolist in tds/loss_reduction.py:read": 2}}
    assert f"passed   faults: {name} (" in capfd.readouterr().out


def make_reads(waits: dict[str, int], *, is_noticed: bool = True) -> dict[str, Any]:
    return {"steps": 2, "found": waits, "is_noticed": is_noticed}


def test_one_read_per_step_passes() -> None:
    assert faults.judge_reads(make_reads({READ: 2})).startswith("one wait per step")


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        (make_reads({READ: 2}, is_noticed=False), "a deliberate wait was not detected"),
        (make_reads({}), "waits 0 times per step"),
        (make_reads({READ: 4}), "waits 2 times per step"),
        (make_reads({READ: 2, "wait in tds/gradients.py:norm": 8}), "per step: wait in tds/gradients.py:norm (4)"),
        (
            make_reads({READ: 2, "synchronize in tds/action_times.py:read": 2}),
            "per step: synchronize in tds/action_times.py:read (1)",
        ),
    ],
)
def test_additional_waits_fail(reads: dict[str, Any], expected: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(expected)):
        faults.judge_reads(reads)


def make_retries(retries: int = 2, losses: str = "0x1") -> dict[str, Any]:
    return {"retries": retries, "losses": [losses], "peak": 9, "limit": 8}


def test_retried_allocations_require_equal_losses() -> None:
    assert faults.judge_retry(make_retries(0), make_retries()).startswith("2 allocations retried")
    for eased, pressed, expected in (
        (make_retries(0), make_retries(0), "no allocation was retried"),
        (make_retries(1), make_retries(), "with sufficient memory retried"),
        (make_retries(0), make_retries(losses="0x2"), "losses \\['0x2'\\], with enough memory \\['0x1'\\]"),
    ):
        with pytest.raises(AssertionError, match=expected):
            faults.judge_retry(eased, pressed)


def test_paused_pipeline_requires_equal_losses() -> None:
    assert faults.judge_equal({"plain": ["1", "2"], "paused": ["1", "2"]}).startswith("plain, paused: losses of 2")
    for losses, expected in (
        ({"plain": ["1", "2"], "paused": ["1", "3"]}, "paused: losses"),
        ({"plain": ["1", "1"], "paused": ["1", "1"]}, "must change"),
        ({"plain": [], "paused": []}, "must change"),
    ):
        with pytest.raises(AssertionError, match=expected):
            faults.judge_equal(losses)


EXPECTED_ENDS = {
    "memory": (
        faults.judge_out_of_memory,
        CompletedCommand(1, OOM, 9.0),
        "2.50 GiB|step 1|micro-batch|Lower --batch-size",
    ),
    "shared": (faults.judge_shared, CompletedCommand(2, SHARED, 9.0), "a separate GPU|GPU-|rank 0|rank 1"),
    "no device": (
        lambda result: faults.judge_no_device(result, 1),
        CompletedCommand(2, NO_DEVICE, 9.0),
        "LOCAL_RANK must|got 1 and 1",
    ),
    "NaN": (
        lambda result: faults.judge_ended(result, make_run([7.0] * 4)),
        CompletedCommand(5, ENDED, 9.0),
        "step 5|micro-batch",
    ),
    "death": (
        lambda result: faults.judge_death(result.code, result.seconds, result.text),
        CompletedCommand(4, DEAD, 9.0),
        "rank 1|SIGKILL",
    ),
}
"""Case -> (its judge, an end that passes, what must be said)."""


@pytest.mark.parametrize(("judge", "result", "fragments"), EXPECTED_ENDS.values(), ids=EXPECTED_ENDS)
def test_end_requires_exit_code_and_message(judge: Any, result: CompletedCommand, fragments: str) -> None:
    assert judge(result).startswith(f"code {result.code}")
    for code in (0, 3, TIMED_OUT):
        with pytest.raises(AssertionError, match=r"ended with code|did not end in time"):
            judge(CompletedCommand(code, result.text, result.seconds))
    for fragment in fragments.split("|"):
        with pytest.raises(AssertionError):
            judge(CompletedCommand(result.code, result.text.replace(fragment, "it"), result.seconds))
    if result.code in (2, 4):
        with pytest.raises(AssertionError, match="only after"):
            judge(CompletedCommand(result.code, result.text, 1e3))


def test_nan_ends_run_or_skips_only_its_step() -> None:
    with pytest.raises(AssertionError, match="5 steps were recorded, not 4"):
        faults.judge_ended(CompletedCommand(5, ENDED, 9.0), make_run([7.0] * 5))
    falling = [7.0 - step / 100 for step in range(train_run.STEPS)]
    falling[4] = math.nan
    assert faults.judge_skipped(CompletedCommand(0, "", 9.0), make_run(falling)).startswith(
        "step 5 skipped, 20 steps run"
    )
    for losses, expected in (
        (falling[:10], "10 steps were recorded"),
        ([7.0, *falling[1:4], 6.9, *falling[5:]], "only step 5 should have no loss"),
        ([*falling[:19], math.nan], "only step 5 should have no loss"),
        ([*falling[:19], 8.0], "must decrease"),
    ):
        with pytest.raises(AssertionError, match=expected):
            faults.judge_skipped(CompletedCommand(0, "", 9.0), make_run(losses))
    with pytest.raises(AssertionError, match="ended with code 5, not 0"):
        faults.judge_skipped(CompletedCommand(5, "", 9.0), make_run(falling))


def test_rank_is_found_among_launcher_children(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, time; "
        "subprocess.Popen(['sleep', '60'], env={'RANK': '1'}); print('up', flush=True); time.sleep(60)"
    )
    live = train_run.start_in_background(make_dry_machine(tmp_path), [sys.executable, "-c", code], tmp_path / "log")
    try:
        live.wait_until(lambda: "up" in live.text, "its child")
        assert b"RANK=1" in Path(f"/proc/{faults.pid_of_rank(live.process.pid, 1)}/environ").read_bytes()
        with pytest.raises(AssertionError, match="the launcher has no rank 0"):
            faults.pid_of_rank(live.process.pid, 0)
    finally:
        live.close()


NEED_GPU = ("two ranks", "LOCAL_RANK", "CUDA_LAUNCH", "allocations", "a batch")


def test_gpu_only_cases_are_skipped_with_reason(tmp_path: Path) -> None:
    machine = make_dry_machine(tmp_path)
    cases = [case for case in faults.cases(machine) if case.name.startswith(NEED_GPU)]
    assert len(cases) == len(NEED_GPU)
    for case in cases:
        with pytest.raises(Skip, match=r"\w+ \w+"):
            case.run(machine, tmp_path)


def test_backend_depends_on_gpus_and_memory_case_is_exclusive(tmp_path: Path) -> None:
    machine = make_dry_machine(tmp_path, device_type="cuda")
    assert faults.two_rank_backend(machine) == "gloo"
    machine.num_devices = 2
    assert faults.two_rank_backend(machine) == "nccl"
    assert [case.name for case in faults.cases(machine) if case.is_exclusive] == ["a batch that cannot fit"]


def list_dry_case_names() -> list[str]:
    cases = faults.cases(make_dry_machine(Path("none")))
    return [case.name for case in cases if not case.name.startswith((*NEED_GPU, "gpt2 waits"))]


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", list_dry_case_names())
def test_dry_run_passes(name: str, tmp_path: Path) -> None:
    machine: Machine = make_dry_machine(tmp_path)
    (case,) = [case for case in faults.cases(machine) if case.name == name]
    assert case.run(machine, tmp_path)[0]
