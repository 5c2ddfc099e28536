"""The training scripts on the device: compared with the CPU, repeated bitwise, stopped, killed and resumed.

The losses of 20 steps are compared with those of the CPU in fp32, with the same seed, texts and flags. The table shows
the largest allowed difference in nats, and differences that were observed on a CPU with these flags:

| format | allowed | why |
|---|---|---|
| fp32 | 2e-4 | other kernels sum in another order; TF32 is off. Micro-batches of half the size: GPT-2 1e-6, T5 2.2e-5 |
| bf16 | 1e-2 | 8 bits of each number are kept. On a CPU: GPT-2 and LLaMA 8e-4, T5 2.1e-3, MPT 1.5e-3, BERT 2.3e-3 |
| fp16 | 2e-3 | 11 bits: an eighth of bf16's rounding. No step may be skipped for an overflow |

The variants have the same tolerances, although rounding decides which expert a token is sent to. In bf16 on a CPU they
differed from fp32 by: experts 1.6e-3, with capacity 1.8e-3, documents 4.3e-3, Muon 7.1e-4, soft-caps 5.4e-4.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import references
from benchmarks.gpu.part import ROOT, Case, Machine, Part, Skip
from benchmarks.gpu.train_run import (
    DROPOUT,
    Run,
    cached_run,
    comparable_flags,
    flags,
    judge_bits,
    judge_losses,
    judge_weights,
    last_step,
    limit_s,
    log_path,
    max_loss_difference,
    read_run,
    start_in_background,
    train,
)
from benchmarks.scripts import SCRIPTS

CaseResult = tuple[str, dict[str, Any]]

TOLERANCES = {"fp32": 2e-4, "bf16": 1e-2, "fp16": 2e-3}
"""Format -> largest allowed difference of a loss from the CPU's in fp32."""
COMPILED_TOLERANCE = 5e-3
"""Largest allowed difference between the losses of a compiled run and the eager run, in bf16."""
MIN_FALL, MIN_DRY_FALL = 0.3, 0.05
"""Minimum decrease from the first to the last loss; GPT-2's decreases by 1.0 and T5's by 3.3 at device sizes."""
MIN_FALL_OF_FAMILY = {"bert": 0.1}
"""Family -> smaller minimum decrease; BERT's loss decreases by 0.22 only, because of its low learning rate."""
FORMATS = {"fp32": "--fp32", "bf16": "--bf16", "fp16": "--fp16 --initial-scale-power 12"}
REPEATED = "--deterministic --hidden-dropout 0.1 --attention-dropout 0.1"
"""Flags of runs that are compared bitwise. With torch's dropout, a resume must also restore the random state."""


@dataclass(frozen=True)
class Variant:
    """A run with flags for which the device has other code than the CPU.

    Args:
        extra: flags of the run on the device.
        reference_extra: flags of the run on the CPU.
        covers: code that runs on the device only.
    """

    family: str
    extra: str
    reference_extra: str
    covers: str
    formats: tuple[str, ...] = ("fp32", "bf16")


EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 128 --moe-layer-freq [0]+[1]*3"
)
"""The flags of ``KIND=glm4`` in examples/moe/run_moe.sh, for 4 layers."""
DRY_EXPERTS = EXPERTS.replace("[1]*3", "[1]*1")
DOCUMENTS = "--reset-position-ids --reset-attention-mask --seq-length 640 --batch-size 2"
"""Samples longer than the 512 tokens from which FlashAttention is used for documents."""
SOFT_CAPS = "--attn-logit-softcapping 20 --final-logit-softcapping 30"
CAPACITY = "--moe-expert-capacity-factor 1 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
VARIANTS = {
    "experts": Variant("llama", EXPERTS, EXPERTS, "grouped_mm in bf16, with experts without rows"),
    "experts with capacity": Variant(
        "llama", f"{EXPERTS} {CAPACITY}", f"{EXPERTS} {CAPACITY}", "grouped_mm with rows after the last expert"
    ),
    "--gradient-accumulation-fusion": Variant(
        "gpt2", "--gradient-accumulation-fusion", "", "addmm and baddbmm with out_dtype fp32 into the gradients"
    ),
    "Muon": Variant("gpt2", "--optimizer muon", "--optimizer muon", "Newton-Schulz in bf16 by cuBLAS"),
    "documents": Variant("llama", DOCUMENTS, DOCUMENTS, "varlen_attn in bf16, flex_attention in fp32"),
    "soft-caps": Variant("llama", SOFT_CAPS, SOFT_CAPS, "flex_attention with a score_mod"),
}
"""Name of a case -> its runs."""
REFERENCES: tuple[tuple[str, str], ...] = (
    *((family, "") for family in SCRIPTS),
    ("gpt2", DROPOUT),
    *dict.fromkeys(
        (variant.family, variant.reference_extra) for variant in VARIANTS.values() if variant.reference_extra
    ),
)
"""(family, flags) of every run on the CPU with which runs on the device are compared."""


