"""Time the start of a run: --help, --dry-run, and the first step of 4 ranks.

    python benchmarks/start_up.py
    python benchmarks/start_up.py --runs 5 --ranks 2

Wall seconds are the minimum over the runs, on an otherwise idle machine; CPU seconds are the sum over all processes.
The time to the first step of ``run_gpt2.sh`` ends when its line is printed, so it includes shell, launcher, imports,
process groups, model, data and the step. The sample data are created before the measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
from benchmarks.turns import measurement_info  # noqa: E402

FIRST_STEP = "--train-iters 1 --log-interval 1 --eval-iters 0 --warmup 0"


def measure_command(command: list[str], until: str, num_ranks: int) -> tuple[float, float]:
    """Run a command and measure its time.

    Args:
        until: start of the line at which the wall time ends; "" for the end of the command.
        num_ranks: number of ranks, for run scripts; 0 for other commands.

    Returns:
        Wall seconds until that line, and CPU seconds of the whole command.

    Raises:
        RuntimeError: the command fails, or prints no such line.
    """
    env = {**os.environ, "GPUS_PER_NODE": str(num_ranks)} if num_ranks else dict(os.environ)
    before, start, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0.0
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            lines.append(line)
            if until and not wall_s and line.startswith(until):
                wall_s = time.perf_counter() - start
    wall_s = wall_s or (0.0 if until else time.perf_counter() - start)
    if run.returncode or not wall_s:
        raise RuntimeError(f"{' '.join(command)} must succeed, got exit code {run.returncode}:\n{''.join(lines[-20:])}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def start_commands(num_ranks: int, folder: Path) -> dict[str, tuple[list[str], str, int]]:
    """Return name -> (command, start of the line that ends the measurement, number of ranks)."""
    program = [sys.executable, "pretrain_gpt2.py"]
    run = ["bash", "run_gpt2.sh", *FIRST_STEP.split(), "--save", str(folder)]
    return {
        "--help": ([*program, "--help"], "", 0),
        "--dry-run": ([*program, "--dry-run", "--vocab-size", "8192"], "", 0),
        "run_gpt2.sh --dry-run": (["bash", "run_gpt2.sh", "--dry-run"], "", num_ranks),
        "first step": (run, "step 1/1", num_ranks),
    }


def measure(num_runs: int, num_ranks: int) -> dict[str, dict[str, float]]:
    """Return name -> shortest wall seconds, and CPU seconds of that run."""
    make_data = [sys.executable, "tools/make_sample_data.py"]
    if code := subprocess.run(make_data, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(code)  # make_sample_data.py has printed the error
    results: dict[str, dict[str, float]] = {}
    for run_idx in range(num_runs):
        with tempfile.TemporaryDirectory(prefix="start-up-") as folder:
            for name, (command, until, command_ranks) in start_commands(num_ranks, Path(folder) / "run").items():
                wall, cpu = measure_command(command, until, command_ranks)
                if run_idx == 0 or wall < results[name]["wall_s"]:
                    results[name] = {"wall_s": round(wall, 3), "cpu_s": round(cpu, 3)}
    return results


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="runs of each command; the fastest is used (default: 3)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the training run (default: 4)")
    args = parser.parse_args()
    results = measure(args.runs, args.ranks)
    sys.stdout.write(json.dumps({**measurement_info(), "ranks": args.ranks, **results}) + "\n")


if __name__ == "__main__":
    main()
