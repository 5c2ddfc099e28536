"""P2PCommunicator: asynchronous messages between stages, with receives posted before the action that needs them.

Each ``train_batch`` or ``eval_batch`` starts with ``begin`` and ends with ``finish``. Messages of one type from one
neighbour are sent in the order of the schedule, so they need no sequence number. A header with shapes and dtypes
precedes the first activation of each boundary, or every activation with ``dynamic_shape``. A gradient has the shape of
its activation. If the header equals the previous call's, both sides reuse the cached layout.

``tds.schedule.limits`` determines after which action each receive is posted. On an accelerator, receives run on a
separate stream, so that they do not wait for the kernels of that action. On the CPU, a receive is posted one action
earlier if its size is known, because gloo transfers nothing before the receive is posted.
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
    """Description of the tensors of one boundary, equal on both sides and cached for later calls.

    Attributes:
        specs: type, shape and flags of each tensor.
        structure: container of the tensors.
        activations, gradients: layouts of the messages.
        header: the header that announced these tensors.
        fingerprint: structure and tensor properties of the output that ``specs`` describes; None on the receiver.
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
        """Return the ``tensors`` of a message for which a gradient is sent back."""
        return [tensor for tensor, spec in zip(tensors, self.specs, strict=True) if spec.needs_grad]


@functools.lru_cache(maxsize=16)
def expected_messages(
    actions: tuple[Action, ...], stage: int, placement: Placement, is_dynamic: bool
) -> tuple[list[Message | None], dict[tuple[Kind, int], list[Message]]]:
    """Return the messages that ``stage`` receives during ``actions``.

    Returns:
        The message of each action (None: the action receives none), and the sequence of messages for each (type, peer).
        The sequence of headers has one header per boundary, or one per activation if ``is_dynamic``. Messages from one
        chunk to another on the same stage are not in the sequences.
    """
    messages = [received(action, stage, placement) for action in actions]
    expected: dict[tuple[Kind, int], list[Message]] = defaultdict(list)
    announced: set[tuple[int, int]] = set()
    for message in messages:
        if message is None or message.peer == stage:
            continue
        expected[message.kind, message.peer].append(message)
        boundary = message.micro_batch if is_dynamic else 0, message.chunk
        if message.kind is Kind.ACTIVATION and boundary not in announced:
            announced.add(boundary)
            expected[Kind.HEADER, message.peer].append(message)
    return messages, expected


