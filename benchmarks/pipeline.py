"""Time our pipeline engine beside DeepSpeed's and torch's, in one run.

    python benchmarks/pipeline.py --out runs/pipeline
    python benchmarks/pipeline.py --model t5 --micro-batches 8

Every contender is a set of processes with one thread each that stay for a whole case; all train the same GPT from the
same weights on the same tokens (their first losses must agree). They take turns, in an order that rotates;
medians over rounds are reported, and ratios within rounds. Which cuts take part is chosen by the time of each layer,
measured first; every contender may cut between the same layers, attention and feed-forward being two.

A T5 has no other engine to be compared with: one process, two of them side by side, and ours, at the cut that a run
gets by default and at those that look best by the engine's own profile.

On a CPU our engine lets the allocator keep freed memory; so do the processes without an engine. The other engines run
as they come, or with ``--keep-freed`` likewise.

DIR gets table.txt, turns.jsonl (a line for each turn) and speed.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import surroundings  # noqa: E402
from benchmarks.pipe.cases import KINDS, Case, Contender, cases_of  # noqa: E402  # noqa: E402
from benchmarks.pipe.report import MEMORY, NO_MEMORY_BAR, Bar, Record, bars, check_losses, draw, row, table  # noqa: E402  # noqa: E402  # noqa: E402
from benchmarks.pipe.team import (  # noqa: E402
    START_METHODS,
    Order,  # noqa: E402
    Team,
    assembled,
)

RECORDED_STEPS = 3


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the benchmark's options."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(KINDS), default="gpt2", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="turns that count, of each contender (default: 5)")
    parser.add_argument("--warm-up", type=int, default=2, help="turns ahead of them (default: 2)")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps in a turn (default: 1)")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 4, 16], help="of the main cases")
    parser.add_argument("--cases", nargs="+", choices=KINDS["gpt2"], help="default: all; T5 has main alone")
    parser.add_argument("--cuts", type=int, default=3, help="how many of its best cuts each engine runs (default: 3)")
    parser.add_argument("--only", nargs="+", help="take contenders alone whose names hold one of these texts")
    parser.add_argument(
        "--keep-freed", action="store_true", help="let the allocator keep freed memory for the other engines, too"
    )
    parser.add_argument("--smoke", action="store_true", help="a model of no use, a few turns: whether it runs at all")
    parser.add_argument("--strict", action="store_true", help="end with code 1 if a bar is not met")
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--start-method", choices=START_METHODS, default=START_METHODS[0], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.cases = args.cases or KINDS[args.model]
    if set(args.cases) - set(KINDS[args.model]):
        parser.error(f"--cases of --model {args.model} must be of {', '.join(KINDS[args.model])}, got {args.cases}")
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the cases; print and write tables, bars, turns and the picture."""
    args = parse_args(argv)
    if min(args.rounds, args.warm_up, args.steps, args.cuts, *args.micro_batches) < 1:
        raise SystemExit("--rounds, --warm-up, --steps, --cuts and --micro-batches must be at least 1")
    if args.smoke:
        args.rounds, args.warm_up = min(args.rounds, 2), 1
    args.out.mkdir(parents=True, exist_ok=True)
    text, drawn = [], {}
    result: dict[str, Any] = {"surroundings": surroundings(), "cases": {}}
    with (args.out / "turns.jsonl").open("w") as lines:
        _write(lines, what="surroundings", **result["surroundings"])
        for case in cases_of(args.model, args.cases, args.micro_batches, is_smoke=args.smoke):
            records = run_case(case, args, lines)
            drawn[case] = records
            found = bars(case, records)
            remark = [NO_MEMORY_BAR] if any(MEMORY in bar.told for bar in found) else []
            text.append("\n".join([table(case, records), "", *map(str, found), *remark, ""]))
            print(text[-1], flush=True)
            rows = [row(case, record, records) for record in records.values()]
            result["cases"][case.name] = {"rows": rows, "bars": [_bar_values(bar) for bar in found]}
            _write(lines, what="result", case=case.name, **result["cases"][case.name])
    (args.out / "table.txt").write_text("\n".join(text))
    draw(drawn, args.out / "speed.png")
    print(f"written: {args.out}/table.txt, turns.jsonl, speed.png")
    missed = [
        f"{name}: {bar['told']}" for name, each in result["cases"].items() for bar in each["bars"] if not bar["is_met"]
    ]
    if args.strict and missed:
        raise SystemExit("\n".join(["bars that are not met:", *missed]))
    return result


