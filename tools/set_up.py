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
SLOW_TEST_EXTRAS = ("eval", "ray", "stores", "kubernetes", "megatron-core")
SEPARATE_EXTRAS = ("megatron-core",)
"""Extras that are installed without dependencies into ``VENV/EXTRA``: their package is also named megatron."""
SATISFIED_PREFIX = "Requirement already satisfied"
"""Start of the lines of pip that are not shown: one for each package that is installed already."""


class SetupError(Exception):
    """The environment cannot be created; the message describes the fix."""


class PythonReport(NamedTuple):
    """The requirements that a Python lacks, and the checkout with an editable install in it ("" for none)."""

    missing: list[str]
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
        print(json.dumps(PythonReport(missing, installed_checkout())))
        return 0
    try:
        python = find_or_create_python("" if flags.purpose == "run" else "test")
        if flags.purpose == "all":
            for extra in SLOW_TEST_EXTRAS:
                install_extra(python, extra)
        print(python)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def find_or_create_python(extra: str) -> str:
    """Return the path of a Python that has the packages of pyproject.toml and of ``extra``."""
    required, index = requirements(extra), torch_index()
    if not find_missing(required):
        warn_of_untested_torch(required)
        warn_of_other_build(Path(sys.prefix), index, "install torch there manually, or unset the variable")
        return sys.executable
    python = VENV / "bin" / "python"
    # VENV may be a link to an environment that several checkouts share, so the lock is next to its target.
    lock_dir = VENV.resolve().parent
    lock_dir.mkdir(parents=True, exist_ok=True)
    with locked(lock_dir):
        if not is_stamped(python, extra):
            report = query_python(python, required)
            if in_progress_path().exists():
                report = report._replace(missing=required)
            is_foreign = is_other_checkout(report.checkout)
            if report.missing:
                if is_foreign:
                    raise SetupError(_foreign_environment_text(report))
                owner, missing = f"this Python ({sys.executable})", find_missing(required)
                if can_start(python):
                    owner, missing = str(VENV), report.missing
                log(f"{owner} lacks {', '.join(missing[:4])}{' ...' if missing[4:] else ''}: setting up {VENV}")
                create_environment(python, report.missing, extra)
                log("set-up done")
            elif is_foreign:
                log(f"using {VENV} unchanged: it belongs to {report.checkout}, and its packages fit")
            else:
                stamp_path(extra).write_text(fingerprint())
    warn_of_other_build(VENV, index, f"remove {VENV} to create it again, or unset the variable")
    return str(python)


def install_extra(python: str, extra: str) -> None:
    """Install the missing packages of ``extra`` into this checkout's environment; a failed installation is no error."""
    requirements_of_extra = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"][extra]
    target = Path(python).parents[1] / extra if extra in SEPARATE_EXTRAS else None
    report = query_python(Path(python), requirements_of_extra, target)
    if not report.missing:
        return
    packages = ", ".join(report.missing)
    skip_note = "tests that need it are skipped"
    options = ["--upgrade", "--no-deps", "--target", str(target)] if target else []
    if Path(python) != VENV / "bin" / "python" or is_other_checkout(report.checkout):
        arguments = " ".join([*options, *report.missing]) if target else f"-e '.[{extra}]'"
        log(f"{python} lacks {packages}: {skip_note}. To install: {python} -m pip install {arguments}")
        return
    command = [python, "-m", "pip", "install", *options, *report.missing]
    with locked(VENV.resolve().parent):
        try:
            run(f"installing {packages}", command, without=SATISFIED_PREFIX)
        except SetupError as error:
            log(f"{error} Until then {skip_note}")


def query_python(python: Path, required: list[str], folder: Path | None = None) -> PythonReport:
    """Return the answer of the Python at this path; if it does not run, it lacks all of ``required``.

    Args:
        folder: a folder with further packages.
    """
    if python.is_file():
        command = [str(python), str(Path(__file__).resolve()), "ask", *required]
        environment = {**os.environ, "PYTHONPATH": str(folder)} if folder else None
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        with suppress(ValueError, TypeError):
            return PythonReport(*json.loads(process.stdout))
    return PythonReport(required, "")


def is_other_checkout(checkout: str) -> bool:
    """Return True if ``checkout`` exists and is not this checkout."""
    return bool(checkout) and Path(checkout) != ROOT.resolve() and (Path(checkout) / PROJECT.name).is_file()


