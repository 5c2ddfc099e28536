"""The folder that holds all of a run: settings, versions, metrics, pictures, checkpoints."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron import files
from megatron.checkpoint import check_writable
from megatron.config import Config
from megatron.errors import CheckpointError, ConfigError
from megatron.training.state import CHECKPOINTS
from megatron.training.world import World

RUNS = Path("runs")
_BY_LAUNCH = ".by-launch"  # runs/.by-launch/<run id>: the folder that a launch chose, for its restarts


def choose(config: Config, name: str, world: World) -> Path:
    """Return the run folder, the same on all ranks: --save's, the resumed run's, or a new one. Collective."""
    chosen: list[Any] = [None]
    if world.rank == 0:
        try:
            folder = _chosen(config, name)
            check_writable(folder)
            chosen[0] = str(folder)
        except (CheckpointError, ConfigError) as error:
            chosen[0] = error
    if world.grid.world.size > 1:
        dist.broadcast_object_list(chosen, src=0, group=world.grid.world.handle)
    if isinstance(chosen[0], Exception):
        raise chosen[0]
    return Path(chosen[0])


def newest_run(name: str) -> Path:
    """Return the run folder of this kind of model with the newest checkpoint.

    Raises:
        CheckpointError: no run here has one.
    """
    runs = [run for run in RUNS.glob(f"{name}-*") if any((run / CHECKPOINTS).glob("step-*"))]
    if not runs:
        raise CheckpointError(
            f"--resume needs a run with a checkpoint in {RUNS.resolve()}/{name}-*, found none. "
            "Start without --resume, or name a folder with --load."
        )
    return max(runs, key=lambda run: max(p.stat().st_mtime for p in (run / CHECKPOINTS).glob("step-*")))


def describe(folder: Path, config: Config, world: World) -> None:
    """Write what was run: config.json, command.txt, versions.json. Rank 0 only."""
    folder.mkdir(parents=True, exist_ok=True)
    files.replace_bytes(folder / "config.json", _json(config.to_dict()))
    with open(folder / "command.txt", "a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {shlex.join([sys.executable, *sys.argv])}\n")
    files.replace_bytes(folder / "versions.json", _json(versions(world)))


def versions(world: World) -> dict[str, Any]:
    """Return versions of what the numbers depend on, the code's commit, and the machine."""
    found = {name: metadata.version(name) for name in ("torch", "deepspeed", "numpy") if _has(name)}
    return {
        **found,
        "python": platform.python_version(),
        "commit": commit(),
        "host": platform.node(),
        "device": world.kind,
        "world_size": world.grid.topology.world_size,
    }


def commit() -> str:
    """Return the code's git commit, with "+changes" where files differ from it, or "unknown" without git."""
    root = Path(__file__).resolve().parents[2]
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=5, check=True)
    return done.stdout.strip()


def _chosen(config: Config, name: str) -> Path:
    if config.checkpoint.save:
        return Path(config.checkpoint.save)
    if config.checkpoint.resume:
        return newest_run(name)
    launch = os.environ.get("MEGATRON_RUN_ID")
    note = RUNS / _BY_LAUNCH / launch if launch else None
    if note is not None and note.exists():
        return Path(note.read_text().strip())
    folder = _free(RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if note is not None:
        note.parent.mkdir(parents=True, exist_ok=True)
        files.replace_bytes(note, str(folder).encode())
    return folder


def _free(folder: Path) -> Path:
    """Make ``folder``, or the same name with a number when another job of this second has taken it."""
    RUNS.mkdir(exist_ok=True)
    for number in range(1000):
        candidate = folder if not number else folder.with_name(f"{folder.name}-{number}")
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            continue
    raise CheckpointError(f"no free name for a run folder beside {folder}")


def _has(name: str) -> bool:
    try:
        metadata.version(name)
        return True
    except metadata.PackageNotFoundError:
        return False


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str).encode() + b"\n"
