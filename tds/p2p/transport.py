"""Transport: starts messages between stages, waits for them, and raises errors for lost peers."""

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
"""(message type, sending stage, receiving stage)."""


@dataclass
class StageLinks:
    """Ranks and process groups through which this stage reaches the others.

    Attributes:
        ranks: global ranks of the pipeline, by stage.
        groups: process group of each route from and to this stage.
        cut: the tensor group over which partitioned tensors are sharded.
        timeout: time limit of waits over gloo, which ignore the group's timeout. NCCL has its own watchdog.
        are_own: the groups between devices are only used for messages, so they may be aborted.
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
"""Added to the timeout of waits over gloo. The error closes this rank's connections, which makes the other ranks fail
too. The grace period lets the watchdog raise the alarm, and all ranks report their waits, before that."""


@dataclass
class P2PHandle:
    """A running send or receive; ``buffer`` must stay alive until it has completed."""

    kind: Kind
    message: Message
    buffer: torch.Tensor
    work: Any


@dataclass
class Transport:
    """Starts transfers and waits for them.

    Attributes:
        waits: for each awaited message of this call, the ``clock``'s marks before and after the wait.
        action: the stage's current action.
        window: maximum number of pending sends per message type and peer; further sends wait. None: no limit.
        history: the last messages that were sent or received, and the collectives that ended.
        waiting: the message that is being waited for, or whose wait failed.
        beside: the stream on which an accelerator receives.
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
        """Start sending ``buffer``, which must not change until the send has completed."""
        sends = self._sending[kind, message.peer]
        sends.append(self._start(dist.isend, kind, message, buffer))
        self.history.append(("sent", kind, message))
        if not is_host(self.links.device) and kind is not Kind.HEADER:
            while sends and sends[0].work.is_completed():  # a query of an event; gloo only completes in wait
                sends.popleft()
        while self.window is not None and len(sends) > self.window:
            self._wait(sends.popleft(), "sending")

    def receive(self, kind: Kind, message: Message, buffer: torch.Tensor) -> P2PHandle:
        """Start receiving into ``buffer``."""
        return self._start(dist.irecv, kind, message, buffer)

    def wait_for(self, transfer: P2PHandle) -> torch.Tensor:
        """Wait for a receive and return its bytes."""
        start = self.clock.mark()
        self._wait(transfer, "receiving")
        if self.beside is not None and transfer.kind is not Kind.HEADER:
            keep_for_current_stream(transfer.buffer)
        self.waits.append((start, self.clock.mark()))
        self.history.append(("received", transfer.kind, transfer.message))
        return transfer.buffer

    def let_go(self, answer: Message) -> None:
        """Free the buffers of sent activations, up to and including the activation whose gradient is ``answer``.

        The peer has received that activation before it sent the gradient, so these sends have completed.
        """
        sends, answered = self._sending[Kind.ACTIVATION, answer.peer], (answer.micro_batch, answer.chunk)
        sent_keys = [(handle.message.micro_batch, handle.message.chunk) for handle in sends]
        for _ in range(sent_keys.index(answered) + 1 if answered in sent_keys else 0):
            self._wait(sends.popleft(), "sending")

    def finish(self) -> None:
        """Wait until all sends have completed."""
        for sends in self._sending.values():
            while sends:
                self._wait(sends.popleft(), "sending")

    def forget(self) -> None:
        """Drop the state of a failed call."""
        for sends in self._sending.values():
            sends.clear()
        self.waits.clear()

    def abort(self) -> bool:
        """Abort the message groups of an accelerator after an error; return True if they were aborted.

        Without this, posted receives would block the device forever, since no rank sends to them any more. The groups
        are unusable afterwards.
        """
        if is_host(self.links.device) or not self.links.are_own:
            return False
        groups = {
            id(group): group for (msg_type, *_), group in self.links.groups.items() if msg_type is not Kind.HEADER
        }
        for group in groups.values():
            torch_api.abort(group, self.links.device)
        return True

    def _start(self, operation: Any, kind: Kind, message: Message, buffer: torch.Tensor) -> P2PHandle:
        stage, peer = self.links.stage, message.peer
        route = (kind, stage, peer) if operation is dist.isend else (kind, peer, stage)
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
