"""Show the contents of a checkpoint, or the differences between two. All files are verified by their checksums first.

    python tools/inspect_checkpoint.py runs/my-run
    python tools/inspect_checkpoint.py runs/my-run/checkpoints/step-00000020 --compare runs/other --weights-only

For a run folder or its checkpoints folder, the newest checkpoint with correct checksums is used. With --compare the
exit code is 0 if all tensors are bitwise identical and 1 otherwise; differences in step or settings are shown but
ignored. Exit code 3: there is no checkpoint, or none with correct checksums.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import log
from megatron.errors import exit_code


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="run folder, its checkpoints folder, or a checkpoint folder")
    parser.add_argument("--compare", type=Path, metavar="OTHER", help="another checkpoint to compare with")
    parser.add_argument("--weights-only", action="store_true", help="with --compare: compare only weights")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    args = parser.parse_args(argv)
    if args.weights_only and args.compare is None:
        parser.error("--weights-only has no effect without --compare OTHER. Add --compare or remove --weights-only")
    return args


def show_checkpoint(path: Path, as_json: bool) -> int:
    """Print the facts and the tensors of one checkpoint; return the exit code."""
    from megatron.checkpoint import inspect
    from megatron.checkpoint.one_process import open_folder

    checkpoint = open_folder(path, any_format=True)
    info, tensors = inspect.summarize_run(checkpoint), inspect.compute_tensor_stats(checkpoint)
    info["files"], info["elements"] = inspect.file_sizes(checkpoint), inspect.num_elements(tensors)
    if as_json:
        print_json({"verified": True, **info, "tensors": [dataclasses.asdict(tensor) for tensor in tensors]})
        return 0
    print_info(info)
    rows = [
        [
            tensor.name,
            tensor.dtype,
            format_shape(tensor.shape),
            format_number(tensor.norm),
            format_number(tensor.largest),
            f"{tensor.num_not_finite or ''}",
            f"{tensor.num_files}",
        ]
        for tensor in tensors
    ]
    print_table("tensors", ["name", "type", "shape", "norm", "largest", "not finite", "files"], rows)
    return 0


def compare_checkpoints(first: Path, second: Path, weights_only: bool, as_json: bool) -> int:
    """Print the differences between two checkpoints; return the exit code."""
    from megatron.checkpoint import inspect
    from megatron.checkpoint.one_process import open_folder

    checkpoint, other_checkpoint = open_folder(first), open_folder(second)
    tensors = inspect.tensor_differences(checkpoint, other_checkpoint, weights_only=weights_only)
    state = inspect.metadata_differences(checkpoint, other_checkpoint)
    if as_json:
        differences = [dataclasses.asdict(difference) for difference in tensors]
        paths = {"first": str(checkpoint.path), "second": str(other_checkpoint.path)}
        print_json({**paths, "equal": not tensors, "tensors": differences, "state": state})
        return 1 if tensors else 0
    if state:
        rows = [[key, *(format_value(value) for value in pair)] for key, pair in state.items()]
        print_table("state (ignored in the verdict)", ["key", str(checkpoint.path), str(other_checkpoint.path)], rows)
    if tensors:
        rows = [
            [d.name, d.kind, d.first or "-", d.second or "-", format_number(d.largest), format_number(d.relative)]
            for d in tensors
        ]
        print_table("tensors that differ", ["name", "by", "first", "second", "largest", "relative"], rows)
    noun = "weights" if weights_only else "tensors"
    print(f"verdict: {len(tensors)} {noun} differ" if tensors else f"verdict: all {noun} are bitwise identical")
    return 1 if tensors else 0


def print_info(info: dict[str, Any]) -> None:
    """Print the table of facts about the run."""
    rows = [[key.replace("_", " "), format_value(value)] for key, value in info.items()]
    print_table("checkpoint (all files verified)", ["key", ""], rows)


def format_value(value: Any) -> str:
    """Return a value of the state as text, with one line per entry of a dictionary."""
    if isinstance(value, dict):
        return "\n".join(
            f"{key} {json.dumps(item) if isinstance(item, (dict, list)) else item}" for key, item in value.items()
        )
    return "-" if value is None else str(value)


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape as "3 x 4"; "-" for a scalar."""
    return " x ".join(map(str, shape)) or "-"


def format_number(value: float | None) -> str:
    """Return a number with four significant digits; "-" for None."""
    return "-" if value is None else f"{value:.4g}"


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


def print_json(content: dict[str, Any]) -> None:
    """Print one JSON object; numbers that JSON does not support become text."""
    print(json.dumps(to_json_value(content), indent=1, ensure_ascii=False))


def to_json_value(value: Any) -> Any:
    """Return ``value`` with "nan", "inf" or "-inf" as text for numbers that JSON does not support."""
    if isinstance(value, dict):
        return {key: to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    is_not_finite = isinstance(value, float) and (value != value or value in (float("inf"), float("-inf")))
    return str(value) if is_not_finite else value


def main() -> int:
    """Run the tool and return the exit code."""
    args = parse_args()
    try:
        if args.compare is not None:
            return compare_checkpoints(args.path, args.compare, args.weights_only, args.json)
        return show_checkpoint(args.path, args.json)
    except Exception as error:
        log.error(f"error: {error}")
        return exit_code(error)


if __name__ == "__main__":
    sys.exit(main())
