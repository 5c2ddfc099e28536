"""P2PCommunicator: asynchronous messages between stages, with receives posted before the actions that need them.

Each ``train_batch`` or ``eval_batch`` starts with ``begin`` and ends with ``finish``. Messages of one type from one
neighbour are sent in schedule order, so they need no sequence number. A header with shapes and dtypes precedes the
first activation of each boundary, or every activation with ``dynamic_shape``. A gradient has its activation's shape. If
the header equals the previous call's, both sides reuse the cached layout.

``tds.schedule.limits`` determines after which action each receive is posted. On an accelerator, receives run on a
separate stream, so that they do not wait for that action's kernels. On the CPU, a receive is posted one action
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
from tds.p2p.boundary_layers import BoundarySide, input_side, output_side
from tds.p2p.collective_scope import collective_scope
from tds.p2p.input_leaves import with_leaves
from tds.p2p.message_header import HEADER_SIZE, decode_header, encode_header
from tds.p2p.packed_layout import PackedLayout, TensorGroup
from tds.p2p.structure import Structure, flatten
from tds.p2p.tensor_meta import TensorMeta, check_received, check_same, describe, format_tensor
from tds.p2p.transport import P2PHandle, StageLinks, Transport
from tds.schedule import Action, Message, MessageType, Placement, received_message
from tds.schedule.limits import Posts

Fingerprint = tuple[Structure, list[tuple[Any, ...]]]


@dataclass
class BoundaryTensors:
    """Description of one boundary's tensors, equal on both sides and cached for later calls.

    Attributes:
        specs: each tensor's type, shape and flags.
        structure: the tensors' container.
        activations, gradients: message layouts.
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
        cls, specs: tuple[TensorMeta, ...], structure: Structure, tensor_group: TensorGroup, header: torch.Tensor,
        fingerprint: Fingerprint | None = None,
    ) -> BoundaryTensors:  # fmt: skip
        with_grad = [spec for spec in specs if spec.needs_grad]
        return cls(
            specs,
            structure,
            PackedLayout(specs, tensor_group),
            PackedLayout(with_grad, tensor_group),
            header,
            fingerprint,
        )

    def with_grad(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a message's ``tensors`` for which a gradient is sent back."""
        return [tensor for tensor, spec in zip(tensors, self.specs, strict=True) if spec.needs_grad]


@functools.lru_cache(maxsize=16)
def expected_messages(
    actions: tuple[Action, ...], stage: int, placement: Placement, is_dynamic: bool
) -> tuple[list[Message | None], dict[tuple[MessageType, int], list[Message]]]:
    """List the messages that ``stage`` receives during ``actions``.

    Returns:
        Each action's message (None: the action receives none), and the message sequence for each (type, peer). The
        header sequence has one header per boundary, or one per activation if ``is_dynamic``. Messages from one chunk to
        another on the same stage are not in the sequences.
    """
    messages = [received_message(action, stage, placement) for action in actions]
    expected: dict[tuple[MessageType, int], list[Message]] = defaultdict(list)
    announced: set[tuple[int, int]] = set()
    for message in messages:
        if message is None or message.peer == stage:
            continue
        expected[message.message_type, message.peer].append(message)
        boundary = message.micro_batch if is_dynamic else 0, message.chunk
        if message.message_type is MessageType.ACTIVATION and boundary not in announced:
            announced.add(boundary)
            expected[MessageType.HEADER, message.peer].append(message)
    return messages, expected


class P2PCommunicator(Transport):
    """Sends and receives one stage's messages.

    Args:
        module: has the boundary declaration, which is read again at each call.
        placement: chunk placement; None: one chunk per stage.
        is_dynamic: shapes may change within a call.

    Attributes:
        incoming, outgoing: the tensors of each boundary that was announced in this call; per micro-batch if
            ``is_dynamic``.
        boundary_cache: each boundary's last tensors, by direction, chunk and mode. Tensors are described,
            checked against the declaration and laid out again only if they differ from the cached tensors.
    """

    def __init__(
        self, links: StageLinks, module: Any = None, *, placement: Placement | None = None, is_dynamic: bool = False
    ) -> None:
        super().__init__(links)
        self.module = module
        self.placement = Placement(links.num_stages) if placement is None else placement
        self.is_dynamic = is_dynamic
        self.receive_stream = side_stream(links.device)
        self.posts: Posts = ()
        self._marks: list[tuple[Action, Any]] = []  # clock mark before each action in this call; accelerators only
        self.incoming: dict[tuple[int, int], BoundaryTensors] = {}
        self.outgoing: dict[tuple[int, int], BoundaryTensors] = {}
        self.boundary_cache: dict[tuple[Any, ...], BoundaryTensors] = {}
        self.declared = declared_boundary(module)
        self._declaration = declaration(module)  # the declaration that ``boundary_cache`` was checked against
        self._posted: dict[tuple[MessageType, int], deque[P2PHandle]] = defaultdict(deque)  # by type and peer
        self._local_tensors: dict[
            tuple[MessageType, int, int], list[torch.Tensor]
        ] = {}  # by type, micro-batch and receiving chunk

    def begin(self, actions: Sequence[Action], *, is_training: bool, marks_all: bool = False) -> None:
        """Start a call that runs ``actions``; ``begin_action`` posts the receives.

        Args:
            marks_all: see ``describe``.

        Raises:
            BoundaryError: the module's declaration is inconsistent.
        """
        self.reset()
        marks, self._marks = self._marks, []
        self.clock.free(mark for _, mark in marks)
        self.action, self.is_training, self.marks_all = None, is_training, marks_all
        if self._declaration != (current_declaration := declaration(self.module)):
            self.declared, self._declaration = declared_boundary(self.module), current_declaration
            self.boundary_cache.clear()
        self._actions = tuple(actions)
        self._messages, expected = expected_messages(self._actions, self.links.stage, self.placement, self.is_dynamic)
        self._expected = {route: deque(messages) for route, messages in expected.items()}
        self._num_begun = 0

    def set_limits(self, window: int | None, posts: Posts = ()) -> None:
        """Set the send window and when receives are posted; without ``posts`` each action posts its receive."""
        self.window, self.posts = window, posts

    def device_action(self) -> Action | None:
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
        with self.receive_stream or nullcontext():
            num_ahead = 1 if is_on_host else 0
            for receive_idx in itertools.chain(*self.posts[idx : idx + 1 + num_ahead]):
                self._post_receives(receive_idx)

    def reset(self) -> None:
        super().reset()
        for cache in (self.incoming, self.outgoing, self._local_tensors):
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
            raise TypeError(f"{self._output_side(message)} {error}") from None
        boundary = self.outgoing.get(self._key(message))
        fingerprint = structure, [(t.dtype, t.shape, t.requires_grad, t.device, t.layout) for t in tensors]
        if boundary is None:
            boundary = self._announce(message, tensors, fingerprint)
        elif boundary.fingerprint != fingerprint:
            self._check_unchanged(message, tensors, structure, boundary)
        if message.peer == self.links.stage:
            self._pass_locally(message, tensors, boundary)
        else:
            self.send(MessageType.ACTIVATION, message, boundary.activations.pack(tensors))
        return boundary.with_grad(tensors)

    def _pass_locally(self, message: Message, tensors: Sequence[torch.Tensor], boundary: BoundaryTensors) -> None:
        """Pass a chunk's output to the next chunk on the same stage, without a copy."""
        micro_batch, chunk = self._key(message)
        self.incoming[micro_batch, chunk + 1] = boundary
        self._local_tensors[MessageType.ACTIVATION, message.micro_batch, chunk + 1] = [
            tensor.detach() for tensor in tensors
        ]

    def recv_forward(self, message: Message) -> tuple[Any, list[torch.Tensor]]:
        """Receive this stage's input; return (input, leaves whose gradients are sent back)."""
        boundary = self.incoming.get(self._key(message)) or self._receive_header(message)
        tensors = self._unpack(boundary.activations, message)
        layer_inputs, leaves = with_leaves(boundary.with_grad(tensors), is_local=message.peer == self.links.stage)
        with_grad = iter(layer_inputs)
        tensors = [next(with_grad) if s.needs_grad else t for t, s in zip(tensors, boundary.specs, strict=True)]
        return boundary.structure.rebuild(tensors), leaves

    def send_backward(self, message: Message, gradients: Sequence[torch.Tensor]) -> None:
        """Send gradients for the leaves from ``recv_forward``, in their order."""
        layout = self.incoming[self._key(message)].gradients
        if message.peer == self.links.stage:
            self._local_tensors[MessageType.GRADIENT, message.micro_batch, message.chunk - 1] = list(gradients)
        elif layout.specs:
            self.send(MessageType.GRADIENT, message, layout.pack(gradients))

    def recv_backward(self, message: Message) -> list[torch.Tensor]:
        """Receive this stage's output gradients."""
        layout = self.outgoing[self._key(message)].gradients
        gradients = self._unpack(layout, message) if layout.specs else []
        self.release_activations(message)
        return gradients

    def _key(self, message: Message) -> tuple[int, int]:
        """Return a boundary's key in ``incoming`` and ``outgoing``."""
        return (message.micro_batch if self.is_dynamic else 0), message.chunk

    def _announce(self, message: Message, tensors: Sequence[torch.Tensor], fingerprint: Fingerprint) -> BoundaryTensors:
        """Send a header for a boundary's first output and return the boundary's tensors."""
        key = "sent", message.chunk, self.is_training, self.marks_all
        boundary = self.boundary_cache.get(key)
        if boundary is None or boundary.fingerprint != fingerprint:
            boundary = self.boundary_cache[key] = self._describe_boundary(message, tensors, fingerprint)
        self.outgoing[self._key(message)] = boundary
        if message.peer != self.links.stage:
            self.send(MessageType.HEADER, message, boundary.header)
        return boundary

    def _describe_boundary(
        self, message: Message, tensors: Sequence[torch.Tensor], fingerprint: Fingerprint
    ) -> BoundaryTensors:
        """Describe an output and check it against the declaration."""
        structure, _ = fingerprint
        specs = self._describe(message, tensors, structure)
        header = encode_header(specs, structure, self._output_side(message))
        return BoundaryTensors.of(specs, structure, self.links.tensor_group, header, fingerprint)

    def _check_unchanged(
        self, message: Message, tensors: Sequence[torch.Tensor], structure: Structure, boundary: BoundaryTensors
    ) -> None:
        """Raise BoundaryError if an output's description differs from the call's first one.

        Called only if the fingerprints differ. The descriptions may still be equal.
        """
        specs = self._describe(message, tensors, structure)
        structures = structure, boundary.structure
        check_same(specs, boundary.specs, structures, self._output_side(message), micro_batch=message.micro_batch)

    def _describe(
        self, message: Message, tensors: Sequence[torch.Tensor], structure: Structure
    ) -> tuple[TensorMeta, ...]:
        side = self._output_side(message)
        for index, tensor in enumerate(tensors):
            if tensor.device.type != self.links.device.type or tensor.layout is not torch.strided:
                raise TypeError(
                    f"{side.describe_tensor(index)} must be a dense tensor on {self.links.device}, got "
                    f"{format_tensor(tensor)} on {tensor.device} with layout {tensor.layout}. Change it in the layer."
                )
        records = records_of(self.declared, self.placement.virtual_stage(self.links.stage, message.chunk))
        flags = {"is_training": self.is_training, "marks_all": self.marks_all}
        return describe(tensors, structure, records, side, **flags)

    def _receive_header(self, message: Message) -> BoundaryTensors:
        """Receive a boundary's header and return its tensors; decode it only if it differs from the cached one."""
        header = self._wait_for_message(MessageType.HEADER, message)
        key = "received", message.chunk, self.is_training
        boundary = self.boundary_cache.get(key)
        if boundary is None or not torch.equal(boundary.header, header):
            boundary = self.boundary_cache[key] = self._read_header(header, message.chunk)
        self.incoming[self._key(message)] = boundary
        return boundary

    def _read_header(self, header: torch.Tensor, chunk: int) -> BoundaryTensors:
        specs, structure = decode_header(header)
        stage, sending_stage = self.links.stage, self.placement.virtual_stage(self.links.stage, chunk) - 1
        side = input_side(self.module, chunk, stage, self.placement)
        check_received(specs, records_of(self.declared, sending_stage), side, self.is_training)
        return BoundaryTensors.of(specs, structure, self.links.tensor_group, header)

    def _output_side(self, message: Message) -> BoundarySide:
        return output_side(self.module, message.chunk, self.links.stage, self.placement)

    def _unpack(self, layout: PackedLayout, message: Message) -> list[torch.Tensor]:
        if message.peer == self.links.stage:
            return self._local_tensors.pop((message.message_type, message.micro_batch, message.chunk))
        received_bytes = self._wait_for_message(message.message_type, message)
        if not layout.is_sharded:
            return layout.unpack(received_bytes)
        operation = (
            f"gathering the {message.message_type.name.lower()} of micro-batch {message.micro_batch} over the "
            "tensor group"
        )
        with collective_scope(self.links.stage, operation):
            return layout.unpack(received_bytes)

    def _wait_for_message(self, message_type: MessageType, message: Message) -> torch.Tensor:
        """Wait for ``message`` and return its bytes."""
        self._post(message_type, message)  # no-op if begin_action has posted it; its size may only be known now
        posted = self._posted[message_type, message.peer]
        if not posted or posted[0].message != message:
            next_message = posted[0].message if posted else "nothing"
            raise RuntimeError(f"stage {self.links.stage} expects {message}, but the next message is {next_message}")
        return self.wait_for(posted.popleft())

    def _post_receives(self, action_idx: int) -> None:
        """Post one action's receives. On an accelerator, first wait for the header, so that the size is known."""
        if (message := self._messages[action_idx]) is not None:
            self._post(MessageType.HEADER, message)
            if self._posted[MessageType.HEADER, message.peer] and not is_host(self.links.device):
                self._receive_header(message)
            self._post(message.message_type, message)

    def _post(self, message_type: MessageType, message: Message) -> None:
        """Post the receive for ``message`` if it is next for its type and peer, and its size is known."""
        expected = self._expected.get((message_type, message.peer))
        while message_type is MessageType.GRADIENT and expected and self._is_never_sent(expected[0]):
            expected.popleft()
        if not expected or expected[0] != message:
            return
        if message_type is MessageType.HEADER:
            buffer = torch.zeros(HEADER_SIZE, dtype=torch.int64)
        else:
            boundary = (self.incoming if message_type is MessageType.ACTIVATION else self.outgoing).get(
                self._key(message)
            )
            if boundary is None:
                return
            layout = boundary.activations if message_type is MessageType.ACTIVATION else boundary.gradients
            buffer = layout.new_buffer(self.links.device)
        self._posted[message_type, message.peer].append(self.receive(message_type, expected.popleft(), buffer))

    def _is_never_sent(self, gradient: Message) -> bool:
        boundary = self.outgoing.get(self._key(gradient))
        return boundary is not None and not boundary.gradients.specs
