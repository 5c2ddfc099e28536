"""P2PCommunicator: packed buffers, isend/irecv posted ahead, waiting for a neighbour or a collective; errors of
lost peers.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tds.device import is_host
from tds.p2p.boundary import (
    HEADER_SIZE,
    Place,
    Structure,
    TensorMeta,
    check_received,
    check_same,
    declaration,
    declared_boundary,
    decode_header,
    describe,
    encode_header,
    entered,
    flatten,
    format_tensor,
    input_place,
    output_place,
    records_of,
)
from tds.p2p.host_copies import Copied
from tds.schedule import Action, Kind, Message, received
from tds.timers import Clock, HostClock

# From tensors to bytes and back: one message holds all tensors that cross a boundary, whatever their dtypes.
#
# Layout of a message: each tensor's bytes at the next multiple of 64. A partitioned tensor travels as this rank's part
# of its flat elements, ``ceil(numel / t)`` of them, the last part filled up. A message is never empty: without any
# bytes it is one byte.

ALIGNMENT = 64


@dataclass(frozen=True)
class Slice:
    """The tensor (slice) group over which partitioned tensors are cut."""

    rank: int = 0
    size: int = 1
    group: object = None


class PackedLayout:
    """Where each tensor of a message lies in its bytes; computed once per boundary and call."""

    def __init__(self, specs: Sequence[TensorMeta], cut: Slice) -> None:
        self.specs = tuple(specs)
        self.cut = cut
        self.offsets: list[int] = []
        self.numels: list[int] = []
        end = 0
        for spec in self.specs:
            numel = math.prod(spec.shape)
            if self._is_cut(spec):
                numel = -(-numel // cut.size)
            start = -(-end // ALIGNMENT) * ALIGNMENT
            self.offsets.append(start)
            self.numels.append(numel)
            end = start + numel * spec.dtype.itemsize
        self.num_bytes = max(end, 1)
        self.is_cut = any(map(self._is_cut, self.specs))

    def _is_cut(self, spec: TensorMeta) -> bool:
        return spec.partitioned and self.cut.size > 1

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the message's bytes; those of a single contiguous tensor are not copied."""
        pieces = [self._local_bytes(t, spec) for t, spec in zip(tensors, self.specs, strict=True)]
        if len(pieces) == 1 and pieces[0].numel() == self.num_bytes:
            return pieces[0]
        message = self.new_buffer(tensors[0].device if tensors else torch.device("cpu"))
        for piece, offset in zip(pieces, self.offsets, strict=True):
            message[offset : offset + piece.numel()].copy_(piece)
        return message

    def new_buffer(self, device: torch.device) -> torch.Tensor:
        """Return bytes to receive a message into."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def unpack(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of a message. Collective over the tensor group where a tensor is partitioned."""
        tensors = []
        for spec, offset, numel in zip(self.specs, self.offsets, self.numels, strict=True):
            piece = message[offset : offset + numel * spec.dtype.itemsize]
            if self._is_cut(spec):
                piece = self._gather(piece, math.prod(spec.shape) * spec.dtype.itemsize)
            # .data: tensors of one message share memory but must not share autograd's count of in-place changes.
            tensors.append(piece.view(spec.dtype).view(spec.shape).data)
        return tensors

    def _local_bytes(self, tensor: torch.Tensor, spec: TensorMeta) -> torch.Tensor:
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        if self._is_cut(spec):
            part = -(-flat.numel() // self.cut.size)
            own = flat[self.cut.rank * part : (self.cut.rank + 1) * part]
            if own.numel() < part:
                own = torch.cat([own, own.new_zeros(part - own.numel())])
            flat = own
        return flat.view(torch.uint8)

    def _gather(self, piece: torch.Tensor, num_bytes: int) -> torch.Tensor:
        whole = piece.new_empty(piece.numel() * self.cut.size)
        if whole.numel():
            dist.all_gather(list(whole.chunk(self.cut.size)), piece.contiguous(), group=self.cut.group)
        return whole[:num_bytes]


# The words for a rank that is gone: gloo and NCCL say neither who waited nor for what.


class PeerLost(RuntimeError):
    """A rank that this one waited for is gone, or did not come in time; its cause is the backend's own error."""


class Together:
    """What one engine does together with other ranks.

    Attributes:
        doing: in words, or what it was when that failed; None if nothing.
        history: gets what ends, in words.
    """

    def __init__(self, history: deque[Any]) -> None:
        self.doing: str | None = None
        self.history = history

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Count what the process waits for in here as this engine's: one engine may run within another's call."""
        global _present
        before, _present = _present, self
        try:
            yield
        finally:
            _present = before

    def forget(self) -> None:
        """Drop what an earlier error has left, here and outside of all engines."""
        self.doing = outside.doing = None


outside = Together(deque(maxlen=1))
"""Of the process while no engine is at work."""
_present = outside
_number = 0


@contextmanager
def collective_scope(stage: int, doing: str) -> Iterator[None]:
    """Let an error of a collective say which stage was ``doing`` what, and the watchdog while it lasts.

    Raises:
        PeerLost: in place of a RuntimeError within.
    """
    global _number
    present = _present
    before, present.doing = present.doing, doing
    _number += 1
    try:
        yield
    except RuntimeError as error:  # ``doing`` stays, for the watchdog to tell until its ``over`` ends
        raise PeerLost(f"stage {stage} lost a rank while {doing}: {error}") from error
    except BaseException:
        present.doing = before
        raise
    present.doing = before
    present.history.append(f"ended {doing}")


def current_collective() -> str | None:
    """Return what this process is doing together with others, or was when that failed; None if nothing."""
    return _present.doing


def number_together() -> int:
    """Return how often this process began to wait together with others: two waits of one name are not one."""
    return _number


# Messages on their way: started, waited for, and the words for a neighbour that is gone.

HISTORY = 20
Route = tuple[Kind, int, int]
"""What travels, the stage that sends it, the stage that it goes to."""


@dataclass
class StageLinks:
    """How this stage reaches the others.

    ``ranks`` are the global ranks of the pipeline, by stage; ``groups`` the process group of each route from and to
    this stage. ``timeout`` bounds a wait over gloo, which forgets its group's; NCCL has its own watchdog.
    """

    stage: int
    ranks: Sequence[int]
    groups: dict[Route, Any]
    cut: Slice
    device: torch.device
    timeout: timedelta | None = None

    @property
    def num_stages(self) -> int:
        return len(self.ranks)


GLOO_GRACE = timedelta(seconds=1)
"""A wait over gloo fails this long after the limit. The error cuts this rank's connections, and the others leave with
errors of their own: by then the watchdog has raised the alarm, and all have said what they wait for."""


@dataclass
class P2PHandle:
    """A message on its way in or out; ``buffer`` must live until it is there."""

    kind: Kind
    message: Message
    buffer: torch.Tensor
    work: Any


@dataclass
class Transport:
    """Starts transfers and waits for them.

    A sender waits once more than ``window`` of its messages of one kind have not left; None: never.

    For those who watch: ``waits`` holds a pair of the ``clock``'s marks for each message that was waited for in this
    call, ``action`` is what the stage is at, ``history`` the last messages that were sent or came in, and ``waiting``
    what is being waited for, or was when waiting failed.
    """

    links: StageLinks
    clock: Clock = field(default_factory=HostClock)
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    action: Action | None = None
    window: int | None = None
    history: deque[tuple[str, Kind, Message] | str] = field(default_factory=lambda: deque(maxlen=HISTORY))
    waiting: tuple[str, Kind, Message] | None = None
    _sending: dict[Kind, deque[P2PHandle]] = field(default_factory=lambda: {kind: deque() for kind in Kind})

    def send(self, kind: Kind, message: Message, buffer: torch.Tensor) -> None:
        """Start sending; the bytes must not change until they have left."""
        sends = self._sending[kind]
        sends.append(self._start(dist.isend, kind, message, buffer))
        self.history.append(("sent", kind, message))
        if not is_host(self.links.device) and kind is not Kind.HEADER:
            while sends and sends[0].work.is_completed():  # asks an event; gloo would not know before it is waited for
                sends.popleft()
        while self.window is not None and len(sends) > self.window:
            self._wait(sends.popleft(), "sending")

    def receive(self, kind: Kind, message: Message, buffer: torch.Tensor) -> P2PHandle:
        """Start receiving into ``buffer``."""
        return self._start(dist.irecv, kind, message, buffer)

    def wait_for(self, transfer: P2PHandle) -> torch.Tensor:
        """Return the bytes of a message that was started to be received, once they are there."""
        before = self.clock.mark()
        self._wait(transfer, "receiving")
        self.waits.append((before, self.clock.mark()))
        self.history.append(("received", transfer.kind, transfer.message))
        return transfer.buffer

    def let_go(self, kind: Kind, micro_batch: int, chunk: int) -> None:
        """Free what was sent up to this message, of which the other side has shown that it has it."""
        sends = self._sending[kind]
        if any(sent.message.micro_batch == micro_batch and sent.message.chunk == chunk for sent in sends):
            while True:
                sent = sends.popleft()
                self._wait(sent, "sending")
                if sent.message.micro_batch == micro_batch and sent.message.chunk == chunk:
                    return

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for sends in self._sending.values():
            while sends:
                self._wait(sends.popleft(), "sending")

    def forget(self) -> None:
        """Drop what is left of a call that was broken off."""
        for sends in self._sending.values():
            sends.clear()
        self.waits.clear()

    def _start(self, operation: Any, kind: Kind, message: Message, buffer: torch.Tensor) -> P2PHandle:
        own, peer = self.links.stage, message.peer
        route = (kind, own, peer) if operation is dist.isend else (kind, peer, own)
        try:
            work = operation(buffer, self.links.ranks[peer], group=self.links.groups[route], tag=int(kind))
        except RuntimeError as error:
            doing = "sending" if operation is dist.isend else "receiving"
            raise self._lost(error, P2PHandle(kind, message, buffer, None), doing) from error
        return P2PHandle(kind, message, buffer, work)

    def _wait(self, transfer: P2PHandle, doing: str) -> None:
        self.waiting = doing, transfer.kind, transfer.message
        is_over_gloo = transfer.kind is Kind.HEADER or is_host(self.links.device) or isinstance(transfer.work, Copied)
        try:
            if is_over_gloo and self.links.timeout is not None:
                transfer.work.wait(self.links.timeout + GLOO_GRACE)
            else:
                transfer.work.wait()
        except RuntimeError as error:
            raise self._lost(error, transfer, doing) from error
        self.waiting = None

    def _lost(self, error: RuntimeError, transfer: P2PHandle, doing: str) -> PeerLost:
        message, peer = transfer.message, transfer.message.peer
        chunk = f" chunk {message.chunk}" if message.chunk else ""
        during = f" during {self.action}" if self.action is not None and doing == "receiving" else ""
        return PeerLost(
            f"stage {self.links.stage} lost stage {peer} (rank {self.links.ranks[peer]}) while {doing} the "
            f"{transfer.kind.name.lower()} of micro-batch {message.micro_batch}{chunk}{during}: {error}"
        )


# What crosses between stages: asynchronous, receives posted ahead, one message per boundary.
#
# One call of train_batch or eval_batch is one ``begin`` ... ``finish``. Messages of one kind from one neighbour go in
# the order of the schedule, so none carries a number. A header with shapes and dtypes goes ahead of the first
# activation of each boundary (with ``dynamic_shape`` of every activation); gradients have the shapes of the activations
# that they answer. The header is mostly that of the call before: then both sides go on with the form that they have.

RECEIVES_AHEAD = {Kind.HEADER: 2, Kind.ACTIVATION: 2, Kind.GRADIENT: 1}
"""How many receives wait for their message while the stage works. Gradients have a whole forward and backward to arrive
in, so one is enough; on the first stages, where memory is short, a second buffer would count.

Not on a GPU in the first call of a kind, nor where shapes may change: a receive waits there as a kernel, and a kernel
that is loaded at its first use, or memory that is got from the driver, may wait for all kernels, while what the
neighbour sends hangs on it. There tensors are received as they are wanted."""
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
    actions: tuple[Action, ...], stage: int, num_stages: int, num_chunks: int, is_dynamic: bool
) -> dict[Kind, list[Message]]:
    """Return what comes in while a stage does ``actions``, in order, with a header ahead of each new form."""
    messages = [received(action, stage, num_stages, num_chunks) for action in actions]
    expected = {kind: [m for m in messages if m is not None and m.kind is kind] for kind in Kind}
    first: dict[tuple[int, int], Message] = {}
    for message in expected[Kind.ACTIVATION]:
        first.setdefault((message.micro_batch if is_dynamic else 0, message.chunk), message)
    return expected | {Kind.HEADER: list(first.values())}


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

    def __init__(self, links: StageLinks, module: Any = None, *, num_chunks: int = 1, is_dynamic: bool = False) -> None:
        super().__init__(links)
        self.module = module
        self.num_chunks = num_chunks
        self.is_dynamic = is_dynamic
        self._has_run: set[bool] = set()  # training, evaluation
        self._posts_ahead = True
        self.window = None  # tds.schedule.simulate says which limit a schedule runs with; it sets it ahead of a call
        self.incoming: dict[tuple[int, int], BoundaryTensors] = {}
        self.outgoing: dict[tuple[int, int], BoundaryTensors] = {}
        self.agreed: dict[tuple[Any, ...], BoundaryTensors] = {}
        self.declared = declared_boundary(module)
        self._declaration = declaration(module)  # that ``agreed`` was checked against
        self._posted: dict[Kind, deque[P2PHandle]] = {kind: deque() for kind in Kind}

    def begin(self, actions: Sequence[Action], *, is_training: bool, marks_all: bool = False) -> None:
        """Note what will come, and post the receives of the first headers. ``marks_all`` as in ``describe``.

        Raises:
            BoundaryError: the module's declaration is wrong in itself.
        """
        self.forget()
        self.action, self.is_training, self.marks_all = None, is_training, marks_all
        if self._declaration != (now := declaration(self.module)):
            self.declared, self._declaration = declared_boundary(self.module), now
            self.agreed.clear()
        self._posts_ahead = is_host(self.links.device) or (is_training in self._has_run and not self.is_dynamic)
        place = self.links.stage, self.links.num_stages, self.num_chunks
        messages = expected_messages(tuple(actions), *place, self.is_dynamic)
        self._expected = {kind: deque(each) for kind, each in messages.items()}
        self._post(Kind.HEADER)

    def forget(self) -> None:
        super().forget()
        self.incoming.clear()
        self.outgoing.clear()
        for posted in self._posted.values():
            posted.clear()

    def finish(self) -> None:
        super().finish()
        self._has_run.add(self.is_training)

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
        self.send(Kind.ACTIVATION, message, crossing.activations.pack(tensors))
        self._post(Kind.GRADIENT)
        return crossing.with_grad(tensors)

    def recv_forward(self, message: Message) -> tuple[Any, list[torch.Tensor]]:
        """Return (what the previous stage sent, the leaves whose gradients go back)."""
        crossing = self.incoming.get(self._key(message)) or self._take_header(message)
        tensors = self._unpack(crossing.activations, message)
        given, leaves = entered(crossing.with_grad(tensors))
        with_grad = iter(given)
        tensors = [next(with_grad) if s.needs_grad else t for t, s in zip(tensors, crossing.specs, strict=True)]
        return crossing.structure.rebuild(tensors), leaves

    def send_backward(self, message: Message, gradients: Sequence[torch.Tensor]) -> None:
        """Send the gradients of the leaves that ``recv_forward`` returned, in their order."""
        layout = self.incoming[self._key(message)].gradients
        if layout.specs:
            self.send(Kind.GRADIENT, message, layout.pack(gradients))

    def recv_backward(self, message: Message) -> list[torch.Tensor]:
        """Return the gradients of this stage's output."""
        layout = self.outgoing[self._key(message)].gradients
        gradients = self._unpack(layout, message) if layout.specs else []
        self.let_go(Kind.ACTIVATION, message.micro_batch, message.chunk)
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
        records = records_of(self.declared, message.chunk * self.links.num_stages + self.links.stage)
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
        stage, num_stages = self.links.stage, self.links.num_stages
        place = input_place(self.module, chunk, stage, num_stages)
        check_received(specs, records_of(self.declared, chunk * num_stages + stage - 1), place, self.is_training)
        return BoundaryTensors.of(specs, structure, self.links.cut, header)

    def _output_place(self, message: Message) -> Place:
        return output_place(self.module, message.chunk, self.links.stage, self.links.num_stages)

    def _unpack(self, layout: PackedLayout, message: Message) -> list[torch.Tensor]:
        received_bytes = self._take(message.kind, message)
        if not layout.is_cut:
            return layout.unpack(received_bytes)
        doing = f"gathering the {message.kind.name.lower()} of micro-batch {message.micro_batch} over the tensor group"
        with collective_scope(self.links.stage, doing):
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
