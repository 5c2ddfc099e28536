"""Put what was seen on a GPU into the repository and its pages.

    python -m benchmarks.gpu.publish runs/gpu/gpu-nvidia-h200-2026-11-24.json
    python -m benchmarks.gpu.publish                 # the pages anew, of the results that are in the repository

The file is kept in benchmarks/gpu/seen; the tables of all files there stand between markers in the README and in
docs/accelerators.md, English and Chinese, beside a chart in docs/pictures. Results of a dry run, or of a CPU, are
refused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import tables
from benchmarks.gpu.parts.pictures import draw

ROOT = Path(__file__).resolve().parents[2]
SEEN = Path("benchmarks/gpu/seen")
PICTURE = Path("docs/pictures/gpu_mfu.png")
BEGIN = "<!-- results of GPUs: written by python -m benchmarks.gpu.publish -->"
END = "<!-- end of the results of GPUs -->"
PAGES = {
    "README.md": (tables.front, "en"),
    "docs/zh/README.md": (tables.front, "zh"),
    "docs/accelerators.md": (tables.page, "en"),
    "docs/zh/accelerators.md": (tables.page, "zh"),
}
SHOWN_FROM = {"docs/accelerators.md": "pictures/gpu_mfu.png", "docs/zh/accelerators.md": "../pictures/gpu_mfu.png"}
"""Page that shows the chart -> the link from there."""


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Do what the command line asks."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.publish",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULTS.json", help="files that run.sh has written")
    args = parser.parse_args(argv)
    for path in args.results:
        if problem := problem_of(path):
            parser.error(problem)
    for path in args.results:
        (root / SEEN).mkdir(parents=True, exist_ok=True)
        if path.resolve() != (root / SEEN / path.name).resolve():
            shutil.copyfile(path, root / SEEN / path.name)
    for name in written(root):
        print(f"written: {name}")
    return 0


def problem_of(path: Path) -> str | None:
    """Return why these results are none of a GPU."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["is_dry"] or content["kind"] != "cuda":
            return f"results must be of a GPU, got a dry run or a CPU's: {path}"
        tables.page([content], "en")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"results must be a file that benchmarks/gpu/run.sh wrote, got {path}: {type(error).__name__}: {error}"
    return None


def seen(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return the results that are in the repository, the newest first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / SEEN).glob("*.json"))]
    return sorted(found, key=lambda content: str(content["date"]), reverse=True)


def block(name: str, results: Sequence[dict[str, Any]]) -> str:
    """Return what stands between the markers of a page."""
    make, language = PAGES[name]
    text = make(results, language)
    if name in SHOWN_FROM and (fast := tables.with_speeds(results)):
        told = tables.WORDS[language]["picture"].format(device=fast[0]["device"])
        text += f"\n\n![{told}]({SHOWN_FROM[name]})"
    return text


def with_block(text: str, made: str) -> str:
    """Return a page with ``made`` between its markers.

    Raises:
        ValueError: it does not have both once, in order.
    """
    before, begin, rest = text.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"a page must have {BEGIN} and after it {END} once each")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


def written(root: Path = ROOT) -> list[str]:
    """Write pages and chart; return their names."""
    results = seen(root)
    for name in PAGES:
        path = root / name
        path.write_text(with_block(path.read_text(encoding="utf-8"), block(name, results)), encoding="utf-8")
    fast = tables.with_speeds(results)
    if fast:
        draw(fast[0], root / PICTURE)
    return [*PAGES, *([str(PICTURE)] if fast else [])]


if __name__ == "__main__":
    sys.exit(main())
