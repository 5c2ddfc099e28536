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

EXAMPLE_VARIABLES = {
    "llama": {"NGROUPS": "2", "NFF": "48"},
    "mpt": {},
    "bert": {},
    "moe": {"NGROUPS": "2", "NFF": "48", "NEXPERTS": "4", "NEXPERTFF": "8"},
}
"""Example -> variables of its own."""
EXAMPLE_FAMILIES = {"moe": "llama"}
"""Example -> the family of its program, where that has another name."""
TINY = {"NLAYERS": "2", "NHIDDEN": "32", "NHEADS": "4", "SEQLEN": "32", "BATCHSIZE": "2", "GAS": "2"}


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job")
    write_corpus(path)
    return path


def run_script(
    work_dir: Path, *flags: str, script: str = "run_gpt2.sh", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the script from another folder, with the Python of the tests."""
    env = (
        os.environ
        | TINY
        | {"PYTHON": sys.executable, "TOKENIZER": str(TOKENIZER), "DATA_PATH": str(work_dir / "texts")}
    )
    env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **variables}
    command = ["bash", str(ROOT / script), *flags]
    return subprocess.run(command, cwd=work_dir, env=env, capture_output=True, text=True, timeout=110, check=False)


EVALUATION_FLAGS = ("--split", "800,100,100", "--eval-interval", "2")


@pytest.fixture(scope="module")
def main_job(work_dir: Path) -> subprocess.CompletedProcess[str]:
    """Return the finished main job, whose run folder is ``place / "run"``."""
    return run_script(work_dir, *EVALUATION_FLAGS, TRAIN_ITERS="4", CHECKPOINT_PATH="run")


def test_main_job_trains_saves_and_evaluates(work_dir: Path, main_job: subprocess.CompletedProcess[str]) -> None:
    assert main_job.returncode == 0, main_job.stderr
    for word in (
        "4 ranks = pipe 2 x data 1 x tensor 2",
        "stage 1",
        "validation loss",
        "test loss",
        "perplexity",
        "MFU",
    ):
        assert word in main_job.stdout
    assert "DeepSpeed" not in main_job.stdout + main_job.stderr
    run = work_dir / "run"
    assert json.loads((run / "config.json").read_text())["batch"]["train_iters"] == 4
    assert {path.name for path in run.iterdir()} >= {"command.txt", "versions.json", "metrics.jsonl", "loss.png"}
    assert any((run / "tensorboard").iterdir())
    assert (run / "checkpoints/step-00000004/manifest.json").exists()


@pytest.mark.slow  # evaluations of a checkpoint alone: tests/training/test_monitoring.py
def test_eval_only_reproduces_test_loss(work_dir: Path, main_job: subprocess.CompletedProcess[str]) -> None:
    run = work_dir / "run"
    before = read_metrics(run / "metrics.jsonl")
    eval_job = run_script(work_dir, *EVALUATION_FLAGS, "--eval-only", "--load", "run", CHECKPOINT_PATH="run")
    assert eval_job.returncode == 0, eval_job.stderr
    lines = [line for line in (main_job.stdout + eval_job.stdout).splitlines() if "| test loss" in line]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert read_metrics(run / "metrics.jsonl")[: len(before)] == before


@pytest.mark.slow  # the losses of every format: tests/training/test_text_runs.py
def test_text_without_token_files_has_the_losses_of_token_files(work_dir: Path, tmp_path: Path) -> None:
    corpus, texts = tmp_path / "corpus.jsonl", sorted((ROOT / "examples" / "corpus").glob("*/*.txt"))
    corpus.write_text("".join(json.dumps({"text": text.read_text(encoding="utf-8")}) + "\n" for text in texts))
    losses = []
    for folder, data_path in ((tmp_path, corpus), (tmp_path / "files", work_dir / "texts")):
        folder.mkdir(exist_ok=True)
        result = run_script(folder, *EVALUATION_FLAGS, DATA_PATH=str(data_path), TRAIN_ITERS="2", CHECKPOINT_PATH="run")
        assert result.returncode == 0, result.stderr
        records = read_metrics(folder / "run" / "metrics.jsonl")
        losses.append([(r["kind"], r["loss"]) for r in records if "loss" in r])
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert (tmp_path / "encoded-text").exists()
    without_tokenizer = run_script(tmp_path, DATA_PATH=str(corpus), TOKENIZER="", CHECKPOINT_PATH="other")
    assert without_tokenizer.returncode == 2
    assert "needs a tokenizer" in without_tokenizer.stdout + without_tokenizer.stderr


@pytest.mark.slow  # dry runs of the scripts: tests/test_run_script.py
def test_dry_run_prints_plan_and_starts_no_job(work_dir: Path) -> None:
    result = run_script(work_dir, "--dry-run", GPUS_PER_NODE="8", pp_size="2", mp_size="2")
    assert result.returncode == 0, result.stderr
    assert "8 ranks = pipe 2 x data 2 x tensor 2" in result.stdout
    assert not (work_dir / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", EXAMPLE_VARIABLES)
def test_example_script_trains_saves_and_resumes(work_dir: Path, tmp_path: Path, family: str) -> None:
    variables = {"script": f"examples/{family}/run_{family}.sh", "CHECKPOINT_PATH": "run", **EXAMPLE_VARIABLES[family]}
    extra = ("--split", "800,100,100", "--eval-interval", "2")
    first = run_script(tmp_path, *extra, DATA_PATH=str(work_dir / "texts"), TRAIN_ITERS="2", **variables)
    assert first.returncode == 0, first.stderr
    assert f"4 ranks = pipe 2 x data {'2 x tensor 1' if family == 'moe' else '1 x tensor 2'}" in first.stdout
    resumed = run_script(tmp_path, *extra, "--resume", DATA_PATH=str(work_dir / "texts"), TRAIN_ITERS="3", **variables)
    assert resumed.returncode == 0, resumed.stderr
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(record["step"], record["kind"]) for record in records if record["kind"] != "train"] == [
        (2, "valid"), (2, "save"), (2, "test"), (3, "save"), (3, "test")
    ]  # fmt: skip
    assert json.loads((tmp_path / "run" / "config.json").read_text())["family"] == EXAMPLE_FAMILIES.get(family, family)
