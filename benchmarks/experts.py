"""Time a layer of experts by a loop over experts and by torch's grouped products, forward and backward, in turns.

    python benchmarks/experts.py
    python benchmarks/experts.py --experts 64 --topk 8 --tokens 4096 --dtype bf16 --device cuda --json experts.json

Both make the same products of the same rows; ratios are taken within rounds. What ``megatron.ops.grouped.way_of`` takes
by itself is the faster of them as measured here.
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
from megatron.models.common.experts import MoE
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import gpt2_rule, initialize
from megatron.models.common.transformer import MLP
from megatron.ops import grouped

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def layer_of(args: argparse.Namespace) -> MoE:
    """Return the layer, with random weights."""
    sizes = ModelArgs(
        num_layers=1, hidden_size=args.hidden_size, num_attention_heads=1, vocab_size=1, max_position_embeddings=1,
        kv_hidden_size=1, ff_hidden_size=1, hidden_bias=False, activation="gated-silu", num_experts=args.experts,
        moe_ffn_hidden_size=args.expert_size, moe_router_topk=args.topk,
    )  # fmt: skip
    layer = MoE(sizes, ParallelContext(), MLP)
    initialize(layer.named_parameters(), seed=0, rule=gpt2_rule(0.02, 1))
    return layer.to(device=args.device, dtype=DTYPES[args.dtype])


def step_of(layer: MoE, x: torch.Tensor, way: str) -> Callable[[], float]:
    """Return what goes forward and backward by ``way`` and returns steps a second."""

    def step() -> float:
        start = time.perf_counter()
        with patch.object(grouped, "WAY", way):
            layer(x).sum().backward()
        layer.zero_grad()
        if x.is_cuda:
            torch.cuda.synchronize()
        return 1.0 / (time.perf_counter() - start)

    return step


def main(argv: list[str] | None = None) -> int:
    """Print a row for each way; the exit code is 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--expert-size", type=int, default=256)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args(argv)
    layer = layer_of(args)
    x = torch.randn(args.tokens, 1, args.hidden_size, device=args.device, dtype=DTYPES[args.dtype])
    turns = {way: step_of(layer, x, way) for way in (grouped.LOOP, grouped.GROUPED)}
    rates_in_turns(turns, 2)
    rates = rates_in_turns(turns, args.rounds)
    print(f"{'way':>10}{'ms':>10}   times as fast as the loop (quartiles)")
    rows = {}
    for name, own in rates.items():
        low, middle, high = ratio_quartiles(own, rates[grouped.LOOP])
        rows[name] = {"ms": 1e3 / quartiles(own)[1], "times": middle, "low": low, "high": high}
        print(f"{name:>10}{rows[name]['ms']:10.1f}{middle:11.2f} ({low:.2f}, {high:.2f})")
    if args.json:
        args.json.write_text(json.dumps({**surroundings(), "settings": vars(args) | {"json": None}, "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
