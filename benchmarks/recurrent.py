"""Time and saved memory per token of recurrent mixers and of attention, forward and backward, by sequence length.

    python benchmarks/recurrent.py --json recurrent.json
    python benchmarks/recurrent.py --lengths 512 2048 4096 --mixers gated_delta_net
    python benchmarks/recurrent.py --device cuda --dtype bf16 --hidden-size 2048 --lengths 512 4096 32768 131072

All mixers have the same hidden size and process the same number of tokens per turn: shorter sequences form a batch.
Mixers and lengths take turns within a round. The time per token of a recurrent mixer does not depend on the length; the
time per token of attention grows linearly. Attention has fewer rounds (``--attention-rounds``), because its turns at
the longest length take most of the time.

| column | value |
|---|---|
| us/token | median over rounds |
| x shortest | time per token divided by that at the shortest length, median of the ratios within rounds |
| x attention | time per token divided by that of attention at the same length, ratio of the medians |
| saved bytes/token | bytes that autograd saves for backward, without weights, per token of one sequence |
| estimate | the planner's estimate of the saved bytes (``megatron.costs.recurrent_cost``); none for attention |
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
import torch

from benchmarks.turns import Bar, measurement_info, quartiles, rates_in_turns, ratio_quartiles
from megatron import device
from megatron.config.layer_types import VARIANTS
from megatron.costs.recurrent_cost import CHUNK_SIZE, COSTS
from megatron.models.common.attention import SelfAttention
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import initialize
from megatron.models.common.recurrent_mixers import make_recurrent_mixer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
ATTENTION = "attention"
CONSTANT_BAR = 1.25
"""Upper bound for the time per token of a recurrent mixer at the longest length, divided by that at the shortest."""


def make_args(name: str, hidden_size: int) -> ModelArgs:
    """Return the args of a layer with attention or a recurrent mixer, with heads of 64 elements."""
    head_size = 64
    num_heads = max(1, hidden_size // head_size)
    linear: dict[str, Any] = {"linear_num_key_heads": num_heads, "linear_num_value_heads": num_heads} | {
        f"linear_{part}_head_dim": head_size for part in ("key", "value")
    }
    return ModelArgs(
        num_layers=1, hidden_size=hidden_size, num_attention_heads=num_heads, vocab_size=1, max_position_embeddings=1,
        kv_hidden_size=head_size, ff_hidden_size=hidden_size, hidden_bias=False, position_embedding_type="none",
        experimental_attention_variant="none" if name == ATTENTION else name,
        **({} if name == ATTENTION or name.startswith("mamba") else linear),
    )  # fmt: skip


def make_mixer(name: str, args: ModelArgs, where: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Return attention or a recurrent mixer with initial weights."""
    mixer: torch.nn.Module = (
        SelfAttention(args, ParallelContext(), 0)
        if name == ATTENTION
        else make_recurrent_mixer(VARIANTS[name], args, ParallelContext(), 0)
    )
    initialize(mixer.named_parameters(), seed=1, rule=lambda _name, _shape: 0.02)
    return mixer.to(where, dtype)


def turn_name(mixer: str, length: int) -> str:
    return f"{mixer}, {length}"


def run_turn(mixer: torch.nn.Module, x: torch.Tensor) -> float:
    """Run forward and backward on ``x`` [s, b, h] and return the tokens per second."""
    device.synchronize(x.device.type)
    start = time.perf_counter()
    mixer(x).sum().backward()
    device.synchronize(x.device.type)
    return x.shape[0] * x.shape[1] / (time.perf_counter() - start)


