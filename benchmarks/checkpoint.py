"""Time saving, stalls, verification, loading and resharding of one state, compared with torch.save.

    python benchmarks/checkpoint.py --json checkpoint.json
    python benchmarks/checkpoint.py --ranks 1 --rounds 3

Weights in fp32 and AdamW's moments are cut over tensor ranks, so each rank holds and writes its part, whoever saves.
Contenders take turns in the same processes, the order rotates, each load is checked for every bit; medians over rounds
are reported and ratios within rounds. What is read has just been written, so it comes from memory. Bars:

| what | at most |
|---|---|
| a save with checksums, flush and commit, over torch.save and a flush of its file | 1.3 |
| the time that an async save stalls training, over the same | 0.45 |
| verification of every byte, over the save | 0.25 |
| the stall, over the 30 minutes between saves of a run that says nothing of them | 0.01 |
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron.environment  # noqa: E402, F401  isort: skip  reports missing packages in one line
import torch
import torch.distributed as dist

from benchmarks.turns import Bar, ratio_quartiles, rotated, surroundings
from megatron.checkpoint import AsyncSaver, TensorRecord, open_checkpoint, save
from megatron.mpu.groups import Grid, build_grid
from megatron.mpu.shard import Shard, set_shard, shard_of
from megatron.mpu.topology import Topology
from megatron.optim import build_optimizer
from megatron.planner.spawn_ranks import Rank, run_ranks
from megatron.training.train_state import make_moments, optimizer_records, weight_records

# The state that all contenders save, the contenders, and the ranks that let them take turns.

WIDTH, SMALL_WIDTH = 512, 64
SMALL_BYTES = 32 << 20
CUTS = {"qkv": (3, 1, 0), "dense": (1, 1, 1), "up": (4, 1, 0), "down": (1, 4, 1)}
"""Weights of a layer: (rows, columns) in widths, and the dimension that tensor ranks cut."""
BYTES_OF_A_NUMBER = 12  # weight and two moments, 4 bytes each


class Layers(torch.nn.Module):
    """One tensor rank's part of a decoder's layers."""

    def __init__(self, num_layers: int, width: int, grid: Grid) -> None:
        super().__init__()
        rank, size = grid.tensor.rank, grid.tensor.size
        for layer in range(num_layers):
            for name, (rows, columns, dim) in CUTS.items():
                shape = (rows * width, columns * width)
                shard = Shard(shape, dim, rank * (shape[dim] // size), shape[dim] // size)
                local = [each if place != dim else shard.length for place, each in enumerate(shape)]
                self.register_parameter(
                    f"layer{layer}_{name}", set_shard(torch.nn.Parameter(torch.randn(local)), shard)
                )
            self.register_parameter(f"layer{layer}_norm", torch.nn.Parameter(torch.ones(width)))


class State:
    """What all contenders save: weights of a decoder in fp32 and AdamW's two moments, cut over tensor ranks."""

    def __init__(self, num_bytes: int, grid: Grid) -> None:
        torch.manual_seed(grid.rank)
        width = WIDTH if num_bytes > SMALL_BYTES else SMALL_WIDTH
        layer_bytes = BYTES_OF_A_NUMBER * (width * width * sum(r * c for r, c, _ in CUTS.values()) + width)
        self.module = Layers(max(1, round(num_bytes / layer_bytes)), width, grid)
        self.optimizer = build_optimizer(self.module.parameters(), model=grid.model, tensor=grid.tensor, data=grid.data)
        make_moments(self.optimizer)
        for weight, moments in self.optimizer.inner.state.items():
            if shard_of(weight).is_partitioned:  # the others are the same on all ranks, as they begin
                moments["exp_avg"].normal_()
                moments["exp_avg_sq"].uniform_()

    def records(self) -> list[TensorRecord]:
        """Return what a checkpoint of this project takes."""
        return [
            *weight_records(self.module, self.optimizer),
            *optimizer_records(self.module, self.optimizer),
        ]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensors by name."""
        return {record.name: record.tensor for record in self.records()}

    def num_bytes(self) -> int:
        """Return the bytes that this rank holds."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def clear(self) -> None:
        """Zero all tensors, so that a load that leaves one out is seen."""
        for tensor in self.tensors().values():
            tensor.zero_()

    def fingerprint(self) -> list[int]:
        """Return a number for each tensor that changes with its bits."""
        return [int(tensor.view(torch.int32).sum()) for tensor in self.tensors().values()]


Seconds = dict[str, float]


