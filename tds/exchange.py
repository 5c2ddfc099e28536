"""What crosses between stages: asynchronous, receives posted ahead, one message per boundary.

One call of train_batch or eval_batch is one ``begin`` ... ``finish``. Messages of one kind from one neighbour go in
the order of the schedule, so none carries a number. A header with shapes and dtypes goes ahead of the first
activation of each boundary (with ``dynamic_shape`` of every activation); gradients have the shapes of the activations
that they answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tds.boundary import declared_boundary, records_of
from tds.device import is_host
from tds.header import HEADER_SIZE, decode_header, encode_header
from tds.peers import waiting_together
from tds.places import Place, input_place, output_place
from tds.schedule import Action, Kind, Message, received
from tds.specs import TensorSpec, check_received, check_same, describe, told
from tds.structure import Structure, entered, flatten
from tds.transport import Links, Transfer, Transport
from tds.wire import Layout, Slice

RECEIVES_AHEAD = {Kind.HEADER: 2, Kind.ACTIVATION: 2, Kind.GRADIENT: 1}
"""How many receives wait for their message while the stage works. Gradients have a whole forward and backward to arrive
in, so one is enough; on the first stages, where memory is short, a second buffer would count.

Not on a GPU in the first call of a kind, nor where shapes may change: a receive waits there as a kernel, and a kernel
that is loaded at its first use, or memory that is got from the driver, may wait for all kernels, while what the
neighbour sends hangs on it. There tensors are received as they are wanted."""
Fingerprint = tuple[Structure, list[tuple[Any, ...]]]


@dataclass
class Crossing:
    """The agreed form of one boundary during one call, or with ``dynamic_shape`` of one micro-batch."""

    specs: tuple[TensorSpec, ...]
    structure: Structure
    activations: Layout
    gradients: Layout
    fingerprint: Fingerprint | None = None

    @classmethod
    def of(cls, specs: tuple[TensorSpec, ...], structure: Structure, cut: Slice) -> Crossing:
        with_grad = [spec for spec in specs if spec.needs_grad]
        return cls(specs, structure, Layout(specs, cut), Layout(with_grad, cut))

    def with_grad(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of the message's ``tensors`` that have a gradient."""
        return [tensor for tensor, spec in zip(tensors, self.specs, strict=True) if spec.needs_grad]


