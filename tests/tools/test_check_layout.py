"""``tools/check_layout.py`` says equal where layouts are, and not equal where a gradient is off."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder
from tests.helpers.chats import CHATML, CONVERSATIONS, make_messages, write_conversations, write_tokenizer
from tests.helpers.layouts import trace_one_process
from tools import check_layout

SCRIPT = Path(check_layout.__file__)
SMALL_FLAGS = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --steps 2".split()


@pytest.mark.slow
def test_interleaved_pipeline_equals_one_process(capfd: pytest.CaptureFixture[str]) -> None:
    layout = "--pipe-parallel-size 2 --pipeline-chunks 2".split()
    command = [sys.executable, str(SCRIPT), *SMALL_FLAGS, *layout, "--num-layers", "4"]
    assert subprocess.run(command, timeout=100, check=False).returncode == 0
    output = capfd.readouterr().out
    assert "2 processes: tensor 1 x pipe 2 x data 1 --pipeline-chunks 2 ..." in output
    assert "verdict: equal" in output
    assert "allowed" in output


@pytest.mark.slow
def test_t5_with_split_rank_and_dropout_equals_one_process(capfd: pytest.CaptureFixture[str]) -> None:
    model_flags = "--hidden-size 16 --num-attention-heads 2 --enc-seq-length 16 --enc-layers 1 --dec-layers 2 --steps 2"
    layout = "--pipe-parallel-size 3 --pipeline-split-rank 1 --reset-attention-mask --layout-independent-dropout"
    command = [sys.executable, str(SCRIPT), "--model", "t5", *model_flags.split(), *layout.split()]
    result = subprocess.run(command, timeout=100, check=False)
    output = capfd.readouterr().out
    assert result.returncode == 0, output
    assert "3 processes: tensor 1 x pipe 3 x data 1 --pipeline-split-rank 1 ..." in output
    assert "verdict: equal" in output


@pytest.mark.slow
def test_expert_parallel_layout_equals_one_process(capfd: pytest.CaptureFixture[str]) -> None:
    layout = "--model llama --data-parallel-size 2 --num-experts 4 --expert-model-parallel-size 2".split()
    assert (
        subprocess.run([sys.executable, str(SCRIPT), *SMALL_FLAGS, *layout], timeout=100, check=False).returncode == 0
    )
    output = capfd.readouterr().out
    assert "2 processes: tensor 1 x pipe 1 x data 2 --expert-model-parallel-size 2 ..." in output
    assert "verdict: equal" in output


@pytest.mark.slow
def test_hybrid_pattern_in_a_layout_equals_one_process(capfd: pytest.CaptureFixture[str]) -> None:
    sizes = (
        "--hidden-size 16 --num-attention-heads 2 --seq-length 16 --steps 2 --linear-num-key-heads 2 "
        "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 6 --mamba-num-heads 4 "
        "--mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 4"
    )
    layout = (
        "--model llama --hybrid-layer-pattern M-|G*|E|-M --num-experts 4 --pipe-parallel-size 2 --reset-attention-mask"
    )
    command = [sys.executable, str(SCRIPT), *sizes.split(), *layout.split()]
    assert subprocess.run(command, timeout=100, check=False).returncode == 0
    output = capfd.readouterr().out
    assert "2 processes: tensor 1 x pipe 2 x data 1" in output and "verdict: equal" in output


@pytest.mark.slow
def test_sinks_and_biased_experts_in_a_layout_equal_one_process(capfd: pytest.CaptureFixture[str]) -> None:
    features = (
        "--model llama --softmax-type learnable --attention-output-gate --no-rope-freq 2 --hidden-bias --quick-geglu "
        "--activation-func-clamp-value 0.5 --glu-linear-offset 1 --qk-norm head --qk-norm-order after --num-experts 4"
    )
    layout = "--model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --expert-model-parallel-size 2"
    command = [sys.executable, str(SCRIPT), *SMALL_FLAGS, *features.split(), *layout.split()]
    result = subprocess.run(command, timeout=100, check=False)
    output = capfd.readouterr().out
    assert result.returncode == 0 and "verdict: equal" in output, output


def test_reference_flags_omit_expert_parallel_sizes() -> None:
    layout = "--num-experts 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1".split()
    _, flags = check_layout.make_tool_parser().parse_known_args(layout)
    assert flags == ["--num-experts", "4"]


def test_flags_of_other_model_exit_with_code_2() -> None:
    for model, flag in (("t5", "--seq-length"), ("gpt2", "--enc-seq-length")):
        command = [sys.executable, str(SCRIPT), "--model", model, flag, "32"]
        result = subprocess.run(command, capture_output=True, check=False)
        assert result.returncode == 2
        assert flag.encode() in result.stderr


def test_invalid_layout_exits_with_code_2() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--model-parallel-size", "3"], capture_output=True, check=False
    )
    assert result.returncode == 2
    assert b"--num-attention-heads" in result.stderr


def test_report_detects_wrong_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    reference = trace_one_process(2, 2)
    modified = copy.deepcopy(reference)
    shard, gradient = modified.gradients["final_norm.weight"]
    modified.gradients["final_norm.weight"] = (shard, gradient * (1 + 1e-9))
    assert check_layout.report(reference, [modified], "fp64") == 1
    assert "NOT EQUAL" in capsys.readouterr().out


def get_error(flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error for flags of the user, next to those that the tool adds itself."""
    user_flags = flags.split()
    with pytest.raises(SystemExit) as caught:
        check_layout.check_flags(
            [*user_flags, "--fp64", "--device", "cpu"], check_layout.Layout(1, 1, 1, 1), "gpt2", user_flags
        )
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_errors_explain_flags_added_by_tool(capsys: pytest.CaptureFixture[str]) -> None:
    message = get_error("--split 9,1,0", capsys)
    assert "got random tokens (no --data-path, --train-data-path or --sft)" in message and "none" not in message
    assert "this tool computes in fp64 by default; use --fp32" in get_error("--bf16", capsys)


def test_data_flags_replace_random_tokens(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data-path: a")
    for flags in ("--data-path a", "--train-data-path a", "--sft a", "--mock-data", f"--config {path}"):
        assert check_layout.add_data_flags(flags.split(), "gpt2") == [*flags.split(), "--eval-iters", "0"]
    assert check_layout.add_data_flags([], "gpt2") == ["--eval-iters", "0", "--data-path", "none"]


@pytest.mark.slow
def test_token_files_and_conversations_match_with_two_replicas(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with IndexedDatasetBuilder(tmp_path / "tokens", vocab_size=100) as builder:
        builder.add(np.arange(4000) % 90, np.full(40, 100))
    write_tokenizer(tmp_path, CHATML)
    write_conversations(
        tmp_path / "c.jsonl", [*CONVERSATIONS, *(make_messages(f"question {n}", f"answer {n}") for n in range(40))]
    )
    null, layout = "--tokenizer-type NullTokenizer --vocab-size 100", "--data-parallel-size 2"
    for data in (
        f"--data-path {tmp_path}/tokens --split 9,1,0 {null}",
        f"--train-data-path {tmp_path}/tokens {null}",
        f"--sft {tmp_path}/c.jsonl --tokenizer-path {tmp_path} --seq-length 64 --max-position-embeddings 64",
    ):
        command = [sys.executable, str(SCRIPT), *SMALL_FLAGS, *layout.split(), *data.split()]
        result = subprocess.run(command, timeout=110, check=False)
        output = capfd.readouterr()
        assert result.returncode == 0 and "verdict: equal" in output.out, output.err
