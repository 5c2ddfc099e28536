"""Choose the run folder, and the run or checkpoint to resume from."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from megatron import log, object_store
from megatron.arguments.unused_flags import format_problems
from megatron.checkpoint import check_writable, remote
from megatron.checkpoint.folders import CHECKPOINTS, last_sequence
from megatron.config import CheckpointConfig, Config
from megatron.errors import CheckpointError, ConfigError, DataError, raise_all
from megatron.training import deepspeed_folders
from megatron.training.checkpoint_source import (
    DOWNLOADS,
    NATIVE,
    RUNS,
    choose_format,
    is_run_folder,
    newest_run,
    require_checkpoint,
    saved_checkpoints,
)
from megatron.training.job_starts import has_checkpoint_of_job, read_choice, write_choice
from megatron.training.rank_0 import run_on_rank_0
from megatron.training.shared_folder import check_shared
from megatron.training.world import World


@dataclass(frozen=True)
class RunPaths:
    """The folder that a run writes to, and the run folder or checkpoint that it resumes from.

    Args:
        folder: the run folder.
        source: the run folder or checkpoint to resume from; None: start from scratch, or from ``remote``.
        is_restart: True if this job has already saved into the folder; everything is restored, regardless of the flags.
        checkpoint_format: checkpoint format for saves.
        may_start_from_scratch: True if an earlier start may have ended before its first checkpoint.
        remote: checkpoint or run in an object store; it is downloaded into ``downloads`` and becomes the source.
    """

    folder: Path
    source: Path | None = None
    is_restart: bool = False
    checkpoint_format: str = NATIVE
    may_start_from_scratch: bool = False
    remote: str | None = None
    downloads: Path | None = None


def choose(config: Config, name: str, world: World) -> RunPaths:
    """Choose the run's folder and source, the same on all ranks. Collective.

    The folder is --save, otherwise the folder of the run that --load or --resume continues, otherwise a new
    ``runs/<name>-<time>``. A restart by the launcher continues in the folder from the job's first start.

    Raises:
        CheckpointError: --load or --resume finds no checkpoint.
        ConfigError: the folder is not writable, or not visible on all nodes.
    """

    def choose_and_check() -> RunPaths:
        paths = _choose_paths(config, name)
        source = None if paths.source is None else paths.source.absolute()
        checkpoint_format = choose_format(paths.folder, config.checkpoint)
        paths = replace(paths, folder=paths.folder.absolute(), source=source, checkpoint_format=checkpoint_format)
        if paths.downloads is not None:
            paths = replace(paths, downloads=paths.downloads.absolute())
        check_writable(paths.folder)
        check_store(paths, config.checkpoint)
        if (checkpoints := paths.folder / CHECKPOINTS).is_dir():
            check_writable(checkpoints)
        if config.run.tensorboard_dir:
            check_writable(Path(config.run.tensorboard_dir))
        return paths

    paths = run_on_rank_0(world, choose_and_check)
    if not config.checkpoint.eval_only:
        check_shared(paths.folder, world)
    return paths


def with_checkpoint_format(config: Config, paths: RunPaths) -> Config:
    """Copy ``config`` with the run's checkpoint format.

    Raises:
        ConfigError: other flags are not supported with this format; the same on every rank.
    """
    config = replace(config, checkpoint=replace(config.checkpoint, checkpoint_format=paths.checkpoint_format))
    raise_all(list(format_problems(config)))
    return config


def check_store(paths: RunPaths, flags: CheckpointConfig) -> None:
    """Check that checkpoints can be uploaded, and that the store holds no other run's checkpoints.

    Raises:
        ConfigError: the store is not writable, or contains another run's checkpoints, so that their order is unknown.
    """
    if flags.save_remote is None or flags.eval_only:
        return
    try:
        object_store.check_writable(flags.save_remote)
        uploaded = remote.find_checkpoints(flags.save_remote)
    except DataError as error:
        raise ConfigError(f"--save-remote must name a writable location in an object store: {error}") from error
    if uploaded and not _is_own_store(flags) and last_sequence(saved_checkpoints(paths.folder)) < uploaded[0].sequence:
        raise ConfigError(
            f"--save-remote must be empty or contain this run, got {flags.save_remote} with {uploaded[0].name} and "
            f"{len(uploaded) - 1} more checkpoints that are not in {paths.folder}. Resume from them (--load "
            f"{flags.save_remote}), or set another location"
        )


def _is_own_store(flags: CheckpointConfig) -> bool:
    """Return True if the run resumes from the same store that it uploads to."""
    is_same_store = flags.load is not None and flags.load.rstrip("/") == (flags.save_remote or "").rstrip("/")
    return is_same_store and not (flags.finetune or flags.eval_only)


def _choose_paths(config: Config, name: str) -> RunPaths:
    """Choose the run's paths as in ``choose``. Called on rank 0."""
    flags = config.checkpoint
    earlier_choice = None if flags.save else read_choice()
    folder, source = earlier_choice or _paths_from_flags(config, name)
    if not flags.save and not earlier_choice:
        write_choice(folder, source)
    is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if is_restart and has_checkpoint_of_job(folder):
        return RunPaths(folder, folder, is_restart=True)
    is_continuation = is_restart or flags.load_if_exists
    if flags.load and object_store.is_remote(flags.load):
        return _paths_from_store(flags, folder, is_continuation=is_continuation)
    return RunPaths(folder, source, may_start_from_scratch=is_continuation and not saved_checkpoints(folder))


