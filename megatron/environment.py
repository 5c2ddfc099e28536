"""A message in one line if a program is started with a Python that lacks the project's packages, such as numpy.

``import megatron`` installs it as ``sys.excepthook``, so every program and tool has it that imports megatron before
other packages.
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
"""Import names that differ from the name of the package."""
OLDEST = (3, 11)
EXIT_CODE = 2
"""That of ``ConfigError``, whose module is not imported here."""
Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


def install() -> None:
    """Report a missing environment in one line when an exception ends this process."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = hook_before(sys.excepthook)


def hook_before(other: Hook) -> Hook:
    """Return an exception hook that prints ``problem`` and exits with code 2, or calls ``other`` if there is none."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        exit_if_outside(error)
        other(kind, error, trace)

    return hook


def exit_if_outside(error: BaseException) -> None:
    """Print ``problem`` of ``error`` and exit with code 2 if there is one; otherwise return.

    Raises:
        SystemExit: there is one.
    """
    text = problem(error)
    if text is not None:
        sys.stderr.write(f"error: {text}\n")
        raise SystemExit(EXIT_CODE)  # otherwise an uncaught exception ends the process with 1


def problem(error: BaseException) -> str | None:
    """Return the message if ``error`` is due to a Python outside of the project's environment, else None.

    In an environment where the project is installed a missing package is a defect, and its traceback is needed.
    """
    if sys.version_info < OLDEST:
        needed, found = ".".join(map(str, OLDEST)), ".".join(map(str, sys.version_info[:3]))
        return f"Python {needed} or newer is needed, this is {found} ({sys.executable}). {cure()}"
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    package = error.name.partition(".")[0]
    if package not in required() or is_installed():
        return None
    return f"this Python ({sys.executable}) lacks {package}. {cure()}"


def cure() -> str:
    """Return the command that activates the environment, after the one that creates it if there is none."""
    venv = Path(os.environ.get("MEGATRON_VENV") or ROOT / ".venv")
    activate, script = _shown(venv / "bin" / "activate"), _shown(ROOT / "run_gpt2.sh")
    if (venv / "bin" / "activate").exists():
        return f"Activate the project's environment: . {activate}"
    return f"Run `bash {script}` once, which creates the project's environment, then activate it: . {activate}"


def required() -> set[str]:
    """Return the import names of the packages that pyproject.toml requires; none without that file."""
    import tomllib  # Python 3.11

    try:
        names = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    except (OSError, ValueError, KeyError):
        return set()
    packages = [re.split(r"[^\w.-]", name, maxsplit=1)[0].lower() for name in names]
    return {IMPORT_NAMES.get(package, package.replace("-", "_")) for package in packages}


def is_installed() -> bool:
    """Return True if pip has installed the project in this Python; an .egg-info in the repository does not count."""
    import importlib.metadata  # 20 ms, only for an error

    found = importlib.metadata.distributions(name=PROJECT)
    return any(Path(str(each.locate_file(""))).resolve() != ROOT for each in found)


def _shown(path: Path) -> str:
    """Return ``path`` as the user types it: relative below the working directory."""
    absolute = Path(os.path.abspath(path))
    here = Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)
