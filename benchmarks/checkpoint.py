"""Benchmark saving, stalls, verification, loading and resharding of a state, relative to torch.save.

    python benchmarks/checkpoint.py --json checkpoint.json
    python benchmarks/checkpoint.py --ranks 1 --rounds 3

The state consists of fp32 weights and AdamW's moments, sharded over tensor ranks; each rank saves its shards.
Contenders take turns in the same processes in rotating order, and each load is compared bit for bit. The benchmark
reports medians over rounds and ratios within rounds. Files are read right after they were written, from the page cache.
Bars:

| time | relative to | at most |
|---|---|---|
| a save with checksums, flush and commit | torch.save and a flush of its file | 1.3 |
| the stall of an asynchronous save | torch.save and a flush of its file | 0.45 |
| verification of every byte | the save | 0.25 |
| the stall of an asynchronous save | 30 minutes, the default time between saves | 0.01 |
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
import torch
import torch.distributed as dist

from benchmarks.turns import Bar, measurement_info, ratio_quartiles, rotated
from megatron.checkpoint import AsyncSaver, CapturedState, TensorRecord, open_checkpoint, save
from megatron.mpu.groups import Grid, build_grid
from megatron.mpu.shard import Shard, set_shard, shard_of
from megatron.mpu.topology import Topology
from megatron.optim import build_optimizer
from megatron.planner.spawn_ranks import Rank, run_ranks
from megatron.training.state_records import make_moments, optimizer_records, weight_records

LAYER = {"qkv": (3, 1, 0), "dense": (1, 1, 1), "up": (4, 1, 0), "down": (1, 4, 1)}
"""Weights of a layer: (rows, columns) in units of the width, and the dimension sharded over tensor ranks."""
BYTES_PER_WEIGHT = 12  # weight and two moments, 4 bytes each
DEFAULT_INTERVAL_S = 30.0 * 60.0
SMOKE = "--megabytes 2 --rounds 1"
Seconds = dict[str, float]


@dataclass
class Result:
    """Measured seconds by name and round, bytes of the full state, and bytes of each contender's files."""

    seconds: dict[str, list[float]]
    state_bytes: int
    files_bytes: dict[str, int]


def make_state(num_bytes: int, grid: Grid) -> Callable[[], list[TensorRecord]]:
    """Build weights and moments of about ``num_bytes`` over all ranks; return the function that lists their records."""
    torch.manual_seed(grid.rank)
    width = 512 if num_bytes > 32 << 20 else 64
    layer_size = width * width * sum(rows * columns for rows, columns, _ in LAYER.values()) + width
    module, tensor = torch.nn.Module(), grid.tensor
    for layer in range(max(1, round(num_bytes / (BYTES_PER_WEIGHT * layer_size)))):
        for name, (rows, columns, dim) in LAYER.items():
            shape = (rows * width, columns * width)
            length = shape[dim] // tensor.size
            shard = Shard(shape, dim, tensor.rank * length, length)
            weight = torch.randn([length if i == dim else size for i, size in enumerate(shape)])
            module.register_parameter(f"layer{layer}_{name}", set_shard(torch.nn.Parameter(weight), shard))
        module.register_parameter(f"layer{layer}_norm", torch.nn.Parameter(torch.ones(width)))
    optimizer = build_optimizer(module.parameters(), model=grid.model, tensor=tensor, data=grid.data)
    make_moments(optimizer)
    for weight, moments in optimizer.inner.state.items():
        if shard_of(weight).is_partitioned:  # replicated weights keep equal moments on all ranks
            moments["exp_avg"].normal_()
            moments["exp_avg_sq"].uniform_()
    return lambda: [*weight_records(module, optimizer), *optimizer_records(module, optimizer)]


