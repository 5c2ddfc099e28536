"""Messages of a pipeline as NCCL runs them: does it end?

``trace`` has every stage, the project's own ``Stage`` and ``P2PCommunicator``, run its actions in a thread, and notes
what each starts in order. ``find_deadlock`` runs these lists on a model of GPUs:

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
from tds.p2p.communicator import P2PCommunicator, TensorGroup
from tds.p2p.process_groups import routes
from tds.p2p.transport import StageLinks
from tds.schedule import MessageType, Placement

CPU = torch.device("cpu")
DEADLINE_S = 60.0
NOTHING = -1


class Step(NamedTuple):
    """What a host does: ``kind`` is "action", "kernel", "send", "receive", "wait", "tell" or "hear".

    ``route`` is the communicator of a message; ``message_idx`` which message of it, or of the host's.
    """

    kind: str
    route: Any = None
    message_idx: int = 0


class Work:
    """A message on its way, of the stage whose thread has started it."""

    def __init__(self, steps: list[Step], step: Step, on_wait: Any = None) -> None:
        self._steps, self._step, self._on_wait = steps, step, on_wait

    def wait(self, timeout: Any = None) -> bool:
        if self._on_wait is not None:
            self._on_wait()
        else:
            self._steps.append(Step("wait", self._step.route, self._step.message_idx))
        return True

    def is_completed(self) -> bool:
        return False


class _Layer(nn.Module):
    """A layer that no schedule splits: what takes gradients of weights apart is one for a process, not for a thread."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.weight, self.steps = nn.Parameter(torch.ones(2)), steps

    def forward(self, inputs: Any, chunk: int = 0) -> torch.Tensor:
        self.steps.append(Step("kernel"))
        return self.weight * (inputs[0] if isinstance(inputs, tuple) else inputs)


class _FakeData:
    def begin(self, reads: bool) -> None: ...

    def next(self, micro_batch: int) -> Any:
        return (torch.ones(1, 2),), None


@contextmanager
def _record_messages(steps_of: dict[int, list[Step]], used_routes: Iterable[Any]) -> Iterator[None]:
    """Let ``isend`` and ``irecv`` of the threads by that name be noted; headers do travel, on the routes that are used.

    The queues are there before the threads are: two that made one at the same time would each have their own.
    """
    headers: dict[Any, queue.Queue[torch.Tensor]] = {
        route: queue.Queue() for route in used_routes if route[0] is MessageType.HEADER
    }
    counts: dict[Any, int] = defaultdict(int)

    def start(step_type: str, tensor: torch.Tensor, route: Any) -> Work:
        stage = int(threading.current_thread().name)
        steps, key = steps_of[stage], (step_type, route)
        step = Step(step_type, route, counts[key])
        counts[key] += 1
        if route[0] is not MessageType.HEADER:
            steps.append(step)
            return Work(steps, step)
        if step_type == "send":
            steps.append(Step("tell", route, step.message_idx))
            headers[route].put(tensor.clone())
            return Work(steps, step, lambda: None)

        def receive_header() -> None:
            steps.append(Step("hear", route, step.message_idx))
            tensor.copy_(headers[route].get(timeout=DEADLINE_S))

        return Work(steps, step, receive_header)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", lambda tensor, dst, group=None, tag=0: start("send", tensor, group))
        patch.setattr(dist, "irecv", lambda tensor, src, group=None, tag=0: start("receive", tensor, group))
        patch.setattr(communicator, "is_host", lambda device: False)
        yield


def trace(schedule: Any, num_stages: int, num_micro_batches: int, chunks: int = 1, calls: int = 2) -> list[list[Step]]:
    """Return what each stage does in so many training calls, one behind the other."""
    steps_of: dict[int, list[Step]] = {stage: [] for stage in range(num_stages)}
    errors: list[BaseException] = []

    def run(stage: int) -> None:
        steps = steps_of[stage]
        placement = Placement(num_stages, chunks)
        groups = {route: route for route in routes(placement) if stage in route[1:]}
        links = StageLinks(stage, list(range(num_stages)), groups, TensorGroup(), CPU)
        layer = _Layer(steps)
        stage_communicator = P2PCommunicator(links, layer, placement=placement)
        plan = SchedulePlan(schedule, placement=placement, stage=stage)
        stage_worker = Stage(layer, stage_communicator, CPU)
        stage_worker.splitter.active = nullcontext  # type: ignore[method-assign] - F.linear is one for all threads
        stage_communicator.set_limits(*plan.message_limits(num_micro_batches))
        gradients = SimpleNamespace(
            accumulates_in_hooks=True, before_backward=lambda: None, after_backward=lambda: steps.append(Step("kernel"))
        )
        try:
            for _ in range(calls):
                call = Call(
                    _FakeData(), True, SimpleNamespace(add=lambda loss, _: loss), lambda output, _: output.sum(),  # type: ignore[arg-type]
                    gradients, on_action=lambda _: steps.append(Step("action")),  # type: ignore[arg-type]
                )  # fmt: skip
                stage_worker.run(plan.training_actions(num_micro_batches), call)
        except BaseException as error:
            errors.append(error)

    with _record_messages(steps_of, routes(Placement(num_stages, chunks))):
        threads = [threading.Thread(target=run, args=(s,), name=str(s), daemon=True) for s in range(num_stages)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"a stage has not done its actions within {DEADLINE_S} s, on a machine that is too busy")
    return [steps_of[stage] for stage in range(num_stages)]


