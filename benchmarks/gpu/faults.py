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

from benchmarks.gpu.part import ROOT, Case, Done, Machine, Part, Skip, python
from benchmarks.gpu.train import (
    STEPS,
    Run,
    begin,
    flags,
    judge_bits,
    last_step,
    limit_s,
    read_run,
    start,
    train,
)

Shown = tuple[str, dict[str, Any]]

WORKERS = str(ROOT / "benchmarks" / "gpu" / "workers.py")
ONCE = "tds/loss_reduction.py:read"
"""The only function in which the host may wait for the device, once per step."""
STEP_SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --batch-size 2 "
STEP_LENGTHS = {"gpt2": "--seq-length 64", "t5": "--enc-seq-length 64 --vocab-extra-ids 8"}
PRESSED_SIZES = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --batch-size 8 --gas 2"
QUICK_S = 90.0
"""Seconds within which a job that cannot start must end, including its imports."""
DEATH_S = 15.0
"""Seconds within which a job must end after a rank has died."""
WIDE, DEEP, LONG = 1024, 8, 1024
"""Hidden size, layers and tokens per sample of the model that cannot fit."""
SPOILED = 5
"""The step whose loss is not finite."""


def worker(machine: Machine, folder: Path, what: str, family: str, extra: str, sizes: str) -> Any:
    """Run the program ``what`` of ``workers.py`` on the device and return its results."""
    file = folder / f"{what}-{len(os.listdir(folder))}.json"
    words = [WORKERS, what, str(file), family, *sizes.split(), *extra.split()]
    python(machine, *words, "--device", machine.kind).check()
    return json.loads(file.read_text())


def host_reads(machine: Machine, folder: Path, *, family: str, extra: str) -> Shown:
    """Check in steps 2 and 3, with four micro-batches each, that the host waits only once per step."""
    result = worker(machine, folder, "reads", family, f"{extra} --gas 4", STEP_SIZES + STEP_LENGTHS[family])
    return judge_reads(result), {"places": result["found"]}


def judge_reads(seen: Mapping[str, Any]) -> str:
    """Check that the host waits once per step, and therefore not in each micro-batch.

    Args:
        seen: results of ``workers.py``.

    Raises:
        AssertionError: the host waits elsewhere or not exactly once per step, or waits are not detected at all.
    """
    assert seen["is_noticed"], "a deliberate wait was not detected, so the detection does not work"
    counts = {place: count / seen["steps"] for place, count in seen["found"].items()}
    unexpected = {place: count for place, count in counts.items() if not place.endswith(f" in {ONCE}")}
    assert not unexpected, f"unexpected waits of the host per step: {_format_counts(unexpected)}"
    assert sum(counts.values()) == 1, f"the host waits {sum(counts.values()):g} times per step, not once"
    return f"one wait per step, in {ONCE}, none in its 4 micro-batches"


def _format_counts(places: Mapping[str, float]) -> str:
    return ", ".join(f"{place} ({count:g})" for place, count in sorted(places.items()))


def memory_retry(machine: Machine, folder: Path) -> Shown:
    """Check that a step whose allocation fails at first continues with the same losses."""
    needs_gpu(machine, "torch's allocator caches freed memory only on a GPU")
    extra = "--bf16 --deterministic"
    eased, pressed = (worker(machine, folder, mode, "gpt2", extra, PRESSED_SIZES) for mode in ("ease", "pressure"))
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


def needs_gpu(machine: Machine, why: str) -> None:
    """Skip the case on a CPU, with the reason ``why``."""
    if machine.kind == "cpu":
        raise Skip(why)


def of_two_ranks(machine: Machine) -> str:
    """Return the backend for two ranks on this machine: NCCL if each has its own GPU."""
    return "nccl" if machine.kind == "cuda" and machine.num_devices > 1 else "gloo"