class Exchange(Transport):
    """The messages of one stage.

    Args:
        module: declares what crosses; read anew at each call.
        is_dynamic: shapes may change within a call.
    """

    def __init__(self, links: Links, module: Any = None, *, num_chunks: int = 1, is_dynamic: bool = False) -> None:
        super().__init__(links)
        self.module = module
        self.num_chunks = num_chunks
        self.is_dynamic = is_dynamic
        self._has_run: set[bool] = set()  # training, evaluation
        self._posts_ahead = True
        self.window = None  # tds.window says which limit a schedule runs with; it sets it ahead of a call
        self._reset(is_training=False)

    def _reset(self, is_training: bool) -> None:
        self.forget()
        self.action = None
        self.is_training = is_training
        self.declared = declared_boundary(self.module)
        self.incoming: dict[tuple[int, int], Crossing] = {}
        self.outgoing: dict[tuple[int, int], Crossing] = {}
        self._expected: dict[Kind, deque[Message]] = {kind: deque() for kind in Kind}
        self._posted: dict[Kind, deque[Transfer]] = {kind: deque() for kind in Kind}

    def begin(self, actions: Sequence[Action], *, is_training: bool, marks_all: bool = False) -> None:
        """Note what will come, and post the receives of the first headers. ``marks_all`` as in ``describe``.

        Raises:
            BoundaryError: the module's declaration is wrong in itself.
        """
        self._reset(is_training)
        self.marks_all = marks_all
        self._posts_ahead = is_host(self.links.device) or (is_training in self._has_run and not self.is_dynamic)
        announced = set()
        for action in actions:
            message = received(action, self.links.stage, self.links.num_stages, self.num_chunks)
            if message is None:
                continue
            self._expected[message.kind].append(message)
            if message.kind is Kind.ACTIVATION and self._key(message) not in announced:
                announced.add(self._key(message))
                self._expected[Kind.HEADER].append(message)
        self._post(Kind.HEADER)

    def finish(self) -> None:
        super().finish()
        self._has_run.add(self.is_training)

    def send_activations(self, message: Message, output: Any) -> list[torch.Tensor]:
        """Send a stage's output; return its tensors whose gradients will come back, in the order in which they come.

        Raises:
            TypeError, BoundaryError: the output does not match; before the wire.
        """
        try:
            tensors, structure = flatten(output)
        except TypeError as error:
            raise TypeError(f"{self._output_place(message)} {error}") from None
        crossing = self.outgoing.get(self._key(message))
        fingerprint = structure, [(t.dtype, t.shape, t.requires_grad, t.device) for t in tensors]
        if crossing is None:
            crossing = self._announce(message, tensors, structure)
            crossing.fingerprint = fingerprint
        elif crossing.fingerprint != fingerprint:
            self._check_again(message, tensors, structure, crossing)
        self.send(Kind.ACTIVATION, message, crossing.activations.pack(tensors))
        self._post(Kind.GRADIENT)
        return crossing.with_grad(tensors)

    def take_activations(self, message: Message) -> tuple[Any, list[torch.Tensor]]:
        """Return (what the previous stage sent, the leaves whose gradients go back)."""
        crossing = self.incoming.get(self._key(message)) or self._read_header(message)
        tensors = self._unpack(crossing.activations, message)
        given, leaves = entered(crossing.with_grad(tensors))
        with_grad = iter(given)
        tensors = [next(with_grad) if s.needs_grad else t for t, s in zip(tensors, crossing.specs, strict=True)]
        return crossing.structure.rebuild(tensors), leaves

    def send_gradients(self, message: Message, gradients: Sequence[torch.Tensor]) -> None:
        """Send the gradients of the leaves that ``take_activations`` returned, in their order."""
        layout = self.incoming[self._key(message)].gradients
        if layout.specs:
            self.send(Kind.GRADIENT, message, layout.pack(gradients))

    def take_gradients(self, message: Message) -> list[torch.Tensor]:
        """Return the gradients of this stage's output."""
        layout = self.outgoing[self._key(message)].gradients
        gradients = self._unpack(layout, message) if layout.specs else []
        self.let_go(Kind.ACTIVATION, message.micro_batch, message.chunk)
        return gradients

    def _key(self, message: Message) -> tuple[int, int]:
        """Return under which key the form of a message is kept."""
        return (message.micro_batch if self.is_dynamic else 0), message.chunk

    def _announce(self, message: Message, tensors: Sequence[torch.Tensor], structure: Structure) -> Crossing:
        """Check the first output of a boundary against the declaration, and send its header ahead."""
        specs = self._describe(message, tensors, structure)
        header = encode_header(specs, structure, self._output_place(message))
        crossing = self.outgoing[self._key(message)] = Crossing.of(specs, structure, self.links.cut)
        self.send(Kind.HEADER, message, header)
        return crossing

    def _check_again(
        self, message: Message, tensors: Sequence[torch.Tensor], structure: Structure, crossing: Crossing
    ) -> None:
        """Raise unless an output that does not look like the first one crosses in the same form all the same."""
        specs = self._describe(message, tensors, structure)
        structures = structure, crossing.structure
        check_same(specs, crossing.specs, structures, self._output_place(message), micro_batch=message.micro_batch)

    def _describe(
        self, message: Message, tensors: Sequence[torch.Tensor], structure: Structure
    ) -> tuple[TensorSpec, ...]:
        place = self._output_place(message)
        for index, tensor in enumerate(tensors):
            if tensor.device.type != self.links.device.type or tensor.layout is not torch.strided:
                raise TypeError(
                    f"{place.tensor(index)} must be a dense tensor on {self.links.device}, got {told(tensor)} on "
                    f"{tensor.device} with layout {tensor.layout}. Change it in the layer."
                )
        records = records_of(self.declared, message.chunk * self.links.num_stages + self.links.stage)
        flags = {"is_training": self.is_training, "marks_all": self.marks_all}
        return describe(tensors, structure, records, place, **flags)

    def _read_header(self, message: Message) -> Crossing:
        specs, structure = decode_header(self._take(Kind.HEADER, message))
        stage, num_stages = self.links.stage, self.links.num_stages
        place = input_place(self.module, message.chunk, stage, num_stages)
        records = records_of(self.declared, message.chunk * num_stages + stage - 1)
        check_received(specs, records, place, is_training=self.is_training)
        crossing = self.incoming[self._key(message)] = Crossing.of(specs, structure, self.links.cut)
        return crossing

    def _output_place(self, message: Message) -> Place:
        return output_place(self.module, message.chunk, self.links.stage, self.links.num_stages)

    def _unpack(self, layout: Layout, message: Message) -> list[torch.Tensor]:
        received_bytes = self._take(message.kind, message)
        if not layout.is_cut:
            return layout.unpack(received_bytes)
        doing = f"gathering the {message.kind.name.lower()} of micro-batch {message.micro_batch} over the tensor group"
        with waiting_together(self.links.stage, doing):
            return layout.unpack(received_bytes)

    def _take(self, kind: Kind, message: Message) -> torch.Tensor:
        """Return the bytes of ``message``, and post the receives that follow."""
        posted = self._posted[kind]
        if not posted:
            self._post(kind, 1)
        if not posted or posted[0].message != message:
            found = posted[0].message if posted else "nothing"
            raise RuntimeError(f"stage {self.links.stage} wants {message}, but the next on the wire is {found}")
        transfer = posted.popleft()
        self._post(kind)
        return self.wait_for(transfer)

    def _post(self, kind: Kind, number: int | None = None) -> None:
        """Start receives until ``number`` are on their way, as far as their sizes are known."""
        if number is None:
            number = RECEIVES_AHEAD[kind] if self._posts_ahead or kind is Kind.HEADER else 0
        expected, posted = self._expected[kind], self._posted[kind]
        while expected and len(posted) < number:
            buffer = self._new_buffer(kind, expected[0])
            if buffer is None:
                return
            message = expected.popleft()
            if buffer.numel():
                posted.append(self.receive(kind, message, buffer))

    def _new_buffer(self, kind: Kind, message: Message) -> torch.Tensor | None:
        """Return room for ``message``: empty if it is never sent, None if its size is not known yet."""
        if kind is Kind.HEADER:
            return torch.zeros(HEADER_SIZE, dtype=torch.int64)
        crossing = (self.incoming if kind is Kind.ACTIVATION else self.outgoing).get(self._key(message))
        if crossing is None:
            return None
        layout = crossing.activations if kind is Kind.ACTIVATION else crossing.gradients
        if kind is Kind.GRADIENT and not layout.specs:
            return torch.empty(0)
        return layout.new_buffer(self.links.device)
