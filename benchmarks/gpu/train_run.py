"""Runs of the training scripts on texts of the repository, as users start them, and comparisons of two runs."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import ROOT, CompletedCommand, Machine, run_python, start_command
from benchmarks.scripts import SCRIPTS

TOKENIZER = ROOT / "tests" / "golden" / "tokenizer.json"
STEPS = 20
COMMON = (
    "--warmup 0.1 --log-interval 1 --eval-interval 0 --eval-iters 0 --split 1,0,0 --progress plain --seed 1234 "
    f"--num-attention-heads 4 --gas 2 --train-iters {STEPS}"
)
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1 --layout-independent-dropout"
DEVICE_SIZES = {
    "gpt2": "--num-layers 4 --seq-length 128 --hidden-bias",
    "t5": "--num-layers 2 --enc-seq-length 128",
    "llama": "--num-layers 4 --seq-length 128 --num-query-groups 2 --ff-hidden-size 704",
    "mpt": "--num-layers 4 --seq-length 128",
    "bert": "--num-layers 4 --seq-length 128 --lr 2e-4",
}
"""Family -> flags. BERT's learning rate is low: at 1e-3 its loss jumps, and bf16 on a CPU differs by 0.36 in step 4."""
DRY_SIZES = {
    "gpt2": "--num-layers 2 --seq-length 32 --hidden-bias",
    "t5": "--num-layers 1 --enc-seq-length 32",
    "llama": "--num-layers 2 --seq-length 32 --num-query-groups 2",
    "mpt": "--num-layers 2 --seq-length 32",
    "bert": "--num-layers 2 --seq-length 32",
}


def limit_s(machine: Machine) -> float:
    """Return the time limit of a case in seconds, longer for a dry run, which may share a few cores with other work."""
    return 480.0 if machine.is_dry else 120.0


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, and loss and gradient norm of each step."""

    folder: Path
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    num_skipped: int
    seconds: float

    @property
    def bits(self) -> list[tuple[int, str, str]]:
        """(step, loss, norm) of each step, with all bits of each number."""
        return [
            (step, loss.hex(), norm.hex())
            for step, loss, norm in zip(self.steps, self.losses, self.grad_norms, strict=True)
        ]


def token_files(machine: Machine) -> Path:
    """Return the prefix of the token files of examples/corpus, which are created once without a network."""
    return machine.compute_once("texts", lambda: write_token_files(machine.work / "texts"))


def write_token_files(folder: Path) -> Path:
    """Tokenize texts of this repository into ``folder``, as for the golden losses; return the prefix."""
    import numpy as np

    from megatron.data import IndexedDatasetBuilder
    from megatron.tokenizer import build

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build(tokenizer_path=TOKENIZER)
    prefix = folder / "texts"
    metadata = {"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.identity, "eod_id": tokenizer.eod_id}
    with IndexedDatasetBuilder(prefix, **metadata) as writer:
        for text in sorted((ROOT / "examples" / "corpus").glob("*/*.txt")):
            writer.add(np.array([*tokenizer.encode(text.read_text(encoding="utf-8")), tokenizer.eod_id]))
    return prefix


def flags(
    machine: Machine,
    family: str,
    folder: Path,
    extra: str = "",
    device: str | None = None,
    *,
    texts: Path | None = None,
) -> list[str]:
    """Return the command line of a run of ``family`` in the run folder ``folder``; later flags take precedence.

    Args:
        texts: prefix of the token files; None: ``token_files``, which creates them.
    """
    size_flags = (DRY_SIZES if machine.is_dry else DEVICE_SIZES)[family]
    common = (
        "--hidden-size 32 --batch-size 2 --lr 3e-3" if machine.is_dry else "--hidden-size 256 --batch-size 8 --lr 1e-3"
    )
    return [
        *f"{common} {COMMON} {NO_DROPOUT} {size_flags}".split(),
        *("--data-path", str(texts or token_files(machine)), "--tokenizer-path", str(TOKENIZER), "--save", str(folder)),
        *("--device", device or machine.device_type, *extra.split()),
    ]


def comparable_flags(machine: Machine, family: str, extra: str, device: str) -> list[str]:
    """Return the command line of a run without its paths, to recognise a run with equal results."""
    words = flags(machine, family, Path("RUN"), extra, device, texts=Path("TEXTS"))
    return [TOKENIZER.name if word == str(TOKENIZER) else word for word in words]


def cpu_environment(machine: Machine) -> dict[str, str]:
    """Return the environment variables of a CPU run that is concurrent with runs on the device."""
    threads = max(1, min(4, machine.num_cores // 4))
    return {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}


def run_script(
    machine: Machine,
    family: str,
    folder: Path,
    extra: str = "",
    *,
    device: str | None = None,
    env: Mapping[str, str] | None = None,
) -> CompletedCommand:
    """Run the script of ``family`` to its end, successful or not."""
    variables = (cpu_environment(machine) if device == "cpu" else {}) | dict(env or {})
    return run_python(
        machine, str(ROOT / SCRIPTS[family]), *flags(machine, family, folder, extra, device), env=variables
    )


def train(machine: Machine, family: str, folder: Path, extra: str = "", **options: Any) -> Run:
    """Run the script of ``family`` to its last step and return its records.

    Raises:
        AssertionError: the exit code of the script is not 0.
    """
    return read_run(folder, run_script(machine, family, folder, extra, **options).check().seconds)


def read_run(folder: Path, seconds: float = 0.0) -> Run:
    """Return the records of the run in ``folder``."""
    from megatron.training.callbacks.metrics_writer import read_metrics

    records = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]
    values = [[_number(record[name]) for record in records] for name in ("loss", "grad_norm")]
    num_skipped = max((record["skipped"] for record in records), default=0)
    return Run(folder, tuple(r["step"] for r in records), tuple(values[0]), tuple(values[1]), num_skipped, seconds)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def cached_run(machine: Machine, name: str, family: str, extra: str, **options: Any) -> Run:
    """Return the run ``name``, which serves as a reference for several cases; the result is cached."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]  # names of runs with many flags are too long for a folder
    folder = machine.work / "kept" / f"{''.join(c if c.isalnum() else '-' for c in name)[:40]}-{digest}"

    def make() -> Run:
        shutil.rmtree(folder, ignore_errors=True)  # left by a failed attempt
        return train(machine, family, folder, extra, **options)

    return machine.compute_once(name, make)