def check_load(tensors: Sequence[torch.Tensor], load: Callable[[], Any]) -> None:
    """Set the tensors to zero, load them, and compare checksums with their former values.

    Raises:
        RuntimeError: the checksum of a tensor differs after the load.
    """
    before = [int(tensor.view(torch.int32).sum()) for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    load()
    if [int(tensor.view(torch.int32).sum()) for tensor in tensors] != before:
        raise RuntimeError("a contender did not load the state that it saved")


def save_once(rank: Rank, num_bytes: int, folder: Path) -> Path:
    """Save a state in a process of ``run_ranks``. Collective."""
    grid = build_grid(Topology.from_world_size(rank.size, tensor=rank.size, pipe=1), rank.idx)
    return save(folder, 1, make_state(num_bytes, grid)(), {}, grid.host)


def measure_rank(rank: Rank, num_bytes: int, rounds: int, folder: Path, other_checkpoint: Path) -> Result:
    """Measure all contenders in turns in a process of ``run_ranks``. Collective.

    Args:
        folder: for the files of all contenders.
        other_checkpoint: a checkpoint of the same state, saved by another number of ranks.
    """
    grid = build_grid(Topology.from_world_size(rank.size, tensor=rank.size, pipe=1), rank.idx)
    records = make_state(num_bytes, grid)
    tensors = {record.name: record.tensor for record in records()}
    async_saver, files_bytes = AsyncSaver(grid.host), dict[str, int]()

    def timed(work: Callable[[], Any]) -> tuple[float, Any]:
        """Call ``work``; return the seconds of the slowest rank and the result."""
        dist.barrier()
        start = time.perf_counter()
        result = work()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds), result

    def timed_load(load: Callable[[], Any]) -> float:
        seconds = 0.0

        def load_timed() -> None:
            nonlocal seconds
            seconds, _ = timed(load)

        check_load(list(tensors.values()), load_timed)
        return seconds

    def empty_folder(name: str) -> Path:
        """Delete the files of the last turn; the deletion is not timed."""
        dist.barrier()
        if grid.rank == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir(parents=True)
        dist.barrier()
        return folder / name

    def count_files(name: str) -> None:
        files_bytes[name] = sum(path.stat().st_size for path in (folder / name).rglob("*") if path.is_file())

    def ours() -> Seconds:
        root = empty_folder("ours")
        save_s, path = timed(lambda: save(root, 1, records(), {}, grid.host))
        verify_s, checkpoint = timed(lambda: open_checkpoint(path, grid.host))
        load_s = timed_load(lambda: checkpoint.load(records()))
        count_files("ours")
        return {"save": save_s, "verification": verify_s, "load": load_s, "verification + load": verify_s + load_s}

    def ours_async() -> Seconds:
        root = empty_folder("async")
        stall_s, _ = timed(lambda: async_saver.save(root, CapturedState(1, records(), {})))
        remaining_s, _ = timed(async_saver.finish)
        return {"stall of an async save": stall_s, "async save until durable": stall_s + remaining_s}

    def torch_save() -> Seconds:
        path = empty_folder("torch") / f"rank-{grid.rank}.pt"

        def flush() -> None:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

        @torch.no_grad()
        def load() -> None:
            for name, tensor in torch.load(path, weights_only=True).items():
                tensors[name].copy_(tensor)

        save_s, _ = timed(lambda: torch.save(tensors, path))
        flush_s, _ = timed(flush)
        load_s = timed_load(load)
        count_files("torch")
        return {"torch.save": save_s, "torch.save + fsync": save_s + flush_s, "torch.load": load_s}

    def reshard() -> Seconds:
        return {"reshard": timed(lambda: open_checkpoint(other_checkpoint, grid.host).load(records()))[0]}

    seconds: dict[str, list[float]] = {}
    turns = {turn.__name__: turn for turn in (ours, ours_async, torch_save, reshard)}
    for round_idx in range(rounds + 1):  # the first round warms up
        for name in rotated(turns, round_idx):
            for measure, value in turns[name]().items():
                if round_idx:
                    seconds.setdefault(measure, []).append(value)
    async_saver.close()
    state_bytes = torch.tensor(sum(tensor.nbytes for tensor in tensors.values()))
    dist.all_reduce(state_bytes)
    return Result(seconds, int(state_bytes), files_bytes)