def _foreign_environment_text(report: PythonReport) -> str:
    venv_text = f"{VENV} (a link to {VENV.resolve()})" if VENV.is_symlink() else str(VENV)
    return (
        f"{venv_text} must have the packages of {PROJECT}, lacks {', '.join(report.missing[:4])}, and belongs to "
        f"{report.checkout}, so nothing is installed into it. Remove {VENV} or set MEGATRON_VENV to another folder to "
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


def find_missing(required: list[str]) -> list[str]:
    """Return the requirements that this Python does not meet; torch may have any version."""
    return [requirement for requirement in required if not is_met(requirement)]


def is_met(requirement: str, *, any_torch: bool = True) -> bool:
    """Return True if this Python has the package in an allowed version; with ``any_torch``, torch in any version."""
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    version = installed_version(name)
    is_any_version = any_torch and name == "torch"
    return version is not None and (is_any_version or is_allowed(version, requirement[len(name) :]))


def installed_version(name: str) -> str | None:
    """Return the version of a package in this Python, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_allowed(version: str, specifier: str) -> bool:
    """Return True if ``version`` satisfies a specifier such as ``>=2,<3`` (operators of pyproject.toml only)."""
    actual = version_tuple(version)
    for operator, bound in re.findall(r"(>=|==|<)\s*([\d.]+)", specifier):
        limit = version_tuple(bound)
        if not {">=": actual >= limit, "<": actual < limit, "==": actual == limit}[operator]:
            return False
    return True


def version_tuple(version: str) -> tuple[int, ...]:
    """Return ``2.13.0+cpu`` as (2, 13, 0, 0), so that 2.13 and 2.13.0 are equal."""
    release = re.match(r"[\d.]*", version)
    components = [int(component) for component in (release.group(0) if release else "").split(".") if component]
    return (*components, 0, 0, 0, 0)[:4]


def warn_of_untested_torch(required: list[str]) -> None:
    """Warn if the active torch is not the version with which the results were measured."""
    pinned_torch = next(requirement for requirement in required if requirement.startswith("torch=="))
    version = installed_version("torch") or ""
    if not is_allowed(version, pinned_torch[len("torch") :]):
        log(f"warning: tested with {pinned_torch}, this Python has {version}; losses may differ in the last digits")


def torch_index() -> str:
    """Return the URL of the index from which TORCH_INDEX installs torch; "" for pip's own index.

    Raises:
        SetupError: TORCH_INDEX is neither the name of a PyTorch index nor a URL.
    """
    choice = os.environ.get("TORCH_INDEX", "").strip()
    if not choice or "://" in choice:
        return choice
    if not TORCH_BUILD.fullmatch(choice):
        raise SetupError(
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


def warn_of_other_build(prefix: Path, index: str, advice: str) -> None:
    """Warn if TORCH_INDEX selects another build of torch than the installed one, which is kept."""
    wanted_build, build = index.rstrip("/").rpartition("/")[2], installed_build(prefix)
    if build and TORCH_BUILD.fullmatch(wanted_build) and wanted_build != build:
        log(f"warning: TORCH_INDEX selects {wanted_build}, but the torch in {prefix} is a {build} build: {advice}")


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


def stamp_path(extra: str) -> Path:
    """Return the path of the file with the fingerprint for which the environment was filled."""
    return VENV / f".set-up-{extra or 'run'}"


def in_progress_path() -> Path:
    """Return the path of the file that exists while the environment is being filled."""
    return VENV / ".set-up-begun"


def is_stamped(python: Path, extra: str) -> bool:
    """Return True if the environment was filled for this pyproject.toml and its Python starts."""
    path = stamp_path(extra)
    return path.is_file() and path.read_text() == fingerprint() and can_start(python)


def fingerprint() -> str:
    """Return a hash of pyproject.toml and of the path of this checkout, which an editable install refers to."""
    return hashlib.sha256(PROJECT.read_bytes() + os.fsencode(ROOT)).hexdigest()


def can_start(python: Path) -> bool:
    """Return True if the Python at this path runs."""
    return python.is_file() and subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def create_environment(python: Path, missing: list[str], extra: str) -> None:
    """Create the environment, or complete the existing one."""
    if in_progress_path().exists() or not can_start(python):
        if in_progress_path().exists():
            log("the last set-up was interrupted; starting from scratch")
        run("creating the virtual environment", [sys.executable, "-m", "venv", "--clear", str(VENV)])
    in_progress_path().touch()
    # pip would compile on one core and install nothing meanwhile, so the packages are compiled separately.
    pip = [str(python), "-m", "pip", "install", "--no-compile"]
    index = torch_index()
    index_flags = ["--index-url", index] if index else []
    for torch in [requirement for requirement in missing if requirement.startswith("torch==")]:
        # torch is installed first and separately, because only torch may come from another index.
        run(f"installing {torch}", [*pip, *index_flags, torch])
    install_command = [*pip, "-e", f"{ROOT}[{extra}]" if extra else str(ROOT)]
    # Compile the packages installed so far (torch and its dependencies) while the others are installed.
    with subprocess.Popen(compile_command(python, num_processes=1)):
        run("installing the other packages", install_command, without=SATISFIED_PREFIX)
    log("compiling the packages")
    subprocess.run(compile_command(python), check=False)
    stamp_path(extra).write_text(fingerprint())
    in_progress_path().unlink()


def compile_command(python: Path, num_processes: int = 0) -> list[str]:
    """Return the command that compiles the installed packages to byte code.

    Compiled files are skipped. The command prints no errors, like pip, because some packages contain files for another
    version of Python.

    Args:
        num_processes: 0 for one process per core.
    """
    folders = [str(path) for path in VENV.glob("lib/python*/site-packages/*") if path.is_dir()]
    return [str(python), "-m", "compileall", "-qq", "-j", str(num_processes), *folders]


def run(description: str, command: list[str], without: str | None = None) -> None:
    """Run one step of the set-up. Its output is written to stderr, except for lines that start with ``without``."""
    log(description)
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
        raise SetupError(
            f"{description} failed with code {code} (see above): {' '.join(command)}. Check the network and the free "
            "disk space and retry, or activate a Python that has the packages of pyproject.toml."
        )


def log(text: str) -> None:
    """Print progress to stderr; stdout is reserved for the path."""
    print(f"set-up: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
