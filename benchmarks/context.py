"""Time a step of LLaMA whose sequences are cut over context ranks, and count what a layer keeps and sends.

    python benchmarks/context.py
    python benchmarks/context.py --seq-length 8192 --sizes 1 2 4 --mean 512 --rounds 7 --json context.json

Contenders are one model on the same sample of documents on this machine's CPU, in fp32, each rank with one thread; they
take turns of a step, and ratios are taken within rounds. Bytes kept are those of the graph of one layer on one rank,
weights aside; bytes sent are a rank's of one layer and micro-batch. Both stand beside the planner's formulas.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
import torch

from benchmarks.turns import Team, ratio_quartiles, surroundings
from megatron.costs.decoder_cost import DecoderCosts
from megatron.models.common import context_attention
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import gpt2_rule, initialize
from megatron.mpu import context_parallel
from megatron.mpu.context_parallel import split_batch
from megatron.mpu.groups import build_grid, single_grid
from megatron.mpu.topology import Topology
from megatron.planner.layout import Layout
from megatron.planner.machine import device
from megatron.planner.time_model import Messages

WAYS = ("all_gather", "a2a")


def sizes_of(args: argparse.Namespace) -> ModelArgs:
    """Return the sizes of the model."""
    return ModelArgs(
        num_layers=args.num_layers, hidden_size=args.hidden_size, num_attention_heads=args.heads, vocab_size=1024,
        max_position_embeddings=args.seq_length, kv_hidden_size=args.hidden_size // args.heads,
        ff_hidden_size=4 * args.hidden_size, num_query_groups=args.groups, position_embedding_type="rope",
        normalization="RMSNorm", activation="gated-silu", hidden_bias=False, untie_embeddings=True,
    )  # fmt: skip


def sample_of(args: argparse.Namespace) -> dict[str, torch.Tensor | None]:
    """Return random tokens in documents of --mean tokens; 0: one document."""
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(1024, (2, 1, args.seq_length), generator=generator)
    ids = (torch.arange(args.seq_length) // args.mean).int().unsqueeze(0) if args.mean else None
    return {"tokens": tokens, "labels": labels, "loss_mask": torch.ones(1, args.seq_length), "segment_ids": ids}


class Rank:
    """One of ``size`` context ranks, with its model and its part of the sample."""

    def __init__(self, args: argparse.Namespace, size: int, way: str, rank: int) -> None:
        self.grid = build_grid(Topology(1, 1, 1, size), rank) if size > 1 else single_grid()
        place = ParallelContext(context=self.grid.context, cp_comm_type=way)
        self.model = DecoderModel(sizes_of(args), place)
        initialize(self.model.named_parameters(), seed=0, rule=gpt2_rule(0.02, args.num_layers))
        self.batch = split_batch(sample_of(args), self.grid.context)
        own = args.seq_length // size
        self.hidden = torch.randn(own, 1, args.hidden_size, requires_grad=True)

    def step(self) -> float:
        """Do a step without an update; return steps a second."""
        start = time.perf_counter()
        loss, _ = self.model(**self.batch)
        loss.backward()
        self.model.zero_grad()
        return 1.0 / (time.perf_counter() - start)

    def counted(self) -> tuple[int, float]:
        """Return the bytes that the first layer keeps for its backward, and those that it sends in both passes."""
        mask = self.model.masks.of(self.hidden, self.batch["segment_ids"])
        with bytes_sent(self.grid.context.size) as sent, bytes_kept(self.model) as kept:
            output = self.model.layers[0](self.hidden, mask)
        held = sum(kept.values())
        with bytes_sent(self.grid.context.size, sent):
            output.sum().backward()
        return held, sum(sent)


@contextmanager
def bytes_kept(model: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Yield the bytes of each memory that autograd keeps of what is done within, the weights of ``model`` aside."""
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}
    held: list[torch.Tensor] = []  # so that no place in memory is used twice

    def keep(x: torch.Tensor) -> torch.Tensor:
        memory = x.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = memory.nbytes()
            held.append(x)
        return x

    pack = context_attention._KeptAsPart.pack

    def pack_part(self: Any, x: torch.Tensor) -> Any:
        found = pack(self, x)
        keep(found if isinstance(found, torch.Tensor) else self._part)
        return found

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with hooks, patch.object(context_attention._KeptAsPart, "pack", pack_part):
        yield kept


