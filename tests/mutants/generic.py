"""Sample the mutants that cosmic-ray makes of a package, and run the package's own tests against each. By hand.

    pip install cosmic-ray==8.7.0
    python -m tests.mutants.generic mpu optim --sample 25 --seed 1
    python -m tests.mutants.generic data --show          # the sample alone

cosmic-ray replaces operators, comparisons, numbers, booleans, exceptions and loops in the source. The mutants of this
folder are written by hand instead and run in every short run; this program looks for code that no test guards. It
works in a git worktree of HEAD, in a temporary folder. A survivor is printed with its diff: it is equivalent, or a
test is missing. Time: about 8 s for a mutant that is killed, the time of the package's tests for one that survives.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Package(NamedTuple):
    """Source files or folders, and the tests that are nearest to them."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


PACKAGES = {
    "mpu": Package(("megatron/mpu",), ("tests/mpu",)),
    "optim": Package(("megatron/optim",), ("tests/optim",)),
    "models": Package(("megatron/models/common",), ("tests/models/common", "tests/models/gpt2", "tests/models/llama")),
    "checkpoint": Package(("megatron/checkpoint",), ("tests/checkpoint",)),
    "evaluation": Package(("megatron/evaluation",), ("tests/evaluation",)),
    "arguments": Package(("megatron/arguments",), ("tests/arguments", "tests/migration")),
    "data": Package(
        tuple(
            f"megatron/data/{name}.py"
            for name in (
                "sample_index", "sample_order", "packing", "permutation", "blend_index", "blend_schedule",
                "blend_resume", "data_loader", "split", "gpt_dataset",
            )
        ),
        ("tests/data/test_*.py",),
    ),
    "chat": Package(("megatron/tokenizer/chat.py",), ("tests/tokenizer", "tests/data/test_conversations.py")),
    "schedule": Package(("tds/schedule",), ("tests/tds/schedule",)),
    "p2p": Package(("tds/p2p",), ("tests/tds/p2p", "tests/tds/test_structures.py")),
    "engine": Package(("tds/engine",), ("tests/tds/engine",)),
    "reduction": Package(
        ("tds/bucket_reducer.py", "tds/gradients.py", "tds/grad_norm.py", "tds/loss.py", "tds/loss_reduction.py"),
        ("tests/tds/test_reduction.py", "tests/tds/test_grad*.py", "tests/tds/test_loss.py"),
    ),
}  # fmt: skip
EXCLUDED_OPERATORS = ("BitOr", "RemoveDecorator")
"""Replacements of ``|`` are mostly those of annotations; nearly every decorator is needed to import the module."""
TIMEOUT_S = 400


@contextmanager
def worktree() -> Iterator[Path]:
    """Check HEAD out in a temporary folder, which becomes the working directory."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(tree)], cwd=ROOT, check=True)
        os.chdir(tree)
        try:
            yield tree
        finally:
            os.chdir(ROOT)
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def sample_mutants(package: Package, num_mutants: int, seed: int, database: Path) -> list[Any]:
    """Return ``num_mutants`` mutants at different places of the source, one of each place."""
    from cosmic_ray.commands import init
    from cosmic_ray.modules import find_modules
    from cosmic_ray.work_db import use_db

    with use_db(str(database)) as work:
        init(sorted(find_modules([Path(source) for source in package.sources])), work, {})
        mutations_by_position: dict[Any, list[Any]] = {}
        for item in work.work_items:
            (mutation,) = item.mutations
            if not any(name in mutation.operator_name for name in EXCLUDED_OPERATORS):
                mutations_by_position.setdefault((mutation.module_path, mutation.start_pos), []).append(mutation)
    rng = random.Random(seed)
    positions = rng.sample(sorted(mutations_by_position), min(num_mutants, len(mutations_by_position)))
    print(f"{sum(map(len, mutations_by_position.values()))} mutants at {len(mutations_by_position)} places", flush=True)
    return [
        rng.choice(sorted(mutations_by_position[position], key=lambda mutation: mutation.operator_name))
        for position in positions
    ]


def run_package(name: str, args: argparse.Namespace, tree: Path) -> list[str]:
    """Run the sample of a package; return the diffs of the mutants that survive."""
    from cosmic_ray.mutating import mutate_and_test

    package = PACKAGES[name]
    tests = [str(path.relative_to(tree)) for pattern in package.tests for path in sorted(tree.glob(pattern))]
    command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {' '.join(tests)}"
    survivors = []
    for mutation in sample_mutants(package, args.sample, args.seed, tree.parent / f"{name}.sqlite"):
        location = f"{mutation.module_path}:{mutation.start_pos[0]} {mutation.operator_name.removeprefix('core/')}"
        if args.show:
            print(location)
            continue
        start = time.monotonic()
        result = mutate_and_test([mutation], command, TIMEOUT_S)
        outcome = str(result.test_outcome.value if result.test_outcome else result.worker_outcome.value)
        print(f"{outcome:9} {location} ({time.monotonic() - start:.0f} s)", flush=True)
        if outcome == "survived":
            survivors.append(result.diff or location)
            print(survivors[-1], flush=True)
    return survivors


def main(argv: Sequence[str] | None = None) -> int:
    """Run the packages that the command line names; return 0."""
    raw_formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=raw_formatter)
    parser.add_argument("packages", nargs="+", choices=PACKAGES, metavar="PACKAGE", help=", ".join(PACKAGES))
    parser.add_argument("--sample", type=int, default=25, help="mutants of each package (default: 25)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (default: 1)")
    parser.add_argument("--show", action="store_true", help="print the sample and run nothing")
    args = parser.parse_args(argv)
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with worktree() as tree:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
        survivors = {name: run_package(name, args, tree) for name in args.packages}
    for name, diffs in survivors.items():
        print(f"{name}: {len(diffs)} of {args.sample} survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