class Contenders:
    """What takes turns in one rank; every call is collective over the ranks of the team.

    Args:
        folder: for all files of this team.
        other: a checkpoint of the same global tensors, saved by another number of ranks.
    """

    def __init__(self, state: State, grid: Grid, folder: Path, other: Path) -> None:
        self._state, self._grid, self._folder, self._other = state, grid, folder, other
        self._background = AsyncSaver(grid.host)
        self.turns: dict[str, Callable[[], Seconds]] = {
            "ours": self.ours,
            "in the background": self.in_the_background,
            "torch": self.torch,
            "other layout": self.other_layout,
        }
        self.files_bytes: dict[str, int] = {}

    def ours(self) -> Seconds:
        """Save, verify, load."""
        root = self._fresh("ours")
        seconds, path = self._timed(lambda: save(root, 1, self._state.records(), {}, self._grid.host))
        verified, found = self._timed(lambda: open_checkpoint(path, self._grid.host))
        loaded = self._loaded(lambda: found.load(self._state.records()))
        self._count("ours", path)
        return {"save": seconds, "verification": verified, "load": loaded, "verification + load": verified + loaded}

    def in_the_background(self) -> Seconds:
        """Stage, then wait until it is durable."""
        root = self._fresh("background")
        stall, _ = self._timed(lambda: self._background.start(root, 1, self._state.records(), {}))
        rest, _ = self._timed(self._background.finish)
        return {"stall of an async save": stall, "async save until durable": stall + rest}

    def torch(self) -> Seconds:
        """``torch.save`` of each rank's tensors, and a flush of its file."""
        path = self._fresh("torch") / f"rank-{self._grid.rank}.pt"
        saved, _ = self._timed(lambda: torch.save(self._state.tensors(), path))
        flushed, _ = self._timed(lambda: _flush([path]))
        loaded = self._loaded(lambda: _copy_into(self._state, torch.load(path, weights_only=True)))
        self._count("torch", path.parent)
        return {"torch.save": saved, "torch.save + fsync": saved + flushed, "torch.load": loaded}

    def other_layout(self) -> Seconds:
        """Verify and load what another number of ranks saved."""
        seconds, _ = self._timed(lambda: open_checkpoint(self._other, self._grid.host).load(self._state.records()))
        return {"reshard (verification + load)": seconds}

    def close(self) -> None:
        """Give back the copy of the background saves."""
        self._background.close()

    def _fresh(self, name: str) -> Path:
        """Return an empty folder; what the last turn left is deleted outside of the measured time."""
        folder = self._folder / name
        self._barrier()
        if self._grid.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self._barrier()
        return folder

    def _loaded(self, load: Callable[[], Any]) -> float:
        """Return the seconds of ``load``, once it is seen to bring every bit back."""
        expected = self._state.fingerprint()
        self._state.clear()
        seconds, _ = self._timed(load)
        if self._state.fingerprint() != expected:
            raise RuntimeError("a contender did not load the state that it saved")
        return seconds

    def _timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds of the slowest rank, and what ``work`` returned."""
        self._barrier()
        start = time.perf_counter()
        result = work()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        if self._grid.world.size > 1:
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds), result

    def _count(self, name: str, folder: Path) -> None:
        self.files_bytes[name] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def _barrier(self) -> None:
        if self._grid.world.size > 1:
            dist.barrier()


def _flush(paths: Iterable[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


@torch.no_grad()
def _copy_into(state: State, loaded: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.tensors().items():
        tensor.copy_(loaded[name])


PATIENCE_S = 600.0


@dataclass(frozen=True)
class Task:
    """What a team does.

    Args:
        num_bytes: of the whole state, about.
        rounds: turns of each contender that count; one more warms up. 0: only save once, to ``folder / "saved"``.
        other: a checkpoint that another number of ranks saved.
    """

    num_ranks: int
    num_bytes: int
    rounds: int
    threads: int
    folder: Path
    other: Path | None = None


@dataclass
class TeamResult:
    """What a team found: seconds of each measure by round, bytes of the state and of each contender's files."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    state_bytes: int = 0
    files_bytes: dict[str, int] = field(default_factory=dict)
    saved: Path | None = None


def run_team(task: Task) -> TeamResult:
    """Let the contenders take turns on ranks in processes of their own; return what rank 0 tells.

    Raises:
        RuntimeError: a rank failed; its traceback is the message.
    """
    task.folder.mkdir(parents=True, exist_ok=True)
    return run_ranks(task.num_ranks, _measure, task, threads=task.threads, deadline_s=PATIENCE_S)[0]


