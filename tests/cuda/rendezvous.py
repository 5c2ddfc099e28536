"""Messages of a pipeline as NCCL runs them: does it end?

``trace`` has every stage, the project's own ``Stage`` and ``P2PCommunicator``, run its actions in a thread, and notes
what each starts in order. ``stuck`` runs these lists on a model of GPUs:

* each communicator and the computation have a stream, whose work runs in order; a send waits for what was given to the
  computation ahead of it, and what waits for a message is behind it; a receive waits for nothing;
* streams share ``num_queues`` hardware queues (CUDA_DEVICE_MAX_CONNECTIONS), in which nothing starts ahead of what
  came earlier;
* a send is done when its receive runs, and the other way round; the messages of a communicator are matched in order;
* a host may stall ahead of any action and any kernel until all that it has given to its GPU is done: memory is got from
  the driver, a kernel is loaded. What a run with more stalls gets through, one with fewer does.

Nothing here takes time: what can go on does, until all is done or nothing can.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tds.engine.schedule_plan import SchedulePlan
from tds.engine.stage import Stage
from tds.engine.stage_call import Call
from tds.p2p import communicator
from tds.p2p.communicator import P2PCommunicator, Slice
from tds.p2p.process_groups import routes
from tds.p2p.transport import StageLinks
from tds.schedule import Kind, Placement

CPU = torch.device("cpu")
DEADLINE_S = 60.0
NOTHING = -1


class Step(NamedTuple):
    """What a host does: ``kind`` is "action", "kernel", "send", "receive", "wait", "tell" or "hear".

    ``route`` is the communicator of a message; ``number`` which message of it, or of the host's.
    """

    kind: str
    route: Any = None
    number: int = 0


class Work:
    """A message on its way, of the stage whose thread has started it."""

    def __init__(self, steps: list[Step], step: Step, on_wait: Any = None) -> None:
        self._steps, self._step, self._on_wait = steps, step, on_wait

    def wait(self, timeout: Any = None) -> bool:
        if self._on_wait is not None:
            self._on_wait()
        else:
            self._steps.append(Step("wait", self._step.route, self._step.number))
        return True

    def is_completed(self) -> bool:
        return False


class _Piece(nn.Module):
    """A layer that no schedule splits: what takes gradients of weights apart is one for a process, not for a thread."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.weight, self.steps = nn.Parameter(torch.ones(2)), steps

    def forward(self, inputs: Any, chunk: int = 0) -> torch.Tensor:
        self.steps.append(Step("kernel"))
        return self.weight * (inputs[0] if isinstance(inputs, tuple) else inputs)


class _Data:
    def begin(self, reads: bool) -> None: ...

    def next(self, micro_batch: int) -> Any:
        return (torch.ones(1, 2),), None


@contextmanager
def _messages(steps_of: dict[int, list[Step]], used: Iterable[Any]) -> Iterator[None]:
    """Let ``isend`` and ``irecv`` of the threads by that name be noted; headers do travel, on the routes that are used.

    The queues are there before the threads are: two that made one at the same time would each have their own.
    """
    headers: dict[Any, queue.Queue[torch.Tensor]] = {route: queue.Queue() for route in used if route[0] is Kind.HEADER}
    counts: dict[Any, int] = defaultdict(int)

    def start(kind: str, tensor: torch.Tensor, route: Any) -> Work:
        stage = int(threading.current_thread().name)
        steps, key = steps_of[stage], (kind, route)
        step = Step(kind, route, counts[key])
        counts[key] += 1
        if route[0] is not Kind.HEADER:
            steps.append(step)
            return Work(steps, step)
        if kind == "send":
            steps.append(Step("tell", route, step.number))
            headers[route].put(tensor.clone())
            return Work(steps, step, lambda: None)

        def hear() -> None:
            steps.append(Step("hear", route, step.number))
            tensor.copy_(headers[route].get(timeout=DEADLINE_S))

        return Work(steps, step, hear)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", lambda tensor, dst, group=None, tag=0: start("send", tensor, group))
        patch.setattr(dist, "irecv", lambda tensor, src, group=None, tag=0: start("receive", tensor, group))
        patch.setattr(communicator, "is_host", lambda device: False)
        yield


