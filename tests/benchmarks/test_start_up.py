"""What a start imports, and what the benchmark of a start measures; how long it takes is not for tests."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import start_up
from megatron.launch import machine

ROOT = Path(__file__).resolve().parents[2]
NOT_FOR_HELP = {"torch", "deepspeed", "tds", "matplotlib", "tensorboard", "transformers", "sympy", "tokenizers"}
"""What neither --help nor --dry-run needs."""
NOT_FOR_FIRST_STEP = {
    "matplotlib",
    "transformers",
    "wandb",
    "scipy",
    "pandas",
    "IPython",
    "torchvision",
    "pydoc_data",
}
"""What no first step needs; setuptools comes with torch's C++ extensions, which DeepSpeed's optimizers import."""


def find_imported(program: str, packages: set[str]) -> set[str]:
    """Return which packages ``packages`` are there after ``program``."""
    report_code = (
        f"import sys; sys.stderr.write('imported ' + ' '.join(sorted({packages!r} & set(sys.modules))) + chr(10))"
    )
    text = f"import atexit\natexit.register(lambda: exec({report_code!r}))\n{program}"
    result = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("imported ")]
    return set(lines[-1].split()[1:])


@pytest.mark.parametrize("flags", ["--help", "--dry-run --vocab-size 8192"])
def test_help_and_dry_run_import_no_large_packages(flags: str) -> None:
    argv = ["pretrain_gpt2.py", *flags.split()]
    run = f"import runpy, sys; sys.argv = {argv!r}; runpy.run_path('pretrain_gpt2.py', run_name='__main__')"
    assert find_imported(run, NOT_FOR_HELP) <= {"tds"}  # which is lazy itself


@pytest.mark.slow
def test_preloaded_modules_exclude_unneeded_packages(capsys: pytest.CaptureFixture[str]) -> None:
    machine.main()
    line = next(line for line in capsys.readouterr().out.splitlines() if "--preload" in line)
    modules = line.partition("--preload ")[2].strip("'")
    packages = find_imported(f"import {modules}", NOT_FOR_FIRST_STEP | {"torch", "deepspeed", "tds"})
    assert packages == {"torch", "deepspeed", "tds"}


@pytest.mark.slow
def test_time_to_first_step_is_measured(tmp_path: Path) -> None:
    (command, until, ranks) = start_up.start_commands(2, tmp_path / "run")["first step"]
    wall, cpu = start_up.measure_command(command, until, ranks)
    assert wall > 0 and cpu > 0.5


@pytest.mark.slow
def test_failed_start_raises() -> None:
    for code in ("raise SystemExit(3)", "print('no step')"):
        with pytest.raises(RuntimeError, match="must succeed"):
            start_up.measure_command([sys.executable, "-c", code], "step 1", 0)
    start = time.perf_counter()
    wall, _ = start_up.measure_command(
        [sys.executable, "-c", "print('step 1', flush=True); import time; time.sleep(1)"], "step", 0
    )
    assert wall < time.perf_counter() - start - 0.5, "what comes behind the first step does not count"
