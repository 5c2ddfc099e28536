"""Canary: each CUDA-only call of the project once, compared with the CPU, in about a minute on a GPU.

    python -m benchmarks.gpu.canary                      # all rows of canary_rows.py and canary_kernels.py
    python -m benchmarks.gpu.canary --out runs/gpu       # and write canary.json
    python -m benchmarks.gpu.canary --device cpu         # rows that exist on a CPU; the others need CUDA
    python -m benchmarks.gpu.canary --only grouped_mm
    TRITON_INTERPRET=1 python -m benchmarks.gpu.canary --device cpu --only gated    # Triton kernels on a CPU

Each row prints one line: passed, failed, recorded (never judged), needs CUDA, or no package (an optional one). The rows
run in a second process. If it dies, does not answer within --row-s seconds, or its device has failed, the row failed
and the next row starts in a new process, so that one bad kernel does not hide the others. The exit code is 1 if a row
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.part import tie_to_parent

if TYPE_CHECKING:
    from benchmarks.gpu.canary_compare import Row

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED, RECORDED = "passed", "failed", "recorded"
NEEDS_CUDA, NEEDS_PACKAGE = "needs CUDA", "no package"
STATUSES = (PASSED, FAILED, RECORDED, NEEDS_CUDA, NEEDS_PACKAGE)
DEVICE_FAILED = 3
"""Exit code of the second process after a row whose device cannot be used any more."""
ANSWER = "@canary "
"""Prefix of the lines that the second process prints for this one."""
START_S = 60.0
"""Seconds within which the second process must have imported torch."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.canary",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="only rows whose names contain TEXT"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of canary.json")
    parser.add_argument(
        "--row-s", type=float, default=40.0, help="time limit of a row in seconds (default: %(default)g)"
    )
    parser.add_argument(
        "--limit-factor",
        type=float,
        default=1.0,
        metavar="F",
        help="factor of --row-s and of the time limit of the start, for a busy machine (default: %(default)g)",
    )
    parser.add_argument("--rows", default="benchmarks.gpu.canary_rows", metavar="MODULE", help="default: %(default)s")
    parser.add_argument("--from-row", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# The second process.


def run_rows(device_type: str, first: int, only: Sequence[str], module_name: str) -> int:
    """Run the selected rows from index ``first`` on, and print an answer before and after each.

    Args:
        module_name: module that has the rows as ``ROWS``.

    Returns:
        The exit code.
    """
    import torch

    rows: Sequence[Row] = importlib.import_module(module_name).ROWS
    device = torch.device(device_type, *([0] if device_type == "cuda" else []))
    torch.backends.cuda.matmul.allow_tf32 = False
    if device_type == "cuda":
        torch.cuda.set_device(device)
    print(ANSWER + json.dumps({"rows": [row.name for row in rows], "about": describe(device)}), flush=True)
    for idx, row in enumerate(rows):
        if idx < first or (only and not any(text in row.name for text in only)):
            continue
        print(ANSWER + json.dumps({"begin": idx}), flush=True)
        start = time.perf_counter()
        status, text = judge_row(row, device)
        if device_type == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                status, text = FAILED if row.is_judged else RECORDED, f"{text}; the device failed: {error}"[:1500]
                print(ANSWER + json.dumps({"end": idx, "status": status, "text": text, "seconds": 0.0}), flush=True)
                os._exit(DEVICE_FAILED)
        answer = {"end": idx, "status": status, "text": text, "seconds": round(time.perf_counter() - start, 2)}
        print(ANSWER + json.dumps(answer), flush=True)
    return 0


def judge_row(row: Row, device: Any) -> tuple[str, str]:
    """Run a row; return its status and one line of text."""
    from benchmarks.gpu.canary_compare import NeedsCuda, NeedsPackage

    try:
        return (PASSED if row.is_judged else RECORDED), row.run(device)
    except NeedsCuda:
        return NEEDS_CUDA, ""
    except NeedsPackage as error:
        return NEEDS_PACKAGE, f"{error} is not installed"
    except Exception as error:
        traceback.print_exc()
        lines = " | ".join(line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip())
        return (FAILED if row.is_judged else RECORDED), lines[:1500]


def describe(device: Any) -> dict[str, Any]:
    """Return the device and the versions of libraries."""
    import platform

    import torch

    about: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(ImportError):
        import triton

        about["triton"] = triton.__version__
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return about


# The first process.


class Worker:
    """The second process and its answers. Its other output is printed."""

    def __init__(self, args: argparse.Namespace, first: int) -> None:
        words = ["--device", args.device, "--from-row", str(first), "--rows", args.rows]
        for text in args.only:
            words += ["--only", text]
        self.process = subprocess.Popen(
            tie_to_parent([sys.executable, "-m", "benchmarks.gpu.canary", *words]),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(json.loads(line.removeprefix(ANSWER)))
            else:
                print("  | " + line.rstrip(), flush=True)
        self._answers.put(None)

    def answer(self, within_s: float) -> dict[str, Any] | None:
        """Return the next answer; None if the process has ended.

        Raises:
            TimeoutError: there is none within ``within_s`` seconds.
        """
        try:
            return self._answers.get(timeout=within_s)
        except queue.Empty:
            raise TimeoutError from None

    def close(self) -> int:
        """End the process; return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def answers(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the answers of all rows, from as many processes as are needed; the first one describes the device."""
    first, is_described = 0, False
    start_s, row_s = START_S * args.limit_factor, args.row_s * args.limit_factor
    while True:
        worker, running = Worker(args, first), None
        reason = ""
        try:
            while True:
                try:
                    answer = worker.answer(row_s if running is not None else start_s)
                except TimeoutError:
                    reason = f"did not end in {row_s:.0f} s" if running is not None else "did not start in time"
                    break
                if answer is None:
                    break
                if "rows" in answer:
                    if not is_described:
                        yield answer
                    is_described = True
                elif "begin" in answer:
                    running = answer["begin"]
                else:
                    running, first = None, answer["end"] + 1
                    yield answer
        finally:
            code = worker.close()
        if running is not None:
            text = reason or f"the process ended with code {code}"
            yield {"end": running, "status": FAILED, "text": text, "seconds": 0.0}
            first = running + 1
        elif code != DEVICE_FAILED:
            if not is_described:
                raise SystemExit(
                    f"error: the canary's process {reason or f'ended with code {code}'} before its first row"
                )
            return


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows and print a line for each; return the exit code."""
    args = parse_args(argv)
    if args.from_row >= 0:
        return run_rows(args.device, args.from_row, args.only, args.rows)
    names: list[str] = []
    content: dict[str, Any] = {"about": {}, "rows": {}}
    for answer in answers(args):
        if "rows" in answer:
            names, content["about"] = answer["rows"], answer["about"]
            print(json.dumps(answer["about"]), flush=True)
        else:
            name = names[answer["end"]]
            content["rows"][name] = {key: answer[key] for key in ("status", "text", "seconds")}
            print(f"{answer['status']:10} {name} ({answer['seconds']:.1f} s): {answer['text']}", flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "canary.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    statuses = [verdict["status"] for verdict in content["rows"].values()]
    counts = [f"{statuses.count(status)} {status}" for status in STATUSES]
    print("== canary: " + ", ".join(count for count in counts if not count.startswith("0 ")))
    return int(FAILED in statuses)


if __name__ == "__main__":
    sys.exit(main())