def _paths_from_store(flags: CheckpointConfig, folder: Path, *, is_continuation: bool) -> RunPaths:
    """Return paths for a run that resumes from an object store.

    If the run uploads to the same store, and its folder has a checkpoint that is at least as new as the store's newest
    one, the run resumes from the folder.
    """
    assert flags.load is not None
    is_own_store, saved_paths = _is_own_store(flags), saved_checkpoints(folder)
    try:
        newest_sequence = remote.require_checkpoints(flags.load)[0].sequence
    except CheckpointError as error:
        if not flags.load_if_exists:
            raise
        if not (is_own_store and saved_paths):
            log.info(f"--load-if-exists: starting from scratch, since {error}")
            return RunPaths(folder, may_start_from_scratch=is_continuation and not saved_paths)
        newest_sequence = 0
    if is_own_store and last_sequence(saved_paths) >= newest_sequence:
        return RunPaths(folder, folder)
    downloads = folder / (CHECKPOINTS if is_own_store else DOWNLOADS)
    return RunPaths(
        folder, remote=flags.load, downloads=downloads, may_start_from_scratch=is_continuation and not saved_paths
    )


def _paths_from_flags(config: Config, name: str) -> tuple[Path, Path | None]:
    """Return the folder and source selected by the flags; create a new folder if they name none."""
    flags, source = config.checkpoint, _source_from_flags(config, name)
    if flags.save:
        return Path(flags.save), source
    if source is not None and is_run_folder(source) and not flags.finetune:
        return source, source  # the same run continues in the same folder
    return _create_free_folder(RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"), source


def _source_from_flags(config: Config, name: str) -> Path | None:
    """Return the --load or --resume path; with --load-if-exists, None if there is no checkpoint."""
    flags = config.checkpoint
    if not flags.resume and (not flags.load or object_store.is_remote(flags.load)):
        return None
    try:
        source = Path(flags.load or flags.save or newest_run(name, config.family))
        require_checkpoint(source)
    except CheckpointError as error:
        # A run that starts from scratch next to another program's checkpoint would lose it without an error.
        if not flags.load_if_exists or (flags.load and deepspeed_folders.foreign_tags_in(Path(flags.load))):
            raise
        log.info(f"--load-if-exists: starting from scratch, since {error}")
        return None
    return source


def _create_free_folder(folder: Path) -> Path:
    """Create ``folder``, or a numbered variant if another job created it in the same second."""
    RUNS.mkdir(exist_ok=True)
    for suffix in range(1000):
        candidate = folder if not suffix else folder.with_name(f"{folder.name}-{suffix}")
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            continue
    raise CheckpointError(f"no free name for a run folder next to {folder}")
