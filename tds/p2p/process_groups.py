"""A communicator per route on NCCL, one group on gloo; timeouts of groups."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tds import torch_api
from tds.device import is_host, sends_over_host
from tds.p2p import host_copies
from tds.p2p.communicator import Route, collective_scope
from tds.schedule import Kind
from tds.torch_api import set_timeout

# How long a rank waits for another, in every group of a pipeline: what the JSON or the default process group says.
#
# DeepSpeed makes its groups without a timeout, so they would wait for the backend's 10 or 30 minutes.

NCCL_GRACE = timedelta(seconds=2)
"""NCCL's own watchdog aborts the process without a word of ours, so it comes after the one in
``tds.watchdog.watchdog``.
"""


def limit_groups(groups: Iterable[Any], limit: timedelta) -> None:
    """Let the operations that ``groups`` start from now on end after ``limit``; sends and receives over gloo do not."""
    for group in groups:
        grace = NCCL_GRACE if dist.get_backend(group) == "nccl" else timedelta()
        set_timeout(group, limit + grace)


# The process groups that messages travel in.
#
# Over gloo, which tells messages apart by their tags, that is the pipeline's own group. NCCL runs what is started on
# one communicator in order, and receives are posted ahead of sends, so there each route (kind of message, from, to)
# has a group of its own: with one group for a whole pipeline a send would wait behind a receive that depends on it.
# Headers go over the CPU.
#
# A communicator of NCCL that is opened by its first message holds the host until the other side comes with its own
# first one: in the middle of a step, for what is posted ahead. So ``open_channels`` opens all of them in one order.

MATCHES_TAGS = ("gloo", "mpi")
"""Backends that tell messages apart by their tags; all others are taken to be as NCCL is."""

Groups = dict[Route, Any]


def message_groups(
    grid: Any, device: torch.device, num_chunks: int = 1, limit: timedelta | None = None
) -> tuple[Groups, bool]:
    """Return (the group of each route from and to this stage, whether they must be opened). Collective.

    Args:
        limit: how long a message is waited for in groups that are made here; None: as in the default group.

    Raises:
        ValueError: the backend cannot send what lies on ``device``.
    """
    own = grid.get_pipe_parallel_group()
    backend = torch_api.backend(own, device).name()
    if not is_host(device) and not sends_over_host() and not isinstance(own, host_copies.HostCopies):
        refuse_host_backend(backend, grid.pipe_parallel_size, device)
    stage = grid.get_stage_id()
    if backend in MATCHES_TAGS:
        return {route: own for route in routes(grid.pipe_parallel_size, num_chunks) if stage in route[1:]}, False
    refuse_blocking_launches(grid.pipe_parallel_size)
    groups: Groups = {}
    for ranks in grid.pipe_groups:
        groups |= _route_groups(ranks, grid.get_global_rank(), backend, num_chunks, limit)
    return groups, True


def routes(num_stages: int, num_chunks: int = 1) -> list[Route]:
    """Return every route of a pipeline, in one order: each kind from each stage to its neighbour.

    Activations and headers go on, gradients go back. With more than one chunk the last stage passes on to the first;
    with two stages these two then have routes of each kind in both directions.
    """
    is_ring = num_chunks > 1 and num_stages > 1
    ahead = [(stage, (stage + 1) % num_stages) for stage in range(num_stages if is_ring else num_stages - 1)]
    back = [(after, before) for before, after in ahead]
    return [
        (kind, *pair)
        for kind, pairs in ((Kind.ACTIVATION, ahead), (Kind.GRADIENT, back), (Kind.HEADER, ahead))
        for pair in pairs
    ]


def _route_groups(ranks: list[int], own_rank: int, backend: str, num_chunks: int, limit: timedelta | None) -> Groups:
    """Make the groups of one pipeline; return those of the routes from and to this rank."""
    limit = torch_api.default_timeout() if limit is None else limit
    grace = NCCL_GRACE if backend == "nccl" else timedelta()
    timeout = None if limit is None else limit + grace
    headers = dist.new_group(ranks, backend="gloo", timeout=limit)
    groups: Groups = {}
    for kind, source, destination in routes(len(ranks), num_chunks):
        pair = [ranks[source], ranks[destination]]
        group = headers
        if kind is not Kind.HEADER:
            group = dist.new_group(sorted(pair), backend=backend, timeout=timeout)
        if own_rank in pair:
            groups[kind, source, destination] = group
    return groups


def open_channels(groups: Groups, ranks: list[int], stage: int, device: torch.device, num_chunks: int = 1) -> None:
    """Send one byte along each route of the pipeline, in the same order on every rank. Collective."""
    for kind, source, destination in routes(len(ranks), num_chunks):
        if kind is Kind.HEADER or stage not in (source, destination):
            continue
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        group = groups[kind, source, destination]
        with collective_scope(stage, f"opening the channel of {kind.name.lower()}s {source} -> {destination}"):
            if stage == source:
                dist.send(byte, ranks[destination], group=group, tag=int(kind))
            else:
                dist.recv(byte, ranks[source], group=group, tag=int(kind))


def refuse_host_backend(backend: str, num_stages: int, device: torch.device) -> None:
    """Raise if tensors on a GPU would have to cross stages over gloo, which sends none."""
    if backend == "gloo" and num_stages > 1:
        raise ValueError(
            f"a pipeline on GPUs needs nccl: gloo does not send tensors of a GPU from stage to stage, got the backend "
            f"gloo with {num_stages} stages on device {device}. Use nccl; or, where several ranks share a GPU and only "
            f'the numbers count, tds.p2p.host_copies.register() and init_distributed(dist_backend="{host_copies.NAME}")'
        )


def refuse_blocking_launches(num_stages: int) -> None:
    """Raise if the host is to wait for each kernel, so for a receive that is posted ahead too."""
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "")
    if num_stages > 1 and blocking not in ("", "0"):
        raise ValueError(
            "CUDA_LAUNCH_BLOCKING must not be set for a pipeline, whose stages would wait for each other at their "
            f"first messages, got {blocking!r} with {num_stages} stages. Unset it. To find the kernel of an error, run "
            "one stage, or call torch.cuda.synchronize() in the layers: a pipeline goes on with that"
        )