def pause_in_pipeline(machine: Machine, folder: Path, *, schedule: str) -> Shown:
    """Check that a pipeline does not hang if its layers synchronize the device, or with CUDA_LAUNCH_BLOCKING."""
    backend = of_two_ranks(machine)
    if backend == "gloo" and machine.kind == "cuda":
        backend = "host_copies"  # gloo through the host, as with --distributed-backend gloo

    def losses(kind: str, env: Mapping[str, str]) -> list[str]:
        file = folder / f"{kind}-{len(env)}.json"
        words = ["--standalone", "--nproc-per-node", "2", WORKERS, kind, str(file), backend, schedule]
        python(machine, "-m", "torch.distributed.run", *words, env=env).check()
        return json.loads(file.read_text())

    losses_by_run = {"plain": losses("plain", {}), "paused": losses("pause", {})}
    if machine.kind == "cuda":
        losses_by_run["blocking"] = losses("plain", {"CUDA_LAUNCH_BLOCKING": "1"})
    return f"{judge_equal(losses_by_run)}; over {backend}", {}


def judge_equal(seen: Mapping[str, Sequence[str]]) -> str:
    """Check that all runs have the same losses, as hexadecimal numbers.

    Raises:
        AssertionError: a run differs from the first one, or the losses do not change from step to step.
    """
    (first, expected), *other_runs = seen.items()
    assert len(set(expected)) == len(expected) > 0, (
        f"the losses of {first} must change from step to step, got {expected}"
    )
    for name, losses in other_runs:
        assert losses == expected, f"{name}: losses {losses}, {first}: {expected}"
    return f"{', '.join(seen)}: losses of {len(expected)} steps bitwise identical"


def launch_blocking(machine: Machine, folder: Path) -> Shown:
    """Check that a run with CUDA_LAUNCH_BLOCKING=1 has the same losses as one without."""
    needs_gpu(machine, "a CPU launches no kernels")
    extra = "--bf16 --deterministic"
    plain = train(machine, "gpt2", folder / "plain", extra)
    blocked = train(machine, "gpt2", folder / "blocked", extra, env={"CUDA_LAUNCH_BLOCKING": "1"})
    return judge_bits(blocked, plain), {"seconds": [plain.seconds, blocked.seconds]}


def too_large(machine: Machine, folder: Path) -> Shown:
    """Check how a run ends whose batch does not fit in memory."""
    needs_gpu(machine, "a batch that exceeds the host's memory would crash the host")
    per_token = 34 * WIDE * DEEP  # bytes that the backward of each layer needs, in 16 bits
    batch = math.ceil(1.5 * machine.memory_bytes / per_token / LONG)
    sizes = f"--num-layers {DEEP} --hidden-size {WIDE} --num-attention-heads 16 --seq-length {LONG}"
    process = start(
        machine, "gpt2", folder / "run", f"--bf16 {sizes} --batch-size {batch} --gas 1 --train-iters 2 --warmup 0"
    )
    return judge_out_of_memory(process), {"batch_size": batch, "seconds": process.seconds}


def judge_out_of_memory(done: Done) -> str:
    """Check the exit code and message of a run that was out of memory.

    Raises:
        AssertionError: the exit code is not 1, or the bytes, the step, the micro-batch or the advice is missing.
    """
    done.check(1)
    line = the_line(done, "out of memory")
    assert re.search(r"could not allocate [\d.]+ ?\w+", line), f"the message does not contain the bytes: {line}"
    assert re.search(r"step 1, (forward|backward) of micro-batch \d", line), (
        f"the message does not contain step and micro-batch: {line}"
    )
    assert "Lower --batch-size" in line, f"the message does not contain the fix: {line}"
    return f"code 1: {line[:200]}"


def the_line(done: Done, sign: str) -> str:
    """Return the first line of the output that contains ``sign``.

    Raises:
        AssertionError: no line contains it.
    """
    lines = [line for line in done.text.splitlines() if sign in line]
    assert lines, f'the output does not contain "{sign}": {done.text[-900:]}'
    return lines[0]


