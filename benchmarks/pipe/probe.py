"""Where time goes: seconds of each layer, Python's own profile of a step, and a recorded step beside its simulation."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.pipe.model import Batch, Model

REPEATS = 5
NUM_LINES = 40


def seconds_of_layers(chain: nn.Module, model: Model, batch: Batch) -> list[float]:
    """Return seconds of forward and backward of each layer for one micro-batch; the loss counts to the last."""
    layers = list(chain.children())
    rounds = []
    for _ in range(REPEATS + 1):
        x, labels = batch
        seconds = []
        for index, layer in enumerate(layers):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x = x.detach().requires_grad_()
            is_last = index == len(layers) - 1
            start = time.perf_counter()
            y = layer(x)
            out = model.loss_fn(y, labels) if is_last else y
            middle = time.perf_counter()
            gradient = torch.ones_like(out)
            after = time.perf_counter()
            out.backward(gradient)
            seconds.append(middle - start + time.perf_counter() - after)
            x = y
        rounds.append(seconds)
    for parameter in chain.parameters():
        parameter.grad = None
    return [statistics.median(each) for each in zip(*rounds[1:], strict=True)]


def seconds_by_profile(module: Any) -> list[float]:
    """Return seconds of each layer as our engine measures them to cut by, the medians of several looks. Collective."""
    rounds = [[layer.total_s for layer in module._profiled_cut().layers] for _ in range(REPEATS)]
    return [statistics.median(each) for each in zip(*rounds, strict=True)]


def hot_spots(run: Callable[[], Any]) -> str:
    """Return the functions in which ``run`` spends most time of its own, as a table."""
    profile = cProfile.Profile()
    profile.runcall(run)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(NUM_LINES)
    return text.getvalue()


# A recorded step of our engine against ``simulate`` with the costs of that same step.
#
# Each rank records its actions (``tds.timers``). Costs are means over the micro-batches, of a forward or a half of a
# backward on each piece; a transfer is the median time from the end of the sender's action to the end of the wait for
# its message, of the messages that were waited for. What follows the actions (loss, optimizer) is added as measured.


@dataclass(frozen=True)
class Recorded:
    """One step of one rank: its ``tds.timers.Work``, seconds of train_batch, and of what came after the actions."""

    work: list[Any]
    step_s: float
    tail_s: float


def record_steps(engine: Any, steps: list[list[Batch]]) -> list[Recorded]:
    """Take steps of our engine and return what each was. Collective."""
    from tds.timers import Recorder

    stage, run = engine._stage, engine._stage.run
    recorder = Recorder(stage.exchange)

    def recorded_run(*args: Any, **kwargs: Any) -> None:
        stage.recorder = recorder
        run(*args, **kwargs)
        stage.recorder = None

    stage.run = recorded_run
    found = []
    for batches in steps:
        start = time.perf_counter_ns()
        engine.train_batch(iter(batches))
        stop = time.perf_counter_ns()
        work = recorder.take()
        found.append(Recorded(work, (stop - start) * 1e-9, (stop - work[-1].ended_ns) * 1e-9))
    del stage.run
    return found


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step as measured and as simulated, with the costs that the simulation took."""

    measured_s: float
    simulated_s: float
    costs: Any

    @property
    def ratio(self) -> float:
        return self.measured_s / self.simulated_s


def compare(stages: Sequence[Recorded], num_chunks: int) -> Prediction:
    """Return one step of all stages beside its simulation."""
    from tds.schedule import simulate

    costs = costs_of([each.work for each in stages], num_chunks)
    actions = [[work.action for work in each.work] for each in stages]
    timeline = simulate(actions, costs, num_chunks)
    tail_s = min(each.tail_s for each in stages)  # the others' holds their wait for the slowest
    return Prediction(max(each.step_s for each in stages), timeline.step_s + tail_s, costs)


def costs_of(stages: Sequence[Sequence[Any]], num_chunks: int) -> Any:
    """Return the costs of a recorded step: means over the micro-batches."""
    from tds import timers

    seconds = [timers.durations_of(works) for works in stages]
    means = [{key: statistics.fmean(each) for key, each in stage.items()} for stage in seconds]
    return replace(timers.costs_of(means, num_chunks), transfer=transfer_s(stages, num_chunks))


def transfer_s(stages: Sequence[Sequence[Any]], num_chunks: int) -> float:
    """Return the median time of a message that was waited for, from the end of the action that sent it."""
    from tds.schedule import Forward, sent
    from tds.schedule.schedules import received

    p = len(stages)
    sent_ns = {}
    for stage, works in enumerate(stages):
        for work in works:
            message = sent(work.action, stage, p, num_chunks)
            if message is not None:
                piece = work.action.chunk * p + stage + (1 if isinstance(work.action, Forward) else -1)
                sent_ns[message.kind, message.micro_batch, piece] = work.ended_ns
    found = []
    for stage, works in enumerate(stages):
        for work in works:
            message = received(work.action, stage, p, num_chunks)
            if message is None or not work.waits:
                continue
            left = sent_ns[message.kind, message.micro_batch, work.action.chunk * p + stage]
            began, ended = work.waits[-1]
            if began < left:
                found.append(max(0, ended - left) * 1e-9)
    return statistics.median(found) if found else 0.0
