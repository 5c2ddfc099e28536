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
    from megatron.debug.compare import Comparison, Difference, TensorKey
    from megatron.debug.dump_files import Dump

MAX_SHOWN = 12


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
        "--all", action="store_true", help=f"list all tensors (default: {MAX_SHOWN} around the first difference)"
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
    from megatron.debug.dump_files import read_dump

    try:
        dumps = read_dump(flags.first), read_dump(flags.second)
        comparison = compare(*dumps, flags.rtol)
        if flags.json:
            print(json.dumps(to_json_data(comparison, dumps), indent=1))
        else:
            report(comparison, dumps, flags)
            draw_picture(comparison, dumps, flags)
    except (ValueError, OSError) as error:
        print(f"compare_dumps.py: {error}", file=sys.stderr)
        return 2
    return 0 if comparison.first is None else 1


def report(comparison: Comparison, dumps: tuple[Dump, Dump], flags: argparse.Namespace) -> None:
    """Print the facts of the runs, the tensors around the first difference, and the verdict."""
    print_table("dumps", ["", *(str(dump.folder) for dump in dumps)], summary_rows(dumps))
    first_idx = 0 if comparison.first is None else comparison.differences.index(comparison.first)
    start = 0 if flags.all else max(first_idx - MAX_SHOWN // 2, 0)
    listed = comparison.differences[start:] if flags.all else comparison.differences[start : start + MAX_SHOWN]
    if comparison.first is not None or flags.all:
        columns = ["step", "phase", "what", "tensor", "samples", "first", "second", "error", "allowed", ""]
        print_table(
            "tensors in execution order, with norms", columns, [difference_row(difference) for difference in listed]
        )
    for dump, keys in zip(dumps, (comparison.only_first, comparison.only_second), strict=True):
        if keys:
            print(f"only in {dump.folder}: {format_names(keys)}")
    print(f"verdict: {verdict(comparison)}", flush=True)


def draw_picture(comparison: Comparison, dumps: tuple[Dump, Dump], flags: argparse.Namespace) -> None:
    """Draw the picture and print its path. Without --picture, an error is printed but does not fail the tool."""
    picture = flags.picture or flags.second / "compare.png"
    try:
        draw(comparison, dumps, picture)
    except (OSError, ImportError) as error:
        if flags.picture is not None:
            raise OSError(f"the picture cannot be drawn: {error}") from error
        print(f"the picture cannot be drawn: {error}", file=sys.stderr)
    else:
        print(f"picture: {picture}")


def summary_rows(dumps: tuple[Dump, Dump]) -> list[list[str]]:
    """Return table rows with the layouts, number formats, losses and gradient norms of both runs."""
    rows = [
        ["layout", *(", ".join(f"{axis} {size}" for axis, size in d.manifest["layout"].items()) for d in dumps)],
        ["micro-batch", *(str(d.manifest["micro_batch_size"]) for d in dumps)],
        ["number format", *(f"{d.manifest['dtype']} on {d.manifest['device']}" for d in dumps)],
    ]
    for step in sorted(set(dumps[0].ends) & set(dumps[1].ends)):
        rows.append([f"loss of step {step}", *(format_number(d.ends[step]["loss"]) for d in dumps)])
        rows.append([f"gradient norm of step {step}", *(format_number(d.ends[step]["grad_norm"]) for d in dumps)])
    for dump_idx, dump in enumerate(dumps):
        for finding in dump.findings:
            cells = ["", ""]
            cells[dump_idx] = finding["text"]
            rows.append([f"not finite, step {finding['step']}", *cells])
    return rows


def difference_row(difference: Difference) -> list[str]:
    """Return the table cells for the difference of one tensor."""
    call_text = f" (call {difference.key.call})" if difference.key.call else ""
    index_text = f"[{difference.key.index}]" if difference.key.index else ""
    first, stop = difference.samples
    status = (
        ("DIFFERS" if difference.error > difference.tolerance else "COPIES DIFFER")
        if difference.is_beyond_tolerance
        else ""
    )
    return [
        str(difference.key.step),
        difference.phase,
        f"{difference.key.tensor_type}{index_text}",
        difference.key.name + call_text,
        f"{first}-{stop - 1}" if stop else "",
        format_norm(
            difference.first_statistics.norm, difference.first_statistics.nan + difference.first_statistics.inf
        ),
        format_norm(
            difference.second_statistics.norm, difference.second_statistics.nan + difference.second_statistics.inf
        ),
        f"{difference.error:.1e}" + (" *" if difference.is_from_tensors else ""),
        f"{difference.tolerance:.0e}" if math.isfinite(difference.tolerance) else "any",
        status,
    ]


def format_norm(norm: float, not_finite: int) -> str:
    """Return a norm ("-" if it is NaN, which means unknown) and the number of values that are not finite, as text."""
    return ("-" if math.isnan(norm) else f"{norm:.6g}") + (f", {not_finite} not finite" if not_finite else "")


def format_number(value: float | None) -> str:
    """Return a number with ten significant digits; "not finite" for None."""
    return "not finite" if value is None else f"{value:.10g}"


def format_names(keys: list[TensorKey]) -> str:
    """Return the distinct names; only the first ones if there are many."""
    names = list(dict.fromkeys(f"{key.name} ({key.tensor_type})" for key in keys))
    return ", ".join(names[:MAX_SHOWN]) + (f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else "")


def draw(comparison: Comparison, dumps: tuple[Dump, Dump], path: Path) -> None:
    """Draw the forward and backward errors of one step: the step of the first difference, or the first step."""
    from megatron.debug import plot
    from megatron.debug.compare import ORDER, worst_by_name

    difference = comparison.first or with_tolerance(comparison)[0]
    curves = {phase: worst_by_name(comparison.differences, difference.key.step, phase) for phase in ORDER}
    mark = None if comparison.first is None else f"{difference.phase}: {difference.key.name}"
    title = f"{dumps[0].folder} and {dumps[1].folder}, step {difference.key.step}"
    plot.plot_errors(curves, difference.tolerance, mark, path, title)


def verdict(comparison: Comparison) -> str:
    """Return the verdict, the last line of the output."""
    first = comparison.first
    if first is None:
        worst = max(with_tolerance(comparison), key=lambda difference: difference.error)
        return (
            f"{len(comparison.differences)} tensors agree, worst error {worst.error:.1e} ({format_difference(worst)})"
        )
    num_beyond = sum(difference.is_beyond_tolerance for difference in comparison.differences)
    reason = f"error {first.error:.1e}, allowed {first.tolerance:.0e}"
    if not first.error > first.tolerance:
        reason = f"copies on the ranks of {', '.join(first.differing_copies)} differ"
    weights = [
        difference
        for difference in comparison.differences
        if difference.phase == "weights" and difference.key.step == first.key.step
    ]
    weights_note = ""
    if weights and math.isinf(weights[0].tolerance):
        worst = max(weights, key=lambda difference: difference.error)
        weights_note = f". The weights of that step differ by up to {worst.error:.1e} ({worst.key.name})"
    return (
        f"first difference: {format_difference(first)}, {reason}; {num_beyond} of {len(comparison.differences)} "
        f"tensors differ{weights_note}"
    )


def with_tolerance(comparison: Comparison) -> list[Difference]:
    """Return the differences of the tensors that have a tolerance; all differences if no tensor has one."""
    return [
        difference for difference in comparison.differences if math.isfinite(difference.tolerance)
    ] or comparison.differences


def format_difference(difference: Difference) -> str:
    """Return the name of the tensor that differs, with its step, phase and micro-batch."""
    micro_batch = f", micro-batch {difference.micro_batch}" if difference.micro_batch is not None else ""
    key = difference.key
    return f"{key.tensor_type} of {key.name} in step {key.step}, {difference.phase}{micro_batch}"


def to_json_data(comparison: Comparison, dumps: tuple[Dump, Dump]) -> dict[str, Any]:
    """Return the comparison as plain data; an infinite error becomes the text "inf"."""
    return {
        "first": str(dumps[0].folder),
        "second": str(dumps[1].folder),
        "equal": comparison.first is None,
        "verdict": verdict(comparison),
        "first_difference": None if comparison.first is None else difference_to_json(comparison.first),
        "tensors": [difference_to_json(difference) for difference in comparison.differences],
        "only_first": sorted({f"{key.name} ({key.tensor_type})" for key in comparison.only_first}),
        "only_second": sorted({f"{key.name} ({key.tensor_type})" for key in comparison.only_second}),
        "findings": {str(dump.folder): dump.findings for dump in dumps},
    }


def difference_to_json(difference: Difference) -> dict[str, Any]:
    """Return a difference as plain data."""
    return {
        "step": difference.key.step,
        "phase": difference.phase,
        "what": difference.key.tensor_type,
        "name": difference.key.name,
        "call": difference.key.call,
        "index": difference.key.index,
        "samples": list(difference.samples) if difference.samples[1] else None,
        "error": difference.error if math.isfinite(difference.error) else "inf",
        "tolerance": difference.tolerance if math.isfinite(difference.tolerance) else "inf",
        "differs": difference.is_beyond_tolerance,
        "norms": [
            None if math.isnan(norms.norm) else norms.norm
            for norms in (difference.first_statistics, difference.second_statistics)
        ],
        "not_finite": [
            difference.first_statistics.nan + difference.first_statistics.inf,
            difference.second_statistics.nan + difference.second_statistics.inf,
        ],
        "by_tensors": difference.is_from_tensors,
        "copies_differ_in": list(difference.differing_copies),
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
