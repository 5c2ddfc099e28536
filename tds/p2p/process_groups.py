"""A communicator per route on NCCL, one group on gloo; timeouts of groups."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tds import torch_api
from tds.device import is_host, sends_over_host
from tds.p2p import host_copies
from tds.p2p.collective_scope import collective_scope
from tds.p2p.transport import Route
from tds.schedule import Kind, Placement
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
        grace = NCCL_GRACE if "nccl" in dist.get_backend(group) else timedelta()
        set_timeout(group, limit + grace)


# The process groups that messages travel in.
#
# Over gloo, which tells messages apart by their tags, that is the pipeline's own group. NCCL runs what is started on
# one communicator in order, and receives are posted ahead of sends, so there each route (kind of message, from, to)
# has a group of its own: with one group for a whole pipeline a send would wait behind a receive that depends on it.
# Headers go over the CPU. NCCL's groups have streams of high priority, ahead of the products that run meanwhile, and
# few processors, for a posted receive holds what it has while it waits. All of them are made by a few splits of the
# world's communicator, in each of which every rank takes part: one for each pair would be hundreds.
#
# A communicator of NCCL that is opened by its first message holds the host until the other side comes with its own
# first one: in the middle of a step, for what is posted ahead. So ``open_channels`` opens all of them in one order.

MAX_CTAS = 4
"""By default. A message has a whole action to arrive in; NCCL itself would take up to 32 between GPUs of one node."""
MATCHES_TAGS = ("gloo", "mpi")
"""Backends that tell messages apart by their tags; all others are taken to be as NCCL is."""

Groups = dict[Route, Any]


def message_groups(
    grid: Any, device: torch.device, placement: Placement, limit: timedelta | None = None, max_ctas: int = MAX_CTAS
) -> tuple[Groups, bool]:
    """Return (the group of each route from and to this stage, whether they must be opened). Collective.

    Args:
        limit: how long a message is waited for in groups that are made here; None: as in the default group.
        max_ctas: how many processors of a GPU a message may hold; 0: as many as NCCL takes.

    Raises:
        ValueError: the backend cannot send what lies on ``device``.
    """
    own = grid.get_pipe_parallel_group()
    backend = torch_api.backend(own, device).name()
    if not is_host(device) and not sends_over_host() and not isinstance(own, host_copies.HostCopies):
        refuse_host_backend(backend, grid.pipe_parallel_size, device)
    stage = grid.get_stage_id()
    if backend in MATCHES_TAGS:
        return {route: own for route in routes(placement) if stage in route[1:]}, False
    refuse_blocking_launches(grid.pipe_parallel_size)
    limit = torch_api.default_timeout() if limit is None else limit
    timeout = None if limit is None else limit + (NCCL_GRACE if backend == "nccl" else timedelta())
    headers = own if torch_api.sends_from_host(own) else dist.new_group(backend="gloo", timeout=limit)
    groups = _device_groups(grid.pipe_groups, grid.get_global_rank(), device, backend, placement, timeout, max_ctas)
    of_headers = [route for route in routes(placement) if route[0] is Kind.HEADER]
    return groups | {route: headers for route in of_headers if stage in route[1:]}, True


def routes(placement: Placement) -> list[Route]:
    """Return every route of a pipeline, in one order: each kind from each stage to its neighbour.

    Activations and headers go on, gradients go back. With more than one chunk in a loop the last stage passes on to the
    first, in a V each stage to both neighbours; with two stages these have routes of each kind in both directions.
    """
    stages = map(placement.stage_of, range(placement.num_pieces))
    ahead = [pair for pair in dict.fromkeys(itertools.pairwise(stages)) if pair[0] != pair[1]]
    back = [(after, before) for before, after in ahead]
    return [
        (kind, *pair)
        for kind, pairs in ((Kind.ACTIVATION, ahead), (Kind.GRADIENT, back), (Kind.HEADER, ahead))
        for pair in pairs
    ]


def split_in_turns(placement: Placement) -> list[list[Route]]:
    """Return the routes of messages between devices in runs in which no stage comes twice: four, with an odd ring six,
    in a V eight.

    The pairs of one run, of all pipelines, are disjoint: one split of the world makes their communicators.
    """
    turns: list[list[Route]] = []
    for route in routes(placement):
        if route[0] is Kind.HEADER:
            continue
        free = (turn for turn in turns if not {s for _, *pair in turn for s in pair} & set(route[1:]))
        turn = next(free, None)
        if turn is None:
            turns.append([route])
        else:
            turn.append(route)
    return turns


def _device_groups(
    pipelines: Sequence[list[int]], own_rank: int, device: torch.device, backend: str, placement: Placement,
    timeout: timedelta | None, max_ctas: int,
) -> Groups:  # fmt: skip
    """Make the groups of the routes between devices of all pipelines; return those of this rank. Collective."""
    groups: Groups = {}
    is_split = backend == "nccl"
    if is_split:
        torch_api.open_world(device)
    for turn in split_in_turns(placement):
        pairs = [
            (sorted((ranks[source], ranks[destination])), (kind, source, destination))
            for ranks in pipelines
            for kind, source, destination in turn
        ]
        own = next((route for pair, route in pairs if own_rank in pair), None)
        if is_split:
            options = torch_api.nccl_options(max_ctas, timeout)
            group = torch_api.split_world([pair for pair, _ in pairs], device, backend, options, timeout)
            if own is not None:
                groups[own] = group
            continue
        for pair, route in pairs:
            group = dist.new_group(pair, backend=backend, timeout=timeout)
            if own_rank in pair:
                groups[route] = group
    return groups


def open_channels(groups: Groups, ranks: list[int], stage: int, device: torch.device, placement: Placement) -> None:
    """Send one byte along each route of the pipeline, in the same order on every rank. Collective."""
    for kind, source, destination in routes(placement):
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
            "one stage, or wait for the device in the layers: a pipeline goes on with that"
        )
