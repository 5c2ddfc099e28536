"""One stage at work: what each action of a schedule does here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tds.batches import BatchSource, stage_inputs, to_device
from tds.exchange import Exchange
from tds.loss import LossMeter
from tds.optimizers import Gradients
from tds.report import BACKWARD, FORWARD, untimed
from tds.schedule import Action, Backward, Forward, received, sent


@dataclass
class Call:
    """One train_batch or eval_batch."""

    source: BatchSource
    is_training: bool
    meter: LossMeter
    loss_fn: Callable[[Any, Any], Any] | None
    gradients: Gradients | None = None
    loss_scale: float = 1.0
    on_micro_batch: Callable[[int], None] | None = None
    recomputes_reentrantly: bool = False
    collects_losses: bool = True
    part: Callable[[str], AbstractContextManager[None]] = untimed
    outputs: list[Any] = field(default_factory=list)
    last_output: Any = None


@dataclass
class _InFlight:
    """What a forward leaves for its backward: the leaves it read, and where the graph of its output begins.

    The outputs themselves are let go once sent: a gradient edge is enough to run the backward.
    """

    leaves: list[torch.Tensor]
    edges: list[GradientEdge]
    loss: torch.Tensor | None = None


class Stage:
    """The layers of one pipeline rank with their messages."""

    def __init__(self, module: torch.nn.Module, exchange: Exchange, device: torch.device) -> None:
        self.module = module
        self.exchange = exchange
        self.device = device
        self.index = exchange.links.stage
        self.num_stages = exchange.links.num_stages
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._methods: dict[type[Action], Callable[[Action, Call], None]] = {
            Forward: self.forward,
            Backward: self.backward,
        }

    def run(self, actions: Sequence[Action], call: Call) -> None:
        """Do ``actions`` in order. Collective: the other stages do theirs."""
        self._in_flight.clear()
        self.exchange.begin(actions, is_training=call.is_training, marks_all=call.recomputes_reentrantly)
        for action in actions:
            self._methods[type(action)](action, call)
        self.exchange.finish()

    def forward(self, action: Action, call: Call) -> None:
        """Run the layers on one micro-batch; send the output on, or take the loss."""
        incoming = received(action, self.index, self.num_stages)
        outgoing = sent(action, self.index, self.num_stages)
        labels = None
        leaves: list[torch.Tensor] = []
        if incoming is None or outgoing is None:
            inputs, labels = call.source.next()
        if incoming is None:
            inputs = stage_inputs(inputs, self.device, needs_grad=call.recomputes_reentrantly)
        else:
            inputs, leaves = self.exchange.take_activations(incoming)
        if call.is_training and call.on_micro_batch is not None:
            call.on_micro_batch(action.micro_batch)
        with call.part(FORWARD):
            output = self.module(inputs)
        if outgoing is None:
            self._finish_forward(action, call, output, to_device(labels, self.device), leaves)
            return
        with_grad = self.exchange.send_activations(outgoing, output)
        if call.is_training:
            self._refuse_lost_gradients(with_grad)
            self._in_flight[_key(action)] = _InFlight(leaves, [get_gradient_edge(t) for t in with_grad])

    def backward(self, action: Action, call: Call) -> None:
        """Run the backward of one micro-batch; send the gradients of what came in back."""
        incoming = received(action, self.index, self.num_stages)
        outgoing = sent(action, self.index, self.num_stages)
        if call.gradients is None:
            raise RuntimeError("a backward needs an optimizer; pass one to initialize")
        gradients = [] if incoming is None else self.exchange.take_gradients(incoming)
        state = self._in_flight.pop(_key(action))
        with call.part(BACKWARD):
            call.gradients.before_backward()
            if state.loss is not None:
                state.loss.backward()
            elif state.edges:
                torch.autograd.backward(state.edges, gradients)
            call.gradients.after_backward()
        if outgoing is not None:
            returned = [torch.zeros_like(t) if t.grad is None else t.grad for t in state.leaves]
            self.exchange.send_gradients(outgoing, returned)

    def _finish_forward(self, action: Action, call: Call, output: Any, labels: Any, leaves: list[torch.Tensor]) -> None:
        """On the last stage: take the loss, or keep the output where none is wanted."""
        call.last_output = output
        if not call.collects_losses:
            call.outputs.append(output)
            return
        with call.part(FORWARD):
            loss = output if call.loss_fn is None else call.loss_fn(output, labels)
        share = call.meter.add(loss, action.micro_batch)
        if not call.is_training:
            call.outputs.append(loss)
            return
        call.last_output = None
        if not share.requires_grad:
            raise RuntimeError(
                f"the loss must depend on the parameters, got one without a gradient at micro-batch "
                f"{action.micro_batch} on stage {self.index}"
            )
        scaled = share if call.loss_scale == 1.0 else share * call.loss_scale
        self._in_flight[_key(action)] = _InFlight(leaves, [], scaled)

    def _refuse_lost_gradients(self, with_grad: Sequence[torch.Tensor]) -> None:
        """Raise if this stage has weights to train but its output carries no graph back to them."""
        if with_grad or not any(p.requires_grad for p in self.module.parameters()):
            return
        raise RuntimeError(
            f"stage {self.index} has parameters to train, but none of its outputs requires a gradient. "
            "Reentrant recompute of a layer whose inputs need no gradient (token ids) detaches it: set "
            '"pipeline": {"use_reentrant": false}, or leave that layer out of checkpointable_layers.'
        )


def _key(action: Action) -> tuple[int, int]:
    return action.micro_batch, action.chunk