def launched(machine: Machine, number: int, words: Sequence[str], *, log: Path | None = None) -> Any:
    """Run ``words`` in ``number`` ranks under our launcher.

    Returns:
        ``Done`` after the end of the job; with ``log``, ``Live`` while the job runs in the background.
    """
    all_words = ["-m", "megatron.launch", "--nproc-per-node", str(number), *words]
    if log is None:
        return python(machine, *all_words)
    return begin(machine, [sys.executable, *all_words], log)


def one_gpu_for_two(machine: Machine, folder: Path) -> Shown:
    """Check that two ranks that use the same GPU under NCCL are rejected."""
    needs_gpu(machine, "NCCL needs GPUs")
    run = flags(machine, "gpt2", folder / "run", "--bf16")
    process = launched(machine, 2, [WORKERS, "one-gpu", *run])
    return judge_shared(process), {"seconds": process.seconds}


def judge_shared(done: Done) -> str:
    """Check that two ranks on one GPU were rejected.

    Raises:
        AssertionError: the code is not 2, a rank or the device is not named, or it took too long.
    """
    done.check(2)
    the_line(done, "each rank must have a separate GPU")
    line = the_line(done, "GPU-")
    assert "rank 0" in line and "rank 1" in line, f"the message does not name both ranks: {line}"
    assert done.seconds <= QUICK_S, f"rejected only after {done.seconds:.0f} s"
    return f"code 2 after {done.seconds:.0f} s: {line.strip()[:200]}"


def no_such_device(machine: Machine, folder: Path) -> Shown:
    """Check that a rank without a device is rejected."""
    needs_gpu(machine, "CPU devices have no index")
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": str(machine.num_devices)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    process = start(machine, "gpt2", folder / "run", "--bf16", env=env)
    return judge_no_device(process, machine.num_devices), {"seconds": process.seconds}


def judge_no_device(done: Done, number: int) -> str:
    """Check that a rank beyond ``number`` devices was rejected.

    Raises:
        AssertionError: the code is not 2, the numbers are missing, or it took too long.
    """
    done.check(2)
    line = the_line(done, "LOCAL_RANK must be below")
    assert f"got {number} and {number}" in line, f"the message does not contain both numbers: {line}"
    assert done.seconds <= QUICK_S, f"rejected only after {done.seconds:.0f} s"
    return f"code 2 after {done.seconds:.0f} s: {line[:160]}"


def killed_rank(machine: Machine, folder: Path) -> Shown:
    """Check that a job ends when one of its ranks is killed during the run."""
    run, backend = folder / "run", of_two_ranks(machine)
    run.mkdir()
    extra = f"--distributed-backend {backend} --train-iters 5000 {'--bf16' if machine.kind == 'cuda' else '--fp32'}"
    fault = ["nan@0"] if backend == "nccl" or machine.kind == "cpu" else ["one-gpu"]
    words = [WORKERS, *fault, *flags(machine, "gpt2", run, extra)]
    live = launched(machine, 2, words, log=folder / "log")
    try:
        live.wait_until(lambda: last_step(run) >= 3, "step 3")
        os.kill(rank_of(live.process.pid, 1), signal.SIGKILL)
        killed_at = time.monotonic()
        code = live.finish(4 * DEATH_S)
        return judge_death(code, time.monotonic() - killed_at, live.text), {"seconds": time.monotonic() - killed_at}
    finally:
        live.close()


def rank_of(launcher: int, rank: int) -> int:
    """Return the process id of a rank among the launcher's children.

    Raises:
        AssertionError: no child has this rank.
    """
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"the launcher has no rank {rank}")


