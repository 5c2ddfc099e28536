"""P2P exchanges without an engine: pieces of a small model whose outputs have all kinds of structures, and a reference.

Piece k of the model returns, by k modulo 4:

* 0: a tensor
* 1: a tuple (mask, hidden)
* 2: a dict of three float tensors, one of them without gradient
* 3: a list (indices, hidden)
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tds.p2p import process_groups
from tds.p2p.communicator import P2PCommunicator
from tds.p2p.packed_layout import Slice
from tds.p2p.transport import StageLinks
from tds.schedule import LOOP, Action, Backward, BackwardWeight, Forward, Placement, received, sent

CPU = torch.device("cpu")


def make_exchange(
    num_chunks: int = 1, timeout_s: float = 10.0, placement: str = LOOP, **options: Any
) -> P2PCommunicator:
    """Return the communicator of this rank; each rank of the world is a stage."""
    stage, num_stages = dist.get_rank(), dist.get_world_size()
    grid = SimpleNamespace(
        get_pipe_parallel_group=lambda: dist.group.WORLD,
        get_stage_id=lambda: stage,
        get_global_rank=lambda: stage,
        pipe_parallel_size=num_stages,
        pipe_groups=[list(range(num_stages))],
    )
    ranks, layout = list(range(num_stages)), Placement(num_stages, num_chunks, placement)
    groups, must_open = process_groups.message_groups(grid, CPU, layout)
    if must_open:
        process_groups.open_channels(groups, ranks, stage, CPU, layout)
    links = StageLinks(stage, ranks, groups, Slice(), CPU, timedelta(seconds=timeout_s))
    return P2PCommunicator(links, placement=layout, **options)


def run_piece(piece: int, value: Any, weight: torch.Tensor) -> Any:
    """Return the output of ``piece`` for ``value``."""
    if isinstance(value, tuple):
        mask, hidden = value
        hidden = torch.where(mask, hidden, -2 * hidden)
    elif isinstance(value, dict):
        hidden = value["hidden"] - 2 * value["factor"] + 0.5 * value["more"]
    elif isinstance(value, list):
        hidden = value[1][:, value[0]]
    else:
        hidden = value
    hidden = torch.tanh(hidden * weight + piece)
    if piece % 4 == 1:
        return hidden > 0.5, hidden
    if piece % 4 == 2:
        return {"hidden": hidden, "factor": hidden.detach() * 0.5, "more": hidden * 3}
    return [torch.arange(hidden.shape[1]).flip(0), hidden] if piece % 4 == 3 else hidden


def loss_of(value: Any) -> torch.Tensor:
    """Return a scalar that depends on every float tensor in ``value``."""
    leaves = value if isinstance(value, (tuple, list)) else value.values() if isinstance(value, dict) else [value]
    return sum((x * torch.arange(1, 1 + x.numel()).view_as(x)).sum() for x in leaves if x.is_floating_point())  # type: ignore[return-value]


def micro_batch(index: int, rows: int = 2) -> torch.Tensor:
    """Return the random input [rows, 3] of a micro-batch."""
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(index))


def weights(num_pieces: int) -> list[torch.Tensor]:
    """Return the weight [3] of each piece."""
    return [torch.full((3,), 0.5 + 0.1 * k, dtype=torch.float64, requires_grad=True) for k in range(num_pieces)]


def drive(
    exchange: P2PCommunicator, actions: Sequence[Action], inputs: Sequence[torch.Tensor], is_training: bool = True
) -> tuple[list[float], list[torch.Tensor]]:
    """Run ``actions``; return (losses on the last stage, gradients of this stage's weights by chunk)."""
    stage, placement = exchange.links.stage, exchange.placement
    all_weights = weights(placement.num_pieces)
    stage_weights = [all_weights[piece] for piece in placement.own_pieces(stage)]
    location = stage, placement
    in_flight: dict[Any, Any] = {}
    losses = []
    exchange.begin(actions, is_training=is_training)
    with torch.set_grad_enabled(is_training):
        for action in actions:
            exchange.begin_action(action)
            if isinstance(action, BackwardWeight):  # the first half runs the whole backward pass
                continue
            source, destination = received(action, *location), sent(action, *location)
            key = action.micro_batch, action.chunk
            if isinstance(action, Forward):
                value, leaves = exchange.recv_forward(source) if source else (inputs[action.micro_batch], [])
                output = run_piece(placement.piece(stage, action.chunk), value, stage_weights[action.chunk])
                if destination is None:
                    ends = [loss_of(output)]
                    losses.append(ends[0].item())
                else:
                    ends = exchange.send_forward(destination, output)
                in_flight[key] = leaves, ends
            else:
                leaves, ends = in_flight.pop(key)
                torch.autograd.backward(ends, exchange.recv_backward(source) if source else None)
                if destination is not None:
                    exchange.send_backward(destination, [leaf.grad for leaf in leaves])
    exchange.finish()
    return losses, [weight.grad for weight in stage_weights]


def in_one_process(num_pieces: int, inputs: Sequence[torch.Tensor]) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses and the gradient of each piece's weight."""
    piece_weights = weights(num_pieces)
    losses = []
    for value in inputs:
        for piece, weight in enumerate(piece_weights):
            value = run_piece(piece, value, weight)
        loss = loss_of(value)
        loss.backward()
        losses.append(loss.item())
    return losses, [weight.grad for weight in piece_weights]


def chunk_by_chunk(num_micro_batches: int, num_chunks: int) -> list[Action]:
    """Return all forwards chunk by chunk, then all backwards: a valid order on every stage."""
    forwards: list[Action] = [Forward(i, c) for c in range(num_chunks) for i in range(num_micro_batches)]
    return forwards + [Backward(i, c) for c in reversed(range(num_chunks)) for i in range(num_micro_batches)]


def check(results: list[Any], inputs: Sequence[torch.Tensor], num_chunks: int = 1, placement: str = LOOP) -> None:
    """Compare the results of ``drive`` on every rank with one process, bitwise."""
    layout = Placement(len(results), num_chunks, placement)
    losses, gradients = in_one_process(layout.num_pieces, inputs)
    assert results[layout.last_stage][0] == losses
    for stage, (_, stage_grads) in enumerate(results):
        for chunk, gradient in enumerate(stage_grads):
            assert torch.equal(gradient, gradients[layout.piece(stage, chunk)]), (stage, chunk)
