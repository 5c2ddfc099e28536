"""Find or create the Python environment of the run scripts and print the path of its Python; tools/setup.sh calls this.

The Python that runs this file is used unchanged if it has every package of pyproject.toml. Otherwise ``.venv`` in the
repository is used, and created or completed with pip. A stamp in it, keyed by pyproject.toml, makes the next start
fast. If ``.venv`` (which may be a link) was filled by another checkout, it is used if its packages fit, but nothing is
installed into it. After an interruption, the set-up starts from scratch. If two scripts start together, one waits.

pip's own variables (PIP_INDEX_URL, PIP_FIND_LINKS ...) and configuration files apply. TORCH_INDEX selects another index
for torch only: cu130, cu128, cpu and similar names select PyTorch's own index, and a URL selects a mirror of one.
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
"""Start of the lines of pip that are not shown: one for each package that is installed already."""


class SetUpError(Exception):
    """The environment cannot be created; the message describes the fix."""


class Answer(NamedTuple):
    """The requirements that a Python lacks, and the checkout with an editable install in it ("" for none)."""

    lacking: list[str]
    checkout: str


def main() -> int:
    """Print the path of a Python that has every package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "purpose", choices=("run", "test", "all", "ask"),
        help="test: also install the extra test; all: also install the extras of slow tests, if they are available; "
        "ask: print the requirements that this Python lacks",
    )  # fmt: skip
    parser.add_argument("requirements", nargs="*", help="requirements to check with ask")
    flags = parser.parse_args()
    if flags.purpose == "ask":
        missing = [requirement for requirement in flags.requirements if not is_met(requirement, any_torch=False)]
        print(json.dumps(Answer(missing, installed_checkout())))
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
    required, index = requirements(extra), torch_index()
    if not lacking(required):
        warn_of_another_torch(required)
        warn_of_another_build(Path(sys.prefix), index, "install torch there manually, or unset the variable")
        return sys.executable
    python = VENV / "bin" / "python"
    # VENV may be a link to an environment that several checkouts share, so the lock is next to its target.
    lock_dir = VENV.resolve().parent
    lock_dir.mkdir(parents=True, exist_ok=True)
    with locked(lock_dir):
        if not is_stamped(python, extra):
            answer = ask(python, required)
            if begun().exists():
                answer = answer._replace(lacking=required)
            is_foreign = is_of_another(answer.checkout)
            if answer.lacking:
                if is_foreign:
                    raise SetUpError(_refusal(answer))
                owner, missing = f"this Python ({sys.executable})", lacking(required)
                if starts(python):
                    owner, missing = str(VENV), answer.lacking
                log(f"{owner} lacks {', '.join(missing[:4])}{' ...' if missing[4:] else ''}: setting up {VENV}")
                make(python, answer.lacking, extra)
                log("set-up done")
            elif is_foreign:
                log(f"using {VENV} unchanged: it belongs to {answer.checkout}, and its packages fit")
            else:
                stamp(extra).write_text(fingerprint())
    warn_of_another_build(VENV, index, f"remove {VENV} to create it again, or unset the variable")
    return str(python)


def add(python: str, extra: str) -> None:
    """Install the missing packages of ``extra`` into this checkout's environment; a failed installation is no error."""
    requirements_of_extra = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"][extra]
    answer = ask(Path(python), requirements_of_extra)
    if not answer.lacking:
        return
    packages = ", ".join(answer.lacking)
    skipped = "tests that need it are skipped"
    if Path(python) != VENV / "bin" / "python" or is_of_another(answer.checkout):
        log(f"{python} lacks {packages}: {skipped}. To install: {python} -m pip install -e '.[{extra}]'")
        return
    with locked(VENV.resolve().parent):
        try:
            run(f"installing {packages}", [python, "-m", "pip", "install", *answer.lacking], without=PRESENT)
        except SetUpError as error:
            log(f"{error} Until then {skipped}")


def ask(python: Path, wanted: list[str]) -> Answer:
    """Return the answer of the Python at this path; if it does not run, it lacks all of ``wanted``."""
    if python.is_file():
        command = [str(python), str(Path(__file__).resolve()), "ask", *wanted]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        with suppress(ValueError, TypeError):
            return Answer(*json.loads(process.stdout))
    return Answer(wanted, "")


