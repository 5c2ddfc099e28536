"""OverlappingStage: the forward of one micro-batch beside the backward of another, in a thread of its own, with
``"pipeline": {"overlap_forward_backward": true}``.

| | main thread | the forward's thread |
|---|---|---|
| 1 | posts what the forward receives | takes it |
| 2 | takes what the backward receives | runs the layers |
| 3 | runs autograd, whose hooks are as ever | the same, until its output is sent |
| 4 | sends the gradients, waits for the forward | |

Numbers are to the bit what they are without: each pass is the same, and backwards keep their order. Which two passes
make a pair follows from the order of the whole pipeline (``tds.schedule.overlap``), so that ranks of one stage agree.

What both passes share, and who sees to it: messages that are sent, ``SharedCommunicator``; ``F.linear``, which is
swapped for a forward that is to be split, while no backward here calls it (recompute is refused); process groups of the
layers, which must be others in the thread of the forward (``runs_beside_backward``): collectives of two threads would
come in another order on each rank.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tds.engine.stage import Call, SchedulePlan, Stage
from tds.gradients import let_run_beside_backward, runs_beside_backward
from tds.p2p.communicator import P2PCommunicator
from tds.schedule import Action, Forward, Kind, Message


class SharedCommunicator(P2PCommunicator):
    """The messages of a stage whose passes send from two threads; only one of them receives at a time.

    Attributes:
        taken: set once the forward of a pair has its message, or has failed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._waiting: dict[bool, tuple[str, Kind, Message] | None] = {}
        super().__init__(*args, **kwargs)
        self.taken = threading.Event()
        self._lock = threading.Lock()

    @property  # type: ignore[override]
    def waiting(self) -> tuple[str, Kind, Message] | None:
        """What the thread of the backwards waits for, or else the other."""
        return self._waiting.get(False) or self._waiting.get(True)

    @waiting.setter
    def waiting(self, what: tuple[str, Kind, Message] | None) -> None:
        self._waiting[runs_beside_backward()] = what

    def send(self, kind: Kind, message: Message, buffer: torch.Tensor) -> None:
        with self._lock:
            super().send(kind, message, buffer)

    def let_go(self, answer: Message) -> None:
        with self._lock:
            super().let_go(answer)

    def recv_forward(self, message: Message) -> tuple[Any, list[torch.Tensor]]:
        received = super().recv_forward(message)
        self.taken.set()
        return received


class ForwardThread:
    """Runs one function at a time. It is a daemon: a forward that waits for a lost rank keeps no process alive."""

    def __init__(self, num_threads: int) -> None:
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(num_threads,), name="tds forward", daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def start(self, function: Callable[[], None]) -> None:
        """Begin to run ``function``."""
        self._todo.put(function)

    def join(self) -> None:
        """Wait until it is done; raise what it raised."""
        error = self._done.get()
        if error is not None:
            raise error

    def _work(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        let_run_beside_backward()
        while True:
            function = self._todo.get()
            try:
                function()
            except BaseException as error:  # noqa: BLE001 - join raises it
                self._done.put(error)
            else:
                self._done.put(None)


def waits_behind(began: int, waits: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what lies behind ``began`` of ``waits``, each from when until when: ahead of it something else ran."""
    return [(max(since, began), until) for since, until in waits if until > began]


class OverlappingStage(Stage):
    """A stage that runs the pairs of its schedule at once.

    Args:
        plan: says which forwards have a backward beside them.
    """

    exchange: SharedCommunicator

    def __init__(self, *args: Any, plan: SchedulePlan) -> None:
        super().__init__(*args)
        self._plan = plan
        self._thread: ForwardThread | None = None
        self._beside: Forward | None = None

    def _do(self, actions: Sequence[Action], call: Call) -> None:
        paired = self._plan.paired(1 + max(a.micro_batch for a in actions)) if call.is_training else frozenset()
        rest = iter(actions)
        for action in rest:
            if action in paired and isinstance(action, Forward):
                self._do_pair(action, next(rest), call)
            else:
                super()._do((action,), call)

    def _do_pair(self, forward: Forward, backward: Action, call: Call) -> None:
        """Run ``forward`` in its thread from when its message is there, and ``backward`` here as soon as its own is."""
        if self._thread is None:
            self._thread = ForwardThread(torch.get_num_threads())
        mark, waits = self.exchange.clock.mark, self.exchange.waits
        marks: list[Any] = []
        num_before = len(waits)
        self._begin(forward, call)
        self._beside = forward
        self.exchange.taken.clear()
        kind = self.device.type
        autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self._thread.start(lambda: self._run_beside(forward, call, autocast, marks))
        try:
            self.exchange.taken.wait()
            num_taken = len(waits)
            self._begin(backward, call)
            began = mark()
            self._methods[type(backward)](backward, call)
            ended = mark()
        finally:
            self._thread.join()  # an error of the forward goes ahead of the backward's, as it would in turn
            self._beside = self.exchange.action = None
        if self.recorder is not None:
            self.recorder.note(forward, marks[0], marks[1], waits[num_before:num_taken], is_beside=True)
            self.recorder.note(backward, began, ended, waits[num_taken:])
        waits[num_taken:] = waits_behind(marks[1], waits[num_taken:])

    def _begin(self, action: Action, call: Call) -> None:
        self.exchange.begin_action(action)
        if call.on_action is not None:
            call.on_action(action)

    def _run_beside(self, action: Forward, call: Call, autocast: torch.autocast, marks: list[Any]) -> None:
        """Run the forward of a pair, in its thread."""
        marks.append(self.exchange.clock.mark())
        try:
            if self._program.messages[action][0] is None:
                self.exchange.taken.set()
            with autocast:
                self.forward(action, call)
        finally:
            marks.append(self.exchange.clock.mark())
            self.exchange.taken.set()

    def _splitting(self, action: Action) -> AbstractContextManager[None]:
        """In a pair the forward's thread alone swaps ``F.linear``: the backward computes no layer again."""
        is_other = self._beside is not None and not isinstance(action, Forward)
        return nullcontext() if is_other else super()._splitting(action)

    def _forward_of(self) -> tuple[int, int] | None:
        """Return the forward of a pair to its own thread."""
        if self._beside is not None and self._thread is not None:
            return (self._beside.micro_batch, self._beside.chunk) if self._thread.is_here else None
        return super()._forward_of()
