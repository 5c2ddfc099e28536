"""What rank 0 does in a job of up to 10,000 ranks and 1e9 documents, counted by one process without a model.

    python benchmarks/many_ranks.py                                        # 20 minutes, 40 GB of disk, 12 GB of memory
    python benchmarks/many_ranks.py --ranks 8 64 512 --documents 1e7 --out runs/ranks          # a minute
    python benchmarks/many_ranks.py --only checkpoint --ranks 64 512 --out runs/ranks

Messages, bytes, files and lists are counted: one process plays rank 0, and stand-ins the rest
(benchmarks/many_ranks_counting.py). Seconds are processor time of this machine. Each figure must grow no faster than
ranks x log(ranks). Tables and a picture go into docs/scaling.md, or a copy of it in --out DIR; the exit code is 1 where
a figure grows faster.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
from benchmarks import many_ranks_start, many_ranks_state
from benchmarks.many_ranks_start import SECONDS, Figures
from benchmarks.scaling import PAGE, update
from megatron.planner.spawn_ranks import run_ranks

RANKS = (8, 64, 512, 4096, 10_000)
DOCUMENTS = (10**7, 10**8, 10**9)
PARTS: dict[str, tuple[Callable[[int], Figures], ...]] = {
    "start-up and end": tuple(many_ranks_start.PARTS.values()),
    "checkpoint": (many_ranks_state.saving,),
    "data and steps": (many_ranks_state.stepping,),
    "planner": (many_ranks_state.planning,),
}
DEADLINE_S = 3600.0
FROM = 512
"""Growth is taken from here on: what does not depend on the ranks is the most of a figure of few."""
TOLERANCE = {SECONDS: 0.15}
"""Of an exponent: seconds differ by so much from one run to the next; what is counted does not."""


@dataclass
class Row:
    """One figure over numbers of ranks, or of documents."""

    part: str
    title: str
    unit: str
    how: str
    values: dict[int, float] = field(default_factory=dict)

    @property
    def span(self) -> tuple[int, int]:
        """The numbers between which the growth is taken."""
        numbers = sorted(number for number, value in self.values.items() if value > 0)
        return next((number for number in numbers[:-1] if number >= FROM), numbers[0]), numbers[-1]

    @property
    def exponent(self) -> float:
        """k, where the figure grows as ranks^k over its span; 0 where there is one number only."""
        if not any(value > 0 for value in self.values.values()):
            return 0.0
        first, last = self.span
        return slope(self.values[first], self.values[last], first, last) if first < last else 0.0

    @property
    def bar(self) -> float:
        """The exponent of ranks x log(ranks) over the same span."""
        first, last = self.span
        return slope(first * math.log(first), last * math.log(last), first, last)

    @property
    def is_within(self) -> bool:
        """Whether it grows no faster than ranks x log(ranks)."""
        return not self.exponent or self.exponent <= self.bar + TOLERANCE.get(self.how, 1e-3)


def slope(before: float, after: float, first: int, last: int) -> float:
    """Return k of after / before = (last / first)^k."""
    return math.log(after / before) / math.log(last / first)


def rows_of(parts: Mapping[str, Sequence[Callable[[int], Figures]]], numbers: Sequence[int]) -> list[Row]:
    """Return the figures of all ``parts`` at all ``numbers``, each found in a process of its own."""
    rows: dict[tuple[str, str], Row] = {}
    for part, functions in parts.items():
        for function in functions:
            for number in numbers:
                began = time.monotonic()
                found: Figures = run_ranks(1, _alone, function, number, backend="", threads=1, deadline_s=DEADLINE_S)[0]
                for title, figure in found.items():
                    row = rows.setdefault((part, title), Row(part, title, figure.unit, figure.how))
                    row.values[number], row.how = figure.value, figure.how
                print(f"{part}, {function.__name__}: {number:,} in {time.monotonic() - began:.1f} s", flush=True)
    return list(rows.values())


def _alone(rank: Any, function: Callable[[int], Figures], number: int) -> Figures:
    return function(number)


def table(rows: Sequence[Row], what: str) -> str:
    """Return the rows in Markdown; ``what`` is counted in the heads of the columns."""
    numbers = sorted({number for row in rows for number in row.values})
    head = " | ".join(f"{number:,}" for number in numbers)
    lines = [f"| {what} | {head} | unit | found | grows as n^ | within n log n |", "|---" * (len(numbers) + 5) + "|"]
    for part in dict.fromkeys(row.part for row in rows):
        if part:
            lines.append(f"| **{part}** |" + " |" * (len(numbers) + 4))
        for row in rows:
            if row.part == part:
                values = " | ".join(text(row.values[n], row.unit) if n in row.values else "" for n in numbers)
                lines.append(
                    f"| {row.title} | {values} | {row.unit} | {row.how} | {row.exponent:.2f} | "
                    f"{'yes' if row.is_within else '**no**'} |"
                )
    return "\n".join(lines)


def text(value: float, unit: str) -> str:
    """Return a figure as a table has it."""
    if unit == "s":
        return f"{value:.2g}" if value < 10 else f"{value:,.0f}"
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit == "bytes" and value >= factor:
            return f"{value / factor:.3g} {letter}"
    return f"{value:,.0f}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the exponent of each row beside that of ranks x log(ranks)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if len(row.values) > 1]
    figure, axis = plt.subplots(figsize=(9.0, 0.24 * len(shown) + 1.2), layout="constrained")
    places = range(len(shown), 0, -1)
    colours = ["#4878a8" if row.is_within else "#c87050" for row in shown]
    axis.barh(list(places), [row.exponent for row in shown], color=colours)
    axis.set_yticks(list(places), [f"{row.title} ({row.unit})" for row in shown], fontsize=7)
    axis.axvline(1.0, color="black", linewidth=0.5)
    axis.axvline(max(row.bar for row in shown), color="black", linewidth=1, linestyle="--")
    axis.set_xlabel("grows as ranks^k: k of each figure; dashed: ranks x log(ranks)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


def order_rows(numbers: Sequence[int], folder: Path) -> list[Row]:
    """Return the figures of the order of so many documents."""

    def part(number: int) -> Figures:
        with tempfile.TemporaryDirectory(prefix="many-ranks-", dir=folder) as here:
            return many_ranks_state.order(number, Path(here))

    return rows_of({"": (part,)}, numbers)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the benchmark's options."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    count = lambda word: int(float(word))  # noqa: E731
    parser.add_argument("--ranks", type=count, nargs="+", default=list(RANKS), metavar="N", help="default: up to 10000")
    parser.add_argument(
        "--documents", type=count, nargs="*", default=list(DOCUMENTS), metavar="N",
        help="1e9 by default, for which 40 GB must be free; none: leave the order of documents out",
    )  # fmt: skip
    parser.add_argument("--only", choices=[part.split()[0] for part in PARTS], nargs="+", help="of the parts of ranks")
    parser.add_argument("--folder", type=Path, help="where corpora are made; default: the temporary folder")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write page and picture here (default: docs/)")
    args = parser.parse_args(argv)
    problems = [f"--{name} must be at least 8, got {number}" for name in ("ranks", "documents")
                for number in getattr(args, name) if number < 8]  # fmt: skip
    problems += [f"--ranks must be a multiple of 8, got {number}" for number in args.ranks if number % 8]
    if args.only and not args.out:
        problems.append(f"--only leaves figures out, and would write so much less into {PAGE.name}: give --out DIR too")
    if problems:
        parser.error("; ".join(problems))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Count, measure, and write tables and picture; return 1 where something grows too fast."""
    args, page = parse_args(argv), PAGE
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        page = Path(shutil.copy(PAGE, args.out / PAGE.name))
    parts = {name: part for name, part in PARTS.items() if not args.only or name.split()[0] in args.only}
    rows = rows_of(parts, sorted(args.ranks))
    by_documents = order_rows(sorted(args.documents), args.folder) if args.documents else []
    cores = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, {time.strftime('%Y-%m-%d')}"
    rows = [row for row in rows if len(row.values) == len(args.ranks)]  # lines of Python are counted for few ranks
    picture = page.parent / "pictures" / "scaling_ranks.png"
    draw(rows, picture)
    update(page, "ranks", f"{cores}.\n\n{table(rows, 'ranks')}\n\n![growth](pictures/{picture.name})")
    if by_documents:
        update(page, "documents", f"{cores}.\n\n{table(by_documents, 'documents')}")
    print(f"written: {page}, {picture}")
    too_fast = [row for row in [*rows, *by_documents] if not row.is_within]
    for row in too_fast:
        print(f"grows faster than n log n: {row.title}, as n^{row.exponent:.2f}")
    return 1 if too_fast else 0


if __name__ == "__main__":
    sys.exit(main())
