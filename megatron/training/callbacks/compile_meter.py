"""CompileMeter: what --compile cost, seconds and graphs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron.mpu.mappings import all_reduce
from megatron.training.trainer import Callback

# What ``--compile`` costs: seconds, and graphs that were compiled here or lay in torch's cache.
#
# A graph is compiled when a layer first sees new shapes, so the first step has most of it, and the first evaluation
# some. torch keeps compiled graphs in a folder (``TORCHINDUCTOR_CACHE_DIR``), from which later starts take them.


class Compiled(NamedTuple):
    """Seconds in which this process waited for the compiler; graphs ``made``, and ``found`` in the cache."""

    seconds: float = 0.0
    made: int = 0
    found: int = 0


class CompileMeter(Callback):
    """Logs what compiling has cost on all ranks since it was made, or has logged last."""

    def __init__(self) -> None:
        self._last = compiled_here()

    def on_log(self, metrics: dict[str, Any]) -> None:
        world = self.trainer.world
        costs = torch.zeros(3, world.grid.topology.world_size, dtype=torch.float32, device=world.device)
        costs[:, world.rank] = torch.tensor(self.drain())
        each = zip(*all_reduce(costs, world.grid.world).tolist(), strict=True)
        cost = compile_metrics([Compiled(seconds, round(made), round(found)) for seconds, made, found in each])
        metrics |= cost
        if line := compile_line(cost):
            self.trainer.print_line(f"step {self.trainer.progress.step} | {line}")

    def drain(self) -> Compiled:
        """Return what was compiled since the last call."""
        total, before = compiled_here(), self._last
        self._last = total
        seconds, made, found = total.seconds - before.seconds, total.made - before.made, total.found - before.found
        return Compiled(max(seconds, 0.0), max(made, 0), max(found, 0))  # less where torch was told to forget


def compiled_here() -> Compiled:
    """Return what torch.compile has cost this process up to now."""
    from torch._dynamo import utils

    graphs = int(utils.counters["stats"]["unique_graphs"])
    found = int(utils.counters["aot_autograd"]["autograd_cache_hit"])
    return Compiled(utils.calculate_time_spent()["total_wall_time"], graphs - found, found)


def cache_folder() -> str:
    """Return where torch keeps compiled graphs."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder: str = cache_dir()
    return folder


def compile_metrics(ranks: list[Compiled]) -> dict[str, Any]:
    """Return by name what is written down of an interval: the longest wait of a rank, graphs of all."""
    return {
        "compile_s": max(each.seconds for each in ranks),
        "graphs_compiled": sum(each.made for each in ranks),
        "graphs_cached": sum(each.found for each in ranks),
    }


def compile_line(metrics: dict[str, Any]) -> str | None:
    """Return ``compile_metrics`` in words, or None where nothing was compiled."""
    made, found = metrics["graphs_compiled"], metrics["graphs_cached"]
    if not made + found:
        return None
    return (
        f"torch.compile took {metrics['compile_s']:.1f} s (the rank that waited longest); graphs of all ranks: "
        f"{made} compiled, {found} found in {cache_folder()}"
    )
