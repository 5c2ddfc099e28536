"""From a started process to a grid of ranks that is known to work."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron import device, log
from megatron.config import Config
from megatron.errors import ConfigError, PeerError, marked
from megatron.mpu.groups import Grid, Group
from megatron.mpu.initialize import initialize_model_parallel
from megatron.mpu.mappings import all_reduce
from megatron.training.accelerator import backend_of, check_device_fits, configure_device
from megatron.training.failure import fault_of_this_rank
from megatron.training.rendezvous import rendezvous
from megatron.training.sameness import compare_devices, compare_ranks

MOST_QUEUES = "32"
"""Of CUDA_DEVICE_MAX_CONNECTIONS."""


@dataclass(frozen=True)
class World:
    """This rank's device and grid."""

    kind: str
    device: torch.device
    grid: Grid
    local_rank: int

    @property
    def rank(self) -> int:
        return self.grid.rank

    @property
    def reads_data(self) -> bool:
        """Whether this rank opens the corpus: the first tensor rank of the first and the last stage."""
        return self.grid.tensor.rank == 0 and self.grid.pipe.rank in (0, self.grid.pipe.size - 1)

    @property
    def council(self) -> tuple[Group, torch.device]:
        """All ranks, and where the numbers lie on which they agree that each host knows by itself.

        Those of a device would make the host wait for its work. On a CPU the group is the one whose time limit is a
        step's.
        """
        on_host = torch.device("cpu")
        return (self.grid.world if self.device == on_host else self.grid.host), on_host

    def any(self, wishes: Sequence[bool]) -> list[bool]:
        """Return, for each of this rank's ``wishes``, whether any rank has it. Collective."""
        group, place = self.council
        votes = torch.tensor(wishes, dtype=torch.float32, device=place)
        return [vote > 0 for vote in all_reduce(votes, group, dist.ReduceOp.MAX).tolist()]

    @property
    def name(self) -> str:
        """This rank in words, for messages."""
        return self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        """Return any rank in words."""
        place = self.grid.topology.coordinate(rank)
        return f"rank {rank} (stage {place.pipe}, tensor {place.tensor}, data {place.data})"


def start(config: Config, signal_name: Callable[[], str | None] = lambda: None) -> World:
    """Form the process groups, choose the device, and check that all ranks run the same thing. Collective.

    Args:
        signal_name: returns the signal that has asked this process to stop, or None.

    Raises:
        ConfigError: the device or backend cannot be used, or ranks differ in code, versions or arguments, or share a
            number or a GPU.
        PeerError: not all ranks came.
        StopRequest: asked to stop while others were missing.
    """
    give_queues(has_pipeline=config.parallel.has_pipeline)
    kind = configure_device(config)
    check_device_fits(config, kind)
    local_rank = int(os.environ.setdefault("LOCAL_RANK", str(config.run.local_rank or 0)))
    asked = config.parallel.distributed_backend
    is_through_host = asked == "gloo" and kind != "cpu"  # gloo does not send what lies on a device
    place = _bind(kind, _shared_device(kind, local_rank) if is_through_host else local_rank)
    if kind == "cpu":
        device.keep_freed_memory()
    timeout = timedelta(seconds=config.parallel.phase_timeout_s)  # Phases sets that of a step once there is one
    backend = _backend(asked, kind, is_through_host=is_through_host)
    _init_process_group(backend, kind, timeout, signal_name)
    parallel = config.parallel
    grid = initialize_model_parallel(parallel.model_parallel_size, parallel.pipe_parallel_size, place, timeout)
    world = World(kind=kind, device=place, grid=grid, local_rank=local_rank)
    compare_devices(place, grid)
    _touch_every_group(grid, place)
    compare_ranks(config, grid)
    device.seed(config.run.seed)
    return world


def give_queues(*, has_pipeline: bool) -> None:
    """Give the streams of a pipeline, if it is on GPUs, a queue each; ahead of whatever asks for a device.

    With CUDA's 8 for all of them the work of a stage may lie behind a receive that waits. What the user says holds.
    """
    if has_pipeline:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", MOST_QUEUES)


def stop() -> None:
    """Leave the process groups together: no rank ends while another still works. Collective."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _backend(asked: str | None, kind: str, *, is_through_host: bool) -> str:
    """Return torch.distributed's backend."""
    if not is_through_host:
        return asked or backend_of(kind)
    from tds import host_copies

    host_copies.register()
    return host_copies.NAME


def _shared_device(kind: str, local_rank: int) -> int:
    """Return the number of this rank's device where a host may have more ranks than devices: they take them in turn."""
    number, ranks = device.count(kind), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not 0 < number < ranks:
        return local_rank
    if os.environ.get("RANK") == "0":
        log.info(f"{ranks} ranks share {number} {kind} device{'' if number == 1 else 's'} on this host")
    os.environ["LOCAL_RANK"] = str(local_rank % number)  # by which DeepSpeed takes its device
    return local_rank % number


def _bind(kind: str, local_rank: int) -> torch.device:
    try:
        return device.bind(kind, local_rank)
    except ValueError as error:
        with marked(is_of_this_rank=True):  # the ranks with a device wait for this one
            raise ConfigError(str(error)) from None


def _init_process_group(
    backend: str, kind: str, timeout: timedelta, signal_name: Callable[[], str | None] = lambda: None
) -> None:
    if dist.is_initialized():
        return
    if backend == "nccl" and kind != "cuda":
        raise ConfigError("--distributed-backend nccl needs CUDA devices, found none. Use gloo.")
    if "RANK" not in os.environ:  # started by hand, alone
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = rendezvous(rank, size, timeout, signal_name)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"all {size} ranks have met, and must connect within {timeout.total_seconds():.0f} s "
            f"(--phase-timeout-minutes), got: {error}. Can the hosts reach each other?"
        ) from error


def _touch_every_group(grid: Grid, place: torch.device) -> None:
    """Send one number through each group: what cannot communicate fails here, not in the first step."""
    for name in ("tensor", "pipe", "data", "model", "world"):
        group: Group = getattr(grid, name)
        if group.size == 1:
            continue
        value = torch.ones(1, device=place)
        try:
            dist.all_reduce(value, group=group.handle)
        except dist.DistError as error:
            own = fault_of_this_rank(error, is_set_up=True)
            if own is None:
                raise
            raise own from None
        if value.item() != group.size:
            raise PeerError(f"the {name} group must have {group.size} ranks, heard from {value.item():.0f}")
