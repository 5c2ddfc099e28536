"""The first 15 minutes on a GPU: calls A and B, each a list of steps with a time limit.

    bash benchmarks/gpu/first.sh A           # 520 s at most
    bash benchmarks/gpu/first.sh B           # 170 s at most; continues the results of A
    bash benchmarks/gpu/first.sh failed      # 170 s at most: repeats the failed cases of A and B
    bash benchmarks/gpu/first.sh A --dry     # on a CPU with toy sizes
    bash benchmarks/gpu/first.sh A --list    # the steps and their commands

The output goes to $OUT (or --out, otherwise runs/gpu-first): at most eight files.

| file | content |
|---|---|
| first-a.log, first-b.log | everything that the steps print, and a table of the steps at the end |
| canary.json | the rows of the canary |
| gpu-<device>-<date>.json, .md | verdicts and figures of all cases; tables |
| gpu-<device>-<date>-logs.tgz | the complete output of failed cases |

Results and logs are also kept in --state, outside of $OUT, so that a later call on the same machine continues them. To
continue them on another machine, put gpu-<device>-<date>.json into .gpu-references. A step that reaches its limit is
killed with all its processes, and the next step starts.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.gpu.part import NOT_RUN_CODE, ROOT, TIMED_OUT, tie_to_parent
from benchmarks.gpu.references import REFERENCES_DIR, carried_commit

CALL_LIMITS_S = {"A": 520.0, "B": 170.0, "failed": 170.0}
"""Call -> seconds for all steps, the installation of wheels and the start."""
RESERVED_S = 20.0
"""Seconds of a call for the installation of wheels and for copies of files."""
MARGIN_S = 8.0
"""Seconds before the limit of a step at which the benchmark itself stops, so that it can save its verdicts."""
MAX_LOG_BYTES = 12 * 2**20
"""Bytes of a log in $OUT; a file of 16 MiB or more might not be returned."""
DRY_FACTOR = 10.0
"""Default factor of all time limits in a dry run, which may share a few cores with other work."""
STATUS_BY_CODE = {0: "passed", TIMED_OUT: "killed at its limit", NOT_RUN_CODE: "not run: some or all cases"}
"""Exit code of a step -> its status in the table; all others are failures."""


@dataclass(frozen=True)
class Step:
    """One command of a call.

    Args:
        limit_s: seconds after which the command is killed.
        program: "benchmark" (``python -m benchmarks.gpu``), "canary", or a command that only a GPU machine has.
        words: arguments of the program.
        dry_words: arguments in a dry run, if other cases are selected than on a GPU.
    """

    name: str
    limit_s: float
    program: str
    words: tuple[str, ...] = ()
    dry_words: tuple[str, ...] | None = None


def only(*texts: str) -> tuple[str, ...]:
    """Return the flags that select the cases whose names contain one of ``texts``."""
    return tuple(word for text in texts for word in ("--only", text))


def skip(*texts: str) -> tuple[str, ...]:
    """Return the flags that exclude the cases whose names contain one of ``texts``."""
    return tuple(word for text in texts for word in ("--skip", text))


LAYOUT_NAMES = (
    "gpt2 fp64 tp 2",
    "gpt2 fp64 pp 2, 1f1b",
    "gpt2 fp64 dp 2, ZeRO 1",
    "gpt2 fp64 dp 2, ZeRO 3",
    "gpt2 fp64 pp 2, zb-h1",
    "gpt2 fp64 cp 2",
    "llama fp64 dp 2 x ep 2",
)
VARIANT_TEXTS = ("experts", "fusion", "Muon", "documents", "soft-caps")
FAULT_NAMES = ("waits of the host", "killed rank", "a batch that cannot fit", "NaN ends")
CALLS: dict[str, tuple[Step, ...]] = {
    "A": (
        Step("machine", 10, "nvidia-smi"),
        Step("canary", 75, "canary"),
        Step("speed of GPT-2 1.3B", 110, "benchmark", ("speed", *only("gpt2 1.3b s2048"))),
        Step("speed of a LLaMA 7B slice", 55, "benchmark", ("speed", *only("llama 7b slice s2048"))),
        Step("speed of GPT-2 125M", 40, "benchmark", ("speed", *only("gpt2 125m s1024"))),
        Step(
            "tests on the device", 110, "benchmark", ("tests", *only("gpu: "), *skip("documents", "compiled")),
            dry_words=("tests", *only("gpu/test_ops", "gpu/test_optimizer", "gpu/test_documents.py 1/")),
        ),
        Step(
            "training", 100, "benchmark", ("train", "tables", *only("fp32", "bf16", "twice", "kill -9")),
            dry_words=("train", "tables", *only("gpt2 fp32", "gpt2 bf16", *VARIANT_TEXTS)),
        ),
    ),
    "B": (
        Step("faults", 55, "benchmark", ("faults", *only(*FAULT_NAMES))),
        Step(
            "layouts", 60, "benchmark", ("layouts", *only(*LAYOUT_NAMES), *skip("pp 2 x dp 2")),
            dry_words=("layouts", *only("gpt2 fp64 cp 2", "llama fp64 dp 2 x ep 2")),
        ),
        Step("documents", 35, "benchmark", ("tests", "tables", *only("gpu/test_documents.py 1/"))),
    ),
    "failed": (
        Step(
            "failed cases", 150, "benchmark",
            ("train", "tests", "layouts", "faults", "speed", "tables", "--failed", "--known"),
        ),
    ),
}  # fmt: skip
"""Call -> its steps, the most important first. MFU comes before the tests, because only a GPU can measure it."""


def command_of(step: Step, args: argparse.Namespace) -> list[str]:
    """Return the command line of a step."""
    factor = args.dry_factor if args.dry else 1.0
    device = ["--device", "cpu" if args.dry else "cuda"]
    words = step.dry_words if args.dry and step.dry_words is not None else step.words
    limit_words = ["--limit-factor", f"{factor:g}"] if args.dry else []
    if step.program == "canary":
        return [sys.executable, "-m", "benchmarks.gpu.canary", *device, "--out", str(args.out), *limit_words, *words]
    if step.program == "benchmark":
        paths = ["--out", str(args.out), "--logs", str(args.state / "logs")]
        minutes = ["--minutes", f"{factor * (step.limit_s - MARGIN_S) / 60:.2f}"]
        commit = carried_commit(ROOT / REFERENCES_DIR)
        commit_words = ["--commit", commit] if commit and not (ROOT / ".git").exists() else []
        return [
            *(sys.executable, "-m", "benchmarks.gpu", *words, *device, *paths, *minutes, *limit_words, *commit_words)
        ]
    return [step.program, *words]


class Log:
    """File that receives a copy of everything that is printed, up to ``MAX_LOG_BYTES``."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = open(path, "w", encoding="utf-8", errors="replace")  # noqa: SIM115 - for the call
        self._num_bytes = 0

    def write(self, line: str) -> None:
        """Print a line, and write it to the file at once, because the machine may be lost at any time."""
        print(line, flush=True)
        self._num_bytes += len(line.encode(errors="replace")) + 1
        if self._num_bytes <= MAX_LOG_BYTES:
            self._file.write(line + "\n")
            self._file.flush()


