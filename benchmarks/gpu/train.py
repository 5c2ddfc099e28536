"""The training scripts on the device: as the CPU in fp32, to the bit where they say so, stopped, killed and resumed.

The losses of 20 steps against those of the CPU in fp32, of the same seed, texts and flags. The largest difference that
is allowed, in nats, beside what was seen on a CPU with these flags:

| format | allowed | why |
|---|---|---|
| fp32 | 2e-4 | other kernels add in another order; TF32 is off. Micro-batches of half the size: GPT-2 1e-6, T5 2.2e-5 |
| bf16 | 1e-2 | 8 bits of each number are kept. On a CPU: GPT-2 and LLaMA 8e-4, T5 2.1e-3, MPT 1.5e-3, BERT 2.3e-3 |
| fp16 | 2e-3 | 11 bits: an eighth of bf16's rounding. No step may be left out for an overflow |
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import ROOT, Case, Machine, Part, Skip
from benchmarks.gpu.runs import (
    DROPOUT,
    SCRIPTS,
    Run,
    begin,
    flags,
    judge_bits,
    judge_losses,
    judge_weights,
    kept,
    last_step,
    limit_s,
    read_run,
    reference,
    train,
    worst,
)

Shown = tuple[str, dict[str, Any]]

TOLERANCES = {"fp32": 2e-4, "bf16": 1e-2, "fp16": 2e-3}
"""Format -> the largest difference of a loss to the CPU's in fp32."""
COMPILED = 5e-3
"""The same, of a compiled run to the eager one in bf16."""
USUAL_FALL, DRY_FALL = 0.3, 0.05
"""By which the loss of the last step must be below that of the first; GPT-2 falls by 1.0, T5 by 3.3 at device sizes."""
LEAST_FALL = {"bert": 0.1}
"""Of families that fall by less: BERT by 0.22, at its low rate."""
FORMATS = {"fp32": "--fp32", "bf16": "--bf16", "fp16": "--fp16 --initial-scale-power 12"}
REPEATED = "--deterministic --hidden-dropout 0.1 --attention-dropout 0.1"
"""Of runs that are compared to the bit; torch's own dropout, so that its random state must come back, too."""


def on_device(machine: Machine, family: str, number_format: str) -> Run:
    """Return the run of ``family`` on the device, made once."""
    if machine.kind == "cpu" and number_format == "fp16":
        raise Skip("a CPU trains in fp32 and bf16; fp16 needs a GPU")
    return kept(machine, f"on device {family} {number_format}", family, FORMATS[number_format])


def as_reference(machine: Machine, folder: Path, *, family: str, number_format: str) -> Shown:
    """Show that the losses on the device are those of the CPU in fp32."""
    run = on_device(machine, family, number_format)
    fall = LEAST_FALL.get(family, USUAL_FALL)
    return compared(run, reference(machine, family), TOLERANCES[number_format], machine, fall)


def compared(run: Run, other: Run, allowed: float, machine: Machine, fall: float = USUAL_FALL) -> Shown:
    """Return what ``judge_losses`` says, and the figures."""
    text = judge_losses(run, other, allowed, fall=DRY_FALL if machine.is_dry else fall)
    return text, {"worst": worst(run, other), "allowed": allowed, "last_loss": run.losses[-1], "seconds": run.seconds}


def same_masks(machine: Machine, folder: Path) -> Shown:
    """Show that --layout-independent-dropout drops the same on the device and on the CPU."""
    run = train(machine, "gpt2", folder / "run", f"--fp32 {DROPOUT}")
    plain, other = reference(machine, "gpt2"), reference(machine, "gpt2", DROPOUT)
    apart = worst(plain, other)
    assert apart > 2 * TOLERANCES["fp32"] or machine.is_dry, f"dropout changes the losses by no more than {apart:.2g}"
    text, figures = compared(run, other, TOLERANCES["fp32"], machine)
    return f"{text}; without dropout they are {apart:.2g} apart", figures


def compiled(machine: Machine, folder: Path, *, family: str) -> Shown:
    """Show that --compile gives the losses of the eager run."""
    run = train(machine, family, folder / "run", f"{FORMATS['bf16']} --compile")
    return compared(run, on_device(machine, family, "bf16"), COMPILED, machine)


def offloaded(machine: Machine, folder: Path) -> Shown:
    """Show that an optimizer on the host gives the losses of one on the device; on a CPU to the bit."""
    run = train(machine, "gpt2", folder / "run", f"{FORMATS['fp32']} --offload-optimizer")
    plain = on_device(machine, "gpt2", "fp32")
    if machine.kind == "cpu":
        return judge_bits(run, plain), {}
    return compared(run, plain, TOLERANCES["fp32"], machine)


