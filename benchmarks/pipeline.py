"""Compare our pipeline engine with DeepSpeed's and torch's.

    python benchmarks/pipeline.py --out runs/pipeline
    python benchmarks/pipeline.py --micro-batches 8 --only ours

Every contender is a set of processes with one thread each that train the same GPT from the same weights on the same
tokens; their first losses must agree. Contenders take turns in rotating order. The benchmark reports medians over
rounds and ratios within rounds. Attention and feed-forward are separate layers, between which all contenders can split
the model. The times of the layers are measured first, and the split is the one whose slowest stage is fastest;
DeepSpeed's engine uses the best split that its partition methods can produce.

Our engine makes the allocator keep freed memory on a CPU, and so do the processes without an engine. The other engines
run with their defaults.

table.txt and result.json are written to DIR. Bars, for 8 micro-batches:

| ratio | bar |
|---|---|
| our 1F1B to torch's 1F1B with the same chunks | at least 0.98 |
| our best to DeepSpeed's engine | at least 1.04 |
| our best to torch's 1F1B | at least 1.05 |
| our best to two one-process runs side by side | at least 0.93 |
| memory of the first stage, our 1F1B to DeepSpeed's engine | at most 1 |
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")  # read when DeepSpeed and torch are imported
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # silence the memory profiler
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.utils import partition_balanced, partition_uniform

import tds
from benchmarks.contenders import GPTSizes
from benchmarks.pipe.model import Bounds, Case, Contender, build, loss_fn
from benchmarks.step_profile import measure_memory
from benchmarks.turns import Bar, Team, measurement_info, ratio_quartiles, rotated
from tds.schedule import Costs, schedule_named, simulate
from tds.schedule.simulate import placement_for

MAIN = GPTSizes(num_layers=8, hidden_size=256, num_attention_heads=8, vocab_size=8192, seq_length=256)
SMALL = GPTSizes(num_layers=3, hidden_size=32, num_attention_heads=4, vocab_size=64, seq_length=16)
ONE_CHUNK = ("1f1b", "zb-h1", "gpipe", "auto")
TWO_CHUNKS = ("interleaved", "zb-h1", "zb-v", "dualpipev")
TRIAL_STEPS = 4
"""Steps in which the schedule "auto" tries the other schedules."""
LOSS_TOLERANCE, NUM_EQUAL_LOSSES = 1e-5, 3
SIDE_BY_SIDE = "side by side"


def all_splits(num_layers: int, num_chunks: int) -> list[Bounds]:
    """Return the bounds of all splits into non-empty chunks."""
    return [
        (0, *inner_bounds, num_layers) for inner_bounds in itertools.combinations(range(1, num_layers), num_chunks - 1)
    ]


def slowest_s(bounds: Bounds, layers_s: Sequence[float]) -> float:
    """Return the seconds of the slowest chunk."""
    return max(sum(layers_s[start:stop]) for start, stop in itertools.pairwise(bounds))


def best_chunks(case: Case, layers_s: Sequence[float], num_chunks: int, schedule: str) -> Bounds:
    """Return the split into ``num_chunks`` chunks per stage with the fastest simulated step."""
    placement = placement_for(schedule)
    order = schedule_named(schedule, num_chunks, placement)
    actions = [order(case.num_stages, case.num_micro_batches, stage) for stage in range(case.num_stages)]

    def step_s(bounds: Bounds) -> float:
        thirds = tuple(sum(layers_s[start:stop]) / 3 for start, stop in itertools.pairwise(bounds))
        return simulate(actions, Costs(thirds, thirds, thirds), num_chunks, placement).step_s

    return min(all_splits(len(layers_s), case.num_stages * num_chunks), key=step_s)


def deepspeed_splits(specs: Sequence[LayerSpec], num_stages: int) -> dict[Bounds, str]:
    """Return split -> partition method, for all splits that DeepSpeed's partition methods can produce."""
    names = [spec.typename.__name__ for spec in specs]
    num_parameters = [sum(p.numel() for p in spec.build().parameters()) for spec in specs]
    splits = {
        tuple(map(int, partition_balanced(weights=num_parameters, num_parts=num_stages))): "parameters",
        tuple(map(int, partition_uniform(num_items=len(specs), num_parts=num_stages))): "uniform",
    }
    types = sorted(set(names))
    for chosen_types in itertools.chain.from_iterable(
        itertools.combinations(types, n) for n in range(1, len(types) + 1)
    ):
        weights = [int(name in chosen_types) for name in names]
        bounds = tuple(map(int, partition_balanced(weights=weights, num_parts=num_stages)))
        splits.setdefault(bounds, "type:" + "|".join(f"^{name}$" for name in chosen_types))
    return {bounds: method for bounds, method in splits.items() if all(a < b for a, b in itertools.pairwise(bounds))}


