"""Processor time that a pipeline engine itself takes for each action, with layers of next to no work.

    python benchmarks/pipeline_overhead.py [--profile "ours 1f1b"]

The same tiny model, two stages, many micro-batches; what one process takes for the layers alone is taken off. An
action is a forward or a backward of one micro-batch on one stage, with its messages. ``--profile`` prints where Python
spends its time on the first stage.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pipe.team import START_METHODS, Case, Contender, Order, assembled
from benchmarks.sizes import GPTSizes

SIZES = GPTSizes(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32, seq_length=8)
CUT = (0, 2, 5)
WARM_UP = 2
CONTENDERS = [
    Contender(name="one process", kind="alone"),
    Contender(name="stock", kind="stock", partition="type:^Attention$|^Norm$|^Head$"),
    Contender(name="torch 1f1b", kind="torch", partition=CUT),
    *[Contender(name=f"ours {name}", kind="ours", partition=CUT, schedule=name) for name in ("gpipe", "1f1b", "zb-h1")],
]


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Print and return microseconds for each action, by contender."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--micro-batches", type=int, default=64, help="default: 64")
    parser.add_argument("--rounds", type=int, default=7, help="default: 7")
    parser.add_argument("--only", nargs="+", help="take contenders alone whose names hold one of these texts")
    parser.add_argument("--profile", metavar="NAME", help="print where this contender spends its time, too")
    parser.add_argument("--start-method", choices=START_METHODS, default=START_METHODS[0], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    case = Case(name="overhead", sizes=SIZES, micro_batch_size=1, num_micro_batches=args.micro_batches)
    base = CONTENDERS[0].name
    chosen = [c for c in CONTENDERS if c.name == base or not args.only or any(text in c.name for text in args.only)]
    with assembled(case, chosen, args.start_method) as teams:
        cpu_s: dict[str, list[float]] = {name: [] for name in teams}
        for number in range(WARM_UP + args.rounds):
            for name, team in teams.items():
                answers = team.ask(Order("run", number))
                if number >= WARM_UP:
                    cpu_s[name].append(sum(each["cpu_s"] for each in answers))
        layers_s = statistics.median(cpu_s.pop(base))
        actions = 2 * case.num_stages * case.num_micro_batches
        found = {name: (statistics.median(each) - layers_s) / actions * 1e6 for name, each in cpu_s.items()}
        print(f"processor time beyond the layers' {layers_s / actions * 1e6:.0f} us, for each of {actions} actions")
        for name, each in found.items():
            print(f"{name:16}{each:8.0f} us")
        if args.profile:
            print(teams[args.profile].ask(Order("profile", WARM_UP + args.rounds, 4))[0])
    return found


if __name__ == "__main__":
    main()
