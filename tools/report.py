"""Make one HTML page of training runs: curves over each other, what differs, stages, timelines. It fetches nothing.

    python tools/report.py runs/gpt2-20261122-150000 runs/gpt2-20261122-151500
    python tools/report.py runs                        # every run in a folder
    python tools/report.py runs -o runs/all.html

The page is report.html in the folder that is named, of several in the one that holds them all; -o says otherwise. Runs
may be under way, cut off, or without a record yet. Open it in a browser; docs/seeing.md says what it shows.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.report_parts.folder import RunFolder, names_of, read_run, run_folders  # noqa: E402
from tools.report_parts.page import POINTS, page  # noqa: E402

NAME = "report.html"


def main() -> int:
    """Write the page that the command line asks for; return the exit code."""
    flags = parse_args()
    try:
        paths = run_folders(flags.runs)
        runs = [read_or_name_error(path, name) for path, name in zip(paths, names_of(paths), strict=True)]
        title = flags.title or (runs[0].name if len(runs) == 1 else "Training runs")
        text = page_of_whole(runs, title, flags.points)
        out = flags.out or place_of(flags.runs)
        out.write_text(text, encoding="utf-8", errors="replace")
    except (ValueError, OSError) as error:
        hint = ". Name another file with -o" if isinstance(error, OSError) else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return 2
    print(f"{out}: {len(runs)} run{'' if len(runs) == 1 else 's'}, {len(text) / 1e6:.1f} MB")
    return 0


def place_of(paths: Sequence[Path]) -> Path:
    """Return where the page of these folders goes: into the one, or the folder that holds them all."""
    return (paths[0] if len(paths) == 1 else Path(os.path.commonpath([path.absolute() for path in paths]))) / NAME


def read_or_name_error(path: Path, name: str) -> RunFolder:
    """Return what can be read of a run; where nothing can, its name and why."""
    try:
        return read_run(path, name)
    except Exception as error:
        return _without_all(path, name, error)


def page_of_whole(runs: Sequence[RunFolder], title: str, points: int) -> str:
    """Return the page; of a run that holds what nothing can be drawn of it has the name and why."""
    try:
        return page(runs, title, points)
    except Exception:
        return page([_drawable(run, points) for run in runs], title, points)


def _drawable(run: RunFolder, points: int) -> RunFolder:
    try:
        page([run], run.name, points)
    except Exception as error:
        return _without_all(run.path, run.name, error)
    return run


def _without_all(path: Path, name: str, error: Exception) -> RunFolder:
    return RunFolder(path, name, notes=[f"it is damaged and left out ({type(error).__name__}: {error})"])


def parse_args(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder, or a folder of run folders")
    parser.add_argument("-o", "--out", type=Path, help=f"the page (default: {NAME} in the folder of RUN)")
    parser.add_argument("--title", help="its title (default: the run's name, or Training runs)")
    parser.add_argument(
        "--points", type=positive, default=POINTS, metavar="N",
        help=f"draw about so many points of a curve (default {POINTS}); extremes of loss and norm stay",
    )  # fmt: skip
    return parser.parse_args(words)


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
