"""``bash run_t5.sh`` as a user types it, with tiny sizes: launcher, training, run folder, evaluation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import ROOT, TOKENIZER, write_corpus

TINY = {"NLAYERS": "1", "NHIDDEN": "32", "NHEADS": "4", "ENC_SEQLEN": "32", "BATCHSIZE": "2", "GAS": "2"}
SPLIT = ("--split", "800,100,100")


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job")
    write_corpus(path)
    return path


def run_script(work_dir: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script from another folder, with the Python of the tests."""
    env = (
        os.environ
        | TINY
        | {"PYTHON": sys.executable, "TOKENIZER": str(TOKENIZER), "DATA_PATH": str(work_dir / "texts")}
    )
    env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **variables}
    command = ["bash", str(ROOT / "run_t5.sh"), *flags]
    return subprocess.run(command, cwd=work_dir, env=env, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.slow  # the short run has run_gpt2.sh (test_main_job.py), run_t5.sh up to its program (test_run_script.py)
def test_t5_job_trains_saves_and_resumes_in_other_layout(work_dir: Path) -> None:
    first = run_script(work_dir, *SPLIT, "--eval-interval", "0", TRAIN_ITERS="2")
    assert first.returncode == 0, first.stderr
    for word in ("4 ranks = pipe 2 x data 1 x tensor 2", "encoder 0", "decoder 0", "target tokens", "test loss", "MFU"):
        assert word in first.stdout
    assert "DeepSpeed" not in first.stdout + first.stderr
    (run,) = (work_dir / "runs").iterdir()
    assert run.name.startswith("t5-")
    settings = json.loads((run / "config.json").read_text())
    assert (settings["t5"]["enc_seq_length"], settings["t5"]["dec_seq_length"]) == (32, 8)
    assert {path.name for path in run.iterdir()} >= {"command.txt", "versions.json", "metrics.jsonl", "loss.png"}
    assert (run / "checkpoints/step-00000002/manifest.json").exists()
    one_gpu = {"GPUS_PER_NODE": "1", "pp_size": "1", "mp_size": "1", "CHECKPOINT_PATH": str(run)}
    eval_job = run_script(work_dir, *SPLIT, "--eval-only", "--load", str(run), **one_gpu)
    assert eval_job.returncode == 0, eval_job.stderr
    lines = [line for line in (first.stdout + eval_job.stdout).splitlines() if "| test loss" in line]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    resumed = run_script(
        work_dir, *SPLIT, "--eval-iters", "0", "--log-interval", "1", "--load", str(run), TRAIN_ITERS="3", **one_gpu
    )
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"][-1] == 3
