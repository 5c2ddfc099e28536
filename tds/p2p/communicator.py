"""P2PCommunicator: asynchronous messages between stages, receives posted ahead of their action.

One call of train_batch or eval_batch is one ``begin`` ... ``finish``. Messages of one kind from one neighbour go in
the order of the schedule, so none carries a number. A header with shapes and dtypes goes ahead of the first
activation of each boundary (with ``dynamic_shape`` of every activation); gradients have the shapes of the activations
that they answer. The header is mostly that of the call before: then both sides go on with the form that they have.

``tds.schedule.limits`` says behind which action each receive is posted. On a device it has a stream of its own: it
does not wait for what the action has given to the computation. On a host, where nothing waits for a whole device, it
is posted one action earlier, as far as its size is known: gloo sends nothing before.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from tds.device import is_host, side_stream
from tds.p2p.boundary import declaration, declared_boundary, records_of
from tds.p2p.boundary_layers import Place, input_place, output_place
from tds.p2p.collective_scope import collective_scope
from tds.p2p.input_leaves import with_leaves
from tds.p2p.message_header import HEADER_SIZE, decode_header, encode_header
from tds.p2p.packed_layout import PackedLayout, Slice
from tds.p2p.structure import Structure, flatten
from tds.p2p.tensor_meta import TensorMeta, check_received, check_same, describe, format_tensor
from tds.p2p.transport import P2PHandle, StageLinks, Transport
from tds.schedule import Action, Kind, Message, Placement, received
from tds.schedule.limits import Posts

Fingerprint = tuple[Structure, list[tuple[Any, ...]]]


@dataclass
class BoundaryTensors:
    """The agreed form of one boundary; kept for the calls that follow, whose header is mostly the same.

    ``fingerprint``: of the output that was described, on the sender's side.
    """

    specs: tuple[TensorMeta, ...]
    structure: Structure
    activations: PackedLayout
    gradients: PackedLayout
    header: torch.Tensor
    fingerprint: Fingerprint | None = None

    @classmethod
    def of(
        cls, specs: tuple[TensorMeta, ...], structure: Structure, cut: Slice, header: torch.Tensor,
        fingerprint: Fingerprint | None = None,
    ) -> BoundaryTensors:  # fmt: skip
        with_grad = [spec for spec in specs if spec.needs_grad]
        return cls(specs, structure, PackedLayout(specs, cut), PackedLayout(with_grad, cut), header, fingerprint)

    def with_grad(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of the message's ``tensors`` that have a gradient."""
        return [tensor for tensor, spec in zip(tensors, self.specs, strict=True) if spec.needs_grad]


@functools.lru_cache(maxsize=16)
def expected_messages(
    actions: tuple[Action, ...], stage: int, placement: Placement, is_dynamic: bool
) -> tuple[list[Message | None], dict[tuple[Kind, int], list[Message]]]:
    """Return (what each of a stage's ``actions`` receives, what comes in of each kind from each stage in order: a
    header ahead of each new form). What a stage hands to itself does not come in."""
    messages = [received(action, stage, placement) for action in actions]
    expected: dict[tuple[Kind, int], list[Message]] = defaultdict(list)
    announced: set[tuple[int, int]] = set()
    for message in messages:
        if message is None or message.peer == stage:
            continue
        expected[message.kind, message.peer].append(message)
        form = message.micro_batch if is_dynamic else 0, message.chunk
        if message.kind is Kind.ACTIVATION and form not in announced:
            announced.add(form)
            expected[Kind.HEADER, message.peer].append(message)
    return messages, expected


