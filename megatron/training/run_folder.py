"""The run folder: name, settings, versions; source of --load; is it seen by all nodes."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron import files, hub, log, object_store
from megatron.checkpoint import check_writable, remote
from megatron.checkpoint.folders import CHECKPOINTS, checkpoints_in, last_sequence
from megatron.checkpoint.huggingface import weights
from megatron.checkpoint.metadata import MANIFEST_NAME, manifest_from_bytes
from megatron.checkpoint.shard_file import FileVisibility
from megatron.config import CheckpointConfig, Config
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.training import deepspeed_checkpoint
from megatron.training.initialize import World, run_on_rank_0

# What --load and --resume may name, and where a run folder's checkpoints lie, in both formats.

RUNS = Path("runs")
NATIVE = "native"
LOADED = "loaded"
"""Folder in a run folder of what was downloaded from the store of another run."""


def newest_run(name: str, family: str = "") -> Path:
    """Return the run folder ``runs/<name>-*`` with the newest checkpoint.

    Args:
        family: family of the model, for the message.

    Raises:
        CheckpointError: none of them has a checkpoint.
    """
    newest = _newest_of(RUNS.glob(f"{name}-*"))
    if newest is None:
        other = _newest_of(run for run in RUNS.glob("*") if _family_of(run) == family)
        named = f"To resume {other}, add --save {other}" if other else "Name another folder with --save"
        raise CheckpointError(
            f"--resume needs a run with a checkpoint in {RUNS.resolve()}/{name}-*, found none. "
            f"{named}, or start without --resume."
        )
    return newest


def _family_of(run: Path) -> str | None:
    """Return the family of the model in the config.json of a run folder, None if there is none."""
    try:
        return str(json.loads((run / "config.json").read_text(encoding="utf-8"))["family"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _newest_of(runs: Iterable[Path]) -> Path | None:
    """Return the run folder with the newest checkpoint, None if none of them has a checkpoint."""
    saved = {run: newest for run in runs if (newest := _newest_save(run))}
    return max(saved, key=lambda run: saved[run], default=None)


def saves_in(folder: Path, flags: CheckpointConfig) -> Path:
    """Return where in a run folder its checkpoints lie: DeepSpeed's in the folder itself."""
    return folder if flags.is_deepspeed else folder / CHECKPOINTS


def saved_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a run folder, of either format, whole or not."""
    return [path for found in _formats_in(folder).values() for path in found]


def is_deepspeed_folder(source: Path) -> bool:
    """Tell whether ``source`` is, or holds, checkpoints in DeepSpeed's layout, and none in ours."""
    return not any(checkpoints_in(source).glob("step-*")) and bool(deepspeed_checkpoint.tags_in(source))


def format_of(folder: Path, flags: CheckpointConfig) -> str:
    """Return the format in which a run saves into ``folder``: as the flags say, else as the folder's checkpoints are.

    Raises:
        ConfigError: the folder holds checkpoints of the other one; nobody could say which is newer.
    """
    held = [name for name, found in _formats_in(folder).items() if found]
    chosen = flags.checkpoint_format or (held[0] if held else NATIVE)
    if held not in ([], [chosen]) and not flags.eval_only:
        raise ConfigError(
            f"a run folder holds checkpoints of one format, got {' and '.join(held)} ones in {folder} and "
            f"--checkpoint-format {chosen}. Give --save another folder (--load may name this one), or the same format"
        )
    return chosen


def _formats_in(folder: Path) -> dict[str, list[Path]]:
    """Return the checkpoints in a run folder by their format."""
    native = [*(folder / CHECKPOINTS).glob("step-*")]
    return {NATIVE: native, deepspeed_checkpoint.FORMAT: deepspeed_checkpoint.tags_in(folder)}


def require_checkpoint(source: Path) -> None:
    """Check that ``source``, a run folder, a folder of checkpoints or a checkpoint, holds one, whole or not.

    A Hugging Face folder will do as well.

    Raises:
        CheckpointError: it is not there, or holds none.
    """
    if is_deepspeed_folder(source) or weights.is_folder(source):
        return
    place = checkpoints_in(source)
    if not place.is_dir():
        found_instead = "a file" if place.exists() else "not there"
        raise CheckpointError(
            hub.load_problem(source) or f"--load must name a folder of checkpoints; {place} is {found_instead}"
        )
    if not (place / MANIFEST_NAME).exists() and not any(place.glob("step-*")):
        message = f"no checkpoint found in {place}: a checkpoint is a folder like step-00000020"
        if deepspeed_checkpoint.foreign_tags_in(source):
            message += (
                ". What DeepSpeed wrote without --checkpoint-format deepspeed does not say where a run stood; "
                "tools/import_checkpoint.py takes the weights"
            )
        raise CheckpointError(message)


