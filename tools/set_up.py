"""Find or make the Python environment of the run scripts and print the path of its Python (tools/setup.sh calls this).

The Python that runs this file is used as it is when it has every package of pyproject.toml. Else ``.venv`` in the
repository is used, made or filled with pip; a stamp in it, keyed by pyproject.toml, makes the next start quick. One
that another checkout has filled (``.venv`` may be a link) is used when its packages fit, and not installed into. A
set-up that was interrupted is begun anew, and of two scripts that start at once one waits for the other.

pip's own variables (PIP_INDEX_URL, PIP_FIND_LINKS ...) and files hold. TORCH_INDEX takes torch alone from another
index: cu130, cu128, cpu and the like name PyTorch's own, and an address is that of a mirror of one.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "pyproject.toml"
VENV = Path(os.environ.get("MEGATRON_VENV") or ROOT / ".venv")
TORCH_INDEXES = "https://download.pytorch.org/whl/"
TORCH_BUILD = re.compile(r"cpu|cu\d{3}|rocm[\d.]+")
OF_SLOW_TESTS = ("eval", "ray", "stores", "kubernetes")
PRESENT = "Requirement already satisfied"
"""How a line of pip begins that tells nothing new; a set-up has up to a hundred of them."""


class SetUpError(Exception):
    """The environment cannot be made; the text says what to do."""


class Answer(NamedTuple):
    """What a Python lacks, and the checkout that is installed in it as editable, if there is one."""

    lacking: list[str]
    checkout: str


def main() -> int:
    """Print the path of a Python that has every package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "purpose", choices=("run", "test", "all", "ask"),
        help="test: with the optional packages of that name too; all: with those that slow tests alone use, where they "
        "can be had; ask: print which requirements this Python lacks",
    )  # fmt: skip
    parser.add_argument("requirements", nargs="*", help="of ask")
    flags = parser.parse_args()
    if flags.purpose == "ask":
        lacks = [one for one in flags.requirements if not is_met(one, any_torch=False)]
        print(json.dumps(Answer(lacks, installed_checkout())))
        return 0
    try:
        python = find_or_make("" if flags.purpose == "run" else "test")
        if flags.purpose == "all":
            for extra in OF_SLOW_TESTS:
                add(python, extra)
        print(python)
    except SetUpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def find_or_make(extra: str) -> str:
    """Return the path of a Python that has the packages of pyproject.toml and of ``extra``."""
    wanted, index = requirements(extra), torch_index()
    if not lacking(wanted):
        warn_of_another_torch(wanted)
        warn_of_another_build(Path(sys.prefix), index, "install torch there by hand, or leave the variable out")
        return sys.executable
    python = VENV / "bin" / "python"
    home = VENV.resolve().parent  # of the environment that a link points to, which other checkouts may lock too
    home.mkdir(parents=True, exist_ok=True)
    with locked(home):
        if not is_stamped(python, extra):
            found = ask(python, wanted)
            if begun().exists():
                found = found._replace(lacking=wanted)
            is_anothers = is_of_another(found.checkout)
            if found.lacking:
                if is_anothers:
                    raise SetUpError(_refusal(found))
                who, what = f"this Python ({sys.executable})", lacking(wanted)
                if starts(python):
                    who, what = str(VENV), found.lacking
                log(f"{who} lacks {', '.join(what[:4])}{' ...' if what[4:] else ''}: setting up {VENV} once")
                make(python, found.lacking, extra)
                log("set-up done")
            elif is_anothers:
                log(f"using {VENV} as it is: {found.checkout} has set it up, and its packages fit")
            else:
                stamp(extra).write_text(fingerprint())
    warn_of_another_build(VENV, index, f"remove {VENV} to have it made anew, or leave the variable out")
    return str(python)


def add(python: str, extra: str) -> None:
    """Install what ``extra`` has more into the environment of this checkout; what cannot be had is no error."""
    wanted = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"][extra]
    found = ask(Path(python), wanted)
    if not found.lacking:
        return
    packages = ", ".join(found.lacking)
    skipped = "tests that need it are skipped"
    if Path(python) != VENV / "bin" / "python" or is_of_another(found.checkout):
        log(f"{python} lacks {packages}: {skipped}. {python} -m pip install -e '.[{extra}]' adds it")
        return
    with locked(VENV.resolve().parent):
        try:
            run(f"installing {packages}", [python, "-m", "pip", "install", *found.lacking], without=PRESENT)
        except SetUpError as error:
            log(f"{error} Until then {skipped}")


def ask(python: Path, wanted: list[str]) -> Answer:
    """Return what the Python at this path lacks: all, where there is none that answers."""
    if python.is_file():
        command = [str(python), str(Path(__file__).resolve()), "ask", *wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        with suppress(ValueError, TypeError):
            return Answer(*json.loads(done.stdout))
    return Answer(wanted, "")


def is_of_another(checkout: str) -> bool:
    """Whether this is a checkout beside this one, and still there."""
    return bool(checkout) and Path(checkout) != ROOT.resolve() and (Path(checkout) / PROJECT.name).is_file()


def _refusal(found: Answer) -> str:
    where = f"{VENV} (a link to {VENV.resolve()})" if VENV.is_symlink() else str(VENV)
    return (
        f"{where} must have the packages of {PROJECT}, lacks {', '.join(found.lacking[:4])}, and belongs to "
        f"{found.checkout}, so nothing is installed into it. Remove {VENV} or set MEGATRON_VENV to another folder to "
        "have one made, or activate it to use it as it is."
    )


def installed_checkout() -> str:
    """Return the folder that pip has installed this project from, as editable, into this Python; "" if none."""
    name = tomllib.loads(PROJECT.read_text())["project"].get("name", "")
    try:
        text = importlib.metadata.distribution(name).read_text("direct_url.json")
        return unquote(urlsplit(json.loads(text)["url"]).path) if text else ""
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError):
        return ""


