"""CPU runs of part ``train`` that are computed beforehand, because they cost minutes of a lent GPU's time.

    python -m benchmarks.gpu.references                  # compute the missing references into .gpu-references
    python -m benchmarks.gpu.references --list

The folder contains a JSON file for each run, and ``about.json`` with the commit and a checksum of the sources. Copy it
together with the repository: a GPU machine then needs no git to know its commit. A reference is used only if its
command line and the checksum of the sources are those of the case; otherwise the case runs the CPU itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import logs
from benchmarks.gpu.part import ROOT, Machine
from benchmarks.gpu.train_run import Run

REFERENCES_DIR = ".gpu-references"
ABOUT = "about.json"
SOURCES = (
    "megatron/**/*.py",
    "megatron/**/*.cpp",
    "tds/**/*.py",
    "pretrain_*.py",
    "examples/*/pretrain_*.py",
    "benchmarks/gpu/train*.py",
    "examples/corpus/*/*.txt",
    "tests/golden/tokenizer.json",
)
"""Patterns of the files that a run on the CPU depends on."""


def sources_checksum(root: Path = ROOT) -> str:
    """Return a checksum of the names and contents of ``SOURCES``."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in root.glob(pattern)}):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def reference_path(folder: Path, family: str, words: Sequence[str]) -> Path:
    """Return the path of the reference of ``family`` with the command line ``words``."""
    digest = hashlib.sha256(json.dumps([family, *words]).encode()).hexdigest()[:12]
    return folder / f"{family}-{digest}.json"


def save_reference(folder: Path, family: str, words: Sequence[str], run: Run, torch_version: str) -> Path:
    """Write ``run`` as the reference of its command line, with all bits of its numbers; return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "family": family,
        "words": list(words),
        "sources": sources_checksum(),
        "torch": torch_version,
        "steps": run.steps,
        "losses": [loss.hex() for loss in run.losses],
        "grad_norms": [norm.hex() for norm in run.grad_norms],
        "num_skipped": run.num_skipped,
        "seconds": run.seconds,
    }
    path = reference_path(folder, family, words)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path


def load_reference(folder: Path | None, family: str, words: Sequence[str], checksum: str) -> Run | None:
    """Return the reference of a command line; None if there is none, or if it belongs to other sources.

    Args:
        checksum: ``sources_checksum()`` of this code.
    """
    if folder is None or not (path := reference_path(folder, family, words)).exists():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["sources"] != checksum or content["words"] != list(words):
        return None
    losses, norms = ([float.fromhex(text) for text in content[name]] for name in ("losses", "grad_norms"))
    return Run(path, tuple(content["steps"]), tuple(losses), tuple(norms), content["num_skipped"], content["seconds"])


def write_about(folder: Path) -> dict[str, str]:
    """Write the commit and the checksum of the sources, and return them."""
    from megatron.training.run_record import git_commit

    about = {"commit": git_commit(), "sources": sources_checksum()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return about


def carried_commit(folder: Path) -> str:
    """Return the commit in ``folder``, with "+changes" if the sources differ from it; "" if there is none."""
    try:
        about: dict[str, str] = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""
    is_changed = about["sources"] != sources_checksum() and not about["commit"].endswith("+changes")
    return about["commit"] + ("+changes" if is_changed else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Compute the references that are missing; return the exit code."""
    from benchmarks.gpu import train

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.references",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / REFERENCES_DIR, help="folder of the references (default: %(default)s)"
    )
    parser.add_argument("--dry", action="store_true", help="toy sizes, for a dry run on the CPU")
    parser.add_argument("--list", action="store_true", help="print the runs and exit")
    args = parser.parse_args(argv)
    if args.list:
        print(*(f"{name}: {extra}" for name, extra in train.REFERENCES), sep="\n")
        return 0
    about = write_about(args.out)
    print(f"references of commit {about['commit']} in {args.out}", flush=True)
    with tempfile.TemporaryDirectory(prefix="megatron-gpu-") as work:
        machine = make_cpu(Path(work), is_dry=args.dry)
        machine.references = args.out
        for name, extra in train.REFERENCES:
            run = train.reference(machine, name, extra)
            is_known = run.folder.suffix == ".json"
            if not is_known:
                import torch

                save_reference(args.out, name, train.reference_words(machine, name, extra), run, torch.__version__)
            how = "known" if is_known else f"{run.seconds:.0f} s"
            print(f"{name} {extra}: {run.losses[0]:.4f} to {run.losses[-1]:.4f} ({how})", flush=True)
    return 0


def make_cpu(work: Path, *, is_dry: bool) -> Machine:
    """Return the CPU, with the sizes of a GPU unless ``is_dry``."""
    num_cores = len(os.sched_getaffinity(0))
    machine = Machine("cpu", "CPU", is_dry, 1, 0, num_cores, work, work)
    machine.logs = logs.start_case(work / "logs", "references", "all")
    return machine


if __name__ == "__main__":
    sys.exit(main())
