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
from tds.device import is_host, record_current_stream
from tds.p2p.collective_scope import PeerLost
from tds.p2p.host_copies import CopiedWork
from tds.p2p.packed_layout import TensorGroup
from tds.schedule import Action, Message, MessageType

HISTORY_LENGTH = 20
Route = tuple[MessageType, int, int]
"""(message type, sending stage, receiving stage)."""


@dataclass
class StageLinks:
    """Ranks and process groups through which this stage reaches the others.

    Attributes:
        ranks: the pipeline's global ranks, by stage.
        groups: process group for each route from and to this stage.
        tensor_group: the tensor group over which partitioned tensors are sharded.
        timeout: time limit for waits over gloo, which ignore the group's timeout. NCCL has its own watchdog.
        are_dedicated: the groups between devices are only used for messages, so they may be aborted.
    """

    stage: int
    ranks: Sequence[int]
    groups: dict[Route, Any]
    tensor_group: TensorGroup
    device: torch.device
    timeout: timedelta | None = None
    are_dedicated: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.ranks)


GLOO_GRACE = timedelta(seconds=1)
"""Added to the timeout for waits over gloo. The error closes this rank's connections, which makes the other ranks fail
too. The grace period lets the watchdog raise the alarm, and all ranks report their waits, before that."""


@dataclass
class P2PHandle:
    """A running send or receive; ``buffer`` must stay alive until it has completed."""

    message_type: MessageType
    message: Message
    buffer: torch.Tensor
    work: Any


@dataclass
class Transport:
    """Starts transfers and waits for them.

    Attributes:
        waits: for each message awaited in this call, the ``clock``'s marks before and after the wait.
        action: the stage's current action.
        window: maximum pending sends per message type and peer; further sends wait. None: no limit.
        history: the last messages that were sent or received, and the collectives that ended.
        waiting: the message that is being waited for, or whose wait failed.
        receive_stream: the stream on which an accelerator receives.
    """

    links: StageLinks
    clock: Clock = field(default_factory=HostClock)
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    action: Action | None = None
    window: int | None = None
    history: deque[tuple[str, MessageType, Message] | str] = field(default_factory=lambda: deque(maxlen=HISTORY_LENGTH))
    waiting: tuple[str, MessageType, Message] | None = None
    receive_stream: Any = None
    _pending_sends: dict[tuple[MessageType, int], deque[P2PHandle]] = field(
        default_factory=lambda: defaultdict(deque)
    )  # by peer

    def send(self, message_type: MessageType, message: Message, buffer: torch.Tensor) -> None:
        """Start sending ``buffer``, which must not change until the send has completed."""
        sends = self._pending_sends[message_type, message.peer]
        sends.append(self._start(dist.isend, message_type, message, buffer))
        self.history.append(("sent", message_type, message))
        if not is_host(self.links.device) and message_type is not MessageType.HEADER:
            while sends and sends[0].work.is_completed():  # an event query; gloo only completes in wait
                sends.popleft()
        while self.window is not None and len(sends) > self.window:
            self._wait(sends.popleft(), "sending")

    def receive(self, message_type: MessageType, message: Message, buffer: torch.Tensor) -> P2PHandle:
        """Start receiving into ``buffer``."""
        return self._start(dist.irecv, message_type, message, buffer)

    def wait_for(self, transfer: P2PHandle) -> torch.Tensor:
        """Wait for a receive and return its bytes."""
        start = self.clock.mark()
        self._wait(transfer, "receiving")
        if self.receive_stream is not None and transfer.message_type is not MessageType.HEADER:
            record_current_stream(transfer.buffer)
        self.waits.append((start, self.clock.mark()))
        self.history.append(("received", transfer.message_type, transfer.message))
        return transfer.buffer

    def release_activations(self, gradient: Message) -> None:
        """Free sent activations' buffers, up to and including the activation whose gradient is ``gradient``.

        The peer received that activation before it sent the gradient, so these sends have completed.
        """
        sends, activation_key = (
            self._pending_sends[MessageType.ACTIVATION, gradient.peer],
            (gradient.micro_batch, gradient.chunk),
        )
        sent_keys = [(handle.message.micro_batch, handle.message.chunk) for handle in sends]
        for _ in range(sent_keys.index(activation_key) + 1 if activation_key in sent_keys else 0):
            self._wait(sends.popleft(), "sending")

    def finish(self) -> None:
        """Wait until all sends have completed."""
        for sends in self._pending_sends.values():
            while sends:
                self._wait(sends.popleft(), "sending")

    def reset(self) -> None:
        """Drop a failed call's state."""
        for sends in self._pending_sends.values():
            sends.clear()
        self.waits.clear()

    def abort(self) -> bool:
        """Abort an accelerator's message groups after an error; return True if they were aborted.

        Without this, posted receives would block the device forever, since no rank sends to them any more. The groups
        are unusable afterwards.
        """
        if is_host(self.links.device) or not self.links.are_dedicated:
            return False
        groups = {
            id(group): group
            for (msg_type, *_), group in self.links.groups.items()
            if msg_type is not MessageType.HEADER
        }
        for group in groups.values():
            torch_api.abort(group, self.links.device)
        return True

    def _start(self, operation: Any, message_type: MessageType, message: Message, buffer: torch.Tensor) -> P2PHandle:
        stage, peer = self.links.stage, message.peer
        route = (message_type, stage, peer) if operation is dist.isend else (message_type, peer, stage)
        try:
            work = operation(buffer, self.links.ranks[peer], group=self.links.groups[route], tag=int(message_type))
        except RuntimeError as error:
            verb = "sending" if operation is dist.isend else "receiving"
            raise self._peer_lost(error, P2PHandle(message_type, message, buffer, None), verb) from error
        return P2PHandle(message_type, message, buffer, work)

    def _wait(self, transfer: P2PHandle, verb: str) -> None:
        self.waiting = verb, transfer.message_type, transfer.message
        is_over_gloo = (
            transfer.message_type is MessageType.HEADER
            or is_host(self.links.device)
            or isinstance(transfer.work, CopiedWork)
        )
        try:
            if is_over_gloo and self.links.timeout is not None:
                transfer.work.wait(self.links.timeout + GLOO_GRACE)
            else:
                transfer.work.wait()
        except RuntimeError as error:
            raise self._peer_lost(error, transfer, verb) from error
        self.waiting = None

    def _peer_lost(self, error: RuntimeError, transfer: P2PHandle, verb: str) -> PeerLost:
        message, peer = transfer.message, transfer.message.peer
        chunk = f" chunk {message.chunk}" if message.chunk else ""
        during = f" during {self.action}" if self.action is not None and verb == "receiving" else ""
        return PeerLost(
            f"stage {self.links.stage} lost stage {peer} (rank {self.links.ranks[peer]}) while {verb} the "
            f"{transfer.message_type.name.lower()} of micro-batch {message.micro_batch}{chunk}{during}: {error}"
        )
