"""Time a step of GPT-2 whose documents are kept apart, by their mean length, in one run.

    python benchmarks/documents.py
    python benchmarks/documents.py --seq-length 4096 --lengths 4096 1024 256 64 --rounds 7 --json documents.json

All contenders are one model on the same tokens on this machine's CPU, in fp32 with dropout 0; they take turns of a step
and ratios are taken within rounds. "mask" is the longest length with the mask of [b, 1, s, s] that there was before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
import torch

from benchmarks.turns import quartiles, rates_in_turns, ratio_quartiles, surroundings
from megatron.models.common import masks
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parameters import gpt2_rule, initialize

MASK = "mask"


def model_of(args: argparse.Namespace) -> DecoderModel:
    """Return the model, with random weights."""
    sizes = ModelArgs(
        num_layers=args.num_layers, hidden_size=args.hidden_size, num_attention_heads=args.heads, vocab_size=1024,
        max_position_embeddings=args.seq_length, kv_hidden_size=args.hidden_size // args.heads,
        ff_hidden_size=4 * args.hidden_size, position_embedding_type=args.positions,
        num_query_groups=args.groups or args.heads,
    )  # fmt: skip
    model = DecoderModel(sizes)
    initialize(model.named_parameters(), seed=0, rule=gpt2_rule(0.02, args.num_layers))
    return model


def step_of(model: DecoderModel, length: int, mean: int, *, by_mask: bool = False) -> Callable[[], float]:
    """Return what does a step on documents of ``mean`` tokens and returns steps a second."""
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(1024, (2, 1, length), generator=generator)
    ids = (torch.arange(length) // mean).int().unsqueeze(0)

    def step() -> float:
        start = time.perf_counter()
        with patch.object(masks, "way_of", (lambda *_, **__: None) if by_mask else masks.way_of):
            loss, _ = model(tokens, None, ids, labels, torch.ones(1, length))
        loss.backward()
        model.zero_grad()
        return 1.0 / (time.perf_counter() - start)

    return step


def main(argv: list[str] | None = None) -> int:
    """Print a row for each mean length; the exit code is 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 512, 128, 32], help="mean lengths in tokens")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--groups", type=int, default=0, help="of queries; 0: a key for each query")
    parser.add_argument("--positions", default="learned_absolute", help="as --position-embedding-type")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args(argv)
    model = model_of(args)
    turns = {str(mean): step_of(model, args.seq_length, mean) for mean in sorted(args.lengths, reverse=True)}
    longest = next(iter(turns))
    turns[MASK] = step_of(model, args.seq_length, int(longest), by_mask=True)
    rates_in_turns(turns, 1)
    rates = rates_in_turns(turns, args.rounds)
    print(f"{'documents':>10}{'ms a step':>12}   times as fast as {longest} (quartiles)   as the mask")
    rows = {}
    for name, own in rates.items():
        low, middle, high = ratio_quartiles(own, rates[longest])
        beside = ratio_quartiles(own, rates[MASK])[1]
        rows[name] = {"ms": 1e3 / quartiles(own)[1], "times": middle, "low": low, "high": high, "times_mask": beside}
        print(f"{name:>10}{rows[name]['ms']:12.0f}{middle:13.2f} ({low:.2f}, {high:.2f}){beside:24.2f}")
    if args.json:
        args.json.write_text(json.dumps({**surroundings(), "settings": vars(args) | {"json": None}, "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
