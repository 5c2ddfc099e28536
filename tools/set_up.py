"""Find or make the Python environment of the run scripts and print the path of its Python (tools/setup.sh calls this).

The Python that runs this file is used as it is when it has every package of pyproject.toml. Else ``.venv`` in the
repository is made and filled with pip; a stamp in it, keyed by pyproject.toml, makes the next start quick. A set-up
that was interrupted is begun anew, and of two scripts that start at once one waits for the other.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "pyproject.toml"
VENV = Path(os.environ.get("MEGATRON_VENV") or ROOT / ".venv")


class SetUpError(Exception):
    """The environment cannot be made; the text says what to do."""


def main() -> int:
    """Print the path of a Python that has every package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("purpose", choices=("run", "test"), help="test: with the optional packages of that name too")
    purpose = parser.parse_args().purpose
    try:
        print(find_or_make("" if purpose == "run" else purpose))
    except SetUpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def find_or_make(extra: str) -> str:
    """Return the path of a Python that has the packages of pyproject.toml and of ``extra``."""
    wanted = requirements(extra)
    if not lacking(wanted):
        warn_of_another_torch(wanted)
        return sys.executable
    python = VENV / "bin" / "python"
    with locked(PROJECT):
        if not is_stamped(python, extra):
            say(f"this Python ({sys.executable}) lacks {', '.join(lacking(wanted)[:4])} ...: setting up {VENV} once")
            make(python, wanted, extra)
            say("set-up done")
    return str(python)


def requirements(extra: str) -> list[str]:
    """Return the requirements of pyproject.toml, as they stand there."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    return [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else ())]


def lacking(wanted: list[str]) -> list[str]:
    """Return what this Python does not have, in a version that pyproject.toml allows; torch may be of any version."""
    return [one for one in wanted if not is_met(one)]


def is_met(requirement: str) -> bool:
    """Whether this Python has the package in an allowed version (for torch: in any)."""
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    version = installed(name)
    return version is not None and (name == "torch" or is_allowed(version, requirement[len(name) :]))


def installed(name: str) -> str | None:
    """Return the version of a package that this Python has, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_allowed(version: str, specifier: str) -> bool:
    """Whether ``version`` satisfies a list such as ``>=2,<3`` of the comparisons that pyproject.toml uses."""
    have = numbers(version)
    for operator, wanted in re.findall(r"(>=|==|<)\s*([\d.]+)", specifier):
        limit = numbers(wanted)
        if not {">=": have >= limit, "<": have < limit, "==": have == limit}[operator]:
            return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """Return ``2.13.0+cpu`` as (2, 13, 0, 0), so that 2.13 and 2.13.0 are equal."""
    release = re.match(r"[\d.]*", version)
    parts = [int(part) for part in (release.group(0) if release else "").split(".") if part]
    return (*parts, 0, 0, 0, 0)[:4]


def warn_of_another_torch(wanted: list[str]) -> None:
    """Say so when the active torch is not the version that the results were measured with."""
    pinned = next(one for one in wanted if one.startswith("torch=="))
    version = installed("torch") or ""
    if not is_allowed(version, pinned[len("torch") :]):
        say(f"warning: tested with {pinned}, this Python has {version}; losses may differ in the last digits")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on ``path`` alone; the system drops it when the process ends, however it ends."""
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another start is setting up; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def stamp(extra: str) -> Path:
    """Return the file that says for which pyproject.toml the environment was filled."""
    return VENV / f".set-up-{extra or 'run'}"


def is_stamped(python: Path, extra: str) -> bool:
    """Whether the environment was filled for this pyproject.toml and its Python starts."""
    path = stamp(extra)
    return path.is_file() and path.read_text() == fingerprint() and starts(python)


def fingerprint() -> str:
    """Return the identity of pyproject.toml and of this place, which pip's editable install points to."""
    return hashlib.sha256(PROJECT.read_bytes() + os.fsencode(ROOT)).hexdigest()


def starts(python: Path) -> bool:
    """Whether there is a Python that runs at this path."""
    return python.is_file() and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def make(python: Path, wanted: list[str], extra: str) -> None:
    """Make the environment, or fill up the one that is there."""
    begun = VENV / ".set-up-begun"
    if begun.exists() or not starts(python):
        if begun.exists():
            say("the last set-up was interrupted; beginning anew")
        run("making the virtual environment", [sys.executable, "-m", "venv", "--clear", str(VENV)])
    begun.touch()
    pip = [str(python), "-m", "pip", "install"]
    torch = next(one for one in wanted if one.startswith("torch=="))
    run(f"installing {torch}", [*pip, torch])  # first and alone: the exact build that this machine offers
    run("installing the other packages", [*pip, "-e", f"{ROOT}[{extra}]" if extra else str(ROOT)])
    stamp(extra).write_text(fingerprint())
    begun.unlink()


def run(what: str, command: list[str]) -> None:
    """Run one step of the set-up, its output on the error stream."""
    say(what)
    code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    if code:
        raise SetUpError(
            f"{what} failed with code {code} (see above): {' '.join(command)}. Check the network and the free disk "
            "space, then start again; or activate a Python that has the packages of pyproject.toml."
        )


def say(text: str) -> None:
    """Show progress on the error stream; standard output is for the path alone."""
    print(f"set-up: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
