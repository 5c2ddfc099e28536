"""Compare the dumps that two runs wrote with --debug-dump, and name the first module that differs.

    python tools/compare_dumps.py one two
    python tools/compare_dumps.py one two --rtol 1e-6 --picture errors.png
    python tools/compare_dumps.py one two --json

The runs may differ in device, layout, schedule and number format: shards of tensor ranks, replicas and micro-batches
are joined. Tensors are compared in the order of the first run: for each step the weights, forward, backward, and the
gradients of weights. Exit code 0: all tensors are within their tolerance. 1: a tensor is not. 2: there is no dump, or
nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.arguments.argparse_parsers import OneLineParser

if TYPE_CHECKING:
    from megatron.debug.compare import Comparison, Difference, Key
    from megatron.debug.dump_files import Dump

SHOWN = 12


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exit with code 2 and one line for options that cannot be combined."""
    parser = OneLineParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path, help="dump folder of the first run, the reference")
    parser.add_argument("second", type=Path, help="dump folder of the second run")
    parser.add_argument(
        "--rtol", type=tolerance, metavar="X",
        help="relative tolerance (default: by the coarser number format, fp64 1e-9, fp32 1e-4, fp16 1e-2, bf16 5e-2; "
        "ten times as much after the first step)",
    )  # fmt: skip
    parser.add_argument(
        "--all", action="store_true", help=f"list all tensors (default: {SHOWN} around the first difference)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables; draw no picture")
    parser.add_argument(
        "--picture", type=Path, metavar="PNG",
        help="plot of the error by layer (default: compare.png in the second folder; none with --json)",
    )  # fmt: skip
    flags = parser.parse_args(argv)
    if flags.picture is not None and flags.picture.suffix.lower() != ".png":
        parser.error(f"--picture must end in .png, got {flags.picture}")
    if flags.picture is not None and flags.json:
        parser.error("--picture has no effect with --json, which draws no picture. Remove one of them")
    if flags.all and flags.json:
        parser.error("--all has no effect with --json, which always lists all tensors. Remove one of them")
    return flags


def tolerance(text: str) -> float:
    """Parse a finite number of at least 0."""
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value


def main() -> int:
    """Compare the dumps of the command line; return the exit code."""
    flags = parse_args()
    from megatron.debug.compare import compare
    from megatron.debug.dump_files import read

    try:
        dumps = read(flags.first), read(flags.second)
        comparison = compare(*dumps, flags.rtol)
        if flags.json:
            print(json.dumps(as_json(comparison, dumps), indent=1))
        else:
            report(comparison, dumps, flags)
            draw_beside(comparison, dumps, flags)
    except (ValueError, OSError) as error:
        print(f"compare_dumps.py: {error}", file=sys.stderr)
        return 2
    return 0 if comparison.first is None else 1