def format_split(bounds: Bounds, specs: Sequence[LayerSpec]) -> str:
    """Return the transformer layers of each chunk as text, such as "5.5+2.5"; embedding, norm and head do not count."""
    halves = [0.5 if spec.typename.__name__ in ("Attention", "Mlp") else 0.0 for spec in specs]
    return "+".join(f"{sum(halves[start:stop]):g}" for start, stop in itertools.pairwise(bounds))


def make_contenders(case: Case, layers_s: Sequence[float]) -> list[Contender]:
    """Return the contenders of a case, given the seconds of each layer."""
    specs = case.specs()
    best = min(all_splits(len(specs), case.num_stages), key=lambda bounds: slowest_s(bounds, layers_s))
    methods = deepspeed_splits(specs, case.num_stages)
    stock = min(methods, key=lambda bounds: slowest_s(bounds, layers_s))

    def contender(engine_type: str, bounds: Bounds, schedule: str = "1f1b", num_chunks: int = 1) -> Contender:
        split_text = format_split(bounds, specs)
        name = f"{engine_type} {schedule} {split_text}"
        partition = methods[bounds] if engine_type == "stock" else bounds
        return Contender(
            name=name,
            kind=engine_type,
            partition=partition,
            split_text=split_text,
            schedule=schedule,
            num_chunks=num_chunks,
        )

    return [
        Contender(name="one process", kind="alone", should_keep_freed=True),
        Contender(name=SIDE_BY_SIDE, kind=SIDE_BY_SIDE, should_keep_freed=True),
        contender("stock", stock),
        *(contender("torch", bounds) for bounds in dict.fromkeys((best, stock))),
        *(contender("ours", bounds) for bounds in dict.fromkeys((best, stock))),
        *(contender("ours", best, schedule) for schedule in ONE_CHUNK[1:]),
        *(contender("ours", best_chunks(case, layers_s, 2, schedule), schedule, 2) for schedule in TWO_CHUNKS),
    ]


class ContenderRank:
    """One process of a contender. All ranks of a contender call each method at the same time."""

    def __init__(self, case: Case, contender: Contender, rank: int) -> None:
        warnings.simplefilter("ignore")
        self.case, self.is_distributed = case, contender.num_ranks(case) > 1
        if contender.kind in ("stock", "ours"):
            tds.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        self.built = build(case, contender, rank)

    def run(self, step: int, num_steps: int = 1) -> dict[str, Any]:
        """Train ``num_steps`` steps; return their seconds, the processor time of this rank and the losses."""
        batches = [self.case.batches(micro_batches) for micro_batches in range(step, step + num_steps)]
        if self.is_distributed:
            dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        losses = [self.built.step(micro_batches) for micro_batches in batches]
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        return {"seconds": seconds / num_steps, "cpu_s": cpu_s / num_steps, "losses": losses}

    def memory(self, step: int) -> int:
        """Train a step; return the peak bytes of live tensors."""
        batches = self.case.batches(step)
        return sum(measure_memory(lambda: self.built.step(batches)))

    def layer_seconds(self, repeats: int = 5) -> list[float]:
        """Return the seconds of each layer's forward plus backward for one micro-batch; the last includes the loss."""
        layers, rounds = list(self.built.module), []
        for _ in range(repeats + 1):
            x, labels = self.case.batches(0)[0]
            seconds = []
            for layer in layers:
                if x.is_floating_point():
                    x = x.detach().requires_grad_()
                start = time.perf_counter()
                y = layer(x)
                out = loss_fn(y, labels) if layer is layers[-1] else y
                out.backward(torch.ones_like(out))
                seconds.append(time.perf_counter() - start)
                x = y
            rounds.append(seconds)
        return [statistics.median(layer_times) for layer_times in zip(*rounds[1:], strict=True)]


def team_of(case: Case, contender: Contender, start_method: str) -> Team:
    """Start the processes of a contender."""
    size = contender.num_ranks(case)
    team = Team(contender.name, ContenderRank, (case, contender), size=size, start_method=start_method,
                has_group=size > 1, threads=1)  # fmt: skip
    team.ready()
    return team