def is_of_another(checkout: str) -> bool:
    """Return True if ``checkout`` exists and is not this checkout."""
    return bool(checkout) and Path(checkout) != ROOT.resolve() and (Path(checkout) / PROJECT.name).is_file()


def _refusal(found: Answer) -> str:
    venv_text = f"{VENV} (a link to {VENV.resolve()})" if VENV.is_symlink() else str(VENV)
    return (
        f"{venv_text} must have the packages of {PROJECT}, lacks {', '.join(found.lacking[:4])}, and belongs to "
        f"{found.checkout}, so nothing is installed into it. Remove {VENV} or set MEGATRON_VENV to another folder to "
        "create a new environment, or activate this one to use it unchanged."
    )


def installed_checkout() -> str:
    """Return the folder of the editable install of this project in this Python; "" if there is none."""
    name = tomllib.loads(PROJECT.read_text())["project"].get("name", "")
    try:
        text = importlib.metadata.distribution(name).read_text("direct_url.json")
        return unquote(urlsplit(json.loads(text)["url"]).path) if text else ""
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError):
        return ""


def requirements(extra: str) -> list[str]:
    """Return the requirements of pyproject.toml as written."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    return [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else ())]


def lacking(wanted: list[str]) -> list[str]:
    """Return the requirements that this Python does not meet; torch may have any version."""
    return [requirement for requirement in wanted if not is_met(requirement)]


def is_met(requirement: str, *, any_torch: bool = True) -> bool:
    """Return True if this Python has the package in an allowed version; with ``any_torch``, torch in any version."""
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    version = installed(name)
    is_free = any_torch and name == "torch"
    return version is not None and (is_free or is_allowed(version, requirement[len(name) :]))


def installed(name: str) -> str | None:
    """Return the version of a package in this Python, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_allowed(version: str, specifier: str) -> bool:
    """Return True if ``version`` satisfies a specifier such as ``>=2,<3`` (operators of pyproject.toml only)."""
    actual = numbers(version)
    for operator, bound in re.findall(r"(>=|==|<)\s*([\d.]+)", specifier):
        limit = numbers(bound)
        if not {">=": actual >= limit, "<": actual < limit, "==": actual == limit}[operator]:
            return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """Return ``2.13.0+cpu`` as (2, 13, 0, 0), so that 2.13 and 2.13.0 are equal."""
    release = re.match(r"[\d.]*", version)
    parts = [int(part) for part in (release.group(0) if release else "").split(".") if part]
    return (*parts, 0, 0, 0, 0)[:4]


def warn_of_another_torch(wanted: list[str]) -> None:
    """Warn if the active torch is not the version with which the results were measured."""
    pinned_torch = next(requirement for requirement in wanted if requirement.startswith("torch=="))
    version = installed("torch") or ""
    if not is_allowed(version, pinned_torch[len("torch") :]):
        log(f"warning: tested with {pinned_torch}, this Python has {version}; losses may differ in the last digits")


def torch_index() -> str:
    """Return the URL of the index from which TORCH_INDEX installs torch; "" for pip's own index.

    Raises:
        SetUpError: TORCH_INDEX is neither the name of a PyTorch index nor a URL.
    """
    choice = os.environ.get("TORCH_INDEX", "").strip()
    if not choice or "://" in choice:
        return choice
    if not TORCH_BUILD.fullmatch(choice):
        raise SetUpError(
            "TORCH_INDEX must be a build of torch, such as cu130, cu128, rocm6.4 or cpu, or the URL of an index, "
            f"got {choice}. Unset it to use the build in pip's own index (CUDA 13 on Linux)."
        )
    return TORCH_INDEXES + choice


def installed_build(prefix: Path) -> str:
    """Return the build of torch in an environment, such as "cpu" or "cu130"; "" if it is unknown."""
    for path in prefix.glob("lib/python*/site-packages/torch/version.py"):
        text = path.read_text()
        cuda = re.search(r"^cuda\b[^=\n]*= *(?:'([^']*)'|None)", text, re.MULTILINE)
        is_rocm = re.search(r"^hip\b[^=\n]*= *'", text, re.MULTILINE)
        if cuda and not is_rocm:
            return f"cu{cuda[1].replace('.', '')}" if cuda[1] else "cpu"
    return ""


