"""The layout check detects faults of a layout, has a limit, and leaves no process and no change behind."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import parse
from megatron.mpu import mappings
from megatron.training.programs import bert, decoder, t5
from megatron.training.proof import check_process
from megatron.training.proof.check_process import CheckJob, CheckProcess
from megatron.training.proof.check_result import FAILED, NOT_CHECKED, OK, CheckResult

PROGRAMS = {"gpt2": decoder, "t5": t5, "bert": bert}
SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 1000 --data-path none --eval-iters 0"


def make_job(flags: str, world_size: int, family: str = "gpt2", **changes: Any) -> CheckJob:
    defaults = getattr(PROGRAMS[family], "DEFAULTS", None)
    argv = f"{SIZES} {flags}".split()
    accepts_model = family == "gpt2"
    config = parse(argv, world_size=world_size, env={}, family=family, accepts_model=accepts_model, defaults=defaults)
    program = PROGRAMS[family]
    return CheckJob(
        config, world_size, "cpu", changes.pop("model_provider", program.model_provider), program.forward_step,
        **{"limit_s": 60.0, "niceness": 0, **changes},
    )  # fmt: skip


def check(flags: str, world_size: int, family: str = "gpt2", **changes: Any) -> CheckResult:
    process = CheckProcess(make_job(flags, world_size, family, **changes))
    try:
        return process.wait()
    finally:
        process.close()


def num_children() -> int:
    """Return the number of child processes of this process, also of those that have not been reaped."""
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_correct_layout_is_ok_and_nothing_remains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = dict(os.environ), torch.get_rng_state(), random.getstate(), os.listdir("/proc/self/fd"), num_children()
    result = check("--model-parallel-size 2 --bf16", 2)
    after = dict(os.environ), torch.get_rng_state(), random.getstate(), os.listdir("/proc/self/fd"), num_children()
    assert result.state == OK, result.line()
    assert 0 < result.gradient < 1e-14 and result.worst_gradient and result.num_ranks == 2
    assert result.line().startswith("layout check: worst gradient") and ", ok (2 ranks, tensor 2, " in result.line()
    assert "not covered: bf16 rounding" in result.line()
    assert after[0] == before[0] and torch.equal(after[1], before[1]) and after[2:] == before[2:]
    assert list(tmp_path.iterdir()) == []


def test_missing_all_reduce_of_gradients_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings._Copy, "backward", staticmethod(lambda ctx, *grads: (grads[0], None)))
    result = check("--model-parallel-size 2", 2)
    assert result.state == FAILED
    assert f"gradient of {result.worst_gradient} off by" in result.reason and result.gradient > 0.1
    assert result.first_loss <= 1e-12  # only the backward is wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "flags", "world_size"),
    [
        ("gpt2", "--model llama --num-layers 4 --model-parallel-size 2 --pipe-parallel-size 2 --pipeline-chunks 2 "
         "--gas 4 --sequence-parallel --checkpoint-activations", 4),
        ("gpt2", "--zero-stage 3 --context-parallel-size 2", 4),
        ("gpt2", "--model llama --num-experts 4 --expert-model-parallel-size 2 --mtp-num-layers 1 --gas 4 "
         "--pipe-parallel-size 2 --pipeline-schedule dualpipev --num-layers 4", 4),
        ("gpt2", "--optimizer muon --zero-stage 1 --layout-independent-dropout --model-parallel-size 2", 4),
        ("gpt2", "--reset-attention-mask --reset-position-ids --model gemma3_text --window-size 9 "
         "--window-attn-skip-freq 2 --num-query-groups 2 --model-parallel-size 2", 2),
        ("gpt2", "--model qwen3_5_text --num-query-groups 2 --linear-attention-freq 2 --num-layers 4 "
         "--sequence-parallel --linear-num-key-heads 4 --linear-num-value-heads 8 --mtp-num-layers 1 "
         "--model-parallel-size 2 --context-parallel-size 2 --reset-attention-mask", 4),
        ("gpt2", "--hybrid-layer-pattern M-*EM-*E --num-layers 8 --num-experts 4 --expert-model-parallel-size 2 "
         "--pipe-parallel-size 2 --pipeline-schedule zb-v --gas 4 --zero-stage 1 --mamba-num-groups 2 "
         "--reset-attention-mask", 4),
        ("gpt2", "--experimental-attention-variant kimi_delta --num-layers 4 --linear-attention-freq 4 --zero-stage 3 "
         "--linear-num-key-heads 4 --linear-num-value-heads 4 --optimizer muon --layout-independent-dropout", 2),
        ("t5", "--model-parallel-size 2 --pipe-parallel-size 2 --gas 4 --reset-attention-mask", 4),
        ("bert", "--pipe-parallel-size 2 --gas 4", 4),
    ],
)  # fmt: skip
def test_layouts_of_all_families_are_ok(family: str, flags: str, world_size: int) -> None:
    result = check(flags, world_size, family)
    assert result.state == OK, result.line()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "replacement", "flags"),
    [
        ("_Reduce.forward", lambda ctx, x, *_: x.clone(), "--model-parallel-size 2"),
        ("_ReduceScatterRows.backward", lambda ctx, *grads: (grads[0].repeat(2, 1, 1), None),
         "--model-parallel-size 2 --sequence-parallel"),
    ],
)  # fmt: skip
def test_faults_of_collectives_fail(
    target: str, replacement: Callable[..., Any], flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = target.split(".")
    monkeypatch.setattr(getattr(mappings, owner), name, staticmethod(replacement))
    assert check(flags, 2).state == FAILED


def is_alive(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(grandchild for child in children for grandchild in descendants(child))]


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hang() -> torch.nn.Module:
    time.sleep(100)
    raise AssertionError


def test_limit_stops_the_check_and_all_of_its_processes() -> None:
    process = CheckProcess(make_job("--model-parallel-size 2", 2, model_provider=hang, limit_s=1.0))
    wait_until(lambda: len(descendants(process._pid)) == 3)
    pids = [process._pid, *descendants(process._pid)]
    result = process.wait()
    process.close()
    assert result.state == NOT_CHECKED and "stopped after 1 s" in result.line()
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_end_of_the_coordinator_ends_its_ranks(signum: signal.Signals) -> None:
    process = CheckProcess(make_job("--model-parallel-size 2", 2, model_provider=hang))
    wait_until(lambda: len(descendants(process._pid)) == 3)
    pids = descendants(process._pid)
    os.kill(process._pid, signum)
    result = process.wait()
    assert result.state == NOT_CHECKED and "was ended" in result.reason
    wait_until(lambda: not any(map(is_alive, pids)))


def test_end_of_the_run_ends_the_check() -> None:
    """The run is a fork of this process that is killed."""
    read_end, write_end = os.pipe()
    run = os.fork()
    if run == 0:
        try:
            process = CheckProcess(make_job("--model-parallel-size 2", 2, model_provider=hang))
            wait_until(lambda: len(descendants(process._pid)) == 3)
            os.write(write_end, " ".join(map(str, [process._pid, *descendants(process._pid)])).encode())
            time.sleep(100)
        finally:
            os._exit(1)
    pids = [int(word) for word in os.read(read_end, 1000).split()]
    assert len(pids) == 4
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    os.close(read_end)
    os.close(write_end)
    wait_until(lambda: not any(map(is_alive, pids)))


def fail() -> torch.nn.Module:
    raise KeyError("no such size")


def test_model_that_cannot_be_built_is_not_checked() -> None:
    result = check("--model-parallel-size 2", 2, model_provider=fail)
    assert result.state == NOT_CHECKED
    assert "the small model in one process failed: KeyError: 'no such size'" in result.line()


def die() -> torch.nn.Module:
    if os.environ["WORLD_SIZE"] == "2" and os.environ["RANK"] == "1":
        os._exit(3)
    return decoder.model_provider()


def test_rank_that_dies_is_named_and_nothing_hangs() -> None:
    result = check("--model-parallel-size 2", 2, model_provider=die, limit_s=20.0)
    assert (
        result.state == NOT_CHECKED and "rank 1 of the small layout failed: it ended without a result" in result.reason
    )


def test_one_way_of_starting_processes_has_no_module_state() -> None:
    """Two checks at the same time do not share a port or a file."""
    first, second = (CheckProcess(make_job("--pipe-parallel-size 2 --gas 2", 2)) for _ in range(2))
    assert (first.wait().state, second.wait().state) == (OK, OK)
    assert check_process.CheckProcess.poll(first) is first.result
