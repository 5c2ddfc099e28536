"""Sending and receiving between stages: asynchronous, receives posted ahead, one message per boundary.

One call of train_batch or eval_batch is one ``begin`` ... ``finish``. On each channel (peer, kind of message) messages
go in the order of the schedule, so no message carries a number. A header with shapes and dtypes goes ahead of the
first activation of each boundary; gradients have the shapes of the activations that they answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tds.boundary import Boundary, TensorSpec, check_received, check_same, describe
from tds.header import HEADER_SIZE, decode_header, encode_header
from tds.peers import waiting_together
from tds.schedule import Action, Kind, Message, received
from tds.structure import Structure, flatten
from tds.wire import Layout, Slice

RECEIVES_AHEAD = 2
Channel = tuple[Kind, int]


@dataclass
class Crossing:
    """The agreed form of one boundary during one call."""

    specs: tuple[TensorSpec, ...]
    structure: Structure
    activations: Layout
    gradients: Layout

    @classmethod
    def of(cls, specs: tuple[TensorSpec, ...], structure: Structure, cut: Slice) -> Crossing:
        with_grad = [spec for spec in specs if spec.needs_grad]
        return cls(specs, structure, Layout(specs, cut), Layout(with_grad, cut))

    def with_grad(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of the message's ``tensors`` that have a gradient."""
        return [tensor for tensor, spec in zip(tensors, self.specs, strict=True) if spec.needs_grad]


@dataclass
class Links:
    """How this stage reaches the others.

    ``ranks`` are the global ranks of the pipeline, by stage; ``groups`` the process group of each kind of message and
    neighbour. ``timeout`` bounds a wait over gloo, which forgets its group's; NCCL has its own watchdog.
    """

    stage: int
    ranks: Sequence[int]
    groups: dict[Channel, Any]
    cut: Slice
    device: torch.device
    timeout: timedelta | None = None

    @property
    def num_stages(self) -> int:
        return len(self.ranks)