def run_case(case: Case, args: argparse.Namespace, lines: Any) -> dict[str, Record]:
    """Let the contenders of one case take their turns."""
    from benchmarks.pipe.cuts import line_up

    costs = of_others = layer_costs(case, args.start_method, keeps_freed=True)
    if not args.keep_freed and case.sizes.family != "t5":  # which no other engine trains
        of_others = layer_costs(case, args.start_method, keeps_freed=False)
    _write(lines, what="layers", case=case.name, seconds=costs, of_others=of_others)
    everyone = line_up(case, costs, args.cuts, of_others)
    if args.keep_freed:
        everyone = [replace(each, keeps_freed=True) for each in everyone]
    contenders = [each for each in everyone if _is_wanted(each, args.only)]
    if not contenders:
        raise ValueError(f"--only must name a contender of case {case.name}, got {args.only}; see {args.out}/table.txt")
    with assembled(case, contenders, args.start_method) as teams:
        records = {name: _record(case, team, costs) for name, team in teams.items()}
        for number in range(args.warm_up + args.rounds):
            start = time.time()
            for name in _rotated(list(teams), number):
                _turn(case, number, args, teams[name], records[name], lines)
            _progress(case, number + 1, args, len(teams), time.time() - start)
        worst = check_losses(records.values(), case.loss_tolerance)
        print(f"{case.name}: the first losses differ by at most {worst:.1e}", file=sys.stderr)
        _look_closer(case, args, teams, records)
    return records


def layer_costs(case: Case, start_method: str, keeps_freed: bool) -> list[float]:
    """Return seconds of each layer, forward and backward, as two processes at once measure them; of T5 our engine."""
    layers = "tensor" if case.tensor > 1 else "half"
    probe = Contender(name="probe", kind="side by side", layers=layers, keeps_freed=keeps_freed)
    if case.sizes.family == "t5":
        probe = Contender(name="probe", kind="ours", layers="t5", partition="profile")
    alone = replace(case, tensor=1, num_stages=2)
    with assembled(alone, [probe], start_method) as teams:
        found = teams[probe.name].ask(Order("layers"))
    return [statistics.fmean(each) for each in zip(*found, strict=True)]


def _turn(case: Case, number: int, args: argparse.Namespace, team: Team, record: Record, lines: Any) -> None:
    is_last_warm_up = number == args.warm_up - 1
    trials_left = team.contender.num_trials - args.warm_up * args.steps
    num_steps = args.steps + (max(0, trials_left) if is_last_warm_up else 0)
    answers = team.ask(Order("run", number * args.steps, num_steps))
    told = next(each["losses"] for each in reversed(answers) if each["losses"][-1] is not None)
    record.losses += told
    seconds = [each["seconds"] / num_steps for each in answers]
    cpu_s = sum(each["cpu_s"] for each in answers) / num_steps
    counts = number >= args.warm_up
    if counts:
        record.seconds.append(seconds)
        record.cpu_s.append(cpu_s)
    _write(lines, what="turn", case=case.name, round=number, counts=counts, contender=team.contender.name,
           seconds=seconds, cpu_s=cpu_s, losses=told)  # fmt: skip


def _look_closer(case: Case, args: argparse.Namespace, teams: Mapping[str, Team], records: dict[str, Record]) -> None:
    """After the turns: memory of the first stage, and steps of ours beside their simulation."""
    from benchmarks.pipe.probe import compare

    step = (args.warm_up + args.rounds) * args.steps
    for name, team in teams.items():
        if team.contender.num_ranks(case) == case.num_stages * case.tensor:
            held = team.ask(Order("memory", step))[0]
            records[name].first_stage_bytes = (held["before_bytes"], held["added_bytes"])
        if team.contender.kind == "ours":
            ranks = team.ask(Order("costs", step + 1, RECORDED_STEPS))[:: case.tensor]
            for stages in zip(*ranks, strict=True):
                records[name].measured_to_simulated.append(compare(stages, team.contender.chunks).ratio)


def _record(case: Case, team: Team, costs: Sequence[float]) -> Record:
    from benchmarks.pipe.cuts import format_cut, stage_seconds
    from benchmarks.pipe.model import make_model

    bounds = team.ask(Order("cut"))[0]
    record = Record(team.contender)
    if bounds:
        record.cut = format_cut(bounds, make_model(case, team.contender.layers).specs)
    if team.contender.kind == "ours":
        record.stage_s = stage_seconds(bounds, costs, case.num_stages)
    return record


def _is_wanted(contender: Contender, only: Sequence[str] | None) -> bool:
    return only is None or any(text in contender.name for text in only)


def _rotated(names: list[str], number: int) -> list[str]:
    shift = number % len(names)
    return names[shift:] + names[:shift]


def _progress(case: Case, done: int, args: argparse.Namespace, num_teams: int, round_s: float) -> None:
    total = args.warm_up + args.rounds
    end = time.strftime("%H:%M", time.localtime(time.time() + (total - done) * round_s))
    print(f"{case.name}: round {done} of {total}, {num_teams} contenders, {round_s:.0f} s; ends about {end}",
          file=sys.stderr, flush=True)  # fmt: skip


def _bar_values(bar: Bar) -> dict[str, Any]:
    return asdict(bar) | {"is_met": bar.is_met}


def _write(lines: Any, **values: Any) -> None:
    lines.write(json.dumps(values) + "\n")
    lines.flush()


if __name__ == "__main__":
    main()