def reference(machine: Machine, family: str, extra: str = "") -> Run:
    """Return the fp32 CPU run of ``family`` with these flags; the result is cached.

    A run that was computed beforehand (``benchmarks.gpu.references``) is used if it has the same flags and sources.
    """
    checksum = machine.compute_once("sources", references.sources_checksum)
    words = reference_words(machine, family, extra)
    carried = references.load_reference(machine.references, family, words, checksum)
    if carried is not None:
        return carried
    return cached_run(machine, f"on cpu {family} {extra}", family, f"--fp32 {_sized(machine, extra)}", device="cpu")


def reference_words(machine: Machine, family: str, extra: str = "") -> list[str]:
    """Return the command line of ``reference`` without paths, by which a reference is found."""
    return comparable_flags(machine, family, f"--fp32 {_sized(machine, extra)}", "cpu")


def _sized(machine: Machine, extra: str) -> str:
    """Return the flags of a variant with toy sizes in a dry run."""
    if not machine.is_dry:
        return extra
    return extra.replace(EXPERTS, DRY_EXPERTS).replace("--seq-length 640", "--seq-length 64")


def on_device(machine: Machine, family: str, number_format: str) -> Run:
    """Return the run of ``family`` on the device; the result is cached."""
    if machine.device_type == "cpu" and number_format == "fp16":
        raise Skip("a CPU trains in fp32 and bf16; fp16 needs a GPU")
    return cached_run(machine, f"on device {family} {number_format}", family, FORMATS[number_format])


def variant_matches_cpu(machine: Machine, folder: Path, *, name: str, number_format: str) -> CaseResult:
    """Check that the losses of a variant on the device agree with those of the CPU in fp32."""
    variant = VARIANTS[name]
    extra = _sized(machine, variant.extra)
    run = train(machine, variant.family, folder / "run", f"{FORMATS[number_format]} {extra}")
    expected = reference(machine, variant.family, variant.reference_extra)
    text, figures = compare_losses(run, expected, TOLERANCES[number_format], machine)
    return f"{text} ({variant.covers})", figures


def matches_cpu(machine: Machine, folder: Path, *, family: str, number_format: str) -> CaseResult:
    """Check that the losses on the device agree with those of the CPU in fp32."""
    run = on_device(machine, family, number_format)
    fall = MIN_FALL_OF_FAMILY.get(family, MIN_FALL)
    return compare_losses(run, reference(machine, family), TOLERANCES[number_format], machine, fall)


def compare_losses(run: Run, other: Run, allowed: float, machine: Machine, fall: float = MIN_FALL) -> CaseResult:
    """Compare the losses of ``run`` with those of ``other``; return the text of ``judge_losses`` and the figures."""
    text = judge_losses(run, other, allowed, fall=MIN_DRY_FALL if machine.is_dry else fall)
    return text, {
        "worst": max_loss_difference(run, other),
        "allowed": allowed,
        "last_loss": run.losses[-1],
        "seconds": run.seconds,
    }


def same_masks(machine: Machine, folder: Path) -> CaseResult:
    """Check that --layout-independent-dropout drops the same elements on the device and on the CPU."""
    run = train(machine, "gpt2", folder / "run", f"--fp32 {DROPOUT}")
    plain, other = reference(machine, "gpt2"), reference(machine, "gpt2", DROPOUT)
    difference = max_loss_difference(plain, other)
    assert difference > 2 * TOLERANCES["fp32"] or machine.is_dry, f"dropout changes the losses only by {difference:.2g}"
    text, figures = compare_losses(run, other, TOLERANCES["fp32"], machine)
    return f"{text}; without dropout they differ by {difference:.2g}", figures


def compiled(machine: Machine, folder: Path, *, family: str) -> CaseResult:
    """Check that a run with --compile has the losses of the eager run, within ``COMPILED_TOLERANCE``."""
    run = train(machine, family, folder / "run", f"{FORMATS['bf16']} --compile")
    return compare_losses(run, on_device(machine, family, "bf16"), COMPILED_TOLERANCE, machine)


def offloaded(machine: Machine, folder: Path) -> CaseResult:
    """Check that a run with an offloaded optimizer has the losses of a run without; bitwise on a CPU."""
    run = train(machine, "gpt2", folder / "run", f"{FORMATS['fp32']} --offload-optimizer")
    plain = on_device(machine, "gpt2", "fp32")
    if machine.device_type == "cpu":
        return judge_bits(run, plain), {}
    return compare_losses(run, plain, TOLERANCES["fp32"], machine)


def num_steps(machine: Machine) -> int:
    """Return the number of steps of runs that are interrupted: enough for a signal to arrive in time."""
    return 80 if machine.is_dry else 240


def repeated_flags(machine: Machine, extra: str = "") -> str:
    """Return the flags of runs that are compared bitwise and save four checkpoints."""
    steps = num_steps(machine)
    return f"--bf16 {REPEATED} --train-iters {steps} --save-interval {steps // 4} {extra}"


