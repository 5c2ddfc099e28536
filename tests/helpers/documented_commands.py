"""Commands in the docstrings of programs, and a folder that looks like a clone, in which they can be run."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLONED_PATHS = (
    "benchmarks", "docs", "examples", "megatron", "tds", "tests", "tools", "README.md",
    "ds_config_gpt2.json", "pretrain_gpt2.py", "run_gpt2.sh",
)  # fmt: skip
MAIN_GUARD = 'if __name__ == "__main__"'

Smoke = Mapping[str, Sequence[str]]
"""Program (its path in the repository) -> its commands in the order in which they run.

Each command is a documented command followed by flags that make it small. The flags may repeat flags of the documented
command with other numbers, files or folders, because the last value is used.
"""


def find_programs(folder: str) -> list[str]:
    """Return the paths in the repository of all programs in ``folder``."""
    files = sorted((ROOT / folder).rglob("*.py"))
    return [file.relative_to(ROOT).as_posix() for file in files if MAIN_GUARD in file.read_text("utf-8")]


def documented_commands(program: str) -> list[str]:
    """Return the commands in the docstring of ``program``, without comments."""
    docstring = ast.get_docstring(ast.parse((ROOT / program).read_text("utf-8"))) or ""
    lines = re.sub(r"\\\n\s*", "", docstring).splitlines()
    commands = [re.split(r"\s{3,}", line.strip())[0] for line in lines if line.startswith("    ") and _is_command(line)]
    return [shlex.join(shlex.split(command, comments=True)) for command in commands]


def _is_command(line: str) -> bool:
    return any(word in line for word in ("python ", "bash "))


def find_smoke_table_problems(smoke: Smoke, exempt: Mapping[str, str], folder: str) -> list[str]:
    """Return the problems of the table ``smoke`` as text.

    Every program in ``folder`` must have an entry or be exempt, and the commands of an entry must start with commands
    in the docstring of its program.
    """
    existing = set(find_programs(folder))
    problems = [f"{name} has no smoke command" for name in sorted(existing - smoke.keys() - exempt.keys())]
    problems += [f"{name} is no program" for name in sorted((smoke.keys() | exempt.keys()) - existing)]
    for name in sorted(existing & smoke.keys()):
        commands = documented_commands(name)
        smoke_commands = [line for line in smoke[name] if any(word in line for word in (Path(name).stem, "gpu/run.sh"))]
        if not smoke_commands:
            problems.append(f"{name} has no smoke command that starts it")
        for line in smoke_commands:
            normalized = shlex.join(shlex.split(line.rpartition("&& ")[2]))
            if not any(normalized == command or normalized.startswith(command + " ") for command in commands):
                problems.append(f"{line!r} does not begin with a command of the docstring of {name}: {commands}")
    return problems


class Clone:
    """A folder with links to the contents of a clone, so that documented commands run in it as a user types them.

    Args:
        folder: an empty or new folder, to which the commands write their files.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        for name in CLONED_PATHS:
            (folder / name).symlink_to(ROOT / name)

    def run(self, command: str, timeout_s: float = 600.0) -> str:
        """Run ``command`` in a shell and return its standard output.

        Raises:
            AssertionError: the exit code is not 0; the message has all output.
        """
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env |= {"PYTHON": sys.executable, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        process = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], cwd=self.folder, env=env, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip
        assert process.returncode == 0, f"{command}: exit code {process.returncode}\n{process.stdout}\n{process.stderr}"
        return process.stdout
