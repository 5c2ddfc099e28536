"""This rank's device and process groups, and the check that all ranks run the same program."""

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
from megatron.runtime.exit_guard import local_nccl_error
from megatron.runtime.rendezvous import rendezvous
from megatron.training.device_setup import check_device_fits, configure_device, default_backend
from megatron.training.rank_consistency import check_ranks_identical, compare_devices
from megatron.training.world import World

MAX_MESH_RANKS = 128
"""Largest number of ranks for which gloo connects all pairs of ranks when a group is created."""

PIPELINE_MAX_CONNECTIONS = "32"
"""CUDA_DEVICE_MAX_CONNECTIONS with a pipeline."""
ALLOCATOR_OPTIONS = "expandable_segments:True,pinned_max_round_threshold_mb:64"
"""PYTORCH_ALLOC_CONF."""


def start(config: Config, signal_name: Callable[[], str | None] = lambda: None) -> World:
    """Select the device, create the process groups, and check that all ranks run the same program. Collective.

    Args:
        signal_name: returns the name of the signal that has requested a stop, or None.

    Raises:
        ConfigError: the device or backend cannot be used, ranks differ in code, versions or arguments, or two ranks
            share a rank number or a GPU.
        PeerError: not all ranks joined.
        StopRequest: a stop was requested while waiting for other ranks.
    """
    # Environment variables that torch reads when the device or the first group is created.
    set_stream_queues(has_pipeline=config.parallel.has_pipeline, tensor_size=config.parallel.model_parallel_size)
    set_allocator_options()
    set_lazy_connections()

    # Device.
    device_type = configure_device(config)
    check_device_fits(config, device_type)
    local_rank = int(os.environ.setdefault("LOCAL_RANK", str(config.run.local_rank or 0)))
    requested_backend = config.parallel.distributed_backend
    is_via_host = requested_backend == "gloo" and device_type != "cpu"  # gloo does not send device memory
    torch_device = _bind_device(device_type, _shared_device(device_type, local_rank) if is_via_host else local_rank)
    if device_type == "cpu":
        device.keep_freed_memory()

    # Process groups.
    timeout = timedelta(seconds=config.parallel.phase_timeout_s)  # RunPhases changes it later
    backend = _backend(requested_backend, device_type, is_via_host=is_via_host)
    _init_process_group(backend, device_type, timeout, signal_name)
    parallel = config.parallel
    grid = initialize_model_parallel(
        parallel.model_parallel_size,
        parallel.pipe_parallel_size,
        torch_device,
        timeout,
        parallel.context_parallel_size,
        *config.expert_sizes,
        parallel.context_inner,
    )
    world = World(
        device_type=device_type, device=torch_device, grid=grid, local_rank=local_rank, loss_stage=parallel.loss_stage
    )

    # Checks over all ranks.
    compare_devices(torch_device, grid)
    _test_groups(grid, torch_device)
    check_ranks_identical(config, grid)
    device.seed(config.run.seed)
    return world


def set_stream_queues(*, has_pipeline: bool, tensor_size: int = 1) -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS unless the user has set it. Must be called before CUDA is initialised.

    A pipeline gets one hardware queue per stream: with CUDA's default of 8, a stage's work may be queued after a
    pending receive. Tensor parallelism without a pipeline gets a single queue: kernels start in call order, so that an
    all-reduce starts before the matrix product that it overlaps with.
    """
    if has_pipeline:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", PIPELINE_MAX_CONNECTIONS)
    elif tensor_size > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def set_allocator_options() -> None:
    """Set PYTORCH_ALLOC_CONF unless the user has set it under either name. Must be called before the device is used.

    Expandable segments avoid fragmentation. Only pinned allocations below 64 MiB are rounded up to a power of two;
    otherwise main params on the host would take up to twice their size.
    """
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        has_pinned_threshold = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
        os.environ["PYTORCH_ALLOC_CONF"] = (
            ALLOCATOR_OPTIONS if has_pinned_threshold else ALLOCATOR_OPTIONS.partition(",")[0]
        )


def set_lazy_connections() -> None:
    """Enable lazy connections in gloo if there are many ranks. Must be called before the first group is created.

    For a full mesh, every rank reads the addresses of all other ranks from the store. With 10,000 ranks, that takes 2e8
    messages with 8e12 bytes in total, and 10,000 connections per rank. A TORCH_GLOO_LAZY_INIT set by the user is not
    changed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > MAX_MESH_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def stop() -> None:
    """Destroy the process groups after a barrier, so that no rank exits while another still works. Collective."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _backend(requested_backend: str | None, device_type: str, *, is_via_host: bool) -> str:
    if not is_via_host:
        return requested_backend or default_backend(device_type)
    from tds.p2p import host_copies

    host_copies.register()
    return host_copies.NAME


def _shared_device(device_type: str, local_rank: int) -> int:
    """Return this rank's device index; if a host has more ranks than devices, the ranks share them round-robin."""
    num_devices, num_ranks = device.num_devices(device_type), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not 0 < num_devices < num_ranks:
        return local_rank
    if os.environ.get("RANK") == "0":
        log.info(
            f"{num_ranks} ranks share {num_devices} {device_type} device{'' if num_devices == 1 else 's'} on this host"
        )
    os.environ["LOCAL_RANK"] = str(local_rank % num_devices)  # DeepSpeed reads it
    return local_rank % num_devices


def _bind_device(device_type: str, local_rank: int) -> torch.device:
    try:
        return device.bind(device_type, local_rank)
    except ValueError as error:
        with marked(is_of_this_rank=True):  # other ranks wait for this one
            raise ConfigError(str(error)) from None


def _init_process_group(
    backend: str, device_type: str, timeout: timedelta, signal_name: Callable[[], str | None] = lambda: None
) -> None:
    """Create the world group, after a rendezvous. No-op if it exists. Collective.

    Raises:
        ConfigError, PeerError, StopRequest: as in ``start``.
    """
    if dist.is_initialized():
        return
    if backend == "nccl" and device_type != "cuda":
        raise ConfigError("--distributed-backend nccl needs CUDA devices, found none. Use gloo.")
    if "RANK" not in os.environ:  # started by hand, without a launcher
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = rendezvous(rank, size, timeout, signal_name)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise PeerError(
            f"all {size} ranks have joined, but did not connect within {timeout.total_seconds():.0f} s "
            f"(--phase-timeout-minutes): {error}. Check that the hosts can reach each other"
        ) from error


def _test_groups(grid: Grid, torch_device: torch.device) -> None:
    """All-reduce a value over each group, so that a broken connection fails here and not in the first step."""
    tested: set[tuple[int, ...]] = set()
    for name in (
        "tensor",
        "pipe",
        "context",
        "context_inner",
        "context_outer",
        "data",
        "data_context",
        "expert",
        "expert_data",
        "expert_tensor",
        "model",
        "world",
    ):
        group: Group = getattr(grid, name)
        if group.size == 1 or group.ranks in tested:
            continue
        tested.add(group.ranks)
        value = torch.ones(1, device=torch_device)
        try:
            dist.all_reduce(value, group=group.handle)
        except dist.DistError as error:
            local_error = local_nccl_error(error, is_during_setup=True)
            if local_error is None:
                raise
            raise local_error from None
        if value.item() != group.size:
            raise PeerError(f"the {name} group must have {group.size} ranks, got {value.item():.0f}")