def uninterrupted_run(machine: Machine, family: str = "gpt2") -> Run:
    """Return the uninterrupted run, which is the reference for interrupted ones; the result is cached."""
    return cached_run(machine, f"whole {family}", family, repeated_flags(machine))


def repeats_bitwise(machine: Machine, folder: Path, *, family: str) -> CaseResult:
    """Check that two runs with --deterministic are bitwise identical."""
    run = train(machine, family, folder / "run", repeated_flags(machine))
    return same_bits(machine, run, uninterrupted_run(machine, family))


def same_bits(machine: Machine, run: Run, other: Run) -> CaseResult:
    """Check that two runs are bitwise identical: losses, norms, weights and moments."""
    text = judge_bits(run, other)
    return f"{text}; {judge_weights(machine, run.folder, other.folder)}", {"steps": len(run.steps)}


def async_save(machine: Machine, folder: Path) -> CaseResult:
    """Check that --async-save writes the same checkpoints as a plain save and does not change the losses."""
    run, other = (
        train(machine, "gpt2", folder / "run", repeated_flags(machine, "--async-save")),
        uninterrupted_run(machine),
    )
    text, figures = same_bits(machine, run, other)
    name = f"checkpoints/step-{num_steps(machine) // 2:08d}"
    assert (run.folder / name).is_dir(), f"the checkpoint {name} does not exist"
    judge_weights(machine, run.folder / name, other.folder / name)
    return f"{text}; so is the checkpoint {name}, written during training", figures


def interrupted(
    machine: Machine, folder: Path, *, signal_number: signal.Signals, code: int, is_due: Callable[[Machine, Path], bool]
) -> CaseResult:
    """Check that a run ended by a signal resumes with the same command, with a bitwise identical result.

    Args:
        code: expected exit code.
        is_due: function of the run folder that returns True when the signal should be sent.
    """
    run, extra = folder / "run", repeated_flags(machine, "--resume --load-if-exists")
    run.mkdir()
    words = [sys.executable, str(ROOT / SCRIPTS["gpt2"]), *flags(machine, "gpt2", run, extra)]
    live = start_in_background(machine, words, log_path(machine, folder))
    try:
        live.wait_until(lambda: is_due(machine, run), "the moment of the signal")
        live.signal(signal_number)
        exit_code = live.finish(limit_s(machine) * machine.limit_factor / 2)
        assert exit_code == code, f"ended with code {exit_code}, not {code}: {live.text[-900:]}"
    finally:
        live.close()
    last = last_step(run)
    assert last < num_steps(machine), f"all {last} steps were run before {signal_number.name} arrived"
    train(machine, "gpt2", run, extra)
    text, figures = same_bits(machine, read_run(run), uninterrupted_run(machine))
    return f"{signal_number.name} after step {last}, code {exit_code}; resumed: {text}", figures | {"cut": last}


def has_begun(machine: Machine, run: Path) -> bool:
    """Return True after an eighth of the steps, which is before the first save."""
    return last_step(run) >= num_steps(machine) // 8


def has_saved(machine: Machine, run: Path) -> bool:
    """Return True if two steps after the first checkpoint are done; a kill then loses them."""
    first = num_steps(machine) // 4
    return (run / "checkpoints" / f"step-{first:08d}").is_dir() and last_step(run) >= first + 2


def cases(machine: Machine) -> Sequence[Case]:
    """Return the cases, the most important first."""
    usual_s, long_s = limit_s(machine), 2 * limit_s(machine)
    stop = functools.partial(interrupted, signal_number=signal.SIGTERM, code=75, is_due=has_begun)
    kill = functools.partial(interrupted, signal_number=signal.SIGKILL, code=-signal.SIGKILL, is_due=has_saved)
    both = ("gpt2", "t5")
    return [
        *(
            Case(
                f"{family} {number_format}",
                functools.partial(matches_cpu, family=family, number_format=number_format),
                usual_s,
            )
            for number_format in FORMATS
            for family in SCRIPTS
        ),
        *(
            Case(f"{family} --deterministic twice", functools.partial(repeats_bitwise, family=family), usual_s)
            for family in both
        ),
        *(
            Case(
                f"{name} {number_format}",
                functools.partial(variant_matches_cpu, name=name, number_format=number_format),
                usual_s,
            )
            for number_format in ("bf16", "fp32")
            for name, variant in VARIANTS.items()
            if number_format in variant.formats
        ),
        Case("SIGTERM and resume", stop, long_s),
        Case("kill -9 and resume", kill, long_s),
        Case("--async-save", async_save, usual_s),
        Case("--layout-independent-dropout", same_masks, usual_s),
        *(Case(f"{family} --compile", functools.partial(compiled, family=family), long_s) for family in both),
        Case("--offload-optimizer", offloaded, usual_s),
    ]


PART = Part(
    "train",
    "training scripts compared with the CPU in fp32; repeated bitwise, stopped, killed, resumed, compiled",
    cases,
    budget_s=300.0,
    num_concurrent=max(1, min(8, len(os.sched_getaffinity(0)) // 2)),
)
