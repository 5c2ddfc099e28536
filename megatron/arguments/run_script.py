"""The parts of --help that describe the run script: its defaults for flags, and the variables at its top."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

SCRIPT_VARIABLE = "MEGATRON_RUN_SCRIPT"
"""Environment variable with the path of the run script that started the program."""
FLAGS_VARIABLE = "MEGATRON_VARIABLES"
"""Environment variable with FLAG=VARIABLE pairs."""
_VARIABLE = re.compile(r"(\w+)=\$\{\1:-(.*?)\}\s*(?:#\s*(.*))?")
_CONTINUED = re.compile(r"\s+#\s*(.*)")
_END = "# ----"
_COLUMN = 36


def command(env: Mapping[str, str]) -> str | None:
    """Format the command that starts the run script, such as "bash run_gpt2.sh"; None without a script."""
    path = env.get(SCRIPT_VARIABLE)
    return f"bash {os.path.relpath(path)}" if path else None


def relative_to_cwd(value: object) -> object:
    """Format a run script's default for --help: a path below the working directory becomes relative."""
    cwd_prefix = os.getcwd() + os.sep
    return value.removeprefix(cwd_prefix) if isinstance(value, str) else value


def variables_text(env: Mapping[str, str]) -> str:
    """Format the --help section on the run script's variables; "" without a script."""
    path = env.get(SCRIPT_VARIABLE)
    if not path:
        return ""
    flags = {name: flag for flag, _, name in (pair.partition("=") for pair in env.get(FLAGS_VARIABLE, "").split())}
    width = max(shutil.get_terminal_size().columns - 2, _COLUMN + 20)
    lines = [
        "variables, set before the command or at the top of the script:",
        f"  NLAYERS=12 {command(env)}",
        "A variable sets the flag next to it; the flag itself takes precedence.",
        "",
    ]
    for name, about in variables_of(Path(path)):
        left = f"  {name}, as {flags[name]}" if name in flags else f"  {name}"
        indent = " " * _COLUMN
        wrapped = textwrap.wrap(about, width - _COLUMN) or [""]
        if len(left) > _COLUMN - 2:
            lines.append(left)
            left = ""
        lines += [f"{left:{_COLUMN}}{wrapped[0]}".rstrip(), *(indent + line for line in wrapped[1:])]
    return "\n".join(lines) + "\n"


def variables_of(script: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, description) for each variable at the top of a run script.

    The description starts with the value if the script sets one.
    """
    name, about = "", ""
    for line in script.read_text(encoding="utf-8").split(_END)[0].splitlines():
        if match := _VARIABLE.fullmatch(line):
            if name:
                yield name, about
            name, value, about = match[1], match[2], match[3] or ""
            if value and not about.startswith(value):
                about = f"set to {value} in the script; {about}"
        elif name and (continued := _CONTINUED.fullmatch(line)):
            about += f" {continued[1]}"
    if name:
        yield name, about
