"""Messages between neighbouring stages: start, wait, and errors of a lost neighbour."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tds import torch_api
from tds.clocks import Clock, HostClock
from tds.device import is_host, keep_for_current_stream
from tds.p2p.collective_scope import PeerLost
from tds.p2p.host_copies import Copied
from tds.p2p.packed_layout import Slice
from tds.schedule import Action, Kind, Message

HISTORY = 20
Route = tuple[Kind, int, int]
"""What travels, the stage that sends it, the stage that it goes to."""


@dataclass
class StageLinks:
    """How this stage reaches the others.

    ``ranks`` are the global ranks of the pipeline, by stage; ``groups`` the process group of each route from and to
    this stage. ``timeout`` bounds a wait over gloo, which forgets its group's; NCCL has its own watchdog. ``are_own``:
    the groups of messages between devices are for them alone, and may be aborted.
    """

    stage: int
    ranks: Sequence[int]
    groups: dict[Route, Any]
    cut: Slice
    device: torch.device
    timeout: timedelta | None = None
    are_own: bool = False

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

    A sender waits once more than ``window`` of its messages of one kind to one stage have not left; None: never.

    For those who watch: ``waits`` holds a pair of the ``clock``'s marks for each message that was waited for in this
    call, ``action`` is what the stage is at, ``history`` the last messages that were sent or came in, and ``waiting``
    what is being waited for, or was when waiting failed. ``beside``: the stream on which a device receives.
    """

    links: StageLinks
    clock: Clock = field(default_factory=HostClock)
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    action: Action | None = None
    window: int | None = None
    history: deque[tuple[str, Kind, Message] | str] = field(default_factory=lambda: deque(maxlen=HISTORY))
    waiting: tuple[str, Kind, Message] | None = None
    beside: Any = None
    _sending: dict[tuple[Kind, int], deque[P2PHandle]] = field(default_factory=lambda: defaultdict(deque))  # by peer

    def send(self, kind: Kind, message: Message, buffer: torch.Tensor) -> None:
        """Start sending; the bytes must not change until they have left."""
        sends = self._sending[kind, message.peer]
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
        if self.beside is not None and transfer.kind is not Kind.HEADER:
            keep_for_current_stream(transfer.buffer)
        self.waits.append((before, self.clock.mark()))
        self.history.append(("received", transfer.kind, transfer.message))
        return transfer.buffer

    def let_go(self, answer: Message) -> None:
        """Free what was sent up to the activation that a gradient answers: its sender has shown that it has it."""
        sends, place = self._sending[Kind.ACTIVATION, answer.peer], (answer.micro_batch, answer.chunk)
        sent = [(each.message.micro_batch, each.message.chunk) for each in sends]
        for _ in range(sent.index(place) + 1 if place in sent else 0):
            self._wait(sends.popleft(), "sending")

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

    def abort(self) -> bool:
        """End the messages that wait on a device, behind an error: nobody will send them, and the device would wait for
        ever. Their groups are of no use afterwards. Return whether there is such a device."""
        if is_host(self.links.device) or not self.links.are_own:
            return False
        groups = {id(group): group for (kind, *_), group in self.links.groups.items() if kind is not Kind.HEADER}
        for group in groups.values():
            torch_api.abort(group, self.links.device)
        return True

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
