"""Checkpoints in the DeepSpeed engine's format (``--checkpoint-format deepspeed``).

The engine of the run (DeepSpeed's without a pipeline, tds's with one) writes and reads the files. Their optimizer state
is ``MixedPrecisionOptimizer.state_dict``. The client state has one key, "megatron": the ``state`` of the run as in the
native format, and the generator states of the replicas whose weights a file stores. The client state contains only
plain values and tensors.

The files contain the slices of one layout. They can be loaded only with the same tensor-parallel size, pipeline size
and split into stages; with another pipeline size, only the weights can be loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron import device, files
from megatron.checkpoint import Checkpoint
from megatron.checkpoint.metadata import FileInfo
from megatron.checkpoint.rank_errors import gather_verdict
from megatron.checkpoint.retention import KEEP_ALL, RetentionPolicy
from megatron.config import Config
from megatron.errors import CheckpointError, marked
from megatron.mpu.topology import Topology
from megatron.training.compatibility import layout_text
from megatron.training.deepspeed_folders import FORMAT, clean_up, commit, make_temporary_folder
from megatron.training.loss_scale_resume import restore_scaler
from megatron.training.restore_options import RestoreOptions
from megatron.training.train_progress import TrainProgress
from megatron.training.world import World

CLIENT_KEY = "megatron"
_PARTITION_FIELDS = ("pipeline_chunks", "partition_method")


class RecordingCheckpointEngine:
    """Replaces an engine's checkpoint engine during a save: syncs every file to disk and records the checksum.

    If a file cannot be written, the error is raised only after the engine's barriers, which every rank must reach.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._written = engine, dict[str, FileInfo]()
        self._error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing, because the folder exists."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write ``state_dict`` to ``path``."""
        if self._error is not None:
            return
        try:
            file_facts = files.write_with(Path(path), lambda stream: torch.save(state_dict, stream))  # type: ignore[arg-type]
            self._written[Path(path).name] = FileInfo(*file_facts)
        except Exception as error:  # raised by ``file_facts``
            self._error = error

    def file_facts(self) -> dict[str, FileInfo]:
        """Return sizes and checksums of the written files, by file name.

        Raises:
            Exception: the error for the first file that could not be written.
        """
        if self._error is not None:
            raise self._error
        return self._written


@marked(is_of_this_rank=False)
def save(
    root: Path,
    step: int,
    metadata: Mapping[str, Any],
    engine: Any,
    world: World,
    *,
    retention: RetentionPolicy = KEEP_ALL,
) -> Path:
    """Write the checkpoint ``root/global_step20`` with DeepSpeed's ``engine`` and return its path. Collective.

    Args:
        metadata: JSON-serializable values, as in the native format.
        retention: selects the older checkpoints to keep.

    Raises:
        CheckpointError: the save failed on any rank; raised on all ranks. Older checkpoints in ``root`` are unchanged.
    """
    host, json_metadata = (
        world.grid.host,
        json.loads(json.dumps({**metadata, "format": FORMAT})),
    )  # converts to the types of JSON
    client_state = {CLIENT_KEY: {"state": json_metadata, "rng": _gather_rng_states(world)}}
    temporary: Path | None = None
    try:
        temporary = gather_verdict(host, lambda: None, lambda _: make_temporary_folder(root, step))
        with _recording_files(engine) as recording_engine:
            engine.save_checkpoint(str(root), tag=temporary.name, client_state=client_state, save_latest=False)
        path: Path = gather_verdict(
            host, recording_engine.file_facts,
            lambda facts_of_ranks: commit(temporary, step, json_metadata, _merge_file_facts(facts_of_ranks)),
        )  # fmt: skip
    except CheckpointError as error:
        if world.rank == 0 and temporary is not None:
            with suppress(OSError):
                files.remove_tree(temporary)
        raise CheckpointError(f"the checkpoint of step {step} was not saved to {root}: {error}") from error
    if world.rank == 0:
        clean_up(path, retention)
    return path