class Exchange:
    """The messages of one stage."""

    def __init__(self, links: Links, declared: tuple[Boundary, ...] | None, num_chunks: int = 1) -> None:
        self.links = links
        self.declared = declared
        self.num_chunks = num_chunks
        self.marks_all = False
        self.window = links.num_stages + 1
        self._reset(is_training=False)

    def _reset(self, is_training: bool) -> None:
        self.is_training = is_training
        self.incoming: dict[int, Crossing] = {}
        self.outgoing: dict[int, Crossing] = {}
        self._headers: dict[int, tuple[Any, torch.Tensor]] = {}
        self._expected: dict[Channel, deque[Message]] = {}
        self._posted: dict[Channel, deque[tuple[Message, torch.Tensor, Any]]] = {}
        self._sending: dict[Channel, deque[tuple[Message, torch.Tensor, Any]]] = {}

    def begin(self, actions: Sequence[Action], *, is_training: bool, marks_all: bool) -> None:
        """Note what will come, and post the receives of the headers. ``marks_all`` as in ``describe``."""
        self._reset(is_training)
        self.marks_all = marks_all
        for action in actions:
            message = received(action, self.links.stage, self.links.num_stages, self.num_chunks)
            if message is None:
                continue
            channel = (message.kind, message.peer)
            self._expected.setdefault(channel, deque()).append(message)
            self._posted.setdefault(channel, deque())
            if message.kind is Kind.ACTIVATION and message.chunk not in self._headers:
                header = torch.zeros(HEADER_SIZE, dtype=torch.int64)
                work = self._start(dist.irecv, header, message, Kind.HEADER)
                self._headers[message.chunk] = (work, header)

    def send_activations(self, message: Message, output: Any) -> list[torch.Tensor]:
        """Send a stage's output; return its tensors whose gradients will come back, in the order in which they come.

        Raises:
            TypeError, BoundaryError: the output does not match; before the wire.
        """
        stage = self.links.stage
        try:
            tensors, structure = flatten(output)
        except TypeError as error:
            raise TypeError(f"the last layer of stage {stage} {error}") from None
        specs = describe(tensors, self.declared, stage=stage, is_training=self.is_training, marks_all=self.marks_all)
        crossing = self.outgoing.get(message.chunk)
        if crossing is None:
            crossing = Crossing.of(specs, structure, self.links.cut)
            self.outgoing[message.chunk] = crossing
            self._send(message, encode_header(specs, structure, stage=stage), Kind.HEADER)
            self._post_gradients(message.peer)
        else:
            names = [record.name for record in self.declared or ()]
            check_same(specs, crossing.specs, stage=stage, micro_batch=message.micro_batch, names=names)
        self._send(message, crossing.activations.pack(tensors), Kind.ACTIVATION)
        return crossing.with_grad(tensors)

    def take_activations(self, message: Message) -> tuple[Any, list[torch.Tensor]]:
        """Return (what the previous stage sent, the fresh leaves in it whose gradients go back)."""
        crossing = self._read_header(message)
        tensors = self._unpack(crossing.activations, message)
        leaves = crossing.with_grad(tensors)
        for leaf in leaves:
            leaf.requires_grad_()
        return crossing.structure.rebuild(tensors), leaves

    def send_gradients(self, message: Message, gradients: Sequence[torch.Tensor]) -> None:
        """Send the gradients of the tensors that ``take_activations`` returned with one, in their order."""
        layout = self.incoming[message.chunk].gradients
        if layout.specs:
            self._send(message, layout.pack(gradients), Kind.GRADIENT)

    def take_gradients(self, message: Message) -> list[torch.Tensor]:
        """Return the gradients of this stage's output."""
        layout = self.outgoing[message.chunk].gradients
        if layout.specs:
            return self._unpack(layout, message)
        self._expected[(message.kind, message.peer)].popleft()
        return []

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for channel, sends in self._sending.items():
            while sends:
                message, _, work = sends.popleft()
                self._wait(work, message, "sending", channel[0])

    def _read_header(self, message: Message) -> Crossing:
        crossing = self.incoming.get(message.chunk)
        if crossing is None:
            work, header = self._headers[message.chunk]
            self._wait(work, message, "receiving", Kind.HEADER)
            specs, structure = decode_header(header)
            check_received(specs, self.declared, stage=self.links.stage, is_training=self.is_training)
            crossing = self.incoming[message.chunk] = Crossing.of(specs, structure, self.links.cut)
        return crossing

    def _unpack(self, layout: Layout, message: Message) -> list[torch.Tensor]:
        received_bytes = self._take(message)
        doing = f"gathering the {message.kind.name.lower()} of micro-batch {message.micro_batch} over the tensor group"
        with waiting_together(self.links.stage, doing):
            return layout.unpack(received_bytes)

    def _take(self, message: Message) -> torch.Tensor:
        """Return the bytes of ``message``, and post the receives that follow on its channel."""
        channel = (message.kind, message.peer)
        posted = self._posted[channel]
        if not posted:
            self._post(channel, 1)
        expected, buffer, work = posted.popleft()
        if expected != message:
            raise RuntimeError(f"stage {self.links.stage} wants {message}, but the next on the wire is {expected}")
        self._post(channel, RECEIVES_AHEAD)
        self._wait(work, message, "receiving", message.kind)
        return buffer

    def _post(self, channel: Channel, number: int) -> None:
        """Start receives until ``number`` are on their way, as far as their sizes are known."""
        expected, posted = self._expected[channel], self._posted[channel]
        crossings = self.incoming if channel[0] is Kind.ACTIVATION else self.outgoing
        while expected and len(posted) < number and expected[0].chunk in crossings:
            message = expected.popleft()
            crossing = crossings[message.chunk]
            layout = crossing.activations if message.kind is Kind.ACTIVATION else crossing.gradients
            buffer = layout.new_buffer(self.links.device)
            posted.append((message, buffer, self._start(dist.irecv, buffer, message, message.kind)))

    def _post_gradients(self, peer: int) -> None:
        channel = (Kind.GRADIENT, peer)
        if channel in self._expected and all(crossing.gradients.specs for crossing in self.outgoing.values()):
            self._post(channel, RECEIVES_AHEAD)

    def _send(self, message: Message, buffer: torch.Tensor, kind: Kind) -> None:
        sends = self._sending.setdefault((kind, message.peer), deque())
        sends.append((message, buffer, self._start(dist.isend, buffer, message, kind)))
        while len(sends) > self.window:
            oldest, _, work = sends.popleft()
            self._wait(work, oldest, "sending", kind)

    def _start(self, operation: Any, buffer: torch.Tensor, message: Message, kind: Kind) -> Any:
        try:
            group = self.links.groups[kind, message.peer]
            return operation(buffer, self.links.ranks[message.peer], group=group, tag=int(kind))
        except RuntimeError as error:
            raise self._lost(error, message, operation.__name__, kind) from error

    def _wait(self, work: Any, message: Message, doing: str, kind: Kind) -> None:
        is_on_host = kind is Kind.HEADER or self.links.device.type == "cpu"
        try:
            if is_on_host and self.links.timeout is not None:
                work.wait(self.links.timeout)
            else:
                work.wait()
        except RuntimeError as error:
            raise self._lost(error, message, doing, kind) from error

    def _lost(self, error: RuntimeError, message: Message, doing: str, kind: Kind) -> RuntimeError:
        peer = message.peer
        return RuntimeError(
            f"stage {self.links.stage} lost stage {peer} (rank {self.links.ranks[peer]}) while {doing} the "
            f"{kind.name.lower()} of micro-batch {message.micro_batch}: {error}"
        )
