"""Messages on their way: started, waited for, and the words for a neighbour that is gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tds.clock import Clock, HostClock
from tds.device import is_host
from tds.host_copies import Copied
from tds.peers import PeerLost
from tds.schedule import Action, Kind, Message
from tds.wire import Slice

HISTORY = 20
Route = tuple[Kind, int, int]
"""What travels, the stage that sends it, the stage that it goes to."""


@dataclass
class Links:
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


@dataclass
class Transfer:
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

    links: Links
    clock: Clock = field(default_factory=HostClock)
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    action: Action | None = None
    window: int | None = None
    history: deque[tuple[str, Kind, Message] | str] = field(default_factory=lambda: deque(maxlen=HISTORY))
    waiting: tuple[str, Kind, Message] | None = None
    _sending: dict[Kind, deque[Transfer]] = field(default_factory=lambda: {kind: deque() for kind in Kind})

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

    def receive(self, kind: Kind, message: Message, buffer: torch.Tensor) -> Transfer:
        """Start receiving into ``buffer``."""
        return self._start(dist.irecv, kind, message, buffer)

    def wait_for(self, transfer: Transfer) -> torch.Tensor:
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

    def _start(self, operation: Any, kind: Kind, message: Message, buffer: torch.Tensor) -> Transfer:
        own, peer = self.links.stage, message.peer
        route = (kind, own, peer) if operation is dist.isend else (kind, peer, own)
        try:
            work = operation(buffer, self.links.ranks[peer], group=self.links.groups[route], tag=int(kind))
        except RuntimeError as error:
            doing = "sending" if operation is dist.isend else "receiving"
            raise self._lost(error, Transfer(kind, message, buffer, None), doing) from error
        return Transfer(kind, message, buffer, work)

    def _wait(self, transfer: Transfer, doing: str) -> None:
        self.waiting = doing, transfer.kind, transfer.message
        is_over_gloo = transfer.kind is Kind.HEADER or is_host(self.links.device) or isinstance(transfer.work, Copied)
        try:
            if is_over_gloo and self.links.timeout is not None:
                transfer.work.wait(self.links.timeout)
            else:
                transfer.work.wait()
        except RuntimeError as error:
            raise self._lost(error, transfer, doing) from error
        self.waiting = None

    def _lost(self, error: RuntimeError, transfer: Transfer, doing: str) -> PeerLost:
        message, peer = transfer.message, transfer.message.peer
        chunk = f" chunk {message.chunk}" if message.chunk else ""
        during = f" during {self.action}" if self.action is not None and doing == "receiving" else ""
        return PeerLost(
            f"stage {self.links.stage} lost stage {peer} (rank {self.links.ranks[peer]}) while {doing} the "
            f"{transfer.kind.name.lower()} of micro-batch {message.micro_batch}{chunk}{during}: {error}"
        )