def run_step(command: Sequence[str], limit_s: float, log: Log) -> int:
    """Run a command with its output in ``log``; return its exit code, or ``TIMED_OUT`` if it was killed."""
    process = subprocess.Popen(
        tie_to_parent(command),
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def copy_output() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line.rstrip("\n"))

    reader = threading.Thread(target=copy_output, daemon=True)
    reader.start()
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = TIMED_OUT
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    reader.join(5.0)  # a process that the step left behind may keep its output open
    return code


def copy_results(source: Path, target: Path) -> None:
    """Copy results from one folder to another, so that the next call continues them."""
    target.mkdir(parents=True, exist_ok=True)
    for path in [*source.glob("gpu-*.json"), *source.glob("canary.json")]:
        shutil.copyfile(path, target / path.name)


def run_call(name: str, args: argparse.Namespace) -> int:
    """Run the steps of a call and print a table of them; return 1 if a step failed or has cases that were not run."""
    start = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    copy_results(args.state if any(args.state.glob("gpu-*.json")) else ROOT / REFERENCES_DIR, args.out)
    log, rows, code = Log(args.out / f"first-{name.lower()}.log"), [], 0
    factor = args.dry_factor if args.dry else 1.0
    end = start + factor * (CALL_LIMITS_S[name] - RESERVED_S)
    for step in CALLS[name]:
        command, limit_s = command_of(step, args), min(factor * step.limit_s, end - time.monotonic())
        log.write(f"=== {step.name}, at most {limit_s:.0f} s: {shlex.join(command)}")
        step_start = time.monotonic()
        if limit_s < 1:
            status, code = "no time left", 1
        elif shutil.which(command[0]) is None:
            status = "not on this machine"
        else:
            step_code = run_step(command, limit_s, log)
            status = STATUS_BY_CODE.get(step_code, f"failed, code {step_code}")
            code |= int(step_code != 0)
        copy_results(args.out, args.state)
        rows.append(f"{step.name:32} {time.monotonic() - step_start:7.1f} s  {status}")
    log.write(f"=== call {name}: {time.monotonic() - start:.1f} s")
    for row in rows:
        log.write(row)
    return code


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/first.sh",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("call", choices=tuple(CALLS))
    parser.add_argument("--dry", action="store_true", help="toy sizes on a CPU, with longer time limits")
    parser.add_argument(
        "--dry-factor",
        type=float,
        default=DRY_FACTOR,
        help="factor of the time limits with --dry (default: %(default)g)",
    )
    parser.add_argument("--list", action="store_true", help="print the steps and exit")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT") or "runs/gpu-first"),
        help="folder of the output (default: $OUT, otherwise runs/gpu-first)",
    )  # fmt: skip
    default_state = Path(tempfile.gettempdir()) / f"megatron-gpu-first-{os.getuid()}"
    parser.add_argument(
        "--state", type=Path, default=default_state,
        help="folder that keeps results and logs between the calls (default: %(default)s)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.dry and args.state == default_state:
        args.state = default_state.with_name(default_state.name + "-dry")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run a call, or list its steps; return the exit code."""
    args = parse_args(argv)
    if args.list:
        for step in CALLS[args.call]:
            print(f"{step.name}, at most {step.limit_s:.0f} s: {shlex.join(command_of(step, args))}")
        return 0
    return run_call(args.call, args)


if __name__ == "__main__":
    sys.exit(main())
