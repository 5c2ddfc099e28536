"""Part ``faults`` of the GPU program: each verdict can fail, and the dry form passes."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import faults, train
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.part import TIMED_OUT, Done, Machine, Skip
from tests.benchmarks.gpu.made import dry_machine, made_run

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
def test_a_dry_case_passes_through_the_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name = "gpt2 waits of the host --fp32"
    assert main(["--device", "cpu", "--out", str(tmp_path), "faults", "--only", name]) == 0
    (file,) = tmp_path.glob("gpu-cpu-*.json")
    (verdict,) = json.loads(file.read_text())["parts"]["faults"]["cases"].values()
    assert verdict["figures"] == {"places": {"tolist in tds/loss_reduction.py:read": 2}}
    assert f"passed   faults: {name} (" in capfd.readouterr().out


def reads_of(found: dict[str, int], *, is_noticed: bool = True) -> dict[str, Any]:
    return {"steps": 2, "found": found, "is_noticed": is_noticed}


def test_one_read_a_step_passes() -> None:
    assert faults.judge_reads(reads_of({READ: 2})).startswith("one wait per step")


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (reads_of({READ: 2}, is_noticed=False), "a deliberate wait was not detected"),
        (reads_of({}), "waits 0 times per step"),
        (reads_of({READ: 4}), "waits 2 times per step"),
        (reads_of({READ: 2, "wait in tds/gradients.py:norm": 8}), "per step: wait in tds/gradients.py:norm (4)"),
        (
            reads_of({READ: 2, "synchronize in tds/action_times.py:read": 2}),
            "per step: synchronize in tds/action_times.py:read (1)",
        ),
    ],
)
def test_other_waits_fail(seen: dict[str, Any], told: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(told)):
        faults.judge_reads(seen)


def pressed_of(retries: int = 2, losses: str = "0x1") -> dict[str, Any]:
    return {"retries": retries, "losses": [losses], "peak": 9, "limit": 8}


def test_allocations_tried_again_pass_with_the_same_losses_alone() -> None:
    assert faults.judge_retry(pressed_of(0), pressed_of()).startswith("2 allocations retried")
    for eased, pressed, told in (
        (pressed_of(0), pressed_of(0), "no allocation was retried"),
        (pressed_of(1), pressed_of(), "with sufficient memory retried"),
        (pressed_of(0), pressed_of(losses="0x2"), "losses \\['0x2'\\], with enough memory \\['0x1'\\]"),
    ):
        with pytest.raises(AssertionError, match=told):
            faults.judge_retry(eased, pressed)


def test_a_paused_pipeline_with_other_losses_fails() -> None:
    assert faults.judge_equal({"plain": ["1", "2"], "paused": ["1", "2"]}).startswith("plain, paused: losses of 2")
    for seen, told in (
        ({"plain": ["1", "2"], "paused": ["1", "3"]}, "paused: losses"),
        ({"plain": ["1", "1"], "paused": ["1", "1"]}, "must change"),
        ({"plain": [], "paused": []}, "must change"),
    ):
        with pytest.raises(AssertionError, match=told):
            faults.judge_equal(seen)


ENDS = {
    "memory": (faults.judge_out_of_memory, Done(1, OOM, 9.0), "2.50 GiB|step 1|micro-batch|Lower --batch-size"),
    "shared": (faults.judge_shared, Done(2, SHARED, 9.0), "a separate GPU|GPU-|rank 0|rank 1"),
    "no device": (lambda done: faults.judge_no_device(done, 1), Done(2, NO_DEVICE, 9.0), "LOCAL_RANK must|got 1 and 1"),
    "NaN": (lambda done: faults.judge_ended(done, made_run([7.0] * 4)), Done(5, ENDED, 9.0), "step 5|micro-batch"),
    "death": (
        lambda done: faults.judge_death(done.code, done.seconds, done.text),
        Done(4, DEAD, 9.0),
        "rank 1|SIGKILL",
    ),
}
"""Case -> (its judge, an end that passes, what must be said)."""


@pytest.mark.parametrize(("judge", "done", "words"), ENDS.values(), ids=ENDS)
def test_an_end_passes_with_its_code_and_words_alone(judge: Any, done: Done, words: str) -> None:
    assert judge(done).startswith(f"code {done.code}")
    for code in (0, 3, TIMED_OUT):
        with pytest.raises(AssertionError, match=r"ended with code|did not end in time"):
            judge(Done(code, done.text, done.seconds))
    for word in words.split("|"):
        with pytest.raises(AssertionError):
            judge(Done(done.code, done.text.replace(word, "it"), done.seconds))
    if done.code in (2, 4):
        with pytest.raises(AssertionError, match="only after"):
            judge(Done(done.code, done.text, 1e3))


def test_a_nan_must_end_the_run_at_its_step_and_be_left_out_there_alone() -> None:
    with pytest.raises(AssertionError, match="5 steps were recorded, not 4"):
        faults.judge_ended(Done(5, ENDED, 9.0), made_run([7.0] * 5))
    falling = [7.0 - step / 100 for step in range(train.STEPS)]
    falling[4] = math.nan
    assert faults.judge_skipped(Done(0, "", 9.0), made_run(falling)).startswith("step 5 skipped, 20 steps run")
    for losses, told in (
        (falling[:10], "10 steps were recorded"),
        ([7.0, *falling[1:4], 6.9, *falling[5:]], "have no loss, not only 5"),
        ([*falling[:19], math.nan], "have no loss, not only 5"),
        ([*falling[:19], 8.0], "must decrease"),
    ):
        with pytest.raises(AssertionError, match=told):
            faults.judge_skipped(Done(0, "", 9.0), made_run(losses))
    with pytest.raises(AssertionError, match="ended with code 5, not 0"):
        faults.judge_skipped(Done(5, "", 9.0), made_run(falling))


def test_a_rank_is_found_among_the_launchers_children(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, time; "
        "subprocess.Popen(['sleep', '60'], env={'RANK': '1'}); print('up', flush=True); time.sleep(60)"
    )
    live = train.begin(dry_machine(tmp_path), [sys.executable, "-c", code], tmp_path / "log")
    try:
        live.wait_until(lambda: "up" in live.text, "its child")
        assert b"RANK=1" in Path(f"/proc/{faults.rank_of(live.process.pid, 1)}/environ").read_bytes()
        with pytest.raises(AssertionError, match="the launcher has no rank 0"):
            faults.rank_of(live.process.pid, 0)
    finally:
        live.close()


NEED_GPU = ("two ranks", "LOCAL_RANK", "CUDA_LAUNCH", "allocations", "a batch")


def test_what_a_cpu_cannot_show_is_skipped_with_the_reason(tmp_path: Path) -> None:
    machine = dry_machine(tmp_path)
    cases = [case for case in faults.cases(machine) if case.name.startswith(NEED_GPU)]
    assert len(cases) == len(NEED_GPU)
    for case in cases:
        with pytest.raises(Skip, match=r"\w+ \w+"):
            case.run(machine, tmp_path)


def test_ranks_talk_over_nccl_where_each_has_a_gpu_and_what_fills_memory_runs_alone(tmp_path: Path) -> None:
    machine = dry_machine(tmp_path, kind="cuda")
    assert faults.of_two_ranks(machine) == "gloo"
    machine.num_devices = 2
    assert faults.of_two_ranks(machine) == "nccl"
    assert [case.name for case in faults.cases(machine) if case.alone] == ["a batch that cannot fit"]


def dry_names() -> list[str]:
    cases = faults.cases(dry_machine(Path("none")))
    return [case.name for case in cases if not case.name.startswith((*NEED_GPU, "gpt2 waits"))]


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", dry_names())
def test_the_dry_form_passes(name: str, tmp_path: Path) -> None:
    machine: Machine = dry_machine(tmp_path)
    (case,) = [case for case in faults.cases(machine) if case.name == name]
    assert case.run(machine, tmp_path)[0]
