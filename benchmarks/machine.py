"""What the numbers of a benchmark depend on."""

from __future__ import annotations

import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def surroundings() -> dict[str, Any]:
    """Return command, commit, versions and processor."""
    from megatron.training.run_folder import commit

    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "versions": {name: _version(name) for name in ("torch", "deepspeed", "transformers")},
        "python": platform.python_version(),
        "processor": cpu_name(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Return the processor's name where the system tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