def num_steps(machine: Machine) -> int:
    """Return the steps of runs that are ended in between: enough for a signal to come in time."""
    return 80 if machine.is_dry else 240


def repeated_flags(machine: Machine, extra: str = "") -> str:
    """Return the flags of runs that are compared to the bit; they save four times."""
    steps = num_steps(machine)
    return f"--bf16 {REPEATED} --train-iters {steps} --save-interval {steps // 4} {extra}"


def whole(machine: Machine, family: str = "gpt2") -> Run:
    """Return the run that the others are compared with, made once."""
    return kept(machine, f"whole {family}", family, repeated_flags(machine))


def repeats(machine: Machine, folder: Path, *, family: str) -> Shown:
    """Show that --deterministic gives the same bits twice."""
    run = train(machine, family, folder / "run", repeated_flags(machine))
    return same_bits(machine, run, whole(machine, family))


def same_bits(machine: Machine, run: Run, other: Run) -> Shown:
    """Show that two runs are the same bits: losses, norms, weights and moments."""
    text = judge_bits(run, other)
    return f"{text}; {judge_weights(machine, run.folder, other.folder)}", {"steps": len(run.steps)}


def saved_beside(machine: Machine, folder: Path) -> Shown:
    """Show that --async-save writes what a plain save does, and leaves the numbers alone."""
    run, other = train(machine, "gpt2", folder / "run", repeated_flags(machine, "--async-save")), whole(machine)
    text, figures = same_bits(machine, run, other)
    name = f"checkpoints/step-{num_steps(machine) // 2:08d}"
    assert (run.folder / name).is_dir(), f"there is no {name} in mid-run"
    judge_weights(machine, run.folder / name, other.folder / name)
    return f"{text}; so are those of the middle, written while training went on", figures


def cut_off(
    machine: Machine, folder: Path, *, number: signal.Signals, code: int, is_due: Callable[[Machine, Path], bool]
) -> Shown:
    """Show that a run which a signal ends goes on to the bit with the same command.

    Args:
        code: that it must end with.
        is_due: says of the run folder whether to send the signal now.
    """
    run, extra = folder / "run", repeated_flags(machine, "--resume --load-if-exists")
    run.mkdir()
    words = [sys.executable, str(ROOT / SCRIPTS["gpt2"]), *flags(machine, "gpt2", run, extra)]
    live = begin(machine, words, folder / "log")
    try:
        live.wait_until(lambda: is_due(machine, run), "the moment of the signal")
        live.signal(number)
        ended = live.finish(limit_s(machine) / 2)
        assert ended == code, f"ended with code {ended}, not {code}: {live.text[-900:]}"
    finally:
        live.close()
    cut = last_step(run)
    assert cut < num_steps(machine), f"all {cut} steps were done before {number.name} came"
    train(machine, "gpt2", run, extra)
    text, figures = same_bits(machine, read_run(run), whole(machine))
    return f"{number.name} behind step {cut}, code {ended}; resumed: {text}", figures | {"cut": cut}


def is_under_way(machine: Machine, run: Path) -> bool:
    """Whether some steps are done, and the next save is not due."""
    return last_step(run) >= num_steps(machine) // 8


def has_saved(machine: Machine, run: Path) -> bool:
    """Whether steps are done behind the first checkpoint, which a kill then loses."""
    first = num_steps(machine) // 4
    return (run / "checkpoints" / f"step-{first:08d}").is_dir() and last_step(run) >= first + 2


def cases(machine: Machine) -> Sequence[Case]:
    """Return the cases, the most telling first."""
    usual, long = limit_s(machine), 2 * limit_s(machine)
    stop = functools.partial(cut_off, number=signal.SIGTERM, code=75, is_due=is_under_way)
    kill = functools.partial(cut_off, number=signal.SIGKILL, code=-signal.SIGKILL, is_due=has_saved)
    both = ("gpt2", "t5")
    return [
        *(
            Case(f"{family} {form}", functools.partial(as_reference, family=family, number_format=form), usual)
            for form in FORMATS
            for family in SCRIPTS
        ),
        *(Case(f"{family} --deterministic twice", functools.partial(repeats, family=family), usual) for family in both),
        Case("SIGTERM and resume", stop, long),
        Case("kill -9 and resume", kill, long),
        Case("--async-save", saved_beside, usual),
        Case("--layout-independent-dropout", same_masks, usual),
        *(Case(f"{family} --compile", functools.partial(compiled, family=family), long) for family in both),
        Case("--offload-optimizer", offloaded, usual),
    ]


PART = Part(
    "train",
    "the training scripts against the CPU in fp32; to the bit, stopped, killed, resumed, compiled",
    cases,
    budget_s=300.0,
    at_once=max(1, min(8, len(os.sched_getaffinity(0)) // 2)),
)
