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
NEVER = {"torch", "deepspeed", "tds", "matplotlib", "tensorboard", "transformers", "sympy", "tokenizers"}
"""What neither --help nor --dry-run needs."""
NOT_YET = {
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


def imported(program: str, among: set[str]) -> set[str]:
    """Return which packages ``among`` are there after ``program``."""
    ends = f"import sys; sys.stderr.write('imported ' + ' '.join(sorted({among!r} & set(sys.modules))) + chr(10))"
    text = f"import atexit\natexit.register(lambda: exec({ends!r}))\n{program}"
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("imported ")]
    return set(told[-1].split()[1:])


@pytest.mark.parametrize("flags", ["--help", "--dry-run --vocab-size 8192"])
def test_questions_about_flags_import_nothing_large(flags: str) -> None:
    argv = ["pretrain_gpt2.py", *flags.split()]
    run = f"import runpy, sys; sys.argv = {argv!r}; runpy.run_path('pretrain_gpt2.py', run_name='__main__')"
    assert imported(run, NEVER) <= {"tds"}  # which is lazy itself


@pytest.mark.slow
def test_what_ranks_are_forked_with_has_no_more_than_a_first_step_needs(capsys: pytest.CaptureFixture[str]) -> None:
    machine.main()
    line = next(line for line in capsys.readouterr().out.splitlines() if "--preload" in line)
    modules = line.partition("--preload ")[2].strip("'")
    found = imported(f"import {modules}", NOT_YET | {"torch", "deepspeed", "tds"})
    assert found == {"torch", "deepspeed", "tds"}


@pytest.mark.slow
def test_a_start_up_to_the_first_step_is_measured(tmp_path: Path) -> None:
    (command, until, ranks) = start_up.starts(2, tmp_path / "run")["first step"]
    wall, cpu = start_up.measured(command, until, ranks)
    assert wall > 0 and cpu > 0.5


@pytest.mark.slow
def test_a_start_that_fails_or_never_steps_is_told() -> None:
    for code in ("raise SystemExit(3)", "print('no step')"):
        with pytest.raises(RuntimeError, match="must succeed"):
            start_up.measured([sys.executable, "-c", code], "step 1", 0)
    start = time.perf_counter()
    wall, _ = start_up.measured(
        [sys.executable, "-c", "print('step 1', flush=True); import time; time.sleep(1)"], "step", 0
    )
    assert wall < time.perf_counter() - start - 0.5, "what comes behind the first step does not count"
