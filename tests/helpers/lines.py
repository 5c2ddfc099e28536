"""P2P exchanges without an engine, and a reference.

The outputs of the virtual stages of a small model have all kinds of structures. Virtual stage k returns, by k
modulo 4:

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
from tds.p2p.packed_layout import TensorGroup
from tds.p2p.transport import StageLinks
from tds.schedule import LOOP, Action, Backward, BackwardWeight, Forward, Placement, received_message, sent_message

CPU = torch.device("cpu")


def make_communicator(
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
    links = StageLinks(stage, ranks, groups, TensorGroup(), CPU, timedelta(seconds=timeout_s))
    return P2PCommunicator(links, placement=layout, **options)


def run_chunk(virtual_stage: int, value: Any, weight: torch.Tensor) -> Any:
    """Return the output of ``virtual_stage`` for ``value``."""
    if isinstance(value, tuple):
        mask, hidden = value
        hidden = torch.where(mask, hidden, -2 * hidden)
    elif isinstance(value, dict):
        hidden = value["hidden"] - 2 * value["factor"] + 0.5 * value["more"]
    elif isinstance(value, list):
        hidden = value[1][:, value[0]]
    else:
        hidden = value
    hidden = torch.tanh(hidden * weight + virtual_stage)
    if virtual_stage % 4 == 1:
        return hidden > 0.5, hidden
    if virtual_stage % 4 == 2:
        return {"hidden": hidden, "factor": hidden.detach() * 0.5, "more": hidden * 3}
    return [torch.arange(hidden.shape[1]).flip(0), hidden] if virtual_stage % 4 == 3 else hidden


def compute_loss(value: Any) -> torch.Tensor:
    """Return a scalar that depends on every float tensor in ``value``."""
    leaves = value if isinstance(value, (tuple, list)) else value.values() if isinstance(value, dict) else [value]
    return sum((x * torch.arange(1, 1 + x.numel()).view_as(x)).sum() for x in leaves if x.is_floating_point())  # type: ignore[return-value]


def make_micro_batch(idx: int, num_rows: int = 2) -> torch.Tensor:
    """Return the random input [rows, 3] of a micro-batch."""
    return torch.randn(num_rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(idx))


def make_weights(num_virtual_stages: int) -> list[torch.Tensor]:
    """Return the weight [3] of each virtual stage."""
    return [
        torch.full((3,), 0.5 + 0.1 * virtual_stage, dtype=torch.float64, requires_grad=True)
        for virtual_stage in range(num_virtual_stages)
    ]


def run_actions(
    communicator: P2PCommunicator, actions: Sequence[Action], inputs: Sequence[torch.Tensor], is_training: bool = True
) -> tuple[list[float], list[torch.Tensor]]:
    """Run ``actions``; return (losses on the last stage, gradients of this stage's weights by chunk)."""
    stage, placement = communicator.links.stage, communicator.placement
    all_weights = make_weights(placement.num_virtual_stages)
    stage_weights = [all_weights[virtual_stage] for virtual_stage in placement.virtual_stages_of(stage)]
    location = stage, placement
    in_flight: dict[Any, Any] = {}
    losses = []
    communicator.begin(actions, is_training=is_training)
    with torch.set_grad_enabled(is_training):
        for action in actions:
            communicator.begin_action(action)
            if isinstance(action, BackwardWeight):  # the first half runs the whole backward pass
                continue
            source, destination = received_message(action, *location), sent_message(action, *location)
            key = action.micro_batch, action.chunk
            if isinstance(action, Forward):
                value, leaves = communicator.recv_forward(source) if source else (inputs[action.micro_batch], [])
                output = run_chunk(placement.virtual_stage(stage, action.chunk), value, stage_weights[action.chunk])
                if destination is None:
                    roots = [compute_loss(output)]
                    losses.append(roots[0].item())
                else:
                    roots = communicator.send_forward(destination, output)
                in_flight[key] = leaves, roots
            else:
                leaves, roots = in_flight.pop(key)
                torch.autograd.backward(roots, communicator.recv_backward(source) if source else None)
                if destination is not None:
                    communicator.send_backward(destination, [leaf.grad for leaf in leaves])
    communicator.finish()
    return losses, [weight.grad for weight in stage_weights]


def run_in_one_process(
    num_virtual_stages: int, inputs: Sequence[torch.Tensor]
) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses and the gradient of each virtual stage's weight."""
    chunk_weights = make_weights(num_virtual_stages)
    losses = []
    for value in inputs:
        for virtual_stage, weight in enumerate(chunk_weights):
            value = run_chunk(virtual_stage, value, weight)
        loss = compute_loss(value)
        loss.backward()
        losses.append(loss.item())
    return losses, [weight.grad for weight in chunk_weights]


def order_chunk_by_chunk(num_micro_batches: int, num_chunks: int) -> list[Action]:
    """Return all forwards chunk by chunk, then all backwards: a valid order on every stage."""
    forwards: list[Action] = [Forward(i, c) for c in range(num_chunks) for i in range(num_micro_batches)]
    return forwards + [Backward(i, c) for c in reversed(range(num_chunks)) for i in range(num_micro_batches)]


def check_equals_one_process(
    results: list[Any], inputs: Sequence[torch.Tensor], num_chunks: int = 1, placement: str = LOOP
) -> None:
    """Compare the results of ``run_actions`` on every rank with one process, bitwise."""
    layout = Placement(len(results), num_chunks, placement)
    reference_losses, reference_grads = run_in_one_process(layout.num_virtual_stages, inputs)
    assert results[layout.last_stage][0] == reference_losses
    for stage, (_, stage_grads) in enumerate(results):
        for chunk, gradient in enumerate(stage_grads):
            assert torch.equal(gradient, reference_grads[layout.virtual_stage(stage, chunk)]), (stage, chunk)
