"""Training runs that lose a rank, and that the launcher starts again: the numbers are those of a run without that."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.launch import machine
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.launch_jobs import Job
from tests.helpers.runs import ROOT, TOKENIZER, make_flags, write_corpus

DROPOUT_FLAGS = "--hidden-dropout 0.1 --attention-dropout 0.1"
FAULTY_SCRIPT = """\
import os, signal, sys
import pretrain_gpt2 as script
from megatron.runtime import rank_status
from megatron.training.startup import pretrain

note = rank_status.write_operation

def note_or_die(text):
    note(text)
    if text == {at!r} and os.environ["RANK"] == "{rank}" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        {act}

rank_status.write_operation = note_or_die
pretrain(script.train_valid_test_datasets_provider, script.model_provider, script.forward_step)
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def read_losses(folder: Path) -> list[tuple[int, str, str]]:
    """Return (step, loss, gradient norm) as hexadecimal numbers."""
    records = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]
    return [(record["step"], float(record["loss"]).hex(), float(record["grad_norm"]).hex()) for record in records]


def start_run(folder: Path, corpus: Path, nproc: int, at: str, rank: int, action: str, extra: str, *launch: str) -> Job:
    """Start a run whose rank ``rank`` does ``action`` once it notes ``at``, in the first start alone."""
    folder.mkdir()
    script = folder / "dying.py"
    script.write_text(FAULTY_SCRIPT.format(at=at, rank=rank, act=action))
    argv = make_flags(corpus, folder / "run", f"{DROPOUT_FLAGS} --train-iters 8 {extra}")
    preload = ",".join(machine.PRELOADED_MODULES)
    return Job(folder, [[]] * nproc, "--preload", preload, *launch, script=script, arguments=argv)


@pytest.mark.parametrize(
    ("nproc", "layout", "at"),
    [
        (2, "--pipe-parallel-size 2", "step 6, Backward(micro_batch=0, chunk=0)"),
        pytest.param(
            4, "--pipe-parallel-size 2 --model-parallel-size 2", "step 6, Forward(micro_batch=1, chunk=0)",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["p2", "t2p2"],
)  # fmt: skip
def test_restarted_run_equals_uninterrupted_run_bitwise(nproc, layout, at, corpus, tmp_path, monkeypatch):
    """Row A01, by the launcher: killed in the midst of step 6, back to step 4, on to the end."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    interrupted = start_run(
        tmp_path / "cut", corpus, nproc, at, 1, kill, f"{layout} --save-interval 4", "--max-restarts", "1"
    )
    assert interrupted.wait(100) == 0, interrupted.output
    assert "restarting from the checkpoint of step 4 (restart 1 of 1)" in interrupted.output
    assert f"by SIGKILL, at {at}" in interrupted.output
    assert "rank 1 (stage " in interrupted.output
    uninterrupted = start_run(tmp_path / "whole", corpus, nproc, "never", 1, "pass", layout)
    assert uninterrupted.wait(100) == 0, uninterrupted.output
    assert len(read_losses(tmp_path / "whole/run")) == 8
    assert read_losses(tmp_path / "cut/run") == read_losses(tmp_path / "whole/run")


def test_allocation_failure_names_bytes_stage_and_micro_batch(corpus, tmp_path, monkeypatch):
    """Row A16; and what comes back in each start ends the job by its progress, not by --max-restarts (row A25)."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    action = "__import__('torch').empty(1 << 60, dtype=__import__('torch').uint8)"
    job = start_run(tmp_path / "job", corpus, 1, "step 2, backward of micro-batch 1", 0, action, "")
    assert job.wait(60) == 1, job.output
    assert (
        "rank 0 (stage 0, tensor 0, data 0) failed: out of memory: could not allocate 1152921504606846976 bytes, "
        "at step 2, backward of micro-batch 1 (" in job.output
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_run_script_job_survives_external_kills(corpus, tmp_path):
    """The real command, 2 x 2, with ranks killed at random moments; its smaller siblings are above."""
    size_variables = {"NLAYERS": "2", "NHIDDEN": "32", "NHEADS": "4", "SEQLEN": "32", "BATCHSIZE": "2", "GAS": "2"}
    env = (
        os.environ | size_variables | {"PYTHON": sys.executable, "TOKENIZER": str(TOKENIZER), "DATA_PATH": str(corpus)}
    )
    env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TRAIN_ITERS": "150", "GPUS_PER_NODE": "4"}
    common = ["bash", str(ROOT / "run_gpt2.sh"), *DROPOUT_FLAGS.split(), "--log-interval", "1", "--eval-iters", "0"]
    uninterrupted = subprocess.run(
        [*common, "--save", "whole"], cwd=tmp_path, env=env, capture_output=True, timeout=110
    )
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    command = [*common, "--save", "cut", "--save-interval", "5", "--max-restarts", "3"]
    rng = random.Random(6)
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log)
        for kill_idx in range(3):
            wait_until(
                lambda kill_idx=kill_idx: last_saved_step(tmp_path / "cut") >= 20 * (kill_idx + 1),
                job,
                tmp_path / "log",
            )
            time.sleep(rng.uniform(0, 0.2))
            os.kill(rng.choice(child_pids(job.pid)), signal.SIGKILL)
            message = f"(restart {kill_idx + 1} of 3)"
            wait_until(lambda message=message: message in (tmp_path / "log").read_text(), job, tmp_path / "log")
        assert job.wait(100) == 0, (tmp_path / "log").read_text()
    assert len(read_losses(tmp_path / "whole")) == 150
    assert read_losses(tmp_path / "cut") == read_losses(tmp_path / "whole")


def last_saved_step(run: Path) -> int:
    steps = [int(path.parent.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*/manifest.json")]
    return max(steps, default=0)


def child_pids(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition, job: subprocess.Popen, log: Path, deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert job.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.01)
