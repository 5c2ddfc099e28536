"""Process groups for messages between stages, and group timeouts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tds import torch_api
from tds.device import is_host, runs_collectives_on_host
from tds.p2p import host_copies
from tds.p2p.collective_scope import collective_scope
from tds.p2p.transport import Route
from tds.schedule import MessageType, Placement
from tds.torch_api import set_timeout

# Timeouts: all the pipeline's groups have the timeout from the JSON or from the default process group. DeepSpeed
# creates its groups without a timeout, so they would wait for the backend's default of 10 or 30 minutes.

NCCL_GRACE = timedelta(seconds=2)
"""Added to NCCL groups' timeout, so that ``tds.watchdog.watchdog`` reports before NCCL's watchdog aborts the
process.
"""


def set_group_timeouts(groups: Iterable[Any], timeout: timedelta) -> None:
    """Set the timeout for further operations in ``groups``, except sends and receives over gloo, which ignore it."""
    for group in groups:
        grace = NCCL_GRACE if "nccl" in dist.get_backend(group) else timedelta()
        set_timeout(group, timeout + grace)


# Message groups. gloo matches messages by tag, so all messages use the pipeline's group. NCCL runs a communicator's
# operations in order, and receives are posted before sends. With one group per pipeline, a send would wait for an
# earlier receive that depends on it. So each route (message type, source, destination) has its own NCCL group. Headers
# are sent over the CPU.
#
# NCCL groups have high-priority streams, so that messages run before concurrent compute kernels. They use few CTAs,
# because a posted receive occupies its CTAs while it waits. A few splits of the world's communicator create all groups;
# every rank takes part in each split. Creating one group per pair would take hundreds of calls.
#
# An NCCL communicator's first message blocks the host until the peer starts its first message too. With receives
# posted in advance, this would block in the middle of a step, so ``open_channels`` opens all channels in one order.

MAX_CTAS = 4
"""Default CTAs per message. NCCL would use up to 32 within a node, but a message has a whole action's time to
arrive."""
TAG_MATCHING_BACKENDS = ("gloo", "mpi")
"""Backends that match messages by tag; all others are treated like NCCL."""

Groups = dict[Route, Any]


def message_groups(
    grid: Any, device: torch.device, placement: Placement, limit: timedelta | None = None, max_ctas: int = MAX_CTAS
) -> tuple[Groups, bool]:
    """Return (group by route from and to this stage, whether the groups must be opened). Collective.

    Args:
        limit: timeout for the groups created by this function; None: the default group's timeout.
        max_ctas: maximum CTAs per message on a GPU; 0: NCCL's default.

    Raises:
        ValueError: the backend cannot send tensors of ``device``, or CUDA_LAUNCH_BLOCKING is set.
    """
    pipe_group = grid.get_pipe_parallel_group()
    backend = torch_api.backend(pipe_group, device).name()
    if not is_host(device) and not runs_collectives_on_host() and not isinstance(pipe_group, host_copies.HostCopies):
        check_backend(backend, grid.pipe_parallel_size, device)
    stage = grid.get_stage_id()
    if backend in TAG_MATCHING_BACKENDS:
        return {route: pipe_group for route in routes(placement) if stage in route[1:]}, False
    check_blocking_launches(grid.pipe_parallel_size)
    limit = torch_api.default_timeout() if limit is None else limit
    timeout = None if limit is None else limit + (NCCL_GRACE if backend == "nccl" else timedelta())
    headers = pipe_group if torch_api.sends_from_host(pipe_group) else dist.new_group(backend="gloo", timeout=limit)
    groups = _device_groups(grid.pipe_groups, grid.get_global_rank(), device, backend, placement, timeout, max_ctas)
    header_routes = [route for route in routes(placement) if route[0] is MessageType.HEADER]
    return groups | {route: headers for route in header_routes if stage in route[1:]}, True


def routes(placement: Placement) -> list[Route]:
    """List a pipeline's routes in the same order on all ranks.

    Activations and headers go from each virtual stage to the next, gradients go back. With several chunks and the
    placement "loop", the last stage also sends to the first. With the placement "v", each stage sends to both
    neighbours. Two stages then have routes for each type in both directions.
    """
    stages = map(placement.stage_of, range(placement.num_virtual_stages))
    forward = [pair for pair in dict.fromkeys(itertools.pairwise(stages)) if pair[0] != pair[1]]
    backward = [(receiver, sender) for sender, receiver in forward]
    return [
        (message_type, *pair)
        for message_type, pairs in (
            (MessageType.ACTIVATION, forward),
            (MessageType.GRADIENT, backward),
            (MessageType.HEADER, forward),
        )
        for pair in pairs
    ]


def disjoint_turns(placement: Placement) -> list[list[Route]]:
    """Partition the routes between devices into turns in which each stage occurs at most once.

    Within one turn, all pipelines' pairs are disjoint, so one split of the world creates their communicators.
    There are four turns, or six with an odd ring, or eight with the placement "v".
    """
    turns: list[list[Route]] = []
    for route in routes(placement):
        if route[0] is MessageType.HEADER:
            continue
        free_turns = (turn for turn in turns if not {stage for _, *pair in turn for stage in pair} & set(route[1:]))
        turn = next(free_turns, None)
        if turn is None:
            turns.append([route])
        else:
            turn.append(route)
    return turns


def _device_groups(
    pipelines: Sequence[list[int]], rank: int, device: torch.device, backend: str, placement: Placement,
    timeout: timedelta | None, max_ctas: int,
) -> Groups:  # fmt: skip
    """Create groups for the routes between devices in all pipelines; return this rank's groups. Collective."""
    groups: Groups = {}
    is_split = backend == "nccl"
    if is_split:
        torch_api.open_world(device)
    for turn in disjoint_turns(placement):
        pairs = [
            (sorted((ranks[source], ranks[destination])), (message_type, source, destination))
            for ranks in pipelines
            for message_type, source, destination in turn
        ]
        local_route = next((route for pair, route in pairs if rank in pair), None)
        if is_split:
            options = torch_api.nccl_options(max_ctas, timeout)
            group = torch_api.split_world([pair for pair, _ in pairs], device, backend, options, timeout)
            if local_route is not None:
                groups[local_route] = group
            continue
        for pair, route in pairs:
            group = dist.new_group(pair, backend=backend, timeout=timeout)
            if rank in pair:
                groups[route] = group
    return groups


