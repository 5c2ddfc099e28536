"""``tools/check_layout.py`` says equal where layouts are, and not equal where a gradient is off."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder
from tests.helpers.chats import CHATML, SOME, turns, write_conversations, write_tokenizer
from tests.helpers.layouts import serial
from tools import check_layout

TOOL = Path(check_layout.__file__)
SMALL = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --steps 2".split()


@pytest.mark.slow
def test_a_pipeline_of_two_stages_with_two_chunks_each_is_equal(capfd: pytest.CaptureFixture[str]) -> None:
    layout = "--pipe-parallel-size 2 --pipeline-chunks 2".split()
    command = [sys.executable, str(TOOL), *SMALL, *layout, "--num-layers", "4"]
    assert subprocess.run(command, timeout=100, check=False).returncode == 0
    output = capfd.readouterr().out
    assert "2 processes: tensor 1 x pipe 2 x data 1 --pipeline-chunks 2 ..." in output
    assert "verdict: equal" in output
    assert "allowed" in output


@pytest.mark.slow
def test_t5_in_three_stages_with_the_seam_by_hand_is_equal_with_dropout(capfd: pytest.CaptureFixture[str]) -> None:
    sizes = "--hidden-size 16 --num-attention-heads 2 --enc-seq-length 16 --enc-layers 1 --dec-layers 2 --steps 2"
    layout = "--pipe-parallel-size 3 --pipeline-split-rank 1 --reset-attention-mask --layout-independent-dropout"
    command = [sys.executable, str(TOOL), "--model", "t5", *sizes.split(), *layout.split()]
    done = subprocess.run(command, timeout=100, check=False)
    output = capfd.readouterr().out
    assert done.returncode == 0, output
    assert "3 processes: tensor 1 x pipe 3 x data 1 --pipeline-split-rank 1 ..." in output
    assert "verdict: equal" in output


@pytest.mark.slow
def test_experts_that_two_ranks_share_out_are_equal(capfd: pytest.CaptureFixture[str]) -> None:
    layout = "--model llama --data-parallel-size 2 --num-experts 4 --expert-model-parallel-size 2".split()
    assert subprocess.run([sys.executable, str(TOOL), *SMALL, *layout], timeout=100, check=False).returncode == 0
    output = capfd.readouterr().out
    assert "2 processes: tensor 1 x pipe 1 x data 2 --expert-model-parallel-size 2 ..." in output
    assert "verdict: equal" in output


def test_the_one_process_is_told_nothing_of_how_experts_are_shared_out() -> None:
    layout = "--num-experts 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1".split()
    _, flags = check_layout.own_parser().parse_known_args(layout)
    assert flags == ["--num-experts", "4"]


def test_flags_of_the_other_model_are_refused_with_2() -> None:
    for model, flag in (("t5", "--seq-length"), ("gpt2", "--enc-seq-length")):
        command = [sys.executable, str(TOOL), "--model", model, flag, "32"]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode == 2
        assert flag.encode() in done.stderr


def test_a_layout_that_cannot_be_is_refused_with_2() -> None:
    done = subprocess.run([sys.executable, str(TOOL), "--model-parallel-size", "3"], capture_output=True, check=False)
    assert done.returncode == 2
    assert b"--num-attention-heads" in done.stderr


def test_a_wrong_gradient_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    one = serial(2, 2)
    other = copy.deepcopy(one)
    shard, gradient = other.gradients["final_norm.weight"]
    other.gradients["final_norm.weight"] = (shard, gradient * (1 + 1e-9))
    assert check_layout.report(one, [other], "fp64") == 1
    assert "NOT EQUAL" in capsys.readouterr().out


def explained(flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error for flags of the user, next to those that the tool adds itself."""
    given = flags.split()
    with pytest.raises(SystemExit) as caught:
        check_layout.check_flags([*given, "--fp64", "--device", "cpu"], check_layout.Layout(1, 1, 1, 1), "gpt2", given)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_messages_explain_what_the_user_did_not_give(capsys: pytest.CaptureFixture[str]) -> None:
    message = explained("--split 9,1,0", capsys)
    assert "got random tokens (no --data-path, --train-data-path or --sft)" in message and "none" not in message
    assert "this tool computes in fp64 by default; use --fp32" in explained("--bf16", capsys)


def test_data_of_each_kind_replaces_the_random_tokens(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data-path: a")
    for flags in ("--data-path a", "--train-data-path a", "--sft a", "--mock-data", f"--config {path}"):
        assert check_layout.with_data(flags.split(), "gpt2") == [*flags.split(), "--eval-iters", "0"]
    assert check_layout.with_data([], "gpt2") == ["--eval-iters", "0", "--data-path", "none"]


@pytest.mark.slow
def test_token_files_and_conversations_are_equal_in_two_replicas(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with IndexedDatasetBuilder(tmp_path / "tokens", vocab_size=100) as builder:
        builder.add(np.arange(4000) % 90, np.full(40, 100))
    write_tokenizer(tmp_path, CHATML)
    write_conversations(tmp_path / "c.jsonl", [*SOME, *(turns(f"question {n}", f"answer {n}") for n in range(40))])
    null, layout = "--tokenizer-type NullTokenizer --vocab-size 100", "--data-parallel-size 2"
    for data in (
        f"--data-path {tmp_path}/tokens --split 9,1,0 {null}",
        f"--train-data-path {tmp_path}/tokens {null}",
        f"--sft {tmp_path}/c.jsonl --tokenizer-path {tmp_path} --seq-length 64 --max-position-embeddings 64",
    ):
        command = [sys.executable, str(TOOL), *SMALL, *layout.split(), *data.split()]
        done = subprocess.run(command, timeout=110, check=False)
        output = capfd.readouterr()
        assert done.returncode == 0 and "verdict: equal" in output.out, output.err
