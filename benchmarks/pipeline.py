"""Time our pipeline engine beside DeepSpeed's and torch's, in one run.

    python benchmarks/pipeline.py --out runs/pipeline
    python benchmarks/pipeline.py --model t5 --micro-batches 8
    python benchmarks/pipeline.py --overhead [--profile "ours 1f1b"]

Every contender is a set of processes with one thread each that stay for a whole case; all train the same GPT from the
same weights on the same tokens (their first losses must agree). They take turns, in an order that rotates;
medians over rounds are reported, and ratios within rounds. Which cuts take part is chosen by the time of each layer,
measured first; every contender may cut between the same layers, attention and feed-forward being two.

A T5 has no other engine to be compared with: one process, two of them side by side, and ours, at the cut that a run
gets by default and at those that look best by the engine's own profile.

On a CPU our engine lets the allocator keep freed memory; so do the processes without an engine. The other engines run
as they come, or with ``--keep-freed`` likewise.

DIR gets table.txt, turns.jsonl (a line for each turn) and speed.png. Bars:

| what | bar |
|---|---|
| our 1F1B to the faster of the stock engine's and torch's at the same cut | at least 0.98 |
| our best to the stock engine at its best, DualPipeV included | at least 1.04 |
| our best to torch's 1F1B at its best cut | at least 1.05 |
| our best to two one-process runs side by side | the case's own |
| a recorded step to ``simulate`` with its costs | off by at most 0.05 |
| our best to the best of ours by ``simulate`` with recorded costs, at the speed of the turns | at least 0.99 |
| longest stage to the shortest at our best cut, by the layers' times | off by at most the case's own |
| tensors on the first stage, our 1F1B and ZB-H1 of one chunk to the stock engine at the same cut | at most 1 |

Chunks and GPipe have no bar of memory: they hold more micro-batches at a time, by design.

``--overhead`` prints the processor time that an engine itself takes for each action, a forward or a backward of one
micro-batch on one stage with its messages: layers of next to no work on two stages, less what one process takes for
them. ``--profile`` prints where Python spends it on the first stage.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
from benchmarks.contenders import GPTSizes, T5Sizes
from benchmarks.pipe.cuts import START_METHODS, assembled, compare, format_cut, line_up, stage_seconds
from benchmarks.pipe.model import Case, Contender, make_model
from benchmarks.turns import Team, rotated, surroundings

MAIN = GPTSizes(num_layers=8, hidden_size=256, num_attention_heads=8, vocab_size=8192, seq_length=256)
DEEP = replace(MAIN, num_layers=16, vocab_size=4096)
SMALL = GPTSizes(num_layers=3, hidden_size=32, num_attention_heads=4, vocab_size=64, seq_length=16)
T5_MAIN = T5Sizes(num_layers=8, hidden_size=256, num_attention_heads=8, vocab_size=11776, enc_seq_length=256)
"""With this vocabulary the decoder's side and the head make up for what the encoder's layers leave over."""
T5_LOSS_TOLERANCE = 5e-5
"""Stages add up the gradients of tied tables in another order, which Adam's first steps blow up."""
T5_SMALL = T5Sizes(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=256, enc_seq_length=16)
KINDS = {"gpt2": ("main", "deep", "tensor"), "t5": ("main",)}


def cases_of(model: str, kinds: Sequence[str], micro_batches: Sequence[int], *, is_smoke: bool) -> list[Case]:
    """Return the cases of ``kinds``, in the order of their running; the main one with each number of micro-batches."""
    batch = 2 if is_smoke else 4
    if model == "t5":
        sizes = T5_SMALL if is_smoke else T5_MAIN
        t5 = Case(name="t5", sizes=sizes, micro_batch_size=batch, balance=0.03, loss_tolerance=T5_LOSS_TOLERANCE)
        return [replace(t5, name=f"t5 m={m}", num_micro_batches=m, bar=_at_8(m, 0.90)) for m in micro_batches]
    main, deep = (SMALL, replace(SMALL, num_layers=4)) if is_smoke else (MAIN, DEEP)
    found = []
    if "main" in kinds:
        case = Case(name="main", sizes=main, micro_batch_size=batch)
        found += [replace(case, name=f"m={m}", num_micro_batches=m, bar=_at_8(m, 0.93)) for m in micro_batches]
    if "deep" in kinds:
        found.append(Case(name="deep m=16", sizes=deep, micro_batch_size=batch, num_micro_batches=16, bar=0.94))
    if "tensor" in kinds:
        found.append(Case(name="tensor m=8", sizes=main, micro_batch_size=batch, num_micro_batches=8, tensor=2))
    return found


