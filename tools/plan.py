"""Plan a run before starting it: find the best layout, its cost, and the command that starts it.

    python tools/plan.py --model gpt2 --num-layers 48 --hidden-size 8192 --gpus 512 --gpu h100-80g
    python tools/plan.py --model t5 --num-layers 24 --hidden-size 2048 --gpus 64 --gpu a100-80g --tokens 300e9
    python tools/plan.py --fits --model gpt2 --num-layers 48 --hidden-size 8192 --gpus 64 --model-parallel-size 8 \\
        --batch-size 4 --gas 8
    python tools/plan.py --load Qwen3-8B --gpus 8                  # sizes of a Hugging Face folder or of a run
    python tools/plan.py --calibrate machine.json      # then: --machine machine.json

The flags of the model and of the layout are the training flags (docs/flags.md). Layout flags on the command line are
fixed, and the planner searches over the others. --fits evaluates the given layout and suggests changes if it does not
fit. docs/planner.md describes the estimates and their errors.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.errors import CheckpointError, ConfigError
from megatron.models.architectures import list_model_types
from megatron.planner import report
from megatron.planner.estimate import Planner
from megatron.planner.options import PlanningTask, check_flags, family_of_load, make_parser, planning_task
from megatron.planner.search import overflow, remedies, search

DOES_NOT_FIT = 1


def main(argv: list[str] | None = None) -> int:
    """Run the requested command; return the exit code: 0, 1 if no layout fits, 2 for invalid flags."""
    parser, flags, training_flags = read_flags(argv)
    try:
        if flags.calibrate is not None:
            return write_machine(parser, flags)
        parsed_question = planning_task(flags, training_flags)
        planner = Planner(parsed_question.config, parsed_question.machine)
        return (
            show_fit(planner, parsed_question, flags.json)
            if parsed_question.layout
            else show_ranking(planner, parsed_question, flags.json)
        )
    except (CheckpointError, ConfigError) as error:
        parser.error(str(error))


def read_flags(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace, list[str]]:
    """Return the parser, the planner's flags, and the training flags; exit with code 2 if they cannot be combined."""
    parser = make_parser(__doc__ or "")
    flags, training_flags = parser.parse_known_args(argv)
    if flags.model is None:
        flags.model = family_of_load(training_flags)
    elif flags.model in list_model_types():
        training_flags = ["--model", flags.model, *training_flags]
        flags.model = list_model_types()[flags.model].family
    check_flags(parser, flags, training_flags)
    return parser, flags, training_flags


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check a command line, including its training flags, and return the planner's flags."""
    parser, flags, training_flags = read_flags(argv)
    try:
        if flags.calibrate is None:
            planning_task(flags, training_flags)
    except (CheckpointError, ConfigError) as error:
        parser.error(str(error))
    return flags


def show_ranking(planner: Planner, query: PlanningTask, is_json: bool) -> int:
    """Print the ranked layouts and the details of the first; return 1 if none fits."""
    result = search(planner, query.search_spec)
    if not result.num_candidates:
        raise ConfigError(
            f"no layout is possible with {query.search_spec.world_size} devices and a global batch of "
            f"{query.search_spec.global_batch_size} samples with these flags. Change --gpus or --global-batch-size, or "
            "set fewer layout flags"
        )
    if not result.best and result.smallest is None:
        raise ConfigError("training supports none of the layouts. Set fewer layout flags")
    if is_json:
        print_json({"layouts": [report.as_data(estimate, query) for estimate in result.best]}, query)
        return 0 if result.best else DOES_NOT_FIT
    print_lines(report.summary(query, planner))
    if not result.best:
        print_lines(["", "no layout fits. The closest one:", ""])
        assert result.smallest is not None
        print_lines(report.details(result.smallest, query))
        excess = overflow(result.smallest, query.machine.usable_bytes)
        print_lines(["", *report.memory_report(query, excess, remedies(planner, result.smallest.layout))])
        return DOES_NOT_FIT
    print_lines(["", *report.ranking(result, query), "", *report.details(result.best[0], query)])
    print_lines(["", *report.start_command(result.best[0], query)])
    return 0


def show_fit(planner: Planner, query: PlanningTask, is_json: bool) -> int:
    """Print the estimate of the given layout; if it does not fit, also print changes that make it fit, and return 1."""
    assert query.layout is not None
    estimate = planner.estimate(query.layout)
    excess = overflow(estimate, query.machine.usable_bytes)
    fixes = remedies(planner, query.layout) if excess else []
    if is_json:
        output: dict[str, Any] = {"fits": excess is None, "layout": report.as_data(estimate, query)}
        if excess is not None:
            output["overflow"] = {
                "stage": excess.stage,
                "part": excess.largest_part,
                "part_bytes": excess.part_bytes,
                "needed": excess.needed_bytes,
                "over": excess.excess_bytes,
            }
            output["remedies"] = [{"changes": fix.changes, **report.as_data(fix.estimate, query)} for fix in fixes]
        print_json(output, query)
    else:
        print_lines([*report.summary(query, planner), "", *report.details(estimate, query), ""])
        print_lines(
            [
                *report.memory_report(query, excess, fixes),
                "",
                *report.start_command(fixes[0].estimate if fixes else estimate, query),
            ]
        )
    return 0 if excess is None else DOES_NOT_FIT


def write_machine(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> int:
    """Measure this machine and write the result to a file."""
    from megatron.planner.calibrate import calibrate

    folder = flags.calibrate.absolute().parent
    if flags.calibrate.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        parser.error(f"--calibrate must be a file in a writable folder, got {flags.calibrate}")
    try:
        machine = calibrate(
            flags.ranks or 0, flags.device or "auto", report=lambda text: print_lines([text], sys.stderr)
        )
        machine.save(flags.calibrate)
    except (ValueError, OSError, RuntimeError) as error:
        parser.error(str(error))
    print_lines([f"{machine.name}: {machine.devices_per_node} ranks, written to {flags.calibrate}", machine.notes])
    return 0


def print_lines(lines: Iterable[str], stream: Any = None) -> None:
    """Print lines."""
    for line in lines:
        print(line, file=stream)


def print_json(output: dict[str, Any], query: PlanningTask) -> None:
    """Print JSON, including the assumptions."""
    print(json.dumps({**output, "machine": query.machine.name, "assumed": query.assumed}, indent=2))


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