def open_channels(groups: Groups, ranks: list[int], stage: int, device: torch.device, placement: Placement) -> None:
    """Send one byte over each route in the pipeline, in the same order on every rank. Collective."""
    for message_type, source, destination in routes(placement):
        if message_type is MessageType.HEADER or stage not in (source, destination):
            continue
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        group = groups[message_type, source, destination]
        with collective_scope(stage, f"opening the channel of {message_type.name.lower()}s {source} -> {destination}"):
            if stage == source:
                dist.send(byte, ranks[destination], group=group, tag=int(message_type))
            else:
                dist.recv(byte, ranks[source], group=group, tag=int(message_type))


def check_backend(backend: str, num_stages: int, device: torch.device) -> None:
    """Raise ValueError if stages would have to send GPU tensors over gloo, which does not support it."""
    if backend == "gloo" and num_stages > 1:
        raise ValueError(
            "a pipeline on GPUs needs nccl, because gloo does not send GPU tensors from stage to stage, got the "
            "backend "
            f"gloo with {num_stages} stages on device {device}. Use nccl. If several ranks share a GPU and speed does "
            "not "
            f'matter, use tds.p2p.host_copies.register() and init_distributed(dist_backend="{host_copies.NAME}")'
        )


def check_blocking_launches(num_stages: int) -> None:
    """Raise ValueError if CUDA_LAUNCH_BLOCKING is set: the host would block on receives that are posted in advance."""
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "")
    if num_stages > 1 and blocking not in ("", "0"):
        raise ValueError(
            "CUDA_LAUNCH_BLOCKING must not be set for a pipeline, whose stages would deadlock at their first messages, "
            f"got {blocking!r} with {num_stages} stages. Unset it. To find the kernel of an error, run one stage, or "
            "synchronize the device in the layers, which a pipeline supports"
        )
