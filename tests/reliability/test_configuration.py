"""Rows C: wrong configurations are told at once, with what to do, before any process group, with and without -O."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config import parse
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.dry_run import dry_run
from tests.helpers.runs import ROOT, launch_script, make_flags, train_ranks
from tests.reliability.cases import CASES, GPT2, T5, Case, error_message


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row} {case.line or case.json!r}")
def test_invalid_configuration_is_reported_with_value_and_fix(case: Case, tmp_path: Path) -> None:
    text = error_message(case, tmp_path)
    for fragment in case.fragments:
        assert fragment in text


def test_optimized_python_reports_same_errors() -> None:
    """Row C20."""
    command = [sys.executable, "-O", "-m", "tests.reliability.cases"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{len(CASES)} cases, __debug__ False, torch False\n"


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ("--model-parallel-size 3", "world size must be a multiple of tensor x pipe"),
        ("--gradient-cliping 1 --lr 0 --batch-size -2", "3 problems in the configuration"),
        ("--deepspeed_config missing.json", "--deepspeed_config must name a file that can be read"),
    ],
    ids=["C05", "C11 and C12", "C10"],
)
def test_one_of_four_ranks_reports_and_all_exit_with_2(
    extra: str, problem: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank hangs, for none of them has begun to look for the others."""
    import torch.distributed as dist

    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was formed"))
    log = tmp_path / "log"
    assert launch_script(4, make_flags(corpus, tmp_path / "run", extra), log) == [2] * 4
    text = log.read_text()
    assert text.count(problem) == 1, text
    assert "Traceback" not in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_vocabulary_is_padded_for_each_layout(tensor: int) -> None:
    """Row C04."""
    config = parse([*GPT2.split(), *f"--model-parallel-size {tensor} --vocab-size 50".split()], world_size=4, env={})
    assert config.model.padded_vocab_size(tensor) % tensor == 0
    assert config.model.vocab_size == 50


@pytest.mark.parametrize("num_layers", [0, 1])
def test_smallest_possible_run_trains(num_layers: int, corpus: Path, tmp_path: Path) -> None:
    """Row C18: no or one layer, one sample of one token, one micro-batch, one rank."""
    smallest_run = f"--num-layers {num_layers} --batch-size 1 --gas 1 --seq-length 1 --train-iters 2 --eval-iters 0"
    assert train_ranks(1, make_flags(corpus, tmp_path / "run", smallest_run))[0] == [0]
    losses = [record["loss"] for record in read_metrics(tmp_path / "run/metrics.jsonl") if record["kind"] == "train"]
    assert len(losses) == 2 and all(0 < loss < 20 for loss in losses)


@pytest.mark.parametrize(
    ("family", "line", "expected_text"),
    [
        ("gpt2", f"{GPT2} --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048", "175G para"),
        ("t5", f"{T5} --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --enc-seq-length 512", "decoder"),
    ],
)
def test_dry_run_of_1024_ranks_prints_every_stage(
    family: str, line: str, expected_text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    line += " --model-parallel-size 8 --pipe-parallel-size 16 --gas 64 --vocab-size 50257 --bf16 --dry-run"
    dry_run(parse(line.split(), world_size=1024, env={}, family=family), 1024)
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Plan (nothing was started)" in text
    assert "1024 ranks = pipe 16 x data 8 x tensor 8" in text
    assert all(f"stage {stage} " in text for stage in range(16)) and "stage 16" not in text
    assert text.count("iB on each rank") == 16 and "pipeline bubble" in text and expected_text in text


def test_invalid_layout_of_1024_ranks_is_reported_without_ranks() -> None:
    case = Case("C05", "--model-parallel-size 8 --pipe-parallel-size 48 --dry-run", (), 1024)
    text = error_message(case, Path())
    assert "1024" in text and "8 x 48 = 384" in text and "768 or 1152" in text
    assert (
        "--num-attention-heads must be a multiple" in text
        and "every pipeline stage must have at least one layer" in text
    )