class P2PCommunicator(Transport):
    """Sends and receives the messages of one stage.

    Args:
        module: has the declaration of the boundaries, which is read again at each call.
        placement: placement of the chunks on the stages; None: one chunk per stage.
        is_dynamic: shapes may change within a call.

    Attributes:
        incoming, outgoing: the tensors of each boundary that was announced in this call; per micro-batch if
            ``is_dynamic``.
        agreed: cache of the last tensors of each boundary, by direction, chunk and mode. Tensors are described, checked
            against the declaration and laid out again only if they differ from the cached tensors.
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
        self._marks: list[tuple[Action, Any]] = []  # clock mark before each action of this call; accelerators only
        self.incoming: dict[tuple[int, int], BoundaryTensors] = {}
        self.outgoing: dict[tuple[int, int], BoundaryTensors] = {}
        self.agreed: dict[tuple[Any, ...], BoundaryTensors] = {}
        self.declared = declared_boundary(module)
        self._declaration = declaration(module)  # the declaration that ``agreed`` was checked against
        self._posted: dict[tuple[Kind, int], deque[P2PHandle]] = defaultdict(deque)  # by type and peer
        self._own: dict[tuple[Kind, int, int], list[torch.Tensor]] = {}  # by type, micro-batch and receiving chunk

    def begin(self, actions: Sequence[Action], *, is_training: bool, marks_all: bool = False) -> None:
        """Start a call that runs ``actions``; ``begin_action`` posts the receives.

        Args:
            marks_all: see ``describe``.

        Raises:
            BoundaryError: the module's declaration is inconsistent.
        """
        self.forget()
        marks, self._marks = self._marks, []
        self.clock.free(mark for _, mark in marks)
        self.action, self.is_training, self.marks_all = None, is_training, marks_all
        if self._declaration != (current := declaration(self.module)):
            self.declared, self._declaration = declared_boundary(self.module), current
            self.agreed.clear()
        self._actions = tuple(actions)
        self._messages, expected = expected_messages(self._actions, self.links.stage, self.placement, self.is_dynamic)
        self._expected = {route: deque(messages) for route, messages in expected.items()}
        self._num_begun = 0

    def set_limits(self, window: int | None, posts: Posts = ()) -> None:
        """Set the send window and the posting times of receives; without ``posts`` each action posts its receive."""
        self.window, self.posts = window, posts

    def action_of_device(self) -> Action | None:
        """Return the last action that the device has started, which may lag far behind the host; None if unknown.

        The method only queries events and never waits, so any thread may call it.
        """
        reached = [action for action, mark in list(self._marks) if self.clock.is_reached(mark)]
        return reached[-1] if reached else None

    def begin_action(self, action: Action) -> None:
        """Start the stage's next action and post the receives that are due."""
        self.action = action
        idx, self._num_begun = self._num_begun, self._num_begun + 1
        is_on_host = is_host(self.links.device)
        if not is_on_host:
            self._marks.append((action, self.clock.mark()))
        with self.beside or nullcontext():
            ahead = 1 if is_on_host else 0
            for receive_idx in itertools.chain(*self.posts[idx : idx + 1 + ahead]):
                self._post_for(receive_idx)

    def forget(self) -> None:
        super().forget()
        for cache in (self.incoming, self.outgoing, self._own):
            cache.clear()
        for posted in self._posted.values():
            posted.clear()

    def send_forward(self, message: Message, output: Any) -> list[torch.Tensor]:
        """Send a stage's output.

        Returns:
            The output tensors for which gradients are sent back, in the order in which ``recv_backward`` returns them.

        Raises:
            TypeError, BoundaryError: the output does not match the declaration. Nothing has been sent.
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
        """Pass a chunk's output to the next chunk on the same stage, without a copy."""
        micro_batch, chunk = self._key(message)
        self.incoming[micro_batch, chunk + 1] = crossing
        self._own[Kind.ACTIVATION, message.micro_batch, chunk + 1] = [tensor.detach() for tensor in tensors]

    def recv_forward(self, message: Message) -> tuple[Any, list[torch.Tensor]]:
        """Return (input of this stage's layers, leaves whose gradients are sent back)."""
        crossing = self.incoming.get(self._key(message)) or self._take_header(message)
        tensors = self._unpack(crossing.activations, message)
        layer_inputs, leaves = with_leaves(crossing.with_grad(tensors), is_own=message.peer == self.links.stage)
        with_grad = iter(layer_inputs)
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
        """Return the key of a message's boundary in ``incoming`` and ``outgoing``."""
        return (message.micro_batch if self.is_dynamic else 0), message.chunk

    def _announce(self, message: Message, tensors: Sequence[torch.Tensor], fingerprint: Fingerprint) -> BoundaryTensors:
        """Send the header of a boundary's first output and return the boundary's tensors."""
        key = "sent", message.chunk, self.is_training, self.marks_all
        crossing = self.agreed.get(key)
        if crossing is None or crossing.fingerprint != fingerprint:
            crossing = self.agreed[key] = self._form(message, tensors, fingerprint)
        self.outgoing[self._key(message)] = crossing
        if message.peer != self.links.stage:
            self.send(Kind.HEADER, message, crossing.header)
        return crossing

    def _form(self, message: Message, tensors: Sequence[torch.Tensor], fingerprint: Fingerprint) -> BoundaryTensors:
        """Describe an output and check it against the declaration."""
        structure, _ = fingerprint
        specs = self._describe(message, tensors, structure)
        header = encode_header(specs, structure, self._output_place(message))
        return BoundaryTensors.of(specs, structure, self.links.cut, header, fingerprint)

    def _check_again(
        self, message: Message, tensors: Sequence[torch.Tensor], structure: Structure, crossing: BoundaryTensors
    ) -> None:
        """Raise BoundaryError if the description of an output differs from the first one of this call.

        Called only if the fingerprints differ. The descriptions may still be equal.
        """
        specs = self._describe(message, tensors, structure)
        structures = structure, crossing.structure
        check_same(specs, crossing.specs, structures, self._output_place(message), micro_batch=message.micro_batch)

    def _describe(
        self, message: Message, tensors: Sequence[torch.Tensor], structure: Structure
    ) -> tuple[TensorMeta, ...]:
        side = self._output_place(message)
        for index, tensor in enumerate(tensors):
            if tensor.device.type != self.links.device.type or tensor.layout is not torch.strided:
                raise TypeError(
                    f"{side.tensor(index)} must be a dense tensor on {self.links.device}, got {format_tensor(tensor)} "
                    f"on {tensor.device} with layout {tensor.layout}. Change it in the layer."
                )
        records = records_of(self.declared, self.placement.piece(self.links.stage, message.chunk))
        flags = {"is_training": self.is_training, "marks_all": self.marks_all}
        return describe(tensors, structure, records, side, **flags)

    def _take_header(self, message: Message) -> BoundaryTensors:
        """Receive the header of a boundary and return its tensors; decode it only if it differs from the cached one."""
        header = self._take(Kind.HEADER, message)
        key = "received", message.chunk, self.is_training
        crossing = self.agreed.get(key)
        if crossing is None or not torch.equal(crossing.header, header):
            crossing = self.agreed[key] = self._read_header(header, message.chunk)
        self.incoming[self._key(message)] = crossing
        return crossing

    def _read_header(self, header: torch.Tensor, chunk: int) -> BoundaryTensors:
        specs, structure = decode_header(header)
        stage, sending_piece = self.links.stage, self.placement.piece(self.links.stage, chunk) - 1
        side = input_place(self.module, chunk, stage, self.placement)
        check_received(specs, records_of(self.declared, sending_piece), side, self.is_training)
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
        """Wait for ``message`` and return its bytes."""
        self._post(kind, message)  # no-op if begin_action has posted it; its size may only be known now
        posted = self._posted[kind, message.peer]
        if not posted or posted[0].message != message:
            next_message = posted[0].message if posted else "nothing"
            raise RuntimeError(f"stage {self.links.stage} expects {message}, but the next message is {next_message}")
        return self.wait_for(posted.popleft())

    def _post_for(self, number: int) -> None:
        """Post the receives of one action. On an accelerator, first wait for the header, so that the size is known."""
        if (message := self._messages[number]) is not None:
            self._post(Kind.HEADER, message)
            if self._posted[Kind.HEADER, message.peer] and not is_host(self.links.device):
                self._take_header(message)
            self._post(message.kind, message)

    def _post(self, kind: Kind, message: Message) -> None:
        """Post the receive of ``message`` if it is the next message of its type and peer, and its size is known."""
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