def _at_8(num_micro_batches: int, bar: float) -> float | None:
    return bar if num_micro_batches == 8 else None


NUM_EQUAL_LOSSES = 3


class UnequalError(RuntimeError):
    """Contenders that do not train the same thing."""


@dataclass
class Record:
    """What one contender told.

    Args:
        seconds: of each turn that counts, a step; of each rank.
        cpu_s: processor time of each turn, a step, over all ranks.
        losses: of each step from the first.
        cut: transformer layers of each piece.
        stage_s: seconds of the layers of each stage for one micro-batch, as measured ahead; of ours.
        first_stage_bytes: tensors on stage 0 before a step, and the most that the step adds.
        measured_to_simulated: for each recorded step of ours.
    """

    contender: Contender
    cut: str = ""
    seconds: list[list[float]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    stage_s: list[float] = field(default_factory=list)
    first_stage_bytes: tuple[int, int] | None = None
    measured_to_simulated: list[float] = field(default_factory=list)

    def speeds(self, case: Case) -> list[float]:
        """Return tokens a second, turn by turn; of processes side by side the sum."""
        if self.contender.kind == "side by side":
            return [sum(case.tokens / each for each in turn) for turn in self.seconds]
        return [case.tokens / max(turn) for turn in self.seconds]

    def speed(self, case: Case) -> float:
        """Return the median of ``speeds``."""
        return statistics.median(self.speeds(case))


def check_losses(records: Iterable[Record], tolerance: float) -> float:
    """Return the largest difference of losses among the first steps.

    Raises:
        UnequalError: above ``tolerance``.
    """
    records = list(records)
    worst = 0.0
    for step in range(min(NUM_EQUAL_LOSSES, *(len(record.losses) for record in records))):
        by_name = {record.contender.name: record.losses[step] for record in records}
        difference = max(by_name.values()) - min(by_name.values())
        if not (all(map(math.isfinite, by_name.values())) and difference <= tolerance):
            raise UnequalError(
                f"contenders must train the same thing, got losses at step {step} that differ by {difference:.2e}, "
                f"above {tolerance}, or are no numbers: {by_name}"
            )
        worst = max(worst, difference)
    return worst


def ratio(case: Case, ours: Record, theirs: Record) -> float:
    """Return how many times as fast ``ours`` is: the median over the rounds."""
    return statistics.median(a / b for a, b in zip(ours.speeds(case), theirs.speeds(case), strict=True))


def fastest(case: Case, records: Iterable[Record], *kinds: str) -> Record | None:
    """Return the record of those ``kinds`` with the highest median speed."""
    chosen = [record for record in records if record.contender.kind in kinds]
    return max(chosen, key=lambda record: record.speed(case), default=None)


NO_MEMORY_BAR = "memory has no bar for chunks and gpipe: they hold more micro-batches at a time, by design"
MEMORY = "memory of the first stage"
SAME_CUT, BEST_OF_STOCK, BEST_OF_TORCH, PREDICTED, BEST_SIMULATED = 0.98, 1.04, 1.05, 0.05, 0.99


@dataclass(frozen=True)
class Bar:
    """Something to reach: ``ratio`` at least ``bar``, or at most where ``is_limit``."""

    told: str
    ratio: float
    bar: float
    is_limit: bool = False

    @property
    def is_met(self) -> bool:
        return self.ratio <= self.bar if self.is_limit else self.ratio >= self.bar

    def __str__(self) -> str:
        sign = "<=" if self.is_limit else ">="
        return f"{'met    ' if self.is_met else 'NOT MET'}  {self.ratio:6.3f} {sign} {self.bar:.3f}  {self.told}"


def bars(case: Case, records: Mapping[str, Record]) -> list[Bar]:
    """Return every bar of the case whose contenders took part; none with more ranks than the bars are meant for."""
    if case.tensor > 1:
        return []
    found = [*_same_cut(case, records), *_predicted(records)]
    if case.bar is None:
        return found
    ours = fastest(case, records.values(), "ours")
    rivals = [
        ("stock at its best", fastest(case, records.values(), "stock", "dualpipev"), BEST_OF_STOCK),
        ("torch at its best", fastest(case, records.values(), "torch"), BEST_OF_TORCH),
        ("two processes", fastest(case, records.values(), "side by side"), case.bar),
    ]
    found += [*_balanced(case, records), *_best_simulated(case, records)]
    for told, rival, bar in rivals:
        if ours is not None and rival is not None:
            told = f"our best ({ours.contender.name}) to {told} ({rival.contender.name})"
            found.append(Bar(told, ratio(case, ours, rival), bar))
    return found


def _same_cut(case: Case, records: Mapping[str, Record]) -> list[Bar]:
    """Our 1F1B beside 1F1B of others on the same layers: speed, and memory of the first stage."""
    found = []
    for own in records.values():
        contender = own.contender
        if contender.kind != "ours" or contender.partition == "profile":
            continue
        rivals = [r for r in records.values() if r.contender.kind in ("stock", "torch") and r.cut == own.cut]
        rival = fastest(case, rivals, "stock", "torch")
        if rival is not None and contender.schedule == "1f1b" and case.bar is not None:
            told = f"{contender.name} to the faster 1F1B of others at this cut ({rival.contender.name})"
            found.append(Bar(told, ratio(case, own, rival), SAME_CUT))
        stock = fastest(case, rivals, "stock")
        is_lean = contender.schedule in ("1f1b", "zb-h1") and contender.chunks == 1
        if is_lean and stock is not None and own.first_stage_bytes and stock.first_stage_bytes:
            told = f"{MEMORY}, {contender.name} to {stock.contender.name}"
            found.append(Bar(told, sum(own.first_stage_bytes) / sum(stock.first_stage_bytes), 1.0, is_limit=True))
    return found


def _balanced(case: Case, records: Mapping[str, Record]) -> list[Bar]:
    """How far apart the stages of our best cut are; chunks are left out, for they have a balance of their own."""
    cut = [record for record in records.values() if record.contender.chunks == 1 and record.stage_s]
    best = fastest(case, cut, "ours")
    if case.balance is None or best is None:
        return []
    apart = max(best.stage_s) / min(best.stage_s) - 1.0
    return [Bar(f"stages of {best.contender.name} are apart by", apart, case.balance, is_limit=True)]


def _predicted(records: Mapping[str, Record]) -> list[Bar]:
    found = []
    for record in records.values():
        if record.measured_to_simulated:
            middle = statistics.median(record.measured_to_simulated)
            told = f"{record.contender.name}: measured step is {middle:.3f} of simulate's, off by"
            found.append(Bar(told, abs(middle - 1.0), PREDICTED, is_limit=True))
    return found


def _best_simulated(case: Case, records: Mapping[str, Record]) -> list[Bar]:
    """How near our best comes to the schedule and cut that ``simulate`` has for the fastest, by recorded costs.

    Steps are recorded one contender after the other, while the machine's own speed changes: so what counts is how much
    faster the simulation is than its own step, at the speed that the contender had in the turns.
    """
    recorded = {name: record for name, record in records.items() if record.measured_to_simulated}
    simulated = {name: _simulated_speed(case, record) for name, record in recorded.items()}
    ours = fastest(case, records.values(), "ours")
    if ours is None or not simulated:
        return []
    best = max(simulated, key=lambda name: simulated[name])
    told = f"our best ({ours.contender.name}) to the best that is simulated ({best})"
    return [Bar(told, ours.speed(case) / simulated[best], BEST_SIMULATED)]


def _simulated_speed(case: Case, record: Record) -> float:
    return record.speed(case) * statistics.median(record.measured_to_simulated)


COLOURS = {"ours": "tab:blue", "stock": "tab:orange", "dualpipev": "tab:red", "torch": "tab:green"}


def row(case: Case, record: Record, records: Mapping[str, Record]) -> dict[str, Any]:
    """Return the numbers of one contender."""
    speed = record.speed(case)
    mark = fastest(case, records.values(), "side by side")
    before, added = record.first_stage_bytes or (None, None)
    return {
        "contender": record.contender.name,
        "cut": record.cut,
        "tokens_per_s": speed,
        "ms_per_step": case.tokens / speed * 1e3,
        "cpu_ms_per_step": statistics.median(record.cpu_s) * 1e3,
        "of_side_by_side": None if mark is None else ratio(case, record, mark),
        "first_stage_bytes_before": before,
        "first_stage_bytes_added": added,
        "measured_to_simulated": statistics.median(record.measured_to_simulated or [float("nan")]),
        "losses": record.losses[:NUM_EQUAL_LOSSES],
    }


def table(case: Case, records: Mapping[str, Record]) -> str:
    """Return the case as lines of text, the fastest first."""
    lines = [
        f"{case.name}: {case.num_stages} stages x {case.tensor} tensor, {case.num_micro_batches} micro-batches of "
        f"{case.micro_batch_size}, {case.sizes.text}",
        f"  {'':32}{'cut':>18}{'tokens/s':>10}{'ms/step':>10}{'CPU ms':>9}{'of two':>8}{'MiB before+step':>17}"
        f"{'/simulate':>11}{'third loss':>12}",
    ]
    rows = [row(case, record, records) for record in records.values()]
    for each in sorted(rows, key=lambda each: -each["tokens_per_s"]):
        of_two = each["of_side_by_side"]
        before, added = each["first_stage_bytes_before"], each["first_stage_bytes_added"]
        memory = "" if before is None else f"{before / 2**20:.1f}+{added / 2**20:.1f}"
        simulated = each["measured_to_simulated"]
        lines.append(
            f"  {each['contender']:32}{each['cut']:>18}{each['tokens_per_s']:10.0f}{each['ms_per_step']:10.1f}"
            f"{each['cpu_ms_per_step']:9.1f}{'' if of_two is None else f'{of_two:.3f}':>8}{memory:>17}"
            f"{'' if simulated != simulated else f'{simulated:.3f}':>11}{each['losses'][-1]:12.6f}"
        )
    return "\n".join(lines)


def draw(cases: Mapping[Case, Mapping[str, Record]], path: Path) -> None:
    """Write a picture of all cases: tokens a second of each contender, with the slowest and the fastest turn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [1.0 + 0.3 * len(records) for records in cases.values()]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(cases), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, (case, records) in zip(axes, cases.items(), strict=True):
        ordered = sorted(records.values(), key=lambda record: record.speed(case))
        middles = [record.speed(case) for record in ordered]
        spread = [
            [middle - min(record.speeds(case)) for middle, record in zip(middles, ordered, strict=True)],
            [max(record.speeds(case)) - middle for middle, record in zip(middles, ordered, strict=True)],
        ]
        colours = [COLOURS.get(record.contender.kind, "tab:gray") for record in ordered]
        names = [record.contender.name for record in ordered]
        drawn = axis.barh(names, middles, xerr=spread, color=colours, ecolor="0.3", capsize=2)
        axis.bar_label(drawn, labels=[f"{middle:.0f}" for middle in middles], padding=4, fontsize=8)
        axis.set_title(case.name, fontsize=10)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.1)
    axes[-1].set_xlabel("tokens a second; lines from the slowest to the fastest turn")
    figure.savefig(path, dpi=120)


RECORDED_STEPS = 5


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the benchmark's options."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(KINDS), default="gpt2", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, help="turns that count, of each contender (default: 5; of --overhead 7)")
    parser.add_argument("--warm-up", type=int, default=2, help="turns ahead of them (default: 2)")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps in a turn (default: 1)")
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", help="of the main cases (default: 8 4 16; of --overhead 64)"
    )
    parser.add_argument("--cases", nargs="+", choices=KINDS["gpt2"], help="default: all; T5 has main alone")
    parser.add_argument("--cuts", type=int, default=3, help="how many of its best cuts each engine runs (default: 3)")
    parser.add_argument("--only", nargs="+", help="take contenders alone whose names hold one of these texts")
    parser.add_argument(
        "--keep-freed", action="store_true", help="let the allocator keep freed memory for the other engines, too"
    )
    parser.add_argument("--overhead", action="store_true", help="measure processor time of the engines alone")
    parser.add_argument(
        "--profile", choices=[each.name for each in ENGINES], metavar="NAME",
        help="with --overhead: print where this contender spends its time, one of: %(choices)s",
    )  # fmt: skip
    parser.add_argument(
        "--look-s", type=float, default=120.0, metavar="S",
        help="seconds after the turns in which memory and recorded steps are measured, for each case (default: 120)",
    )  # fmt: skip
    parser.add_argument("--smoke", action="store_true", help="a model of no use, a few turns: whether it runs at all")
    parser.add_argument("--strict", action="store_true", help="end with code 1 if a bar is not met")
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--start-method", choices=START_METHODS, default=START_METHODS[0], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.cases = args.cases or KINDS[args.model]
    args.rounds = args.rounds if args.rounds is not None else 7 if args.overhead else 5
    args.micro_batches = args.micro_batches or ([64] if args.overhead else [8, 4, 16])
    if args.profile and not args.overhead:
        parser.error("--profile needs --overhead")
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
    if args.overhead:
        return overhead(args)
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
        records = {each.name: _record(case, each, teams[each.name], costs) for each in contenders}
        for number in range(args.warm_up + args.rounds):
            start = time.time()
            for name in rotated(teams, number):
                _turn(case, number, args, teams[name], records[name], lines)
            _progress(case, number + 1, args, len(teams), time.time() - start)
            if args.warm_up <= number < args.warm_up + args.rounds - 1:
                so_far = f"after {number - args.warm_up + 1} of {args.rounds} rounds, {table(case, records)}"
                print(so_far, flush=True)
                (args.out / "table.txt").write_text(so_far + "\n")
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
        found = teams[probe.name].ask("layers")
    return [statistics.fmean(each) for each in zip(*found, strict=True)]


def _turn(case: Case, number: int, args: argparse.Namespace, team: Team, record: Record, lines: Any) -> None:
    is_last_warm_up = number == args.warm_up - 1
    trials_left = record.contender.num_trials - args.warm_up * args.steps
    num_steps = args.steps + (max(0, trials_left) if is_last_warm_up else 0)
    answers = team.ask("run", number * args.steps, num_steps)
    told = next(each["losses"] for each in reversed(answers) if each["losses"][-1] is not None)
    record.losses += told
    seconds = [each["seconds"] / num_steps for each in answers]
    cpu_s = sum(each["cpu_s"] for each in answers) / num_steps
    counts = number >= args.warm_up
    if counts:
        record.seconds.append(seconds)
        record.cpu_s.append(cpu_s)
    _write(lines, what="turn", case=case.name, round=number, counts=counts, contender=team.name,
           seconds=seconds, cpu_s=cpu_s, losses=told)  # fmt: skip


def _look_closer(case: Case, args: argparse.Namespace, teams: Mapping[str, Team], records: dict[str, Record]) -> None:
    """Measure after the turns: memory of the first stage, and steps of ours compared with their simulation.

    Counting its memory makes a step take more of it. So each contender ends when it has been looked at, and leaves
    its memory to the next; ours come last. After ``--look-s`` seconds the contenders that remain are left out.
    """
    step = (args.warm_up + args.rounds) * args.steps
    ordered = sorted(teams.items(), key=lambda each: records[each[0]].contender.kind == "ours")
    deadline = time.monotonic() + args.look_s
    for number, (name, team) in enumerate(ordered, 1):
        if time.monotonic() > deadline:
            left_out = ", ".join(each for each, _ in ordered[number - 1 :])
            print(f"{case.name}: no memory and no recorded steps after {args.look_s:g} s (--look-s): {left_out}",
                  file=sys.stderr, flush=True)  # fmt: skip
            return
        print(f"{case.name}: memory and recorded steps, contender {number} of {len(ordered)}: {name}",
              file=sys.stderr, flush=True)  # fmt: skip
        contender = records[name].contender
        if contender.num_ranks(case) == case.num_stages * case.tensor:
            held = team.ask("memory", step)[0]
            records[name].first_stage_bytes = (held["before_bytes"], held["added_bytes"])
        if contender.kind == "ours":
            ranks = team.ask("costs", step + 1, RECORDED_STEPS)[:: case.tensor]
            for stages in zip(*ranks, strict=True):
                predicted = compare(stages, contender.chunks, contender.placement)
                records[name].measured_to_simulated.append(predicted.ratio)
        team.close()


def _record(case: Case, contender: Contender, team: Team, costs: Sequence[float]) -> Record:
    bounds = team.ask("cut")[0]
    record = Record(contender)
    if bounds:
        record.cut = format_cut(bounds, make_model(case, contender.layers).specs)
    if contender.kind == "ours":
        record.stage_s = stage_seconds(bounds, costs, case.num_stages, contender.placement)
    return record


def _is_wanted(contender: Contender, only: Sequence[str] | None) -> bool:
    return only is None or any(text in contender.name for text in only)


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


# What an engine itself takes.

TINY = GPTSizes(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32, seq_length=8)
CUT = (0, 2, 5)
ONE_PROCESS = Contender(name="one process", kind="alone")
ENGINES = [
    Contender(name="stock", kind="stock", partition="type:^Attention$|^Norm$|^Head$"),
    Contender(name="torch 1f1b", kind="torch", partition=CUT),
    *[Contender(name=f"ours {name}", kind="ours", partition=CUT, schedule=name) for name in ("gpipe", "1f1b", "zb-h1")],
]


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    """Print and return microseconds for each action, by number of micro-batches and contender."""
    found: dict[str, Any] = {}
    engines = [each for each in ENGINES if _is_wanted(each, args.only) or each.name == args.profile]
    for m in args.micro_batches:
        case = Case(name="overhead", sizes=TINY, micro_batch_size=1, num_micro_batches=m)
        with assembled(case, [ONE_PROCESS, *engines], args.start_method) as teams:
            cpu_s: dict[str, list[float]] = {name: [] for name in teams}
            for number in range(args.warm_up + args.rounds):
                for name, team in teams.items():
                    answers = team.ask("run", number)
                    if number >= args.warm_up:
                        cpu_s[name].append(sum(each["cpu_s"] for each in answers))
            layers_s = statistics.median(cpu_s.pop(ONE_PROCESS.name))
            actions = 2 * case.num_stages * m
            print(f"processor time beyond the layers' {layers_s / actions * 1e6:.0f} us, for each of {actions} actions")
            found[f"m={m}"] = {n: (statistics.median(each) - layers_s) / actions * 1e6 for n, each in cpu_s.items()}
            for name, each in found[f"m={m}"].items():
                print(f"{name:16}{each:8.0f} us")
            if args.profile:
                print(teams[args.profile].ask("profile", args.warm_up + args.rounds, 4)[0])
    return found


if __name__ == "__main__":
    main()
