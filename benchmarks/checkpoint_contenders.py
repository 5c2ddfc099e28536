"""The contenders of one rank: each turn saves the state, or saves and loads it, and tells the seconds of each part."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint_parts.state import State
from megatron.checkpoint import AsyncSaver, open_checkpoint, save
from megatron.mpu.groups import Grid

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
        self._engine = _deepspeed_engine(state, grid)
        self.turns: dict[str, Callable[[], Seconds]] = {
            "ours": self.ours,
            "in the background": self.in_the_background,
            "torch": self.torch,
            "DeepSpeed": self.deepspeed,
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

    def deepspeed(self) -> Seconds:
        """DeepSpeed's ``save_checkpoint``, which flushes nothing; the flush of its files; its ``load_checkpoint``."""
        root = self._fresh("deepspeed")
        saved, _ = self._timed(lambda: self._engine.save_checkpoint(str(root), tag="step1"))
        own = [path for path in sorted(root.rglob("*")) if path.is_file()][self._grid.rank :: self._grid.world.size]
        flushed, _ = self._timed(lambda: _flush(own))
        loaded = self._loaded(lambda: self._engine.load_checkpoint(str(root), tag="step1"))
        self._count("DeepSpeed", root)
        return {
            "DeepSpeed save_checkpoint": saved,
            "DeepSpeed save_checkpoint + fsync": saved + flushed,
            "DeepSpeed load_checkpoint": loaded,
        }

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


def _deepspeed_engine(state: State, grid: Grid) -> Any:
    """Return DeepSpeed's own engine over the same module and torch's own AdamW: nothing of this project saves."""
    import deepspeed

    import tds
    from megatron.training.setup import DeepSpeedMpu

    tds.quiet()
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    engine, *_ = deepspeed.initialize(
        model=state.module, optimizer=state.optimizer.inner, config=config, mpu=DeepSpeedMpu(grid)
    )
    return engine


def _flush(paths: Iterable[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


@torch.no_grad()
def _copy_into(state: State, loaded: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.tensors().items():
        tensor.copy_(loaded[name])