def restore(
    checkpoint: Checkpoint, engine: Any, config: Config, world: World, options: RestoreOptions
) -> TrainProgress:
    """Load a checkpoint into the engine; return the restored counters. Collective.

    The engine loads model and optimizer. Loss scale, random states and counters are restored as in
    ``megatron.training.resume.restore``.

    Raises:
        CheckpointError: the layout differs or a tensor does not fit; raised on all ranks.
    """
    metadata, topology = checkpoint.metadata, world.grid.topology
    with marked(is_of_this_rank=False):
        check_layout(checkpoint, config, topology, loads_optimizer=options.optimizer)
    client_state: dict[str, Any] = {}
    gather_verdict(
        world.grid.host, lambda: client_state.update(_read(engine, checkpoint.path, options.optimizer)), lambda _: None
    )
    if options.optimizer:  # files of earlier versions lack the scaler type; their manifest has it
        restore_scaler(engine.optimizer.scaler, metadata, config)
    if options.generators and layout_text(metadata["layout"], topology) is None:
        device.set_rng_states({**device.rng_states(world.device_type), **client_state[CLIENT_KEY]["rng"][world.rank]})
    return TrainProgress.from_metadata(metadata, config.tokens_per_sample) if options.counters else TrainProgress()


def check_layout(checkpoint: Checkpoint, config: Config, now: Topology, *, loads_optimizer: bool) -> None:
    """Check that the files, which contain one layout's slices, can be loaded in the layout ``now``.

    Raises:
        CheckpointError: they cannot; the message names both layouts.
    """
    layout = checkpoint.metadata["layout"]
    difference = layout_text(layout, now)
    if layout["tensor"] != now.tensor or (layout["pipe"] > 1) != (now.pipe > 1):
        raise CheckpointError(
            f"{checkpoint.path} is in DeepSpeed's format, which loads only with the tensor-parallel size that it was "
            f"saved with, and with a pipeline only if it was saved with one: {difference}. Start with the saved "
            "layout, and save with --checkpoint-format native, which loads in every layout"
        )
    if loads_optimizer and (partition_change := _partition_change(checkpoint, config, now)):
        raise CheckpointError(
            f"{checkpoint.path} is in DeepSpeed's format, whose optimizer states load only if every stage has the "
            f"same layers as when it was saved: {partition_change}. Start with the saved layout and save with "
            "--checkpoint-format native, which loads in every layout, or load only the weights with "
            "--load-weights-only or --finetune"
        )


def _partition_change(checkpoint: Checkpoint, config: Config, now: Topology) -> str | None:
    """Describe the difference from the checkpoint's split of layers into stages, or return None if there is none."""
    if checkpoint.metadata["layout"]["pipe"] != now.pipe:
        return layout_text(checkpoint.metadata["layout"], now)
    saved, current = checkpoint.metadata["config"]["parallel"], asdict(config.parallel)
    if now.pipe == 1:
        return None
    changed = [
        f"{name}: saved {saved[name]}, now {current[name]}"
        for name in _PARTITION_FIELDS
        if saved[name] != current[name]
    ]
    return "; ".join(changed) or None


def _read(engine: Any, path: Path, loads_optimizer: bool) -> dict[str, Any]:
    """Load the files with the engine, in a mode in which they cannot run code, and return the client state."""
    from tds.deepspeed.safe_load import make_safe  # imports DeepSpeed

    make_safe(engine.checkpoint_engine)
    _, client_state = engine.load_checkpoint(
        str(path.parent), tag=path.name, load_optimizer_states=loads_optimizer, load_lr_scheduler_states=False,
        load_module_only=not loads_optimizer,
    )  # fmt: skip
    if client_state is None:
        raise CheckpointError(f"{path} contains no file for this rank")
    return dict(client_state)


@contextmanager
def _recording_files(engine: Any) -> Iterator[RecordingCheckpointEngine]:
    """Replace the engine's checkpoint engine by ``RecordingCheckpointEngine`` within the context."""
    original = engine.checkpoint_engine
    engine.checkpoint_engine = recording_engine = RecordingCheckpointEngine(original)
    try:
        yield recording_engine
    finally:
        engine.checkpoint_engine = original


def _merge_file_facts(facts_of_ranks: list[dict[str, FileInfo]]) -> dict[str, FileInfo]:
    return {name: file_facts for rank_facts in facts_of_ranks for name, file_facts in sorted(rank_facts.items())}


def _gather_rng_states(world: World) -> dict[int, dict[str, torch.Tensor]]:
    """Gather generator states by rank from the ranks with the same weights as this rank. Collective."""
    states = world.grid.host.gather_objects(device.rng_states(world.device_type))
    return {rank: states[rank] for rank in world.grid.data_context.ranks}