@dataclass
class _Entry:
    """Work on a GPU: it starts behind ``dependencies``; a message is done with its other half."""

    stream: Any
    dependencies: list[_Entry]
    message_half: tuple[str, Any, int] | None = None
    is_started: bool = False
    is_done: bool = False


@dataclass
class _Gpu:
    """A stage's host and GPU. ``stalls``: given the number of an action or kernel, whether the host waits for all its
    work ahead of it."""

    steps: Sequence[Step]
    num_queues: int
    stalls: Callable[[int], bool]
    step_idx: int = 0
    action_idx: int = 0
    last_entries: dict[Any, _Entry] = field(default_factory=dict)
    queues: list[deque[_Entry]] = field(default_factory=list)
    streams: dict[Any, int] = field(default_factory=dict)
    pending: list[_Entry] = field(default_factory=list)
    messages: dict[Any, _Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queues = [deque() for _ in range(self.num_queues)]

    def enqueue(self, stream: Any, dependencies: Iterable[_Entry | None], message_half: Any = None) -> _Entry:
        stream_idx = self.streams.setdefault(stream, len(self.streams))
        entry = _Entry(
            stream,
            [dependency for dependency in (*dependencies, self.last_entries.get(stream)) if dependency is not None],
            message_half,
        )
        self.last_entries[stream] = entry
        self.queues[stream_idx % self.num_queues].append(entry)
        self.pending.append(entry)
        return entry

    def advance_host(self, sent: set[Any]) -> bool:
        """Let the host go on as far as it can; return whether it did."""
        before = self.step_idx
        while self.step_idx < len(self.steps):
            step = self.steps[self.step_idx]
            if step.kind in ("action", "kernel"):
                if self.stalls(self.action_idx) and not all(work.is_done for work in self.pending):
                    break
                self.action_idx += 1
                if step.kind == "kernel":
                    self.enqueue("computation", ())
            elif step.kind == "hear":
                if (step.route, step.message_idx) not in sent:
                    break
            elif step.kind == "tell":
                sent.add((step.route, step.message_idx))
            elif step.kind == "wait":
                self.enqueue("computation", [self.messages[step.route, step.message_idx]])
            else:
                dependencies = [self.last_entries.get("computation")] if step.kind == "send" else []
                entry = self.enqueue(step.route, dependencies, (step.kind, step.route, step.message_idx))
                self.messages[step.route, step.message_idx] = entry
            self.step_idx += 1
        return self.step_idx > before

    def advance_device(self, halves: dict[Any, _Entry]) -> bool:
        """Start what can start; return whether anything did."""
        has_progress = False
        for entries in self.queues:
            while entries and all(work.is_done for work in entries[0].dependencies):
                entry = entries.popleft()
                entry.is_started = has_progress = True
                if entry.message_half is None:
                    entry.is_done = True
                    continue
                halves[entry.message_half] = entry
                step_type, route, message_idx = entry.message_half
                other_half = halves.get(("receive" if step_type == "send" else "send", route, message_idx))
                if other_half is not None:
                    entry.is_done = other_half.is_done = True
        self.pending = [work for work in self.pending if not work.is_done]
        return has_progress


def find_deadlock(
    steps: Sequence[Sequence[Step]],
    num_queues: int = 32,
    stalls: Callable[[int, int], bool] = lambda stage, action_idx: False,
) -> str:
    """Return where a run of these lists stands still; "" where it ends.

    Args:
        stalls: given a stage and the number of an action or kernel there, whether its host waits for its GPU first.
    """
    gpus = [_Gpu(stage_steps, num_queues, partial(stalls, stage)) for stage, stage_steps in enumerate(steps)]
    sent: set[Any] = set()
    halves: dict[Any, _Entry] = {}
    has_progress = True
    while has_progress:
        has_progress = False
        for gpu in gpus:
            has_progress |= gpu.advance_host(sent) | gpu.advance_device(halves)
    unfinished = [
        f"stage {stage} at {gpu.steps[gpu.step_idx] if gpu.step_idx < len(gpu.steps) else 'its end'}, "
        f"{len(gpu.pending)} not done"
        for stage, gpu in enumerate(gpus)
        if gpu.step_idx < len(gpu.steps) or gpu.pending
    ]
    return "; ".join(unfinished)
