"""From a started process to a tested grid of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron import device, log
from megatron.config import Config
from megatron.errors import ConfigError, PeerError, marked
from megatron.mpu.groups import Grid, Group
from megatron.mpu.initialize import initialize_model_parallel
from megatron.runtime.exit_guard import fault_of_this_rank
from megatron.runtime.rendezvous import rendezvous
from megatron.training.device_setup import backend_of, check_device_fits, configure_device
from megatron.training.rank_consistency import check_ranks_identical, compare_devices
from megatron.training.world import World

MOST_MESHED = 128
"""Ranks of a job up to which gloo connects each with each as soon as a group is made."""

MOST_QUEUES = "32"
"""Of CUDA_DEVICE_MAX_CONNECTIONS."""
ALLOCATOR = "expandable_segments:True,pinned_max_round_threshold_mb:64"
"""Of PYTORCH_ALLOC_CONF."""


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
    give_queues(has_pipeline=config.parallel.has_pipeline, tensor_size=config.parallel.model_parallel_size)
    let_memory_grow()
    connect_as_needed()
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
    sizes = parallel.model_parallel_size, parallel.pipe_parallel_size
    beside = parallel.context_parallel_size, parallel.expert_model_parallel_size if config.model.num_experts else 1
    grid = initialize_model_parallel(*sizes, place, timeout, *beside)
    world = World(kind=kind, device=place, grid=grid, local_rank=local_rank, loss_stage=config.parallel.loss_stage)
    compare_devices(place, grid)
    _touch_every_group(grid, place)
    check_ranks_identical(config, grid)
    device.seed(config.run.seed)
    return world


def give_queues(*, has_pipeline: bool, tensor_size: int = 1) -> None:
    """Give the streams of a pipeline, if it is on GPUs, a queue each; ahead of whatever asks for a device.

    With CUDA's 8 for all of them the work of a stage may lie behind a receive that waits. Tensor ranks without a
    pipeline get one for all: kernels start in the order of their calls, so that a sum starts ahead of the product that
    hides it. What the user says holds.
    """
    if has_pipeline:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", MOST_QUEUES)
    elif tensor_size > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def let_memory_grow() -> None:
    """Let torch's allocators grow what they hold rather than hold pieces; ahead of whatever asks for a device.

    Pinned memory is rounded up to a power of two below 64 MiB alone: main params on the host would take up to twice
    their bytes. What the user says, by the newer or the older name of the variable, holds.
    """
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        is_known = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
        os.environ["PYTORCH_ALLOC_CONF"] = ALLOCATOR if is_known else ALLOCATOR.partition(",")[0]


def connect_as_needed() -> None:
    """Let gloo connect two ranks at their first message, in a job of many ranks; ahead of the first group.

    For a mesh every rank reads from the store what every other one wrote, a number for each rank in it: at 10,000 ranks
    2e8 messages and 8e12 bytes, and 10,000 connections of each rank. What the user says holds.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > MOST_MESHED:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def stop() -> None:
    """Leave the process groups together: no rank ends while another still works. Collective."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _backend(asked: str | None, kind: str, *, is_through_host: bool) -> str:
    """Return torch.distributed's backend."""
    if not is_through_host:
        return asked or backend_of(kind)
    from tds.p2p import host_copies

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
    touched: set[tuple[int, ...]] = set()
    for name in ("tensor", "pipe", "context", "data", "data_context", "expert", "expert_data", "model", "world"):
        group: Group = getattr(grid, name)
        if group.size == 1 or group.ranks in touched:
            continue
        touched.add(group.ranks)
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