def trace(schedule: Any, num_stages: int, num_micro_batches: int, chunks: int = 1, calls: int = 2) -> list[list[Step]]:
    """Return what each stage does in so many training calls, one behind the other."""
    steps_of: dict[int, list[Step]] = {stage: [] for stage in range(num_stages)}
    problems: list[BaseException] = []

    def run(stage: int) -> None:
        steps = steps_of[stage]
        lie = Placement(num_stages, chunks)
        groups = {route: route for route in routes(lie) if stage in route[1:]}
        links = StageLinks(stage, list(range(num_stages)), groups, Slice(), CPU)
        made = _Piece(steps)
        exchange = P2PCommunicator(links, made, placement=lie)
        plan = SchedulePlan(schedule, placement=lie, stage=stage)
        worker = Stage(made, exchange, CPU)
        worker.splitter.active = nullcontext  # type: ignore[method-assign] - F.linear is one for all threads
        exchange.set_limits(*plan.limits(num_micro_batches))
        gradients = SimpleNamespace(
            come_in_hooks=True, before_backward=lambda: None, after_backward=lambda: steps.append(Step("kernel"))
        )
        try:
            for _ in range(calls):
                call = Call(
                    _Data(), True, SimpleNamespace(add=lambda loss, _: loss), lambda output, _: output.sum(),  # type: ignore[arg-type]
                    gradients, on_action=lambda _: steps.append(Step("action")),  # type: ignore[arg-type]
                )  # fmt: skip
                worker.run(plan.training(num_micro_batches), call)
        except BaseException as error:
            problems.append(error)

    with _messages(steps_of, routes(Placement(num_stages, chunks))):
        threads = [threading.Thread(target=run, args=(s,), name=str(s), daemon=True) for s in range(num_stages)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    if problems:
        raise problems[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"a stage has not done its actions within {DEADLINE_S} s, on a machine that is too busy")
    return [steps_of[stage] for stage in range(num_stages)]


@dataclass
class _Entry:
    """Work on a GPU: it starts behind ``behind``; a message is done with its other half."""

    stream: Any
    behind: list[_Entry]
    half: tuple[str, Any, int] | None = None
    is_started: bool = False
    is_done: bool = False


@dataclass
class _Gpu:
    """A stage's host and GPU. ``stalls``: given the number of an action or kernel, whether the host waits for all its
    work ahead of it."""

    steps: Sequence[Step]
    num_queues: int
    stalls: Callable[[int], bool]
    at: int = 0
    places: int = 0
    last: dict[Any, _Entry] = field(default_factory=dict)
    queues: list[deque[_Entry]] = field(default_factory=list)
    streams: dict[Any, int] = field(default_factory=dict)
    given: list[_Entry] = field(default_factory=list)
    messages: dict[Any, _Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queues = [deque() for _ in range(self.num_queues)]

    def give(self, stream: Any, behind: Iterable[_Entry | None], half: Any = None) -> _Entry:
        number = self.streams.setdefault(stream, len(self.streams))
        entry = _Entry(stream, [each for each in (*behind, self.last.get(stream)) if each is not None], half)
        self.last[stream] = entry
        self.queues[number % self.num_queues].append(entry)
        self.given.append(entry)
        return entry

    def host(self, sent: set[Any]) -> bool:
        """Let the host go on as far as it can; return whether it did."""
        before = self.at
        while self.at < len(self.steps):
            step = self.steps[self.at]
            if step.kind in ("action", "kernel"):
                if self.stalls(self.places) and not all(each.is_done for each in self.given):
                    break
                self.places += 1
                if step.kind == "kernel":
                    self.give("computation", ())
            elif step.kind == "hear":
                if (step.route, step.number) not in sent:
                    break
            elif step.kind == "tell":
                sent.add((step.route, step.number))
            elif step.kind == "wait":
                self.give("computation", [self.messages[step.route, step.number]])
            else:
                behind = [self.last.get("computation")] if step.kind == "send" else []
                made = self.give(step.route, behind, (step.kind, step.route, step.number))
                self.messages[step.route, step.number] = made
            self.at += 1
        return self.at > before

    def device(self, halves: dict[Any, _Entry]) -> bool:
        """Start what can start; return whether anything did."""
        moved = False
        for line in self.queues:
            while line and all(each.is_done for each in line[0].behind):
                entry = line.popleft()
                entry.is_started = moved = True
                if entry.half is None:
                    entry.is_done = True
                    continue
                halves[entry.half] = entry
                kind, route, number = entry.half
                other = halves.get(("receive" if kind == "send" else "send", route, number))
                if other is not None:
                    entry.is_done = other.is_done = True
        self.given = [each for each in self.given if not each.is_done]
        return moved


def stuck(
    steps: Sequence[Sequence[Step]],
    num_queues: int = 32,
    stalls: Callable[[int, int], bool] = lambda stage, place: False,
) -> str:
    """Return where a run of these lists stands still; "" where it ends.

    Args:
        stalls: given a stage and the number of an action or kernel there, whether its host waits for its GPU first.
    """
    gpus = [_Gpu(each, num_queues, partial(stalls, stage)) for stage, each in enumerate(steps)]
    sent: set[Any] = set()
    halves: dict[Any, _Entry] = {}
    moved = True
    while moved:
        moved = False
        for gpu in gpus:
            moved |= gpu.host(sent) | gpu.device(halves)
    left = [
        f"stage {stage} at {gpu.steps[gpu.at] if gpu.at < len(gpu.steps) else 'its end'}, {len(gpu.given)} not done"
        for stage, gpu in enumerate(gpus)
        if gpu.at < len(gpu.steps) or gpu.given
    ]
    return "; ".join(left)
