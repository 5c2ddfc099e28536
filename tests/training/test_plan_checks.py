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
NULL_TOKENIZER_FLAGS = "--tokenizer-type NullTokenizer --vocab-size 100"


def run_dry_run(
    command_line: str, program: str = "pretrain_gpt2.py", family: str = "gpt2", world_size: int = 1
) -> None:
    config = parse([*command_line.split(), "--dry-run"], world_size=world_size, env={}, family=family)
    dry_run(config, world_size, program)


@pytest.mark.parametrize(
    ("command_line", "program", "message"),
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
        (
            f"--data-path mock {NULL_TOKENIZER_FLAGS} --fim-rate 0.5",
            "pretrain_gpt2.py",
            "--fim-rate 0.5 needs a vocabulary with",
        ),
        (
            f"--data-path a {NULL_TOKENIZER_FLAGS} --split 0,1,1",
            "pretrain_gpt2.py",
            "training needs documents, but --split 0,1,1",
        ),
        (
            f"--data-path a {NULL_TOKENIZER_FLAGS} --split 9,1,0 --load a --eval-only",
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
def test_dry_run_rejects_arguments_that_run_rejects(command_line: str, program: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_dry_run(command_line, program)


@pytest.mark.parametrize(
    "command_line",
    [
        "--vocab-size 100",  # a plan without data
        f"--data-path mock {NULL_TOKENIZER_FLAGS}",
        f"--data-path mock {NULL_TOKENIZER_FLAGS} --reset-position-ids --eod-mask-loss --split 100,0,0",
        f"--data-path a {NULL_TOKENIZER_FLAGS} --split 100,0,0",  # as published scripts have it: nothing is evaluated
        "--fp16 --min-scale 65536 --vocab-size 100",
        "--fp16 --loss-scale 8 --vocab-size 100",
    ],
)
def test_dry_run_accepts_arguments_that_run_accepts(command_line: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_dry_run(command_line)
    assert "Plan (nothing was started)" in capsys.readouterr().out


def test_missing_tokenizer_error_names_run_script_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_VARIABLES", "--tokenizer-path=TOKENIZER --save=CHECKPOINT_PATH")
    for command_line in ("--data-path a --vocab-size 100", "--data-path a"):
        with pytest.raises(ConfigError, match=r"\(in the run script: --tokenizer-path is TOKENIZER\)$"):
            run_dry_run(command_line, "pretrain_gpt.py")


def test_user_program_may_read_data_without_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    run_dry_run("--data-path mock --vocab-size 100", "train_mine.py")
    assert "random tokens" in capsys.readouterr().out


def dry_run_warnings(
    command_line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], world_size: int = 1
) -> str:
    """Return the warnings of a dry run, which --check-paths turns into one error."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    run_dry_run(command_line, "mine.py", world_size=world_size)
    output = capfd.readouterr()
    assert "Plan (nothing was started)" in output.out
    warnings = re.findall(r"^warning: (.*) \(--check-paths makes this an error\)$", output.err, re.M)
    if warnings:
        with pytest.raises(ConfigError) as error_info:
            run_dry_run(f"{command_line} --check-paths", "mine.py", world_size=world_size)
        assert all(warning in str(error_info.value) for warning in warnings)
    else:
        run_dry_run(f"{command_line} --check-paths", "mine.py", world_size=world_size)
    return "\n".join(warnings)


def test_missing_files_and_folders_warn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a plan for several ranks has it
    base_flags = "--vocab-size 100 --device cpu"
    warnings = dry_run_warnings(f"{base_flags} --data-path {tmp_path}/a --load {tmp_path}/b", monkeypatch, capfd, 2)
    assert (
        f"{tmp_path}/a.idx and {tmp_path}/a.bin" in warnings and f"got {tmp_path}/b, which does not exist" in warnings
    )
    assert f"{tmp_path}, which is empty" in dry_run_warnings(f"{base_flags} --load {tmp_path}", monkeypatch, capfd, 2)
    monkeypatch.chdir(tmp_path)
    assert "--resume needs a run with a checkpoint" in dry_run_warnings(f"{base_flags} --resume", monkeypatch, capfd, 2)
    assert not dry_run_warnings(f"{base_flags} --resume --load-if-exists", monkeypatch, capfd, 2)
    download_warning = dry_run_warnings(f"{base_flags} --load Qwen/Qwen3-0.6B", monkeypatch, capfd, 2)
    assert "`hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B`" in download_warning
    assert not dry_run_warnings(f"{base_flags} --load {tmp_path}/b --load-if-exists", monkeypatch, capfd, 2)
    for suffix in (".idx", ".bin"):
        (tmp_path / f"a{suffix}").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").touch()
    assert not dry_run_warnings(f"{base_flags} --data-path {tmp_path}/a --load {tmp_path}/run", monkeypatch, capfd, 2)


def test_insufficient_memory_warns(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    command_line = "--vocab-size 100 --device cpu"
    assert not dry_run_warnings(command_line, monkeypatch, capfd)
    monkeypatch.setattr(plan_checks, "host_bytes", lambda: 1 << 20)
    pattern = r"1 rank needs about [\d.]+ MiB of host memory, but this machine has 1\.00 MiB"
    assert re.search(pattern, dry_run_warnings(command_line, monkeypatch, capfd))
    assert "2 ranks need about" in dry_run_warnings(command_line, monkeypatch, capfd, 2)
    config = parse([*command_line.split(), "--device", "cuda"], world_size=4, env={})
    monkeypatch.setattr(plan_checks, "_num_gpus", lambda: 1)
    monkeypatch.setattr(plan_checks, "gpu_bytes", lambda: 3 << 20)
    memory = [Memory(weights=4 << 20, gradients=0, optimizer=0, activations=0, logits=0)]
    (problem,) = plan_checks._memory_problems(config, 4, memory)
    assert "a rank needs about 4.00 MiB, but a GPU has 3.00 MiB" in problem
    monkeypatch.setattr(plan_checks, "gpu_bytes", lambda: None)
    assert not list(plan_checks._memory_problems(config, 4, memory))


def test_absent_device_warns(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plan_checks, "_num_gpus", lambda: 0)
    assert "--device cuda needs a GPU" in dry_run_warnings("--vocab-size 100 --device cuda", monkeypatch, capfd)
    assert not dry_run_warnings("--vocab-size 100", monkeypatch, capfd)


def test_check_paths_exits_with_code_2_without_importing_torch() -> None:
    flags = f"--data-path /nowhere/x {NULL_TOKENIZER_FLAGS} --dry-run --check-paths".split()
    command = [sys.executable, "-X", "importtime", "pretrain_gpt2.py", *flags]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "/nowhere/x.idx" in result.stderr
    assert not re.search(r"\| +(torch|deepspeed)$", result.stderr, re.M)