def saved_bytes(mixer: torch.nn.Module, x: torch.Tensor) -> int:
    """Return the bytes that autograd saves for backward, without weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in mixer.parameters()}
    sizes: dict[int, int] = {}
    kept: list[torch.Tensor] = []  # prevents reuse of an address

    def record(saved: torch.Tensor) -> torch.Tensor:
        if saved.untyped_storage().data_ptr() not in weights:
            sizes[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
            kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(record, lambda saved: saved):
        mixer(x)
    return sum(sizes.values())


def estimated_bytes(name: str, args: ModelArgs, dtype: torch.dtype) -> int:
    """Return the planner's estimate of the saved bytes per token of a recurrent mixer and of its input."""
    total, _ = COSTS[VARIANTS[name]](args).saved_bytes(CHUNK_SIZE, 1, dtype.itemsize)
    return total // CHUNK_SIZE + args.hidden_size * dtype.itemsize


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 32768], help="sequence lengths")
    parser.add_argument(
        "--mixers", nargs="+", default=["gated_delta_net", "kimi_delta", "mamba2"], help="recurrent mixers"
    )
    parser.add_argument("--hidden-size", type=int, default=256, help="hidden size; heads have 64 elements")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each recurrent mixer and length")
    parser.add_argument("--attention-rounds", type=int, default=1, help="turns of attention and each length")
    parser.add_argument("--device", default="cpu", help="device of the mixers")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="type of weights and activations")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args()


def main() -> None:
    options = parse_args()
    where, dtype, lengths = torch.device(options.device), DTYPES[options.dtype], sorted(options.lengths)
    names = [ATTENTION, *options.mixers]
    args = {name: make_args(name, options.hidden_size) for name in names}
    mixers = {name: make_mixer(name, args[name], where, dtype) for name in names}
    estimates = {name: estimated_bytes(name, args[name], dtype) for name in options.mixers}
    turns: dict[str, dict[str, Callable[[], float]]] = {name: {} for name in names}
    saved: dict[str, int] = {}
    for length in lengths:
        batch = max(1, lengths[-1] // length)
        x = torch.randn(length, batch, options.hidden_size, device=where, dtype=dtype, requires_grad=True)
        sequence = x[:, :1].detach().clone().requires_grad_()
        for name in names:
            # also the first pass, which is slower than later ones
            saved[turn_name(name, length)] = saved_bytes(mixers[name], sequence) // length
            turns[name][turn_name(name, length)] = partial(run_turn, mixers[name], x)
    recurrent_turns = {key: turn for name in options.mixers for key, turn in turns[name].items()}
    rates = rates_in_turns(turns[ATTENTION], options.attention_rounds)
    rates |= rates_in_turns(recurrent_turns, options.rounds)
    results: list[dict[str, Any]] = []
    print(
        f"{'mixer, tokens':28} {'us/token':>10} {'x shortest':>11} {'x attention':>12} {'saved bytes/token':>18} "
        f"{'estimate':>9}"
    )
    for name in names:
        for length in lengths:
            key = turn_name(name, length)
            low, middle, high = quartiles(rates[key])
            growth = ratio_quartiles(rates[turn_name(name, lengths[0])], rates[key])
            relative = quartiles(rates[turn_name(ATTENTION, length)])[1] / middle
            estimate = estimates.get(name)
            print(
                f"{key:28} {1e6 / middle:10.2f} {growth[1]:11.2f} {relative:12.2f} {saved[key]:18} "
                f"{'-' if estimate is None else estimate:>9}"
            )
            results.append(
                {
                    "mixer": name, "length": length, "us_per_token": [1e6 / rate for rate in (high, middle, low)],
                    "relative_to_shortest": growth, "relative_to_attention": relative,
                    "saved_bytes_per_token": saved[key], "estimated_bytes_per_token": estimate,
                }
            )  # fmt: skip
    for name in options.mixers:
        shortest, longest = (rates[turn_name(name, length)] for length in (lengths[0], lengths[-1]))
        bar = f"time per token of {name} at {lengths[-1]} tokens, divided by that at {lengths[0]}"
        print(Bar(bar, ratio_quartiles(shortest, longest), at_most=CONSTANT_BAR).text)
    if options.json:
        options.json.write_text(json.dumps({**measurement_info(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
