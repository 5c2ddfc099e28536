"""CompileMeter: seconds and graphs of torch.compile (--compile)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron.mpu.mappings import all_reduce
from megatron.training.trainer import Callback

# A graph is compiled when a layer first sees new shapes, so most compile time falls into the first step and some into
# the first evaluation. torch caches compiled graphs in a folder (``TORCHINDUCTOR_CACHE_DIR``) that later starts reuse.


class CompileCost(NamedTuple):
    """Compilation on one rank.

    Args:
        seconds: time that the process waited for the compiler.
        num_compiled: graphs that were compiled.
        num_cached: graphs that were loaded from the cache.
    """

    seconds: float = 0.0
    num_compiled: int = 0
    num_cached: int = 0


class CompileMeter(Callback):
    """Logs the compilation cost on all ranks since the start or the last log line."""

    def __init__(self) -> None:
        self._last_total = process_compile_cost()

    def on_log(self, metrics: dict[str, Any]) -> None:
        world = self.trainer.world
        costs = torch.zeros(3, world.grid.topology.world_size, dtype=torch.float32, device=world.device)
        costs[:, world.rank] = torch.tensor(self.drain())
        by_rank = zip(*all_reduce(costs, world.grid.world).tolist(), strict=True)
        cost = compile_metrics(
            [
                CompileCost(seconds, round(num_compiled), round(num_cached))
                for seconds, num_compiled, num_cached in by_rank
            ]
        )
        metrics |= cost
        if line := compile_line(cost):
            self.trainer.print_line(f"step {self.trainer.progress.step} | {line}")

    def drain(self) -> CompileCost:
        """Return this rank's compilation cost since the last call."""
        total, last_total = process_compile_cost(), self._last_total
        self._last_total = total
        seconds, num_compiled, num_cached = (
            total.seconds - last_total.seconds,
            total.num_compiled - last_total.num_compiled,
            total.num_cached - last_total.num_cached,
        )
        return CompileCost(
            max(seconds, 0.0), max(num_compiled, 0), max(num_cached, 0)
        )  # torch's counters decrease when they are reset


def process_compile_cost() -> CompileCost:
    """Return this process's total compilation cost."""
    from torch._dynamo import utils

    num_graphs = int(utils.counters["stats"]["unique_graphs"])
    num_cached = int(utils.counters["aot_autograd"]["autograd_cache_hit"])
    return CompileCost(utils.calculate_time_spent()["total_wall_time"], num_graphs - num_cached, num_cached)


def cache_folder() -> str:
    """Return torch's cache folder for compiled graphs."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder: str = cache_dir()
    return folder


def compile_metrics(rank_costs: list[CompileCost]) -> dict[str, Any]:
    """Compute an interval's metrics: the longest wait on any rank, and the graph counts over all ranks."""
    return {
        "compile_s": max(rank_cost.seconds for rank_cost in rank_costs),
        "graphs_compiled": sum(rank_cost.num_compiled for rank_cost in rank_costs),
        "graphs_cached": sum(rank_cost.num_cached for rank_cost in rank_costs),
    }


def compile_line(metrics: dict[str, Any]) -> str | None:
    """Format ``compile_metrics`` as a log line, or None if nothing was compiled."""
    num_compiled, num_cached = metrics["graphs_compiled"], metrics["graphs_cached"]
    if not num_compiled + num_cached:
        return None
    return (
        f"torch.compile took {metrics['compile_s']:.1f} s (the slowest rank); graphs of all ranks: "
        f"{num_compiled} compiled, {num_cached} loaded from {cache_folder()}"
    )