def judge_death(code: int, seconds: float, text: str) -> str:
    """Check how a job ended whose rank 1 was killed.

    Raises:
        AssertionError: the code is not 4, it took too long, or the rank is not named.
    """
    assert code == 4, f"ended with code {code}, not 4: {text[-900:]}"
    assert seconds <= DEATH_S, f"the other ranks ended only after {seconds:.1f} s"
    assert re.search(r"rank 1\b.*SIGKILL|SIGKILL.*rank 1\b", text), f"dead rank not named: {text[-900:]}"
    return f"code 4 {seconds:.1f} s after SIGKILL of rank 1"


def spoiled(machine: Machine, folder: Path, *, guard: str) -> Shown:
    """Check the effect of a loss that is not finite."""
    run = folder / "run"
    extra = f"{'--bf16' if machine.kind == 'cuda' else '--fp32'} --stability-guard {guard}"
    words = [WORKERS, f"nan@{SPOILED}", *flags(machine, "gpt2", run, extra)]
    process = python(machine, *words)
    return (judge_ended if guard == "off" else judge_skipped)(process, read_run(run)), {"seconds": process.seconds}


def judge_ended(done: Done, run: Run) -> str:
    """Check that a run ended at step ``SPOILED``.

    Raises:
        AssertionError: the exit code is not 5, the run ended at another step, or step or micro-batch are not named.
    """
    done.check(5)
    line = the_line(done, f"step {SPOILED} ")
    assert "micro-batch" in line, f"the message does not name the micro-batch: {line}"
    assert run.steps == (*range(1, SPOILED),), f"{len(run.steps)} steps were recorded, not {SPOILED - 1}"
    return f"code 5: {line[:200]}"


def judge_skipped(done: Done, run: Run) -> str:
    """Check that a run continued after step ``SPOILED``.

    Raises:
        AssertionError: the run did not reach its last step, or a step other than ``SPOILED`` has no loss.
    """
    done.check()
    assert run.steps == (*range(1, STEPS + 1),), f"{len(run.steps)} steps were recorded, not {STEPS}"
    non_finite_steps = [step for step, loss in zip(run.steps, run.losses, strict=True) if not math.isfinite(loss)]
    assert non_finite_steps == [SPOILED], f"the steps {non_finite_steps} have no loss, not only {SPOILED}"
    assert run.losses[-1] < run.losses[0], "the loss must decrease after the skipped step"
    return f"step {SPOILED} skipped, {STEPS} steps run, loss {run.losses[0]:.3f} to {run.losses[-1]:.3f}"


def cases(machine: Machine) -> Sequence[Case]:
    """Return the cases, the most important first."""
    usual = limit_s(machine)
    number_format = "--bf16" if machine.kind == "cuda" else "--fp32"
    watched = [("gpt2", number_format), ("t5", f"{number_format} --checkpoint-activations")]
    if machine.kind == "cuda":
        watched.append(("gpt2", "--fp16"))
    return [
        *(
            Case(
                f"{family} waits of the host {extra}", functools.partial(host_reads, family=family, extra=extra), usual
            )
            for family, extra in watched
        ),
        Case("killed rank", killed_rank, usual),
        Case("two ranks on one GPU", one_gpu_for_two),
        Case("LOCAL_RANK beyond the devices", no_such_device),
        Case("NaN ends the run", functools.partial(spoiled, guard="off"), usual),
        Case("NaN and --stability-guard skip", functools.partial(spoiled, guard="skip"), usual),
        *(
            Case(
                f"pause in a pipeline, {schedule}", functools.partial(pause_in_pipeline, schedule=schedule), 1.5 * usual
            )
            for schedule in ("1f1b", "zb-h1")
        ),
        Case("CUDA_LAUNCH_BLOCKING", launch_blocking),
        Case("allocations that are tried again", memory_retry),
        Case("a batch that cannot fit", too_large, 180.0, alone=True),
    ]


PART = Part(
    "faults",
    "host waits, out-of-memory errors, ranks that die or share a GPU, losses that are not finite",
    cases,
    budget_s=240.0,
    at_once=max(1, min(6, len(os.sched_getaffinity(0)) // 2)),
)
