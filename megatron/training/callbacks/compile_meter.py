"""CompileMeter: seconds and graphs of torch.compile (--compile)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron.mpu.mappings import all_reduce
from megatron.training.trainer import Callback

# A graph is compiled when a layer first sees new shapes, so most compile time falls into the first step and some into
# the first evaluation. torch caches compiled graphs in a folder (``TORCHINDUCTOR_CACHE_DIR``) that later starts reuse.


class Compiled(NamedTuple):
    """Compilation on one rank.

    Args:
        seconds: time in which the process waited for the compiler.
        made: number of graphs that were compiled.
        found: number of graphs that were loaded from the cache.
    """

    seconds: float = 0.0
    made: int = 0
    found: int = 0


class CompileMeter(Callback):
    """Logs the cost of compilation on all ranks since the start or the last log line."""

    def __init__(self) -> None:
        self._last = compiled_here()

    def on_log(self, metrics: dict[str, Any]) -> None:
        world = self.trainer.world
        costs = torch.zeros(3, world.grid.topology.world_size, dtype=torch.float32, device=world.device)
        costs[:, world.rank] = torch.tensor(self.drain())
        by_rank = zip(*all_reduce(costs, world.grid.world).tolist(), strict=True)
        cost = compile_metrics(
            [Compiled(seconds, round(num_made), round(num_cached)) for seconds, num_made, num_cached in by_rank]
        )
        metrics |= cost
        if line := compile_line(cost):
            self.trainer.print_line(f"step {self.trainer.progress.step} | {line}")

    def drain(self) -> Compiled:
        """Return the compilation on this rank since the last call."""
        total, before = compiled_here(), self._last
        self._last = total
        seconds, num_made, num_cached = (
            total.seconds - before.seconds,
            total.made - before.made,
            total.found - before.found,
        )
        return Compiled(
            max(seconds, 0.0), max(num_made, 0), max(num_cached, 0)
        )  # torch's counters decrease when they are reset


def compiled_here() -> Compiled:
    """Return the total compilation of this process."""
    from torch._dynamo import utils

    graphs = int(utils.counters["stats"]["unique_graphs"])
    num_cached = int(utils.counters["aot_autograd"]["autograd_cache_hit"])
    return Compiled(utils.calculate_time_spent()["total_wall_time"], graphs - num_cached, num_cached)


def cache_folder() -> str:
    """Return the folder of torch's cache of compiled graphs."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder: str = cache_dir()
    return folder


def compile_metrics(ranks: list[Compiled]) -> dict[str, Any]:
    """Return the metrics of an interval: the longest wait of any rank, and the number of graphs of all ranks."""
    return {
        "compile_s": max(compiled.seconds for compiled in ranks),
        "graphs_compiled": sum(compiled.made for compiled in ranks),
        "graphs_cached": sum(compiled.found for compiled in ranks),
    }


def compile_line(metrics: dict[str, Any]) -> str | None:
    """Return ``compile_metrics`` as a log line, or None if nothing was compiled."""
    num_made, num_cached = metrics["graphs_compiled"], metrics["graphs_cached"]
    if not num_made + num_cached:
        return None
    return (
        f"torch.compile took {metrics['compile_s']:.1f} s (the slowest rank); graphs of all ranks: "
        f"{num_made} compiled, {num_cached} loaded from {cache_folder()}"
    )