def bars_of(seconds: dict[str, list[float]], interval_s: float = DEFAULT_INTERVAL_S) -> list[Bar]:
    """Return the required ratios with their measured values.

    Args:
        seconds: name of a measure -> seconds of each round.
        interval_s: seconds between two saves of a run.
    """
    flushed, save, stall = seconds["torch.save + fsync"], seconds["save"], seconds["stall of an async save"]
    return [
        Bar("save / (torch.save + fsync)", ratio_quartiles(save, flushed), at_most=1.3),
        Bar("stall of an async save / (torch.save + fsync)", ratio_quartiles(stall, flushed), at_most=0.45),
        Bar("verification / save", ratio_quartiles(seconds["verification"], save), at_most=0.25),
        Bar(f"stall / {interval_s / 60:g} min", ratio_quartiles(stall, [interval_s] * len(stall)), at_most=0.01),
    ]


def table(num_ranks: int, result: Result) -> str:
    """Return the result for a number of ranks as text."""
    lines = [f"{num_ranks} rank{'s' if num_ranks > 1 else ''}, {result.state_bytes / 1e6:,.0f} MB"]
    torch_s = statistics.median(result.seconds["torch.save + fsync"])
    for name, values in result.seconds.items():
        median_s = statistics.median(values)
        rate = result.state_bytes / 1e6 / median_s
        lines.append(f"  {name:28}{median_s:9.3f} s{rate:10,.0f} MB/s{median_s / torch_s:9.2f} of torch.save + fsync")
    return "\n".join([*lines, *(f"  {bar.text}" for bar in bars_of(result.seconds))])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables and write the JSON file."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="numbers of processes (default: 1 2)")
    parser.add_argument("--megabytes", type=float, default=450.0, help="size of the full state (default: 450)")
    parser.add_argument("--rounds", type=int, default=7, help="measured turns of each contender (default: 7)")
    parser.add_argument("--folder", type=Path, help="folder for the files (default: the system's temporary folder)")
    parser.add_argument("--smoke", action="store_true", help=f"tiny sizes, to test the benchmark: {SMOKE}")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args([*SMOKE.split(), *words] if "--smoke" in words else words)
    os.environ["DS_ACCELERATOR"] = "cpu"
    num_bytes, cores = int(args.megabytes * 1e6), len(os.sched_getaffinity(0))
    output: dict[str, Any] = {**measurement_info(), "options": {k: str(v) for k, v in vars(args).items()}, "teams": {}}
    with tempfile.TemporaryDirectory(prefix="megatron-checkpoints-", dir=args.folder) as name:
        folder = Path(name)
        for num_ranks in args.ranks:
            num_other_ranks = 1 if num_ranks > 1 else 2
            saved_checkpoint = run_ranks(
                num_other_ranks, save_once, num_bytes, folder / f"{num_other_ranks}-saved-for-{num_ranks}", threads=1
            )[0]
            team_folder, threads = folder / f"{num_ranks}-ranks", max(1, cores // num_ranks)
            limits: dict[str, Any] = {"threads": threads, "deadline_s": 600.0}
            result: Result = run_ranks(
                num_ranks, measure_rank, num_bytes, args.rounds, team_folder, saved_checkpoint, **limits
            )[0]
            print(table(num_ranks, result), flush=True)
            bars = [asdict(bar) | {"is_met": bar.is_met} for bar in bars_of(result.seconds)]
            output["teams"][str(num_ranks)] = asdict(result) | {"bars": bars}
    if args.json:
        args.json.write_text(json.dumps(output, indent=1) + "\n")
    return output


if __name__ == "__main__":
    main()
