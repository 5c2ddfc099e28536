"""The run folder: name, settings, versions, metrics, checkpoints."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron import files, log, object_store
from megatron.arguments.unused_flags import format_problems
from megatron.checkpoint import check_writable, remote
from megatron.checkpoint.folders import CHECKPOINTS, last_sequence
from megatron.config import CheckpointConfig, Config
from megatron.errors import CheckpointError, ConfigError, DataError, raise_all
from megatron.training.checkpoint_source import (
    LOADED,
    NATIVE,
    RUNS,
    format_of,
    is_run_folder,
    newest_run,
    require_checkpoint,
    saved_in,
)
from megatron.training.job_starts import has_saved, note_choice, noted_choice
from megatron.training.rank_0 import run_on_rank_0
from megatron.training.shared_folder import check_shared
from megatron.training.world import World


@dataclass(frozen=True)
class Place:
    """Where a run writes, and the run folder or checkpoint that it goes on from (None: from the start).

    ``is_restart``: the job has saved there already and goes on with everything, whatever its flags say of the start.
    ``checkpoint_format``: what it saves.
    ``begins_again``: an earlier start of the run may have been there, which ended before its first checkpoint.
    ``remote``: what of an object store is to be downloaded into ``downloads`` first, and is the source then.
    """

    folder: Path
    source: Path | None = None
    is_restart: bool = False
    checkpoint_format: str = NATIVE
    begins_again: bool = False
    remote: str | None = None
    downloads: Path | None = None


def choose(config: Config, name: str, world: World) -> Place:
    """Return the run's place, the same on all ranks. Collective.

    The folder is --save's, else that of the run which --load or --resume goes on with, else a new
    ``runs/<name>-<time>``. A restart by the launcher finds the folder of the first start, and goes on from there.

    Raises:
        CheckpointError: --load or --resume finds no checkpoint.
        ConfigError: the folder cannot be written, or not all nodes see it.
    """

    def chosen() -> Place:
        place = _chosen(config, name)
        source = None if place.source is None else place.source.absolute()
        kind = format_of(place.folder, config.checkpoint)
        place = replace(place, folder=place.folder.absolute(), source=source, checkpoint_format=kind)
        if place.downloads is not None:
            place = replace(place, downloads=place.downloads.absolute())
        check_writable(place.folder)
        check_store(place, config.checkpoint)
        if (checkpoints := place.folder / CHECKPOINTS).is_dir():
            check_writable(checkpoints)
        if config.run.tensorboard_dir:
            check_writable(Path(config.run.tensorboard_dir))
        return place

    place = run_on_rank_0(world, chosen)
    if not config.checkpoint.eval_only:
        check_shared(place.folder, world)
    return place


def with_checkpoint_format(config: Config, place: Place) -> Config:
    """Return ``config`` with the format in which the run saves its checkpoints.

    Raises:
        ConfigError: other flags are not supported with this format; the same on every rank.
    """
    config = replace(config, checkpoint=replace(config.checkpoint, checkpoint_format=place.checkpoint_format))
    raise_all(list(format_problems(config)))
    return config


def check_store(place: Place, flags: CheckpointConfig) -> None:
    """Check that checkpoints can be uploaded, and that the store holds none of another run.

    Raises:
        ConfigError: they cannot, or it does: nobody could say which are newer.
    """
    if flags.save_remote is None or flags.eval_only:
        return
    try:
        object_store.check_writable(flags.save_remote)
        found = remote.find(flags.save_remote)
    except DataError as error:
        raise ConfigError(f"--save-remote must name a place of a store that can be written to: {error}") from error
    if found and not _is_own_store(flags) and last_sequence(saved_in(place.folder)) < found[0].sequence:
        raise ConfigError(
            f"--save-remote must be empty or hold this run, got {flags.save_remote} with {found[0].name} and "
            f"{len(found) - 1} more checkpoints that are not in {place.folder}. Go on with them (--load "
            f"{flags.save_remote}), or give another place"
        )


def _is_own_store(flags: CheckpointConfig) -> bool:
    """Return whether the run goes on with what lies where it uploads to."""
    is_one = flags.load is not None and flags.load.rstrip("/") == (flags.save_remote or "").rstrip("/")
    return is_one and not (flags.finetune or flags.eval_only)


def describe(folder: Path, config: Config, world: World, step: int) -> None:
    """Write what was run: config.json, command.txt, versions.json, starts.jsonl.

    Rank 0 only, which holds the folder's lock.

    Args:
        step: behind which this start goes on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder)
    files.replace_bytes(folder / "config.json", _json(config.to_dict()))
    with open(folder / "command.txt", "a", encoding="utf-8") as file:
        recipe = os.environ.get("MEGATRON_DEFAULTS", "")
        shown = f"MEGATRON_DEFAULTS={shlex.quote(recipe)} " if recipe else ""
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {shown}{shlex.join([sys.executable, *sys.argv])}\n")
    files.replace_bytes(folder / "versions.json", _json(versions(world)))
    with open(folder / "starts.jsonl", "a", encoding="utf-8") as file:
        started = {"step": step, "time": time.time(), "ranks": world.grid.topology.world_size}
        file.write(json.dumps(started) + "\n")