def is_run_folder(source: Path) -> bool:
    """Return whether ``source`` is a run's folder, not its folder of checkpoints or one of these."""
    if (source / CHECKPOINTS).is_dir():
        return True
    return is_deepspeed_folder(source) and deepspeed_checkpoint.tags_in(source) != [source]


def _newest_save(run: Path) -> float | None:
    """Return when the newest checkpoint of a run folder was written, None if it has none."""
    return max((path.stat().st_mtime for path in saved_in(run)), default=None)


# What the starts of one job, as the launcher counts it, know of each other.

_BY_LAUNCH = ".by-launch"  # runs/.by-launch/<job>: the folder and the source that its first start chose


def job() -> str | None:
    """Return the launcher's name for this job, which its restarts share; None without our launcher."""
    return os.environ.get("MEGATRON_RUN_ID") or None


def has_saved(folder: Path) -> bool:
    """Return whether this job has saved into ``folder``, in which an earlier one may have, too."""
    return job() is not None and any(_job_of(path) == job() for path in saved_in(folder))


def _job_of(checkpoint: Path) -> str | None:
    path = checkpoint / MANIFEST_NAME
    try:
        return manifest_from_bytes(path.read_bytes(), path).state.get("job")
    except (OSError, CheckpointError):
        return None


def _note_file() -> Path | None:
    """Return where a launch that may start the job again notes what was chosen: another run may be the newest then."""
    launch = job()
    return RUNS / _BY_LAUNCH / launch if launch and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" else None


def noted_choice() -> tuple[Path, Path | None] | None:
    """Return the folder and the source that an earlier start of this launch chose."""
    note = _note_file()
    if note is None or not note.exists():
        return None
    folder, *source = note.read_text().splitlines()
    return Path(folder), Path(source[0]) if source else None


def note_choice(folder: Path, source: Path | None) -> None:
    """Write down what this start has chosen, for those that may follow."""
    note = _note_file()
    if note is not None:
        note.parent.mkdir(parents=True, exist_ok=True)
        files.replace_bytes(note, "\n".join(str(path) for path in (folder, source) if path is not None).encode())


# Do all nodes see the folder that rank 0 has chosen? Found at the start, not at the first save.


def check_shared(folder: Path, world: World) -> None:
    """Check that the first rank of each node sees a file that rank 0 leaves in ``folder``. Collective.

    On a network file system the file is waited for as long as those of a checkpoint are.

    Raises:
        ConfigError: a node does not see it; on all ranks alike.
    """
    host = world.grid.host
    if host.size == 1:
        return
    probe = run_on_rank_0(world, lambda: _leave_probe(folder))
    if world.local_rank == 0:
        FileVisibility().wait_for(probe)
    is_blind = world.local_rank == 0 and not probe.exists()
    hosts = host.gather_objects(platform.node() if is_blind else None)
    run_on_rank_0(world, lambda: _judge(probe, sorted({name for name in hosts if name is not None})))


def _leave_probe(folder: Path) -> Path:
    try:
        descriptor, name = tempfile.mkstemp(prefix=".probe-", dir=folder)
    except OSError as error:
        raise ConfigError(f"--save must name a folder that can be written, got {folder}: {error}") from error
    os.close(descriptor)
    return Path(name)


def _judge(probe: Path, blind: list[str]) -> None:
    """Take the probe away; one that has gone already, with the leftovers of another start, proves nothing."""
    try:
        probe.unlink()
    except OSError:
        return
    if blind:
        raise ConfigError(
            f"--save must be a folder that all nodes share; node {', '.join(blind)} does not see what rank 0 writes to "
            f"{probe.parent} on {platform.node()}. Name a folder of a file system that all of them mount there"
        )


# The folder that holds all of a run: settings, versions, metrics, pictures, checkpoints.


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
