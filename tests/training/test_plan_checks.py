"""--dry-run rejects what a run rejects, and warns of what this machine lacks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.arguments import parse
from megatron.costs.memory import Memory
from megatron.errors import ConfigError
from megatron.training import plan_checks
from megatron.training.dry_run import dry_run

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "tests" / "golden" / "tokenizer.json"
NULL = "--tokenizer-type NullTokenizer --vocab-size 100"


def plan(line: str, program: str = "pretrain_gpt2.py", family: str = "gpt2", world_size: int = 1) -> None:
    config = parse([*line.split(), "--dry-run"], world_size=world_size, env={}, family=family)
    dry_run(config, world_size, program)


@pytest.mark.parametrize(
    ("line", "program", "message"),
    [
        (
            "--data-path mock --vocab-size 77",
            "pretrain_gpt2.py",
            "mock needs a vocabulary, got no tokenizer. Add --tokenizer-type NullTokenizer --vocab-size 77",
        ),
        ("--data-path mock", "pretrain_gpt2.py", "Add --tokenizer-type NullTokenizer --vocab-size N, or name"),
        ("--data-path a --vocab-size 100", "pretrain_gpt.py", "needs a tokenizer, got no --tokenizer-path"),
        ("--data-path mock", "pretrain_gpt2.py", "Add --tokenizer-type NullTokenizer --vocab-size N"),
        (
            "--data-path mock",
            "own.py",
            "--dry-run needs a vocabulary size, got no --tokenizer-path",
        ),
        ("--data-path mock --vocab-size 100", "pretrain_llama.py", "--tokenizer-type NullTokenizer"),
        ("--sample-prompts a --vocab-size 100", "", "--sample-prompts needs a tokenizer, got none"),
        (f"--data-path mock {NULL} --fim-rate 0.5", "pretrain_gpt2.py", "--fim-rate 0.5 needs a vocabulary with"),
        (f"--data-path a {NULL} --split 0,1,1", "pretrain_gpt2.py", "training needs documents, but --split 0,1,1"),
        (
            f"--data-path a {NULL} --split 9,1,0 --load a --eval-only",
            "pretrain_gpt2.py",
            "--eval-only needs a test split",
        ),
        (f"--sft {__file__} --tokenizer-path {TOKENIZER}", "pretrain_gpt2.py", "requires a chat template, got none"),
        (
            "--export-hf-interval 5 --vocab-size 100 --apply-layernorm-1p",
            "",
            "--export-hf-interval: this model has no Hugging Face format",
        ),
        (
            "--fp16 --min-scale 1e6 --vocab-size 100",
            "",
            "--min-scale must not exceed the initial loss scale, got 1e+06",
        ),
        ("--min-loss-scale 2 --initial-scale-power 0 --vocab-size 9", "", "was given as --min-loss-scale 2"),
        ("--fused-kernels apex --fp64 --vocab-size 100", "", "--fused-kernels apex needs fp32, bf16 or fp16"),
        ("--fused-kernels apex --device cpu --vocab-size 100", "", "apex needs a GPU, got --device cpu"),
    ],
)
def test_what_a_run_rejects_later_is_rejected_by_a_dry_run(line: str, program: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan(line, program)


@pytest.mark.parametrize(
    "line",
    [
        "--vocab-size 100",  # a plan without data
        f"--data-path mock {NULL}",
        f"--data-path mock {NULL} --reset-position-ids --eod-mask-loss --split 100,0,0",
        f"--data-path a {NULL} --split 100,0,0",  # as published scripts have it: nothing is evaluated
        "--fp16 --min-scale 65536 --vocab-size 100",
        "--fp16 --loss-scale 8 --vocab-size 100",
    ],
)
def test_what_a_run_accepts_is_accepted(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan(line)
    assert "Plan (nothing was started)" in capsys.readouterr().out


def test_a_missing_tokenizer_is_named_with_its_variable_in_the_run_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_VARIABLES", "--tokenizer-path=TOKENIZER --save=CHECKPOINT_PATH")
    for line in ("--data-path a --vocab-size 100", "--data-path a"):
        with pytest.raises(ConfigError, match=r"\(in the run script: --tokenizer-path is TOKENIZER\)$"):
            plan(line, "pretrain_gpt.py")


def test_a_program_of_the_user_may_read_data_without_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    plan("--data-path mock --vocab-size 100", "train_mine.py")
    assert "random tokens" in capsys.readouterr().out


def lacking(line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], world_size: int = 1) -> str:
    """Return the warnings of a dry run, which --check-paths turns into one error."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    plan(line, "mine.py", world_size=world_size)
    output = capfd.readouterr()
    assert "Plan (nothing was started)" in output.out
    warnings = re.findall(r"^warning: (.*) \(--check-paths makes this an error\)$", output.err, re.M)
    if warnings:
        with pytest.raises(ConfigError) as caught:
            plan(f"{line} --check-paths", "mine.py", world_size=world_size)
        assert all(warning in str(caught.value) for warning in warnings)
    else:
        plan(f"{line} --check-paths", "mine.py", world_size=world_size)
    return "\n".join(warnings)


