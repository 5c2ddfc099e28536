"""Print a one-line message if a program is started with a Python that lacks the project's packages, such as numpy.

``import megatron`` installs the hook of this module as ``sys.excepthook``. The hook covers every program and tool that
imports megatron before other packages.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "megatron-tds"
IMPORT_NAMES = {"pyyaml": "yaml"}
"""Package name -> import name, where the two differ."""
MIN_PYTHON = (3, 11)
EXIT_CODE = 2
"""Exit code of ``ConfigError``, whose module is not imported here."""
Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


def install() -> None:
    """Install the exception hook that reports a missing environment in one line."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = hook_before(sys.excepthook)


def hook_before(next_hook: Hook) -> Hook:
    """Return an exception hook that exits with code 2 if ``problem`` has a message; otherwise ``next_hook`` runs."""

    def hook(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        exit_if_outside(error)
        next_hook(error_type, error, trace)

    return hook


def exit_if_outside(error: BaseException) -> None:
    """Print the message of ``problem`` and exit with code 2; return if ``error`` has another cause.

    Raises:
        SystemExit: ``problem`` returned a message.
    """
    text = problem(error)
    if text is not None:
        sys.stderr.write(f"error: {text}\n")
        raise SystemExit(EXIT_CODE)  # an uncaught exception would exit with 1


def problem(error: BaseException) -> str | None:
    """Return a message if ``error`` is caused by running outside of the project's environment, otherwise None.

    Returns None if the project is installed: a missing package is then a defect, and the traceback is needed.
    """
    if sys.version_info < MIN_PYTHON:
        needed, actual = ".".join(map(str, MIN_PYTHON)), ".".join(map(str, sys.version_info[:3]))
        return f"Python {needed} or newer is needed, this is {actual} ({sys.executable}). {setup_advice()}"
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    package = error.name.partition(".")[0]
    if package not in required_packages() or is_installed():
        return None
    return f"this Python ({sys.executable}) lacks {package}. {setup_advice()}"


def setup_advice() -> str:
    """Explain how to activate the environment, and how to create it if it is missing."""
    venv = Path(os.environ.get("MEGATRON_VENV") or ROOT / ".venv")
    activate, script = _display_path(venv / "bin" / "activate"), _display_path(ROOT / "run_gpt2.sh")
    if (venv / "bin" / "activate").exists():
        return f"Activate the project's environment: . {activate}"
    return f"Run `bash {script}` once, which creates the project's environment, then activate it: . {activate}"


def required_packages() -> set[str]:
    """Return the packages that pyproject.toml requires, by import name; empty without that file."""
    import tomllib  # Python 3.11

    try:
        names = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    except (OSError, ValueError, KeyError):
        return set()
    packages = [re.split(r"[^\w.-]", name, maxsplit=1)[0].lower() for name in names]
    return {IMPORT_NAMES.get(package, package.replace("-", "_")) for package in packages}


def is_installed() -> bool:
    """Return True if pip has installed the project in this Python. An .egg-info in the repository does not count."""
    import importlib.metadata  # takes 20 ms, needed only after an error

    distributions = importlib.metadata.distributions(name=PROJECT)
    return any(Path(str(distribution.locate_file(""))).resolve() != ROOT for distribution in distributions)


def _display_path(path: Path) -> str:
    """Format ``path`` as the user would type it: relative if it is below the working directory."""
    absolute = Path(os.path.abspath(path))
    working_dir = Path.cwd()
    return str(absolute.relative_to(working_dir)) if absolute.is_relative_to(working_dir) else str(absolute)