@contextmanager
def bytes_sent(size: int, sent: list[float] | None = None) -> Iterator[list[float]]:
    """Yield the bytes that each exchange over ``size`` context ranks sends from this one, added to ``sent``."""
    found = [] if sent is None else sent

    def counting(call: Callable[..., Any], number: int) -> Callable[..., Any]:
        def counted(*tensors: torch.Tensor, **how: Any) -> Any:
            found.append(tensors[number].nbytes * (size - 1) / size)
            return call(*tensors, **how)

        return counted

    with ExitStack() as stack:
        for module, name, number in (
            (context_parallel, "all_gather_single", 0), (context_parallel, "reduce_scatter_single", 1),
            (context_parallel.dist, "all_to_all_single", 0),
        ):  # fmt: skip
            stack.enter_context(patch.object(module, name, counting(getattr(module, name), number)))
        yield found


def planned(args: argparse.Namespace, size: int, way: str) -> tuple[int, float]:
    """Return what the planner's formulas say of ``Rank.counted``."""
    is_alone, cuts = size == 1, way == "a2a"
    how: dict[str, Any] = {"mask_bytes": 0, "context": size, "cuts_heads": cuts}
    costs = DecoderCosts(
        sizes_of(args), args.seq_length, is_by_length=True, is_blocked=is_alone and not args.mean, **how
    )
    layout = Layout(context=size, cuts_heads=cuts, micro_batch_size=1, dtype="fp32")
    return costs.unit_kept(1, 1, 4)[1].full, 0.0 if is_alone else Messages(costs, device("h100-80g")).context(
        layout
    ).bytes


def main(argv: list[str] | None = None, start_method: str = "spawn") -> int:
    """Print a row for each number of ranks and way; the exit code is 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2], help="context ranks")
    parser.add_argument("--mean", type=int, default=0, help="tokens of a document; 0: one document in a sample")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args(argv)
    names = {f"cp {size}" + f" {way}" * (size > 1): (size, way) for size in args.sizes for way in WAYS}
    rates: dict[str, list[float]] = {name: [] for name in names}
    counts: dict[str, tuple[float, ...]] = {}
    with ExitStack() as stack:
        how: dict[str, Any] = {"start_method": start_method, "threads": 1}
        teams = {name: Team(name, Rank, (args, size, way), size=size, has_group=size > 1, **how)
                 for name, (size, way) in names.items()}  # fmt: skip
        for team in teams.values():
            stack.callback(team.close)
        for name, team in teams.items():
            team.ready()
            of_ranks = team.ask("counted")
            counts[name] = (max(kept for kept, _ in of_ranks), max(sent for _, sent in of_ranks))
            team.ask("step")
        for _ in range(args.rounds):
            for name, team in teams.items():
                rates[name].append(min(team.ask("step")))
    first, rows = next(iter(names)), {}
    titles = ("", "ms a step", "times as fast (quartiles)", "MB kept", "planned", "MB sent", "planned")
    print("".join(f"{title:>{width}}" for title, width in zip(titles, (18, 10, 28, 10, 9, 10, 9), strict=True)))
    for name, (size, way) in names.items():
        low, middle, high = ratio_quartiles(rates[name], rates[first])
        (kept, sent), (kept_planned, sent_planned) = counts[name], planned(args, size, way)
        rows[name] = {
            "ms": 1e3 / statistics.median(rates[name]), "times": middle, "low": low, "high": high,
            "kept": kept, "kept_planned": kept_planned, "sent": sent, "sent_planned": sent_planned,
        }  # fmt: skip
        print(
            f"{name:18}{rows[name]['ms']:10.0f}{middle:14.2f} ({low:.2f}, {high:.2f}){kept / 1e6:10.2f}"
            f"{kept_planned / 1e6:9.2f}{sent / 1e6:10.2f}{sent_planned / 1e6:9.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps({**surroundings(), "settings": vars(args) | {"json": None}, "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