def report(found: Comparison, dumps: tuple[Dump, Dump], flags: argparse.Namespace) -> None:
    """Print the facts of the runs, the tensors around the first difference, and the verdict."""
    print_table("dumps", ["", *(str(dump.folder) for dump in dumps)], facts_of(dumps))
    first_idx = 0 if found.first is None else found.differences.index(found.first)
    start = 0 if flags.all else max(first_idx - SHOWN // 2, 0)
    listed = found.differences[start:] if flags.all else found.differences[start : start + SHOWN]
    if found.first is not None or flags.all:
        columns = ["step", "phase", "what", "tensor", "samples", "first", "second", "error", "allowed", ""]
        print_table("tensors in execution order, with norms", columns, [row_of(difference) for difference in listed])
    for dump, keys in zip(dumps, (found.only_first, found.only_second), strict=True):
        if keys:
            print(f"only in {dump.folder}: {listed_names(keys)}")
    print(f"verdict: {verdict(found)}", flush=True)


def draw_beside(found: Comparison, dumps: tuple[Dump, Dump], flags: argparse.Namespace) -> None:
    """Draw the picture and print its path. Without --picture, an error is printed but does not fail the tool."""
    picture = flags.picture or flags.second / "compare.png"
    try:
        draw(found, dumps, picture)
    except (OSError, ImportError) as error:
        if flags.picture is not None:
            raise OSError(f"the picture cannot be drawn: {error}") from error
        print(f"the picture cannot be drawn: {error}", file=sys.stderr)
    else:
        print(f"picture: {picture}")


def facts_of(dumps: tuple[Dump, Dump]) -> list[list[str]]:
    """Return table rows with the layouts, number formats, losses and gradient norms of both runs."""
    rows = [
        ["layout", *(", ".join(f"{axis} {size}" for axis, size in d.facts["layout"].items()) for d in dumps)],
        ["micro-batch", *(str(d.facts["micro_batch_size"]) for d in dumps)],
        ["number format", *(f"{d.facts['dtype']} on {d.facts['device']}" for d in dumps)],
    ]
    for step in sorted(set(dumps[0].ends) & set(dumps[1].ends)):
        rows.append([f"loss of step {step}", *(number_text(d.ends[step]["loss"]) for d in dumps)])
        rows.append([f"gradient norm of step {step}", *(number_text(d.ends[step]["grad_norm"]) for d in dumps)])
    for dump_idx, dump in enumerate(dumps):
        for finding in dump.findings:
            cells = ["", ""]
            cells[dump_idx] = finding["text"]
            rows.append([f"not finite, step {finding['step']}", *cells])
    return rows


def row_of(one: Difference) -> list[str]:
    """Return the table cells for the difference of one tensor."""
    call = f" (call {one.key.call})" if one.key.call else ""
    part = f"[{one.key.index}]" if one.key.index else ""
    first, stop = one.samples
    verdict = ("DIFFERS" if one.error > one.tolerance else "COPIES DIFFER") if one.is_beyond else ""
    return [
        str(one.key.step),
        one.phase,
        f"{one.key.what}{part}",
        one.key.name + call,
        f"{first}-{stop - 1}" if stop else "",
        norm_text(one.one.norm, one.one.nan + one.one.inf),
        norm_text(one.other.norm, one.other.nan + one.other.inf),
        f"{one.error:.1e}" + (" *" if one.by_tensors else ""),
        f"{one.tolerance:.0e}" if math.isfinite(one.tolerance) else "any",
        verdict,
    ]


def norm_text(norm: float, not_finite: int) -> str:
    """Return a norm ("-" if it is NaN, which means unknown) and the number of values that are not finite, as text."""
    return ("-" if math.isnan(norm) else f"{norm:.6g}") + (f", {not_finite} not finite" if not_finite else "")


def number_text(number: float | None) -> str:
    """Return a number with ten significant digits; "not finite" for None."""
    return "not finite" if number is None else f"{number:.10g}"


def listed_names(keys: list[Key]) -> str:
    """Return the distinct names; only the first ones if there are many."""
    names = list(dict.fromkeys(f"{key.name} ({key.what})" for key in keys))
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def draw(found: Comparison, dumps: tuple[Dump, Dump], path: Path) -> None:
    """Draw the forward and backward errors of one step: the step of the first difference, or the first step."""
    from megatron.debug import plot
    from megatron.debug.compare import ORDER, worst_by_name

    difference = found.first or judged(found)[0]
    curves = {phase: worst_by_name(found.differences, difference.key.step, phase) for phase in ORDER}
    mark = None if found.first is None else f"{difference.phase}: {difference.key.name}"
    title = f"{dumps[0].folder} and {dumps[1].folder}, step {difference.key.step}"
    plot.draw(curves, difference.tolerance, mark, path, title)


def verdict(found: Comparison) -> str:
    """Return the verdict, the last line of the output."""
    first = found.first
    if first is None:
        worst = max(judged(found), key=lambda each: each.error)
        return f"{len(found.differences)} tensors agree, worst error {worst.error:.1e} ({format_difference(worst)})"
    count = sum(each.is_beyond for each in found.differences)
    reason = f"error {first.error:.1e}, allowed {first.tolerance:.0e}"
    if not first.error > first.tolerance:
        reason = f"copies on the ranks of {', '.join(first.copies)} differ"
    weights = [
        difference
        for difference in found.differences
        if difference.phase == "weights" and difference.key.step == first.key.step
    ]
    since = ""
    if weights and math.isinf(weights[0].tolerance):
        worst = max(weights, key=lambda each: each.error)
        since = f". The weights of that step differ by up to {worst.error:.1e} ({worst.key.name})"
    return (
        f"first difference: {format_difference(first)}, {reason}; {count} of {len(found.differences)} tensors differ"
        f"{since}"
    )


def judged(found: Comparison) -> list[Difference]:
    """Return the differences of the tensors that have a tolerance; all differences if no tensor has one."""
    return [difference for difference in found.differences if math.isfinite(difference.tolerance)] or found.differences


def format_difference(one: Difference) -> str:
    """Return the name of the tensor that differs, with its step, phase and micro-batch."""
    micro_batch = f", micro-batch {one.micro_batch}" if one.micro_batch is not None else ""
    return f"{one.key.what} of {one.key.name} in step {one.key.step}, {one.phase}{micro_batch}"


def as_json(found: Comparison, dumps: tuple[Dump, Dump]) -> dict[str, Any]:
    """Return the comparison as plain data; an infinite error becomes the text "inf"."""
    return {
        "first": str(dumps[0].folder),
        "second": str(dumps[1].folder),
        "equal": found.first is None,
        "verdict": verdict(found),
        "first_difference": None if found.first is None else plain(found.first),
        "tensors": [plain(difference) for difference in found.differences],
        "only_first": sorted({f"{key.name} ({key.what})" for key in found.only_first}),
        "only_second": sorted({f"{key.name} ({key.what})" for key in found.only_second}),
        "findings": {str(dump.folder): dump.findings for dump in dumps},
    }


def plain(one: Difference) -> dict[str, Any]:
    """Return a difference as plain data."""
    return {
        "step": one.key.step,
        "phase": one.phase,
        "what": one.key.what,
        "name": one.key.name,
        "call": one.key.call,
        "index": one.key.index,
        "samples": list(one.samples) if one.samples[1] else None,
        "error": one.error if math.isfinite(one.error) else "inf",
        "tolerance": one.tolerance if math.isfinite(one.tolerance) else "inf",
        "differs": one.is_beyond,
        "norms": [None if math.isnan(norms.norm) else norms.norm for norms in (one.one, one.other)],
        "not_finite": [one.one.nan + one.one.inf, one.other.nan + one.other.inf],
        "by_tensors": one.by_tensors,
        "copies_differ_in": list(one.copies),
    }


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table as wide as the terminal, or as wide as needed without a terminal."""
    from rich.table import Table

    from megatron import console

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print_table(table)


if __name__ == "__main__":
    sys.exit(main())