class P2PCommunicator(Transport):
    """The messages of one stage.

    Args:
        module: declares what crosses; read anew at each call.
        is_dynamic: shapes may change within a call.

    Attributes:
        incoming, outgoing: the form of each boundary that was announced in this call, with ``dynamic_shape`` of each
            micro-batch.
        agreed: the last one of each boundary, by what is expected of it: only another one is described, checked
            against the declaration and laid out anew.
    """

    def __init__(
        self, links: StageLinks, module: Any = None, *, placement: Placement | None = None, is_dynamic: bool = False
    ) -> None:
        super().__init__(links)
        self.module = module
        self.placement = Placement(links.num_stages) if placement is None else placement
        self.is_dynamic = is_dynamic
        self.beside = side_stream(links.device)
        self.posts: Posts = ()
        self._marks: list[tuple[Action, Any]] = []  # of the clock, ahead of each action of this call, on a device
        self.incoming: dict[tuple[int, int], BoundaryTensors] = {}
        self.outgoing: dict[tuple[int, int], BoundaryTensors] = {}
        self.agreed: dict[tuple[Any, ...], BoundaryTensors] = {}
        self.declared = declared_boundary(module)
        self._declaration = declaration(module)  # that ``agreed`` was checked against
        self._posted: dict[tuple[Kind, int], deque[P2PHandle]] = defaultdict(deque)  # by kind and peer
        self._own: dict[tuple[Kind, int, int], list[torch.Tensor]] = {}  # by kind, micro-batch, chunk that takes it

    def begin(self, actions: Sequence[Action], *, is_training: bool, marks_all: bool = False) -> None:
        """Note what will come; ``begin_action`` posts its receives. ``marks_all`` as in ``describe``.

        Raises:
            BoundaryError: the module's declaration is wrong in itself.
        """
        self.forget()
        marks, self._marks = self._marks, []
        self.clock.free(mark for _, mark in marks)
        self.action, self.is_training, self.marks_all = None, is_training, marks_all
        if self._declaration != (now := declaration(self.module)):
            self.declared, self._declaration = declared_boundary(self.module), now
            self.agreed.clear()
        self._actions = tuple(actions)
        self._messages, expected = expected_messages(self._actions, self.links.stage, self.placement, self.is_dynamic)
        self._expected = {route: deque(each) for route, each in expected.items()}
        self._num_begun = 0

    def set_limits(self, window: int | None, posts: Posts = ()) -> None:
        """Let later calls keep to these of their schedule; without ``posts`` an action posts its own receive."""
        self.window, self.posts = window, posts

    def action_of_device(self) -> Action | None:
        """Return the last action that the device has reached, which the host may be far ahead of; None if unknown. Asks
        events and waits for nothing, so any thread may call it."""
        reached = [action for action, mark in list(self._marks) if self.clock.is_reached(mark)]
        return reached[-1] if reached else None

    def begin_action(self, action: Action) -> None:
        """Note that the stage begins the next of its actions; post the receives that are due."""
        self.action = action
        place, self._num_begun = self._num_begun, self._num_begun + 1
        is_on_host = is_host(self.links.device)
        if not is_on_host:
            self._marks.append((action, self.clock.mark()))
        with self.beside or nullcontext():
            ahead = 1 if is_on_host else 0  # on a host one action earlier
            for number in itertools.chain(*self.posts[place : place + 1 + ahead]):
                self._post_for(number)

    def forget(self) -> None:
        super().forget()
        for kept in (self.incoming, self.outgoing, self._own):
            kept.clear()
        for posted in self._posted.values():
            posted.clear()

    def send_forward(self, message: Message, output: Any) -> list[torch.Tensor]:
        """Send a stage's output; return its tensors whose gradients will come back, in the order in which they come.

        Raises:
            TypeError, BoundaryError: the output does not match; before the wire.
        """
        try:
            tensors, structure = flatten(output)
        except TypeError as error:
            raise TypeError(f"{self._output_place(message)} {error}") from None
        crossing = self.outgoing.get(self._key(message))
        fingerprint = structure, [(t.dtype, t.shape, t.requires_grad, t.device, t.layout) for t in tensors]
        if crossing is None:
            crossing = self._announce(message, tensors, fingerprint)
        elif crossing.fingerprint != fingerprint:
            self._check_again(message, tensors, structure, crossing)
        if message.peer == self.links.stage:
            self._hand_on(message, tensors, crossing)
        else:
            self.send(Kind.ACTIVATION, message, crossing.activations.pack(tensors))
        return crossing.with_grad(tensors)

    def _hand_on(self, message: Message, tensors: Sequence[torch.Tensor], crossing: BoundaryTensors) -> None:
        """Let the next chunk, which lies here too, have a chunk's output: nothing is copied."""
        number, chunk = self._key(message)
        self.incoming[number, chunk + 1] = crossing
        self._own[Kind.ACTIVATION, message.micro_batch, chunk + 1] = [tensor.detach() for tensor in tensors]

    def recv_forward(self, message: Message) -> tuple[Any, list[torch.Tensor]]:
        """Return (what the previous stage sent, the leaves whose gradients go back)."""
        crossing = self.incoming.get(self._key(message)) or self._take_header(message)
        tensors = self._unpack(crossing.activations, message)
        given, leaves = with_leaves(crossing.with_grad(tensors), is_own=message.peer == self.links.stage)
        with_grad = iter(given)
        tensors = [next(with_grad) if s.needs_grad else t for t, s in zip(tensors, crossing.specs, strict=True)]
        return crossing.structure.rebuild(tensors), leaves

    def send_backward(self, message: Message, gradients: Sequence[torch.Tensor]) -> None:
        """Send the gradients of the leaves that ``recv_forward`` returned, in their order."""
        layout = self.incoming[self._key(message)].gradients
        if message.peer == self.links.stage:
            self._own[Kind.GRADIENT, message.micro_batch, message.chunk - 1] = list(gradients)
        elif layout.specs:
            self.send(Kind.GRADIENT, message, layout.pack(gradients))

    def recv_backward(self, message: Message) -> list[torch.Tensor]:
        """Return the gradients of this stage's output."""
        layout = self.outgoing[self._key(message)].gradients
        gradients = self._unpack(layout, message) if layout.specs else []
        self.let_go(message)
        return gradients

    def _key(self, message: Message) -> tuple[int, int]:
        """Return under which key the form of a message is kept."""
        return (message.micro_batch if self.is_dynamic else 0), message.chunk

    def _announce(self, message: Message, tensors: Sequence[torch.Tensor], fingerprint: Fingerprint) -> BoundaryTensors:
        """Send the header of a boundary's first output ahead; return its form."""
        key = "sent", message.chunk, self.is_training, self.marks_all
        crossing = self.agreed.get(key)
        if crossing is None or crossing.fingerprint != fingerprint:
            crossing = self.agreed[key] = self._form(message, tensors, fingerprint)
        self.outgoing[self._key(message)] = crossing
        if message.peer != self.links.stage:
            self.send(Kind.HEADER, message, crossing.header)
        return crossing

    def _form(self, message: Message, tensors: Sequence[torch.Tensor], fingerprint: Fingerprint) -> BoundaryTensors:
        """Return the form of an output once it matches the declaration."""
        structure, _ = fingerprint
        specs = self._describe(message, tensors, structure)
        header = encode_header(specs, structure, self._output_place(message))
        return BoundaryTensors.of(specs, structure, self.links.cut, header, fingerprint)

    def _check_again(
        self, message: Message, tensors: Sequence[torch.Tensor], structure: Structure, crossing: BoundaryTensors
    ) -> None:
        """Raise unless an output that does not look like the first one crosses in the same form all the same."""
        specs = self._describe(message, tensors, structure)
        structures = structure, crossing.structure
        check_same(specs, crossing.specs, structures, self._output_place(message), micro_batch=message.micro_batch)

    def _describe(
        self, message: Message, tensors: Sequence[torch.Tensor], structure: Structure
    ) -> tuple[TensorMeta, ...]:
        place = self._output_place(message)
        for index, tensor in enumerate(tensors):
            if tensor.device.type != self.links.device.type or tensor.layout is not torch.strided:
                raise TypeError(
                    f"{place.tensor(index)} must be a dense tensor on {self.links.device}, got {format_tensor(tensor)} "
                    f"on {tensor.device} with layout {tensor.layout}. Change it in the layer."
                )
        records = records_of(self.declared, self.placement.piece(self.links.stage, message.chunk))
        flags = {"is_training": self.is_training, "marks_all": self.marks_all}
        return describe(tensors, structure, records, place, **flags)

    def _take_header(self, message: Message) -> BoundaryTensors:
        """Return the form that the header of a boundary announces; it is read where it is another than before."""
        header = self._take(Kind.HEADER, message)
        key = "received", message.chunk, self.is_training
        crossing = self.agreed.get(key)
        if crossing is None or not torch.equal(crossing.header, header):
            crossing = self.agreed[key] = self._read_header(header, message.chunk)
        self.incoming[self._key(message)] = crossing
        return crossing

    def _read_header(self, header: torch.Tensor, chunk: int) -> BoundaryTensors:
        specs, structure = decode_header(header)
        stage, before = self.links.stage, self.placement.piece(self.links.stage, chunk) - 1
        place = input_place(self.module, chunk, stage, self.placement)
        check_received(specs, records_of(self.declared, before), place, self.is_training)
        return BoundaryTensors.of(specs, structure, self.links.cut, header)

    def _output_place(self, message: Message) -> Place:
        return output_place(self.module, message.chunk, self.links.stage, self.placement)

    def _unpack(self, layout: PackedLayout, message: Message) -> list[torch.Tensor]:
        if message.peer == self.links.stage:
            return self._own.pop((message.kind, message.micro_batch, message.chunk))
        received_bytes = self._take(message.kind, message)
        if not layout.is_cut:
            return layout.unpack(received_bytes)
        doing = f"gathering the {message.kind.name.lower()} of micro-batch {message.micro_batch} over the tensor group"
        with collective_scope(self.links.stage, doing):
            return layout.unpack(received_bytes)

    def _take(self, kind: Kind, message: Message) -> torch.Tensor:
        """Return the bytes of ``message``."""
        self._post(kind, message)  # unless begin_action has: its size may have come with a header only now
        posted = self._posted[kind, message.peer]
        if not posted or posted[0].message != message:
            found = posted[0].message if posted else "nothing"
            raise RuntimeError(f"stage {self.links.stage} wants {message}, but the next on the wire is {found}")
        return self.wait_for(posted.popleft())

    def _post_for(self, number: int) -> None:
        """Start the receives of one action. A device, for which all are posted here, waits for its header if any."""
        if (message := self._messages[number]) is not None:
            self._post(Kind.HEADER, message)
            if self._posted[Kind.HEADER, message.peer] and not is_host(self.links.device):
                self._take_header(message)
            self._post(message.kind, message)

    def _post(self, kind: Kind, message: Message) -> None:
        """Start the receive of ``message`` if it is the next of its kind, and its size is known."""
        expected = self._expected.get((kind, message.peer))
        while kind is Kind.GRADIENT and expected and self._is_never_sent(expected[0]):
            expected.popleft()
        if not expected or expected[0] != message:
            return
        if kind is Kind.HEADER:
            buffer = torch.zeros(HEADER_SIZE, dtype=torch.int64)
        else:
            crossing = (self.incoming if kind is Kind.ACTIVATION else self.outgoing).get(self._key(message))
            if crossing is None:
                return
            layout = crossing.activations if kind is Kind.ACTIVATION else crossing.gradients
            buffer = layout.new_buffer(self.links.device)
        self._posted[kind, message.peer].append(self.receive(kind, expected.popleft(), buffer))

    def _is_never_sent(self, gradient: Message) -> bool:
        crossing = self.outgoing.get(self._key(gradient))
        return crossing is not None and not crossing.gradients.specs
