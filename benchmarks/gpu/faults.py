"""Faults on a device: hosts that wait, memory that runs out, ranks that die or share a GPU, NaN.

| fault | expected outcome |
|---|---|
| the host waits for the device | one wait per step, for losses and norm; none within a micro-batch |
| an allocation fails while the allocator caches memory | the cache is freed and the step has the same losses |
| a layer of a pipeline synchronizes the whole device | the step ends (no deadlock) with the same losses |
| a batch that does not fit in memory | code 1, one line: bytes, step, micro-batch, and which sizes to reduce |
| two ranks on one GPU under NCCL | code 2 on all, naming both ranks and the device |
| LOCAL_RANK beyond the devices | code 2, naming both numbers |
| a rank is killed | code 4 within seconds |
| a loss that is not finite | code 5, or with --stability-guard skip a skipped step |
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import ROOT, Case, CompletedCommand, Machine, Part, Skip, run_python
from benchmarks.gpu.train_run import (
    STEPS,
    Run,
    flags,
    judge_bits,
    last_step,
    limit_s,
    log_path,
    read_run,
    run_script,
    start_in_background,
    train,
)

CaseResult = tuple[str, dict[str, Any]]

WORKERS = str(ROOT / "benchmarks" / "gpu" / "workers.py")
ALLOWED_WAIT = "tds/loss_reduction.py:read"
"""The only function in which the host may wait for the device, once per step."""
STEP_SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --batch-size 2 "
STEP_LENGTHS = {"gpt2": "--seq-length 64", "t5": "--enc-seq-length 64 --vocab-extra-ids 8"}
PRESSURE_SIZES = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --batch-size 8 --gas 2"
MAX_REJECT_S = 90.0
"""Seconds within which a job that cannot start must end, including its imports."""
MAX_DEATH_S = 15.0
"""Seconds within which a job must end after a rank has died."""
WIDE, DEEP, LONG = 1024, 8, 1024
"""Hidden size, layers and tokens per sample of the model that cannot fit."""
NAN_STEP = 5
"""The step whose loss is not finite."""


def worker(machine: Machine, folder: Path, program: str, family: str, extra: str, size_flags: str) -> Any:
    """Run the program ``program`` of ``workers.py`` on the device and return its results."""
    file = folder / f"{program}-{len(os.listdir(folder))}.json"
    words = [WORKERS, program, str(file), family, *size_flags.split(), *extra.split()]
    run_python(machine, *words, "--device", machine.device_type).check()
    return json.loads(file.read_text())


def host_reads(machine: Machine, folder: Path, *, family: str, extra: str) -> CaseResult:
    """Check in steps 2 and 3, with four micro-batches each, that the host waits only once per step."""
    result = worker(machine, folder, "reads", family, f"{extra} --gas 4", STEP_SIZES + STEP_LENGTHS[family])
    return judge_reads(result), {"places": result["found"]}


def judge_reads(result: Mapping[str, Any]) -> str:
    """Check that the host waits once per step, and therefore not in each micro-batch.

    Args:
        result: results of ``workers.py``.

    Raises:
        AssertionError: the host waits elsewhere or not exactly once per step, or waits are not detected at all.
    """
    assert result["is_noticed"], "a deliberate wait was not detected, so the detection does not work"
    counts = {location: count / result["steps"] for location, count in result["found"].items()}
    unexpected = {location: count for location, count in counts.items() if not location.endswith(f" in {ALLOWED_WAIT}")}
    assert not unexpected, f"unexpected waits of the host per step: {_format_counts(unexpected)}"
    assert sum(counts.values()) == 1, f"the host waits {sum(counts.values()):g} times per step, not once"
    return f"one wait per step, in {ALLOWED_WAIT}, none in its 4 micro-batches"


def _format_counts(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{location} ({count:g})" for location, count in sorted(counts.items()))


def memory_retry(machine: Machine, folder: Path) -> CaseResult:
    """Check that a step whose allocation fails at first continues with the same losses."""
    require_gpu(machine, "torch's allocator caches freed memory only on a GPU")
    extra = "--bf16 --deterministic"
    eased, pressed = (worker(machine, folder, mode, "gpt2", extra, PRESSURE_SIZES) for mode in ("ease", "pressure"))
    return judge_retry(eased, pressed), {name: pressed[name] for name in ("retries", "peak", "limit")}


def judge_retry(eased: Mapping[str, Any], pressed: Mapping[str, Any]) -> str:
    """Check that the allocator freed cached memory and retried; return the number of retries as text.

    Raises:
        AssertionError: there was no retry, or the losses differ from those of a run with sufficient memory.
    """
    assert pressed["retries"] > 0, f"no allocation was retried: peak {pressed['peak']}, limit {pressed['limit']}"
    assert not eased["retries"], "the run with sufficient memory retried allocations"
    assert pressed["losses"] == eased["losses"], f"losses {pressed['losses']}, with enough memory {eased['losses']}"
    return f"{pressed['retries']} allocations retried, losses of {len(eased['losses'])} steps bitwise identical"


def require_gpu(machine: Machine, reason: str) -> None:
    """Skip the case on a CPU, with the reason ``reason``."""
    if machine.device_type == "cpu":
        raise Skip(reason)


def two_rank_backend(machine: Machine) -> str:
    """Return the backend for two ranks on this machine: NCCL if each has its own GPU."""
    return "nccl" if machine.device_type == "cuda" and machine.num_devices > 1 else "gloo"


def pause_in_pipeline(machine: Machine, folder: Path, *, schedule: str) -> CaseResult:
    """Check that a pipeline does not hang if its layers synchronize the device.

    CUDA_LAUNCH_BLOCKING changes no loss over the host; over NCCL the pipeline must reject it.
    """
    backend = two_rank_backend(machine)
    if backend == "gloo" and machine.device_type == "cuda":
        backend = "host_copies"  # gloo through the host, as with --distributed-backend gloo

    def start(program: str, env: Mapping[str, str]) -> CompletedCommand:
        words = [
            "--standalone",
            "--nproc-per-node",
            "2",
            WORKERS,
            program,
            str(file_of(program, env)),
            backend,
            schedule,
        ]
        return run_python(machine, "-m", "torch.distributed.run", *words, env=env)

    def file_of(program: str, env: Mapping[str, str]) -> Path:
        return folder / f"{program}-{len(env)}.json"

    def losses(program: str, env: Mapping[str, str]) -> list[str]:
        start(program, env).check()
        return json.loads(file_of(program, env).read_text())

    losses_by_run = {"plain": losses("plain", {}), "paused": losses("pause", {})}
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"}
    if backend == "host_copies":
        losses_by_run["blocking"] = losses("plain", blocking)
    elif backend == "nccl":
        rejected = start("plain", blocking)
        assert rejected.code and "CUDA_LAUNCH_BLOCKING must not be set" in rejected.text, rejected.text[-2000:]
    return f"{judge_equal(losses_by_run)}; over {backend}", {}


def judge_equal(losses_by_run: Mapping[str, Sequence[str]]) -> str:
    """Check that all runs have the same losses, as hexadecimal numbers.

    Raises:
        AssertionError: a run differs from the first one, or the losses do not change from step to step.
    """
    (first, expected), *other_runs = losses_by_run.items()
    assert len(set(expected)) == len(expected) > 0, (
        f"the losses of {first} must change from step to step, got {expected}"
    )
    for name, losses in other_runs:
        assert losses == expected, f"{name}: losses {losses}, {first}: {expected}"
    return f"{', '.join(losses_by_run)}: losses of {len(expected)} steps bitwise identical"


def launch_blocking(machine: Machine, folder: Path) -> CaseResult:
    """Check that a run with CUDA_LAUNCH_BLOCKING=1 has the same losses as one without."""
    require_gpu(machine, "a CPU launches no kernels")
    extra = "--bf16 --deterministic"
    plain = train(machine, "gpt2", folder / "plain", extra)
    blocked = train(machine, "gpt2", folder / "blocked", extra, env={"CUDA_LAUNCH_BLOCKING": "1"})
    return judge_bits(blocked, plain), {"seconds": [plain.seconds, blocked.seconds]}


def too_large(machine: Machine, folder: Path) -> CaseResult:
    """Check the exit code and message of a run whose batch does not fit in memory."""
    require_gpu(machine, "a batch that exceeds the host's memory would crash the host")
    per_token = 34 * WIDE * DEEP  # bytes that the backward of each layer needs, in 16 bits
    batch = math.ceil(1.5 * machine.memory_bytes / per_token / LONG)
    size_flags = f"--num-layers {DEEP} --hidden-size {WIDE} --num-attention-heads 16 --seq-length {LONG}"
    process = run_script(
        machine, "gpt2", folder / "run", f"--bf16 {size_flags} --batch-size {batch} --gas 1 --train-iters 2 --warmup 0"
    )
    return judge_out_of_memory(process), {"batch_size": batch, "seconds": process.seconds}


def judge_out_of_memory(completed: CompletedCommand) -> str:
    """Check the exit code and message of a run that was out of memory.

    Raises:
        AssertionError: the exit code is not 1, or the bytes, the step, the micro-batch or the advice is missing.
    """
    completed.check(1)
    line = find_line(completed, "out of memory")
    assert re.search(r"could not allocate [\d.]+ ?\w+", line), f"the message does not contain the bytes: {line}"
    assert re.search(r"step 1, (forward|backward) of micro-batch \d", line), (
        f"the message does not contain step and micro-batch: {line}"
    )
    assert "Lower --batch-size" in line, f"the message does not contain the fix: {line}"
    return f"code 1: {line[:200]}"


def find_line(completed: CompletedCommand, text: str) -> str:
    """Return the first line of the output that contains ``text``.

    Raises:
        AssertionError: no line contains it.
    """
    lines = [line for line in completed.text.splitlines() if text in line]
    assert lines, f'the output does not contain "{text}": {completed.text[-900:]}'
    return lines[0]


def launch_ranks(machine: Machine, num_ranks: int, words: Sequence[str], *, log: Path | None = None) -> Any:
    """Run ``words`` in ``num_ranks`` ranks under our launcher.

    Returns:
        ``CompletedCommand`` after the end of the job; with ``log``, ``RunningScript`` while the job runs in
        the background.
    """
    all_words = ["-m", "megatron.launch", "--nproc-per-node", str(num_ranks), *words]
    if log is None:
        return run_python(machine, *all_words)
    return start_in_background(machine, [sys.executable, *all_words], log)


def one_gpu_for_two(machine: Machine, folder: Path) -> CaseResult:
    """Check that two ranks that use the same GPU under NCCL are rejected."""
    require_gpu(machine, "NCCL needs GPUs")
    run = flags(machine, "gpt2", folder / "run", "--bf16")
    process = launch_ranks(machine, 2, [WORKERS, "one-gpu", *run])
    return judge_shared(process), {"seconds": process.seconds}


def judge_shared(completed: CompletedCommand) -> str:
    """Check that two ranks on one GPU were rejected.

    Raises:
        AssertionError: the code is not 2, a rank or the device is not named, or it took too long.
    """
    completed.check(2)
    find_line(completed, "each rank must have a separate GPU")
    line = find_line(completed, "GPU-")
    assert "rank 0" in line and "rank 1" in line, f"the message does not name both ranks: {line}"
    assert completed.seconds <= MAX_REJECT_S, f"rejected only after {completed.seconds:.0f} s"
    return f"code 2 after {completed.seconds:.0f} s: {line.strip()[:200]}"


def no_such_device(machine: Machine, folder: Path) -> CaseResult:
    """Check that a rank without a device is rejected."""
    require_gpu(machine, "CPU devices have no index")
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": str(machine.num_devices)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    process = run_script(machine, "gpt2", folder / "run", "--bf16", env=env)
    return judge_no_device(process, machine.num_devices), {"seconds": process.seconds}


def judge_no_device(completed: CompletedCommand, num_devices: int) -> str:
    """Check that a rank beyond ``num_devices`` devices was rejected.

    Raises:
        AssertionError: the code is not 2, the numbers are missing, or it took too long.
    """
    completed.check(2)
    line = find_line(completed, "LOCAL_RANK must be below")
    assert f"got {num_devices} and {num_devices}" in line, f"the message does not contain both numbers: {line}"
    assert completed.seconds <= MAX_REJECT_S, f"rejected only after {completed.seconds:.0f} s"
    return f"code 2 after {completed.seconds:.0f} s: {line[:160]}"


def killed_rank(machine: Machine, folder: Path) -> CaseResult:
    """Check that a job ends when one of its ranks is killed during the run."""
    run, backend = folder / "run", two_rank_backend(machine)
    run.mkdir()
    extra = (
        f"--distributed-backend {backend} --train-iters 5000 {'--bf16' if machine.device_type == 'cuda' else '--fp32'}"
    )
    fault = ["nan@0"] if backend == "nccl" or machine.device_type == "cpu" else ["one-gpu"]
    words = [WORKERS, *fault, *flags(machine, "gpt2", run, extra)]
    live = launch_ranks(machine, 2, words, log=log_path(machine, folder))
    try:
        live.wait_until(lambda: last_step(run) >= 3, "step 3")
        os.kill(pid_of_rank(live.process.pid, 1), signal.SIGKILL)
        killed_at = time.monotonic()
        allowed_s = MAX_DEATH_S * machine.limit_factor
        code = live.finish(4 * allowed_s)
        seconds = time.monotonic() - killed_at
        return judge_death(code, seconds, live.text, allowed_s), {"seconds": seconds}
    finally:
        live.close()


def pid_of_rank(launcher: int, rank: int) -> int:
    """Return the process id of a rank among the launcher's children.

    Raises:
        AssertionError: no child has this rank.
    """
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"the launcher has no rank {rank}")


def judge_death(code: int, seconds: float, text: str, allowed_s: float = MAX_DEATH_S) -> str:
    """Check the end of a job after its rank 1 was killed.

    Raises:
        AssertionError: the code is not 4, it took too long, or the rank is not named.
    """
    assert code == 4, f"ended with code {code}, not 4: {text[-900:]}"
    assert seconds <= allowed_s, f"the other ranks ended only after {seconds:.1f} s"
    assert re.search(r"rank 1\b.*SIGKILL|SIGKILL.*rank 1\b", text), f"dead rank not named: {text[-900:]}"
    return f"code 4 {seconds:.1f} s after SIGKILL of rank 1"


def nan_loss(machine: Machine, folder: Path, *, guard: str) -> CaseResult:
    """Check the effect of a loss that is not finite."""
    run = folder / "run"
    extra = f"{'--bf16' if machine.device_type == 'cuda' else '--fp32'} --stability-guard {guard}"
    words = [WORKERS, f"nan@{NAN_STEP}", *flags(machine, "gpt2", run, extra)]
    process = run_python(machine, *words)
    return (judge_ended if guard == "off" else judge_skipped)(process, read_run(run)), {"seconds": process.seconds}


def judge_ended(completed: CompletedCommand, run: Run) -> str:
    """Check that a run ended at step ``NAN_STEP``.

    Raises:
        AssertionError: the exit code is not 5, the run ended at another step, or step or micro-batch are not named.
    """
    completed.check(5)
    line = find_line(completed, f"step {NAN_STEP} ")
    assert "micro-batch" in line, f"the message does not name the micro-batch: {line}"
    assert run.steps == (*range(1, NAN_STEP),), f"{len(run.steps)} steps were recorded, not {NAN_STEP - 1}"
    return f"code 5: {line[:200]}"


def judge_skipped(completed: CompletedCommand, run: Run) -> str:
    """Check that a run continued after step ``NAN_STEP``.

    Raises:
        AssertionError: the run did not reach its last step, or a step other than ``NAN_STEP`` has no loss.
    """
    completed.check()
    assert run.steps == (*range(1, STEPS + 1),), f"{len(run.steps)} steps were recorded, not {STEPS}"
    non_finite_steps = [step for step, loss in zip(run.steps, run.losses, strict=True) if not math.isfinite(loss)]
    assert non_finite_steps == [NAN_STEP], f"only step {NAN_STEP} should have no loss, got {non_finite_steps}"
    assert run.losses[-1] < run.losses[0], "the loss must decrease after the skipped step"
    return f"step {NAN_STEP} skipped, {STEPS} steps run, loss {run.losses[0]:.3f} to {run.losses[-1]:.3f}"


def cases(machine: Machine) -> Sequence[Case]:
    """Return the cases, the most important first."""
    usual_s = limit_s(machine)
    number_format = "--bf16" if machine.device_type == "cuda" else "--fp32"
    watched = [("gpt2", number_format), ("t5", f"{number_format} --checkpoint-activations")]
    if machine.device_type == "cuda":
        watched.append(("gpt2", "--fp16"))
    return [
        *(
            Case(
                f"{family} waits of the host {extra}",
                functools.partial(host_reads, family=family, extra=extra),
                usual_s,
            )
            for family, extra in watched
        ),
        Case("killed rank", killed_rank, usual_s),
        Case("two ranks on one GPU", one_gpu_for_two),
        Case("LOCAL_RANK beyond the devices", no_such_device),
        Case("NaN ends the run", functools.partial(nan_loss, guard="off"), usual_s),
        Case("NaN and --stability-guard skip", functools.partial(nan_loss, guard="skip"), usual_s),
        *(
            Case(
                f"pause in a pipeline, {schedule}",
                functools.partial(pause_in_pipeline, schedule=schedule),
                1.5 * usual_s,
            )
            for schedule in ("1f1b", "zb-h1")
        ),
        Case("CUDA_LAUNCH_BLOCKING", launch_blocking),
        Case("allocations that are tried again", memory_retry),
        Case("a batch that cannot fit", too_large, 180.0, is_exclusive=True),
    ]


PART = Part(
    "faults",
    "host waits, out-of-memory errors, ranks that die or share a GPU, losses that are not finite",
    cases,
    budget_s=240.0,
    num_concurrent=max(1, min(6, len(os.sched_getaffinity(0)) // 2)),
)