def max_loss_difference(run: Run, other: Run) -> float:
    """Return the largest difference between the losses of two runs.

    Raises:
        AssertionError: they have different steps, or a loss is not finite.
    """
    assert run.steps == other.steps, (
        f"the steps {format_steps(run.steps)} were run, expected {format_steps(other.steps)}"
    )
    assert run.steps, "no step was recorded"
    assert all(map(math.isfinite, run.losses + other.losses)), f"a loss is not finite: {run.losses}"
    return max(abs(loss - other_loss) for loss, other_loss in zip(run.losses, other.losses, strict=True))


def format_steps(steps: Sequence[int]) -> str:
    """Return steps as text, such as "1 to 20 (20)"."""
    return f"{steps[0]} to {steps[-1]} ({len(steps)})" if steps else "none"


def judge_losses(run: Run, other: Run, allowed: float, fall: float = 0.3) -> str:
    """Check that the losses of ``run`` are close to those of ``other``.

    Args:
        fall: minimum decrease from the first to the last loss.

    Raises:
        AssertionError: the difference exceeds ``allowed``, the losses have not decreased, or a step was skipped.
    """
    largest = max_loss_difference(run, other)
    assert not run.num_skipped, f"{run.num_skipped} steps were skipped due to an overflow"
    fallen = run.losses[0] - run.losses[-1]
    summary = f"losses of {len(run.steps)} steps within {largest:.2g}, allowed {allowed:.2g}"
    assert largest <= allowed, f"{summary}: got {_format_losses(run.losses)}, expected {_format_losses(other.losses)}"
    assert fallen >= fall, f"the loss must decrease by {fall:g}, got {run.losses[0]:.4f} to {run.losses[-1]:.4f}"
    return f"{summary}; {run.losses[0]:.3f} to {run.losses[-1]:.3f}"


def _format_losses(losses: Sequence[float]) -> str:
    return " ".join(f"{loss:.5f}" for loss in losses)


def judge_bits(run: Run, other: Run) -> str:
    """Check that losses and gradient norms of two runs are bitwise identical.

    Raises:
        AssertionError: the runs differ; the message has the first step that differs.
    """
    assert run.steps == other.steps, (
        f"the steps {format_steps(run.steps)} were run, expected {format_steps(other.steps)}"
    )
    assert run.steps, "no step was recorded"
    for bits, other_bits in zip(run.bits, other.bits, strict=True):
        assert bits == other_bits, f"step {bits[0]} has loss and norm {bits[1:]}, expected {other_bits[1:]}"
    return f"losses and norms of {len(run.steps)} steps bitwise identical"


def judge_weights(machine: Machine, checkpoint: Path, other_checkpoint: Path) -> str:
    """Check that two checkpoints are bitwise identical, including the optimizer states.

    Raises:
        AssertionError: the checkpoints differ; the message has the differences.
    """
    process = run_python(
        machine, str(ROOT / "tools" / "inspect_checkpoint.py"), str(checkpoint), "--compare", str(other_checkpoint)
    )
    assert process.code == 0, (
        f"the checkpoints differ or were not compared (code {process.code}): {process.text[-600:]}"
    )
    return "weights and moments bitwise identical"


@dataclass
class RunningScript:
    """A script that is running."""

    process: subprocess.Popen[str]
    log: Path
    end: float

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until(self, condition: Callable[[], bool], description: str) -> None:
        """Wait until ``condition()`` is true while the script runs; ``description`` describes the condition in errors.

        Raises:
            AssertionError: the script ends, or the time of the case is over, before the condition is true.
        """
        while not condition():
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode} before {description}: {self.text[-900:]}"
            )
            assert time.monotonic() < self.end, f"timed out before {description}: {self.text[-900:]}"
            time.sleep(0.005)

    def signal(self, signal_number: signal.Signals) -> None:
        """Send a signal to the script's own process."""
        self.process.send_signal(signal_number)

    def finish(self, within_s: float = math.inf) -> int:
        """Wait for the script and return its exit code.

        Raises:
            AssertionError: the script did not end within ``within_s`` seconds or the time of the case.
        """
        limit = min(within_s, self.end - time.monotonic())
        try:
            return self.process.wait(max(limit, 0.1))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {limit:.0f} s: {self.text[-900:]}") from None

    def close(self) -> None:
        """Kill the script's processes if they still run."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def log_path(machine: Machine, folder: Path) -> Path:
    """Return the path of the output of a case's background command: in its folder of logs, otherwise in ``folder``."""
    return (machine.logs or folder) / "background.log"


def start_in_background(
    machine: Machine, words: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> RunningScript:
    """Start ``words`` in the background; the caller must call ``close``."""
    with open(log, "w") as file:
        process = start_command(machine, words, file, env)
    return RunningScript(process, log, machine.deadline)


def last_step(folder: Path) -> int:
    """Return the last step that the run in ``folder`` has recorded; 0 if there is none."""
    from megatron.training.callbacks.metrics_writer import read_metrics

    return max((r["step"] for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"), default=0)
