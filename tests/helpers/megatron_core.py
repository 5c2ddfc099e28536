"""Programs that use megatron-core, NVIDIA's package, as a reference for ours; each runs in a process of its own.

Both packages are named ``megatron``, so no process can import both. A test starts a program, a module of ``tests``
with a function ``main``, and exchanges arrays with it through files of a folder:

    run_megatron_core("tests.megatron_core.gpt_program", tmp_path, num_ranks=2, seed=1)

calls ``main(rank, tmp_path, seed=1)`` in two forked processes that form a gloo group on the CPU. There
``megatron.core`` is NVIDIA's, and no other module of ``megatron`` can be imported. Before the program is imported,
``tests.helpers.megatron_core_on_cpu`` replaces the calls of CUDA.

``bash run_tests.sh --all`` installs the package. MEGATRON_CORE names another folder, one that
``pip install --no-deps --target FOLDER megatron-core==0.16.1`` has filled. Release 0.16.1 is the last one for
Python 3.11, which this project supports; 0.17 and later need Python 3.12.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_DIR = Path(os.environ.get("MEGATRON_CORE") or Path(sys.prefix) / "megatron-core")
"""The folder with the package. The default is the folder of the environment that tools/set_up.py fills."""

IMPORT_DEADLINE_S = 240
"""Seconds for the imports of a program: they take 5 s of CPU time, and much longer on a busy machine."""

requires_megatron_core = pytest.mark.skipif(
    not (PACKAGE_DIR / "megatron" / "core").is_dir(),
    reason="megatron-core is not installed: `bash run_tests.sh --all` installs it, or MEGATRON_CORE names its folder",
)


class ProgramFailure(AssertionError):
    """A program with megatron-core failed or did not end in time."""


def run_megatron_core(
    program: str, folder: Path, num_ranks: int = 1, *, deadline_s: float = 120.0, **options: Any
) -> None:
    """Call ``main(rank, folder, **options)`` of a module in ``num_ranks`` processes that use megatron-core.

    Args:
        program: dotted name of the module, such as "tests.megatron_core.gpt_program".
        folder: passed to ``main``, for the files that the test and the program exchange.
        deadline_s: seconds within which the ranks must end, without the time of the imports.
        options: keyword arguments of ``main``; values that JSON can represent.

    Raises:
        ProgramFailure: with the output of the program, which contains the traceback of each rank that failed.
    """
    call = json.dumps([str(PACKAGE_DIR), program, str(folder), num_ranks, deadline_s, options])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.megatron_core", call]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = process.communicate(timeout=deadline_s + IMPORT_DEADLINE_S)
    except BaseException as error:
        process.kill()
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    if process.returncode:
        raise ProgramFailure(f"{program} exited with code {process.returncode}:\n{output}")


def _run_ranks(package_dir: str, program: str, folder: str, num_ranks: int, deadline_s: float, options: dict) -> None:
    """Replace our package by NVIDIA's, import the program, and fork its ranks."""
    package = ModuleType("megatron")
    package.__path__ = [str(Path(package_dir) / "megatron")]
    sys.modules["megatron"] = package
    sys.meta_path.insert(0, _OurModulesHidden())
    from tests.helpers import megatron_core_on_cpu
    from tests.helpers.harness import run_ranks

    megatron_core_on_cpu.replace_cuda_calls()
    main = importlib.import_module(program).main
    run_ranks(num_ranks, _call_main, main, Path(folder), options, deadline_s=deadline_s)


class _OurModulesHidden:
    """Import hook that rejects modules of ``megatron`` other than megatron.core; an editable install finds ours."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith("megatron.") and name.split(".")[1] != "core":
            raise ModuleNotFoundError(f"No module named {name!r} next to megatron-core", name=name)


def _call_main(rank: int, main: Any, folder: Path, options: dict[str, Any]) -> None:
    main(rank, folder, **options)


if __name__ == "__main__":
    _run_ranks(*json.loads(sys.argv[1]))