def warn_of_another_build(prefix: Path, index: str, way_out: str) -> None:
    """Warn if TORCH_INDEX selects another build of torch than the installed one, which is kept."""
    wanted_build, build = index.rstrip("/").rpartition("/")[2], installed_build(prefix)
    if build and TORCH_BUILD.fullmatch(wanted_build) and wanted_build != build:
        log(f"warning: TORCH_INDEX selects {wanted_build}, but the torch in {prefix} is a {build} build: {way_out}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the folder ``path``; the operating system releases it when the process ends."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("waiting for another process that is setting up")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def stamp(extra: str) -> Path:
    """Return the path of the file with the fingerprint for which the environment was filled."""
    return VENV / f".set-up-{extra or 'run'}"


def begun() -> Path:
    """Return the path of the file that exists while the environment is being filled."""
    return VENV / ".set-up-begun"


def is_stamped(python: Path, extra: str) -> bool:
    """Return True if the environment was filled for this pyproject.toml and its Python starts."""
    path = stamp(extra)
    return path.is_file() and path.read_text() == fingerprint() and starts(python)


def fingerprint() -> str:
    """Return a hash of pyproject.toml and of the path of this checkout, which an editable install refers to."""
    return hashlib.sha256(PROJECT.read_bytes() + os.fsencode(ROOT)).hexdigest()


def starts(python: Path) -> bool:
    """Return True if the Python at this path runs."""
    return python.is_file() and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def make(python: Path, missing: list[str], extra: str) -> None:
    """Create the environment, or complete the existing one."""
    if begun().exists() or not starts(python):
        if begun().exists():
            log("the last set-up was interrupted; starting from scratch")
        run("creating the virtual environment", [sys.executable, "-m", "venv", "--clear", str(VENV)])
    begun().touch()
    # pip would compile on one core and install nothing meanwhile, so the packages are compiled separately.
    pip = [str(python), "-m", "pip", "install", "--no-compile"]
    index = torch_index()
    source = ["--index-url", index] if index else []
    for torch in [requirement for requirement in missing if requirement.startswith("torch==")]:
        # torch is installed first and separately, because only torch may come from another index.
        run(f"installing {torch}", [*pip, *source, torch])
    other_packages = [*pip, "-e", f"{ROOT}[{extra}]" if extra else str(ROOT)]
    # Compile the packages installed so far (torch and its dependencies) while the others are installed.
    with subprocess.Popen(compiling(python, num_processes=1)):
        run("installing the other packages", other_packages, without=PRESENT)
    log("compiling the packages")
    subprocess.run(compiling(python), check=False)
    stamp(extra).write_text(fingerprint())
    begun().unlink()


def compiling(python: Path, num_processes: int = 0) -> list[str]:
    """Return the command that compiles the installed packages to byte code.

    Compiled files are skipped. The command prints no errors, like pip, because some packages contain files for another
    version of Python.

    Args:
        num_processes: 0 for one process per core.
    """
    folders = [str(path) for path in VENV.glob("lib/python*/site-packages/*") if path.is_dir()]
    return [str(python), "-m", "compileall", "-qq", "-j", str(num_processes), *folders]


def run(what: str, command: list[str], without: str | None = None) -> None:
    """Run one step of the set-up. Its output is written to stderr, except for lines that start with ``without``."""
    log(what)
    if without is None:
        # pip writes to stderr directly, so that it shows its progress bars on a terminal.
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    else:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
            for line in process.stdout or ():
                if not line.startswith(without):
                    print(line, end="", file=sys.stderr, flush=True)
        code = process.returncode
    if code:
        raise SetUpError(
            f"{what} failed with code {code} (see above): {' '.join(command)}. Check the network and the free disk "
            "space and retry, or activate a Python that has the packages of pyproject.toml."
        )


def log(text: str) -> None:
    """Print progress to stderr; stdout is reserved for the path."""
    print(f"set-up: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