def _measure(rank: Rank, task: Task) -> TeamResult:
    os.environ["DS_ACCELERATOR"] = "cpu"
    grid = build_grid(Topology.of_world(rank.size, tensor=rank.size, pipe=1), rank.number)
    state, told = State(task.num_bytes, grid), TeamResult()
    if task.other is None:
        told.saved = save(task.folder / "saved", 1, state.records(), {}, grid.host)
    else:
        contenders = Contenders(state, grid, task.folder, task.other)
        told.seconds = _rounds(contenders, task.rounds)
        told.files_bytes = contenders.files_bytes
        contenders.close()
    told.state_bytes = _sum(state.num_bytes())
    return told


def _rounds(contenders: Contenders, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each measure; the order rotates from round to round, the first round warms up."""
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name in rotated(contenders.turns, number):
            for measure, seconds in contenders.turns[name]().items():
                if number:
                    found.setdefault(measure, []).append(seconds)
    return found


def _sum(value: int) -> int:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return int(total)


def bars_of(seconds: dict[str, list[float]], interval_s: float) -> list[Bar]:
    """Return the bars of one team from the seconds of its rounds.

    Args:
        interval_s: default time between two saves.
    """
    flushed, save, stall = seconds["torch.save + fsync"], seconds["save"], seconds["stall of an async save"]
    return [
        Bar("save / (torch.save + fsync)", ratio_quartiles(save, flushed), at_most=1.3),
        Bar("stall of an async save / (torch.save + fsync)", ratio_quartiles(stall, flushed), at_most=0.45),
        Bar("verification / save", ratio_quartiles(seconds["verification"], save), at_most=0.25),
        Bar(f"stall / {interval_s / 60:g} min", ratio_quartiles(stall, [interval_s] * len(stall)), at_most=0.01),
    ]


DEFAULT_INTERVAL_S = 30.0 * 60.0
SMOKE = "--megabytes 2 --rounds 1"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the benchmark's options."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="processes of each team (default: 1 2)")
    parser.add_argument("--megabytes", type=float, default=450.0, help="of the whole state, about (default: 450)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender that count (default: 7)")
    parser.add_argument("--folder", type=Path, help="write below it, on the disk that matters (default: the system's)")
    parser.add_argument("--smoke", action="store_true", help=f"a run of seconds that says nothing: {SMOKE}")
    parser.add_argument("--json", type=Path, help="write the result here too")
    words = list(sys.argv[1:] if argv is None else argv)
    return parser.parse_args([*SMOKE.split(), *words] if "--smoke" in words else words)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the results of each team."""
    num_bytes, cores = int(args.megabytes * 1e6), len(os.sched_getaffinity(0))
    teams, saved = {}, {}
    for ranks in {*args.ranks, *map(_other, args.ranks)}:
        saved[ranks] = run_team(Task(ranks, num_bytes, 0, 1, folder / f"{ranks}-saves")).saved
    for ranks in args.ranks:
        threads, other = max(1, cores // ranks), saved[_other(ranks)]
        task = Task(ranks, num_bytes, args.rounds, threads, folder / f"{ranks}-ranks", other)
        teams[ranks] = run_team(task)
    result: dict[str, Any] = {"teams": teams, "bars": {}}
    for ranks, told in teams.items():
        result["bars"][ranks] = bars_of(told.seconds, DEFAULT_INTERVAL_S)
    return result


def _other(ranks: int) -> int:
    """Return how many ranks saved what a team of ``ranks`` reshards."""
    return 1 if ranks > 1 else 2


def table(result: dict[str, Any]) -> str:
    """Return the result as lines of text."""
    lines = []
    for ranks, told in result["teams"].items():
        lines.append(f"{ranks} rank{'s' if ranks > 1 else ''}, {told.state_bytes / 1e6:,.0f} MB")
        plain = statistics.median(told.seconds["torch.save + fsync"])
        for name, values in told.seconds.items():
            middle = statistics.median(values)
            rate = told.state_bytes / 1e6 / middle
            lines.append(f"  {name:38}{middle:9.3f} s{rate:10,.0f} MB/s{middle / plain:9.2f} of torch.save + fsync")
        lines += [f"  {bar.text}" for bar in result["bars"][ranks]]
    return "\n".join(lines)


def as_json(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result as plain values."""
    told: dict[str, Any] = {"teams": {}}
    for ranks, team in result["teams"].items():
        bars = [asdict(bar) | {"met": bar.is_met} for bar in result["bars"][ranks]]
        facts = {"state_bytes": team.state_bytes, "files_bytes": team.files_bytes}
        told["teams"][str(ranks)] = {"seconds": team.seconds, "bars": bars, **facts}
    return told


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table, write the JSON."""
    args = parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="megatron-checkpoints-", dir=args.folder) as folder:
        result = measure(args, Path(folder))
    print(table(result))
    told = surroundings() | {"options": {name: str(value) for name, value in vars(args).items()}} | as_json(result)
    if args.json:
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return told


if __name__ == "__main__":
    main()