def requirements(extra: str) -> list[str]:
    """Return the requirements of pyproject.toml, as they stand there."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    return [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else ())]


def lacking(wanted: list[str]) -> list[str]:
    """Return what this Python does not have, in a version that pyproject.toml allows; torch may be of any version."""
    return [one for one in wanted if not is_met(one)]


def is_met(requirement: str, *, any_torch: bool = True) -> bool:
    """Whether this Python has the package in an allowed version (for torch: in any, unless that is False)."""
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    version = installed(name)
    is_free = any_torch and name == "torch"
    return version is not None and (is_free or is_allowed(version, requirement[len(name) :]))


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
        log(f"warning: tested with {pinned}, this Python has {version}; losses may differ in the last digits")


def torch_index() -> str:
    """Return the address of the index that TORCH_INDEX asks torch to be taken from, "" for pip's own.

    Raises:
        SetUpError: it is neither a name of PyTorch's indexes nor an address.
    """
    choice = os.environ.get("TORCH_INDEX", "").strip()
    if not choice or "://" in choice:
        return choice
    if not TORCH_BUILD.fullmatch(choice):
        raise SetUpError(
            "TORCH_INDEX must be a build of torch, such as cu130, cu128, rocm6.4 or cpu, or the address of an index, "
            f"got {choice}. Leave it out for the build that pip's own index has (CUDA 13 on Linux)."
        )
    return TORCH_INDEXES + choice


def installed_build(prefix: Path) -> str:
    """Return the build of the torch in an environment, as "cpu" or "cu130"; "" where that cannot be told."""
    for path in prefix.glob("lib/python*/site-packages/torch/version.py"):
        text = path.read_text()
        cuda = re.search(r"^cuda\b[^=\n]*= *(?:'([^']*)'|None)", text, re.MULTILINE)
        is_rocm = re.search(r"^hip\b[^=\n]*= *'", text, re.MULTILINE)
        if cuda and not is_rocm:
            return f"cu{cuda[1].replace('.', '')}" if cuda[1] else "cpu"
    return ""


def warn_of_another_build(prefix: Path, index: str, way_out: str) -> None:
    """Say so when TORCH_INDEX asks for another build of torch than the one that is there, which stays."""
    wanted, there = index.rstrip("/").rpartition("/")[2], installed_build(prefix)
    if there and TORCH_BUILD.fullmatch(wanted) and wanted != there:
        log(f"warning: TORCH_INDEX asks for {wanted}, and the torch in {prefix} is of {there}: {way_out}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on the folder ``path`` alone; the system drops it when the process ends, however it ends."""
    folder = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("another start is setting up; waiting for it")
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def stamp(extra: str) -> Path:
    """Return the file that says for which pyproject.toml the environment was filled."""
    return VENV / f".set-up-{extra or 'run'}"


def begun() -> Path:
    """Return the file that is there while the environment is filled."""
    return VENV / ".set-up-begun"


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


def make(python: Path, missing: list[str], extra: str) -> None:
    """Make the environment, or fill up the one that is there."""
    if begun().exists() or not starts(python):
        if begun().exists():
            log("the last set-up was interrupted; beginning anew")
        run("making the virtual environment", [sys.executable, "-m", "venv", "--clear", str(VENV)])
    begun().touch()
    pip = [str(python), "-m", "pip", "install", "--no-compile"]  # pip compiles on one core, and installs nothing then
    index = torch_index()
    source = ["--index-url", index] if index else []
    for torch in [one for one in missing if one.startswith("torch==")]:
        run(f"installing {torch}", [*pip, *source, torch])  # first and alone: the exact build that this machine offers
    rest = [*pip, "-e", f"{ROOT}[{extra}]" if extra else str(ROOT)]
    with subprocess.Popen(compiling(python, num_processes=1)):  # what came with torch, beside the others
        run("installing the other packages", rest, without=PRESENT)
    log("compiling the packages")
    subprocess.run(compiling(python), check=False)
    stamp(extra).write_text(fingerprint())
    begun().unlink()


def compiling(python: Path, num_processes: int = 0) -> list[str]:
    """Return the command that compiles the packages that are there now and are not compiled; 0: on all cores.

    It says nothing, as pip: some packages hold files for another Python.
    """
    folders = [str(each) for each in VENV.glob("lib/python*/site-packages/*") if each.is_dir()]
    return [str(python), "-m", "compileall", "-qq", "-j", str(num_processes), *folders]


def run(what: str, command: list[str], without: str | None = None) -> None:
    """Run one step of the set-up, its output on the error stream but for lines that begin with ``without``."""
    log(what)
    if without is None:
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode  # with pip's bars on a terminal
    else:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
            for line in process.stdout or ():
                if not line.startswith(without):
                    print(line, end="", file=sys.stderr, flush=True)
        code = process.returncode
    if code:
        raise SetUpError(
            f"{what} failed with code {code} (see above): {' '.join(command)}. Check the network and the free disk "
            "space, then start again; or activate a Python that has the packages of pyproject.toml."
        )


def log(text: str) -> None:
    """Show progress on the error stream; standard output is for the path alone."""
    print(f"set-up: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