@dataclass
class Record:
    """Measurements of one contender.

    Args:
        seconds: for each turn, seconds per step of each rank.
        cpu_s: for each turn, processor seconds per step over all ranks.
        first_stage_bytes: peak bytes of live tensors on the first stage.
    """

    contender: Contender
    seconds: list[list[float]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first_stage_bytes: int = 0

    def speeds(self, case: Case) -> list[float]:
        """Return tokens per second of each turn. For one-process runs side by side, it is the sum of their speeds."""
        if self.contender.kind == SIDE_BY_SIDE:
            return [sum(case.tokens / seconds for seconds in turn) for turn in self.seconds]
        return [case.tokens / max(turn) for turn in self.seconds]

    def speed(self, case: Case) -> float:
        """Return the median of ``speeds``."""
        return statistics.median(self.speeds(case))


def fastest(case: Case, records: Mapping[str, Record], engine_type: str) -> Record | None:
    """Return the record with the highest median speed among the contenders of ``engine_type``."""
    candidates = [record for record in records.values() if record.contender.kind == engine_type]
    return max(candidates, key=lambda record: record.speed(case), default=None)


def check_losses(records: Mapping[str, Record]) -> None:
    """Check that all contenders have the same losses in the first steps.

    Raises:
        RuntimeError: contenders differ by more than the tolerance.
    """
    for step in range(min(NUM_EQUAL_LOSSES, *(len(record.losses) for record in records.values()))):
        losses = {name: record.losses[step] for name, record in records.items()}
        difference = max(losses.values()) - min(losses.values())
        if not (all(map(math.isfinite, losses.values())) and difference <= LOSS_TOLERANCE):
            raise RuntimeError(f"losses of step {step} must agree within {LOSS_TOLERANCE}, got {losses}")


def bars(case: Case, records: Mapping[str, Record]) -> Iterator[Bar]:
    """Yield the required ratios of a case for which both contenders took part."""
    ours = fastest(case, records, "ours")
    if case.bar is None or ours is None:
        return
    for engine_type, bar in (("stock", 1.04), ("torch", 1.05), (SIDE_BY_SIDE, case.bar)):
        other = fastest(case, records, engine_type)
        if other is not None:
            text = f"our best ({ours.contender.name}) to {other.contender.name}"
            yield Bar(text, ratio_quartiles(ours.speeds(case), other.speeds(case)), at_least=bar)
    stock = fastest(case, records, "stock")
    for record in records.values():
        contender = record.contender
        if contender.kind != "ours" or contender.schedule != "1f1b":
            continue
        torch_record = records.get(f"torch 1f1b {contender.split_text}")
        if torch_record is not None:
            speeds = ratio_quartiles(record.speeds(case), torch_record.speeds(case))
            yield Bar(f"{contender.name} to torch's", speeds, at_least=0.98)
        if stock is not None and stock.contender.split_text == contender.split_text:
            memory = record.first_stage_bytes / stock.first_stage_bytes
            text = f"memory of the first stage, {contender.name} to {stock.contender.name}"
            yield Bar(text, (memory, memory, memory), at_most=1.0)


def rows_of(case: Case, records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Return the figures of all contenders, the fastest first."""
    side_by_side = fastest(case, records, SIDE_BY_SIDE)
    rows = [
        {
            "contender": record.contender.name,
            "cut": record.contender.split_text,
            "tokens_per_s": record.speed(case),
            "ms_per_step": case.tokens / record.speed(case) * 1e3,
            "cpu_ms_per_step": statistics.median(record.cpu_s) * 1e3,
            "of_side_by_side": side_by_side and ratio_quartiles(record.speeds(case), side_by_side.speeds(case))[1],
            "first_stage_bytes": record.first_stage_bytes,
            "losses": record.losses[:NUM_EQUAL_LOSSES],
        }
        for record in records.values()
    ]
    return sorted(rows, key=lambda row: -row["tokens_per_s"])


def table(case: Case, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the figures of a case as text."""
    lines = [
        f"{case.name}: {case.num_stages} stages, {case.num_micro_batches} micro-batches of {case.micro_batch_size}, "
        f"{case.sizes.text}",
        f"  {'':32}{'tokens/s':>10}{'ms/step':>10}{'CPU ms':>9}{'of two':>8}{'MiB stage 0':>13}{'third loss':>12}",
    ]
    for row in rows:
        ratio_text = "" if row["of_side_by_side"] is None else f"{row['of_side_by_side']:.3f}"
        memory = f"{row['first_stage_bytes'] / 2**20:.1f}" if row["first_stage_bytes"] else ""
        lines.append(
            f"  {row['contender']:32}{row['tokens_per_s']:10.0f}{row['ms_per_step']:10.1f}{row['cpu_ms_per_step']:9.1f}"
            f"{ratio_text:>8}{memory:>13}{row['losses'][-1]:12.6f}"
        )
    return "\n".join(lines)


def run_case(case: Case, args: argparse.Namespace) -> dict[str, Record]:
    """Measure all contenders of a case."""
    probe = Contender(name="probe", kind=SIDE_BY_SIDE, should_keep_freed=True)
    with closing(team_of(case, probe, args.start_method)) as team:
        layers_s = [statistics.fmean(answer) for answer in zip(*team.ask("layer_seconds"), strict=True)]
    contenders = make_contenders(case, layers_s)
    if args.only:
        contenders = [answer for answer in contenders if any(text in answer.name for text in args.only)]
    if not contenders:
        raise SystemExit(f"--only must name a contender, got {args.only}")
    with ExitStack() as stack:
        teams, records = {}, {}
        for contender in contenders:
            teams[contender.name] = stack.enter_context(closing(team_of(case, contender, args.start_method)))
            records[contender.name] = Record(contender)
        for turn in range(args.warm_up + args.rounds):
            for name in rotated(teams, turn):
                record = records[name]
                is_last_warm_up = turn == args.warm_up - 1
                num_steps = 1 + TRIAL_STEPS * (record.contender.schedule == "auto" and is_last_warm_up)
                answers = teams[name].ask("run", turn, num_steps)
                record.losses += next(
                    answer["losses"] for answer in reversed(answers) if answer["losses"][-1] is not None
                )
                if turn >= args.warm_up:
                    record.seconds.append([answer["seconds"] for answer in answers])
                    record.cpu_s.append(sum(answer["cpu_s"] for answer in answers))
            print(f"{case.name}: round {turn + 1} of {args.warm_up + args.rounds}", file=sys.stderr, flush=True)
        check_losses(records)
        for name, team in teams.items():
            if records[name].contender.num_ranks(case) > 1:
                records[name].first_stage_bytes = team.ask("memory", args.warm_up + args.rounds)[0]
            team.close()  # closed before memory is counted, which needs memory itself
    return records


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured turns of each contender (default: 5)")
    parser.add_argument("--warm-up", type=int, default=2, help="warm-up turns of each contender (default: 2)")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 4, 16], help="default: 8 4 16")
    parser.add_argument("--only", nargs="+", help="only contenders whose names contain one of these texts")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few turns, to test the benchmark")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a bar is not met")
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--start-method", default="forkserver", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if min(args.rounds, args.warm_up, *args.micro_batches) < 1:
        parser.error("--rounds, --warm-up and --micro-batches must be at least 1")
    if args.smoke:
        args.rounds, args.warm_up = min(args.rounds, 2), 1
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the cases; print and write the tables."""
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.start_method == "forkserver":  # the server imports once, so that a process starts in a fraction of a second
        multiprocessing.set_forkserver_preload(["torch.distributed.pipelining", "benchmarks.pipeline"])
    case = Case(name="", sizes=SMALL if args.smoke else MAIN, micro_batch_size=2 if args.smoke else 4)
    result: dict[str, Any] = {"surroundings": measurement_info(), "cases": {}}
    text = []
    for num_micro_batches in args.micro_batches:
        case = replace(
            case,
            name=f"m={num_micro_batches}",
            num_micro_batches=num_micro_batches,
            bar=0.93 if num_micro_batches == 8 else None,
        )
        records = run_case(case, args)
        rows, case_bars = rows_of(case, records), list(bars(case, records))
        text.append("\n".join([table(case, rows), *(bar.text for bar in case_bars), ""]))
        print(text[-1], flush=True)
        result["cases"][case.name] = {"rows": rows, "bars": [vars(bar) | {"is_met": bar.is_met} for bar in case_bars]}
    (args.out / "table.txt").write_text("\n".join(text))
    (args.out / "result.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
    print(f"written: {args.out}/table.txt, result.json")
    missed = [
        bar["name"] for case_result in result["cases"].values() for bar in case_result["bars"] if not bar["is_met"]
    ]
    if args.strict and missed:
        raise SystemExit("\n".join(["unmet bars:", *missed]))
    return result


if __name__ == "__main__":
    main()