def test_missing_files_and_folders_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a plan for several ranks has it
    small = "--vocab-size 100 --device cpu"
    found = lacking(f"{small} --data-path {tmp_path}/a --load {tmp_path}/b", monkeypatch, capfd, 2)
    assert f"{tmp_path}/a.idx and {tmp_path}/a.bin" in found and f"got {tmp_path}/b, which does not exist" in found
    assert f"{tmp_path}, which is empty" in lacking(f"{small} --load {tmp_path}", monkeypatch, capfd, 2)
    monkeypatch.chdir(tmp_path)
    assert "--resume needs a run with a checkpoint" in lacking(f"{small} --resume", monkeypatch, capfd, 2)
    assert not lacking(f"{small} --resume --load-if-exists", monkeypatch, capfd, 2)
    named = lacking(f"{small} --load Qwen/Qwen3-0.6B", monkeypatch, capfd, 2)
    assert "`hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B`" in named
    assert not lacking(f"{small} --load {tmp_path}/b --load-if-exists", monkeypatch, capfd, 2)
    for suffix in (".idx", ".bin"):
        (tmp_path / f"a{suffix}").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").touch()
    assert not lacking(f"{small} --data-path {tmp_path}/a --load {tmp_path}/run", monkeypatch, capfd, 2)


def test_more_memory_than_the_machine_has_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    line = "--vocab-size 100 --device cpu"
    assert not lacking(line, monkeypatch, capfd)
    monkeypatch.setattr(plan_checks, "host_bytes", lambda: 1 << 20)
    pattern = r"1 rank needs about [\d.]+ MiB of host memory, but this machine has 1\.00 MiB"
    assert re.search(pattern, lacking(line, monkeypatch, capfd))
    assert "2 ranks need about" in lacking(line, monkeypatch, capfd, 2)
    config = parse([*line.split(), "--device", "cuda"], world_size=4, env={})
    monkeypatch.setattr(plan_checks, "_num_gpus", lambda: 1)
    monkeypatch.setattr(plan_checks, "gpu_bytes", lambda: 3 << 20)
    memory = [Memory(weights=4 << 20, gradients=0, optimizer=0, activations=0, logits=0)]
    (problem,) = plan_checks._memory_problems(config, 4, memory)
    assert "a rank needs about 4.00 MiB, but a GPU has 3.00 MiB" in problem
    monkeypatch.setattr(plan_checks, "gpu_bytes", lambda: None)
    assert not list(plan_checks._memory_problems(config, 4, memory))


def test_an_absent_device_is_a_warning(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plan_checks, "_num_gpus", lambda: 0)
    assert "--device cuda needs a GPU" in lacking("--vocab-size 100 --device cuda", monkeypatch, capfd)
    assert not lacking("--vocab-size 100", monkeypatch, capfd)


def test_check_paths_ends_with_2_and_without_torch() -> None:
    flags = f"--data-path /nowhere/x {NULL} --dry-run --check-paths".split()
    command = [sys.executable, "-X", "importtime", "pretrain_gpt2.py", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "/nowhere/x.idx" in done.stderr
    assert not re.search(r"\| +(torch|deepspeed)$", done.stderr, re.M)