def _remove_stale(folder: Path) -> None:
    """Delete the files that killed starts were writing."""
    for path in folder.glob(".*"):
        if path.is_file() and (".tmp-" in path.name or path.name.startswith(".probe-")):
            files.remove_file(path)


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


def _chosen(config: Config, name: str) -> Place:
    flags = config.checkpoint
    noted = None if flags.save else noted_choice()
    folder, source = noted or _by_flags(config, name)
    if not flags.save and not noted:
        note_choice(folder, source)
    is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if is_restart and has_saved(folder):
        return Place(folder, folder, is_restart=True)
    goes_on = is_restart or flags.load_if_exists
    if flags.load and object_store.is_remote(flags.load):
        return _of_store(flags, folder, goes_on=goes_on)
    return Place(folder, source, begins_again=goes_on and not saved_in(folder))


def _of_store(flags: CheckpointConfig, folder: Path, *, goes_on: bool) -> Place:
    """Return the place of a run that goes on from a store; from its own folder, where that has the newest, too."""
    assert flags.load is not None
    is_own, saved = _is_own_store(flags), saved_in(folder)
    try:
        newest = remote.require(flags.load)[0].sequence
    except CheckpointError as error:
        if not flags.load_if_exists:
            raise
        if not (is_own and saved):
            log.info(f"--load-if-exists: starting from scratch, since {error}")
            return Place(folder, begins_again=goes_on and not saved)
        newest = 0
    if is_own and last_sequence(saved) >= newest:
        return Place(folder, folder)
    downloads = folder / (CHECKPOINTS if is_own else LOADED)
    return Place(folder, remote=flags.load, downloads=downloads, begins_again=goes_on and not saved)


def _by_flags(config: Config, name: str) -> tuple[Path, Path | None]:
    """Return the folder and the source that the flags mean; a new folder is made."""
    flags, source = config.checkpoint, _source(config, name)
    if flags.save:
        return Path(flags.save), source
    if source is not None and is_run_folder(source) and not flags.finetune:
        return source, source  # the same run goes on in the same place
    return _free(RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"), source


def _source(config: Config, name: str) -> Path | None:
    """Return what the flags go on from; with --load-if-exists None where it holds no checkpoint."""
    flags = config.checkpoint
    if not flags.resume and (not flags.load or object_store.is_remote(flags.load)):
        return None
    try:
        source = Path(flags.load or flags.save or newest_run(name, config.family))
        require_checkpoint(source)
    except CheckpointError as error:
        if not flags.load_if_exists:
            raise
        log.info(f"--load-if-exists: starting from scratch, since {error}")
        return None
    return source


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
