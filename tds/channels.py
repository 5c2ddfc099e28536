"""The process groups that messages travel in.

Over gloo, which tells messages apart by their tags, that is the pipeline's own group. NCCL runs what is started on
one communicator in order, and receives are posted ahead of sends, so there each pair of neighbours has a group for
each kind of message: with one group for a whole pipeline a send would wait behind a receive that depends on it.
Headers go over the CPU.

A communicator of NCCL that is opened by its first message holds the host until the other side comes with its own
first one. A stage would then wait for gradients while the next one waits for activations, so ``open_channels`` opens
all of them in one order.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist

from tds.peers import waiting_together
from tds.schedule import Kind
from tds.waiting import default_timeout

NEEDS_PAIRS = ("nccl",)
_log = logging.getLogger("tds")
_has_warned = False

Groups = dict[tuple[Kind, int], Any]


def message_groups(grid: Any, device: torch.device) -> tuple[Groups, bool]:
    """Return (the group of each kind of message and neighbour, whether they must be opened). Collective.

    Raises:
        ValueError: the backend cannot send what lies on ``device``.
    """
    own = grid.get_pipe_parallel_group()
    backend = own._get_backend(device).name()
    if device.type == "cuda":
        refuse_host_backend(backend, grid.pipe_parallel_size, device)
    stage = grid.get_stage_id()
    if backend not in NEEDS_PAIRS:
        return {(kind, peer): own for kind in Kind for peer in (stage - 1, stage + 1)}, False
    warn_of_one_queue(grid.pipe_parallel_size)
    groups: Groups = {}
    for ranks in grid.pipe_groups:
        groups |= _pair_groups(ranks, grid.get_global_rank(), backend)
    return groups, True


def _pair_groups(ranks: list[int], own_rank: int, backend: str) -> Groups:
    """Make the groups of one pipeline; return those of this rank, by kind and stage of the neighbour."""
    timeout = default_timeout()
    groups: Groups = {}
    headers = dist.new_group(ranks, backend="gloo", timeout=timeout)
    for stage, pair in enumerate(zip(ranks, ranks[1:], strict=False)):
        made = {kind: dist.new_group(list(pair), backend=backend, timeout=timeout) for kind in channel_kinds()}
        made[Kind.HEADER] = headers
        if own_rank in pair:
            peer = stage + 1 if own_rank == pair[0] else stage
            groups |= {(kind, peer): group for kind, group in made.items()}
    return groups


def channel_kinds() -> tuple[Kind, ...]:
    """Return the kinds of message that travel from device to device, in the order in which they are opened."""
    return Kind.ACTIVATION, Kind.GRADIENT


def open_channels(groups: Groups, ranks: list[int], stage: int, device: torch.device) -> None:
    """Send one byte over each channel of the pipeline, in the same order on every rank. Collective."""
    for kind in channel_kinds():
        for sender in range(len(ranks) - 1):
            byte = torch.zeros(1, dtype=torch.uint8, device=device)
            with waiting_together(stage, f"opening the channel of {kind.name.lower()}s {sender} -> {sender + 1}"):
                if stage == sender:
                    dist.send(byte, ranks[sender + 1], group=groups[kind, sender + 1], tag=int(kind))
                elif stage == sender + 1:
                    dist.recv(byte, ranks[sender], group=groups[kind, sender], tag=int(kind))


def refuse_host_backend(backend: str, num_stages: int, device: torch.device) -> None:
    """Raise if tensors on a GPU would have to cross stages over gloo, which sends none."""
    if backend == "gloo" and num_stages > 1:
        raise ValueError(
            f"a pipeline on GPUs needs nccl: gloo does not send tensors of a GPU from stage to stage, got "
            f"--distributed-backend gloo with {num_stages} stages on device {device}. Use --distributed-backend nccl, "
            "or --device cpu"
        )


def warn_of_one_queue(num_stages: int) -> None:
    """Warn, once in a process, of the variable that lets a receive posted ahead hold up everything after it."""
    global _has_warned
    if num_stages > 1 and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" and not _has_warned:
        _has_warned = True
        _log.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all work of a GPU into one queue; this pipeline posts receives ahead, "
            "which then hold up what comes after them, or stop the pipeline. Unset the variable."
        )
