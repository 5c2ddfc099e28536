"""Forwards beside backwards of other micro-batches: steps by simulation, and steps of a small GPT-2 with experts.

    python benchmarks/overlap.py                          # a table, simulated
    python benchmarks/overlap.py --picture pairs.png      # dualpipev with pairs, below itself without, simulated
    python benchmarks/overlap.py --run --delay-ms 10      # trains; 2 stages x 2 expert ranks over gloo, or --tensor 2
    python benchmarks/overlap.py --run --trace FOLDER     # and leaves the trace of the steps with pairs

The table has steps over the time of what a stage computes: 1 is all that can be. Communication within a stage is given
as a share of what a forward, and a backward for the input, computes; the backward for the weights sends nothing. With
--run both ways take turns of a step in processes of their own. --delay-ms lets each collective of a layer sleep first,
as a slow network would; without it ranks of one host wait for each other alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
import torch
import torch.distributed as dist

from benchmarks.turns import Team, ratio_quartiles
from tds.gradients import runs_beside_backward
from tds.schedule import Costs, Timeline, schedule_named, simulate, validate
from tds.schedule.overlap import simulate_pairs, with_earlier_forwards
from tds.schedule.simulate import in_flight, placement_for

SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb-v": 2, "dualpipev": 2}
"""Those with pairs, and their chunks."""
SHARES = (0.0, 0.2, 0.4, 0.6)
"""Of communication, beside what is computed."""


def timelines(schedule: str, num_stages: int, num_micro_batches: int, share: float) -> tuple[Timeline, Timeline]:
    """Return a step without pairs and one with them; F, B and W of a stage compute for 1 each."""
    chunks, placement = SCHEDULES[schedule], placement_for(schedule)
    order = schedule_named(schedule, chunks, placement)
    pieces, each = num_stages * chunks, 1 / chunks
    costs = Costs.even(pieces, each * (1 + share), each * (1 + share), each)
    waits = Costs.even(pieces, each * share, each * share, 0.0)
    both = order, with_earlier_forwards(order, schedule)
    plain, paired = (_stages(each, num_stages, num_micro_batches) for each in both)
    return simulate(plain, costs, chunks, placement), simulate_pairs(paired, costs, waits, chunks, placement)


def _stages(order: Any, num_stages: int, num_micro_batches: int) -> list[Any]:
    return [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]


def held(schedule: str, num_stages: int, num_micro_batches: int) -> list[float]:
    """Return the most micro-batches of all layers of stage 0 in flight, without pairs and with them."""
    lie = num_stages, num_micro_batches, schedule, SCHEDULES[schedule], 0, placement_for(schedule)
    return [in_flight(*lie, has_pairs=has_pairs) / SCHEDULES[schedule] for has_pairs in (False, True)]


def table(sizes: Sequence[tuple[int, int]] = ((4, 16), (8, 32), (16, 64))) -> list[str]:
    """Return the rows of the page: for each schedule and share the step without and with pairs."""
    heads = " | ".join(f"{share:.0%} sent" for share in SHARES)
    rows = [f"| p, m | schedule | in flight on stage 0 | {heads} |", "|---" * (3 + len(SHARES)) + "|"]
    for p, m in sizes:
        for schedule in SCHEDULES:
            peaks = " to ".join(f"{number:g}" for number in dict.fromkeys(held(schedule, p, m)))
            cells = []
            for share in SHARES:
                without, paired = (line.step_s / (3 * m) for line in timelines(schedule, p, m, share))
                cells.append(f"{without:.2f} to {paired:.2f}")
            rows.append(f"| {p}, {m} | {schedule} | {peaks} | {' | '.join(cells)} |")
    return rows


def draw(path: Path, schedule: str = "dualpipev", num_stages: int = 4, num_micro_batches: int = 10) -> None:
    """Draw a schedule without pairs above itself with them, at 60 % of communication."""
    from tds import plot

    lines = timelines(schedule, num_stages, num_micro_batches, 0.6)
    order = schedule_named(schedule, SCHEDULES[schedule], placement_for(schedule))
    stages = _stages(order, num_stages, num_micro_batches)
    chunks = SCHEDULES[schedule]
    peaks = validate(stages, num_micro_batches, num_chunks=chunks, placement=placement_for(schedule))
    names = ("passes in turn", "forwards beside backwards")
    title = f"{schedule}, {num_stages} stages, {num_micro_batches} micro-batches, communication 60 % of computation"
    panels = [
        plot.Panel(line, f"{name}: step {line.step_s:.4g}", peaks, chunks)
        for name, line in zip(names, lines, strict=True)
    ]
    plot.draw_panels(panels, title, "time in the unit of the costs", path)


# A run: GPT-2 with experts on 2 stages x 2 expert ranks, or without experts on 2 x 2 tensor ranks.


class Rank:
    """One of four ranks, with its engine."""

    def __init__(self, args: argparse.Namespace, is_beside: bool, rank: int) -> None:
        import pretrain_gpt2
        from megatron.config import parse
        from megatron.data.mock_dataset import MockTokens
        from megatron.training import global_vars, initialize
        from megatron.training.data import RunData
        from megatron.training.parity import mock_tokenizer
        from megatron.training.setup import build_engine, make_streams
        from megatron.training.trainer import Trainer

        self._watch = Watch(args.delay_ms * 1e-3)
        words = f"""--num-layers {args.num_layers} --hidden-size {args.hidden_size} --num-attention-heads 4
            --seq-length {args.seq_length} --max-position-embeddings {args.seq_length} --vocab-size 512 --data-path none
            --device cpu --train-iters 1000 --lr 1e-4 --batch-size 1 --gas {args.micro_batches} --hidden-dropout 0
            --attention-dropout 0 --pipe-parallel-size 2 --pipeline-schedule {args.schedule}
            --model-parallel-size {args.tensor} --fp64"""
        if args.tensor == 1:
            words += " --num-experts 4 --disable-bias-linear --expert-model-parallel-size 2"
        words += f" --pipeline-chunks {SCHEDULES[args.schedule]}" if args.schedule == "interleaved" else ""
        words += " --overlap-forward-backward" if is_beside else ""
        words += f" --pipeline-trace {args.trace}" if is_beside and args.trace else ""
        config = parse(words.split(), world_size=4).with_vocab(512)
        here = initialize.start(config)
        streams = make_streams(config, here)
        global_vars.set_current(config, mock_tokenizer(config), streams)
        engine = build_engine(config, here, streams, pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
        tokens = MockTokens(512, args.seq_length, seed=1)
        data = RunData({"train": tokens} if here.reads_data else {}, None)
        self._trainer = Trainer(config, here, engine, data, Path(), [])
        self._open = self._trainer.open_batches()
        self._open.__enter__()

    def step(self) -> tuple[float, float]:
        """Do a step; return steps a second and the loss."""
        start = time.perf_counter()
        loss = self._trainer.train_step().loss
        return 1.0 / (time.perf_counter() - start), loss

    def hidden(self) -> tuple[float, float, float]:
        """Return what ``Watch.hidden`` does."""
        return self._watch.hidden()

    def bubble(self) -> float:
        """Return the share of idle time since the last call. Collective."""
        found: float = self._trainer.engine.bubble()
        return found


Spans = list[tuple[float, float]]


class Watch:
    """When layers were in collectives, by the pass that they are of, and when autograd ran.

    Args:
        delay_s: that each collective sleeps first, in the thread that calls it.
    """

    def __init__(self, delay_s: float) -> None:
        self._beside: Spans = []
        self._in_turn: Spans = []
        self._backwards: Spans = []
        for name in ("all_reduce", "all_to_all_single"):
            self._note(dist, name, lambda: self._beside if runs_beside_backward() else self._in_turn, delay_s)
        self._note(torch.autograd, "backward", lambda: self._backwards)

    def _note(self, module: Any, name: str, spans_of: Callable[[], Spans], delay_s: float = 0.0) -> None:
        own = getattr(module, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            time.sleep(delay_s)
            found = own(*args, **kwargs)
            spans_of().append((start, time.perf_counter()))
            return found

        patch.object(module, name, noted).start()

    def hidden(self) -> tuple[float, float, float]:
        """Return the seconds that forwards beside backwards were in collectives, and of these the seconds in which the
        backward computed, and was in collectives too; since the last call."""
        sending = _covered(self._beside, self._in_turn, self._backwards)
        computing = _covered(self._beside, self._backwards) - sending
        whole = _covered(self._beside)
        for each in (self._beside, self._in_turn, self._backwards):
            each.clear()
        return whole, computing, sending


def _covered(*sets: Spans) -> float:
    """Return how long a span of each set lasts at once; those of one set do not overlap."""
    first, *others = sets
    for other in others:
        cut = ((max(a, c), min(b, d)) for a, b in first for c, d in other)
        first = [(start, end) for start, end in cut if start < end]
    return sum(end - start for start, end in first)


def run(args: argparse.Namespace) -> None:
    """Train both ways in turns and print the times of a step."""
    teams = [
        Team(name, Rank, (args, is_beside), size=4, has_group=True, threads=1)
        for name, is_beside in (("in turn", False), ("beside", True))
    ]
    try:
        for team in teams:
            team.ready()
            team.ask("step")
            team.ask("bubble")
            team.ask("hidden")
        rates: list[list[float]] = [[], []]
        for _ in range(args.rounds):
            found = [team.ask("step")[0] for team in teams]
            if found[0][1] != found[1][1]:
                raise RuntimeError(f"both ways must have one loss, got {found[0][1]!r} and {found[1][1]!r}")
            for kept, (rate, _) in zip(rates, found, strict=True):
                kept.append(rate)
        hidden = teams[1].ask("hidden")
        bubbles = [team.ask("bubble")[0] for team in teams]
    finally:
        for team in teams:
            team.close()
    for team, each, bubble in zip(teams, rates, bubbles, strict=True):
        print(f"{team.name:8} {1e3 / statistics.median(each):.0f} ms a step, bubble {100 * bubble:.1f} %")
    low, middle, high = ratio_quartiles(rates[1], rates[0])
    for rank, (whole, computing, sending) in enumerate(hidden):
        print(
            f"rank {rank}: forwards beside backwards are {1e3 * whole / args.rounds:.0f} ms a step in collectives, "
            f"{computing / whole:.0%} of it while the backward computes, {sending / whole:.0%} while it is in its own"
        )
    print(f"beside is {middle:.3f} times as fast (quartiles {low:.3f}, {high:.3f})")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="draw a simulated schedule")
    parser.add_argument("--run", action="store_true", help="train, rather than simulate")
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="dualpipev")
    parser.add_argument("--tensor", type=int, choices=(1, 2), default=1, help="tensor ranks; 1: 2 expert ranks")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="that each collective of a layer sleeps first")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--trace", type=Path, help="folder for a trace of the steps with pairs")
    args = parser.parse_args(words)
    if args.run:
        run(args)
        return 0
    if args.picture is not None:
        draw(args.picture)
    else:
        print("\n".join(table()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
