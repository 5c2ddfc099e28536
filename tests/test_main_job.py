"""The run scripts as a user types them, with tiny sizes: set-up, launcher, training, run folder, evaluation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import ROOT, TOKENIZER, write_corpus

OF_EXAMPLES = {
    "llama": {"NGROUPS": "2", "NFF": "48"},
    "mpt": {},
    "bert": {},
    "moe": {"NGROUPS": "2", "NFF": "48", "NEXPERTS": "4", "NEXPERTFF": "8"},
}
"""Example -> variables of its own."""
TRAINED_AS = {"moe": "llama"}
"""Example -> the family of its program, where that has another name."""
TINY = {"NLAYERS": "2", "NHIDDEN": "32", "NHEADS": "4", "SEQLEN": "32", "BATCHSIZE": "2", "GAS": "2"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    write_corpus(folder)
    return folder


def start(place: Path, *flags: str, script: str = "run_gpt2.sh", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script from another folder, with the Python of the tests."""
    env = os.environ | TINY | {"PYTHON": sys.executable, "TOKENIZER": str(TOKENIZER), "DATA_PATH": str(place / "texts")}
    env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **variables}
    command = ["bash", str(ROOT / script), *flags]
    return subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=110, check=False)


EVALUATING = ("--split", "800,100,100", "--eval-interval", "2")


@pytest.fixture(scope="module")
def done(place: Path) -> subprocess.CompletedProcess[str]:
    """Return the finished main job, whose run folder is ``place / "run"``."""
    return start(place, *EVALUATING, TRAIN_ITERS="4", CHECKPOINT_PATH="run")


def test_the_main_job_trains_saves_and_evaluates(place: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    for word in (
        "4 ranks = pipe 2 x data 1 x tensor 2",
        "stage 1",
        "validation loss",
        "test loss",
        "perplexity",
        "MFU",
    ):
        assert word in done.stdout
    assert "DeepSpeed" not in done.stdout + done.stderr
    run = place / "run"
    assert json.loads((run / "config.json").read_text())["batch"]["train_iters"] == 4
    assert {path.name for path in run.iterdir()} >= {"command.txt", "versions.json", "metrics.jsonl", "loss.png"}
    assert any((run / "tensorboard").iterdir())
    assert (run / "checkpoints/step-00000004/manifest.json").exists()


@pytest.mark.slow  # evaluations of a checkpoint alone: tests/training/test_seeing.py
def test_an_evaluation_alone_has_the_loss_of_the_main_job(place: Path, done: subprocess.CompletedProcess[str]) -> None:
    run = place / "run"
    before = read_metrics(run / "metrics.jsonl")
    again = start(place, *EVALUATING, "--eval-only", "--load", "run", CHECKPOINT_PATH="run")
    assert again.returncode == 0, again.stderr
    lines = [line for line in (done.stdout + again.stdout).splitlines() if "| test loss" in line]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert read_metrics(run / "metrics.jsonl")[: len(before)] == before


@pytest.mark.slow  # dry runs of the scripts: tests/test_run_script.py
def test_a_dry_run_prints_the_plan_and_starts_nothing(place: Path) -> None:
    done = start(place, "--dry-run", GPUS_PER_NODE="8", pp_size="2", mp_size="2")
    assert done.returncode == 0, done.stderr
    assert "8 ranks = pipe 2 x data 2 x tensor 2" in done.stdout
    assert not (place / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", OF_EXAMPLES)
def test_the_script_of_an_example_trains_saves_and_goes_on(place: Path, tmp_path: Path, family: str) -> None:
    how = {"script": f"examples/{family}/run_{family}.sh", "CHECKPOINT_PATH": "run", **OF_EXAMPLES[family]}
    extra = ("--split", "800,100,100", "--eval-interval", "2")
    done = start(tmp_path, *extra, DATA_PATH=str(place / "texts"), TRAIN_ITERS="2", **how)
    assert done.returncode == 0, done.stderr
    assert f"4 ranks = pipe 2 x data {'2 x tensor 1' if family == 'moe' else '1 x tensor 2'}" in done.stdout
    again = start(tmp_path, *extra, "--resume", DATA_PATH=str(place / "texts"), TRAIN_ITERS="3", **how)
    assert again.returncode == 0, again.stderr
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(record["step"], record["kind"]) for record in records if record["kind"] != "train"] == [
        (2, "valid"), (2, "save"), (2, "test"), (3, "save"), (3, "test")
    ]  # fmt: skip
    assert json.loads((tmp_path / "run" / "config.json").read_text())["family"] == TRAINED_AS.get(family, family)
