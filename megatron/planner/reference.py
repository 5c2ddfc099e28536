"""Speed of a rank at a moment: the time of a fixed piece of work, measured next to every other measurement.

If other programs, or other guests of the host, use a machine, its speed changes by half within seconds. A time measured
in a slow second is then not a property of the measured work. Each time is therefore divided by the time of the
reference, measured before and after it. A calibration reports all times at the speed of its median reading
(``Machine.reference_s``), so that a training's times can be compared at the speed of its machine's calibration.

The reference is the MLP of a small layer, forward and backward, since it has a step's mixture of matmuls and passes
over memory. A matmul that stays in the caches follows a step's speed less closely (docs/experiments.md).

On GPUs nothing is scaled: other programs do not change their clocks, and such a short piece of work would measure
launch overhead.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron import device
from megatron.planner.spawn_ranks import Rank

TOKENS, HIDDEN, FF = 512, 256, 512
TURNS = 2
"""Repetitions per measurement; the minimum is used because the first one runs with cold caches."""


class Reference:
    """Measures the speed of all ranks at once; the slowest rank's reading counts on each. Its methods are collective.

    Args:
        now: clock with which the scaled times are measured.
        looks: number of measurements per reading, of which the median is used. A single one takes some ms, during which
            a guest of the same host may or may not be active, while the measured work may take seconds.
    """

    def __init__(self, rank: Rank, now: Callable[[], float], looks: int = 1) -> None:
        self._rank, self._now, self._looks = rank, now, looks
        self._turn = _mlp(rank.place) if rank.kind == "cpu" else None
        self._began = time.perf_counter(), busy_s(), time.process_time()
        self.readings: list[float] = []
        for _ in range(3):  # warm-up: first touch of memory, selection of kernels
            self.read()
        self.readings = [self.readings[-1]]

    @property
    def unit_s(self) -> float:
        """The first reading; ``scale`` converts times to the speed of this reading."""
        return self.readings[0]

    @property
    def usual_s(self) -> float:
        """The median of the readings so far."""
        return statistics.median(self.readings)

    def read(self) -> float:
        """Return the current time of the reference on the slowest rank, in seconds; 1 on a GPU."""
        looks = [self._look() for _ in range(self._looks)] if self._turn is not None else [1.0]
        self.readings.append(statistics.median(looks))
        return self.readings[-1]

    def beside(self) -> float:
        """Return the mean of the last reading, before the measurements made since, and of a new one after them."""
        before = self.readings[-1]
        return (before + self.read()) / 2

    def scale(self) -> float:
        """Return the factor for the times measured since the last reading."""
        return self.unit_s / self.beside()

    def others(self) -> float:
        """Return the average number of cores used by other programs since this object was created."""
        wall, busy, cpu = self._began
        others_s = busy_s() - busy - self._rank.sum(time.process_time() - cpu)
        return max(0.0, others_s) / max(time.perf_counter() - wall, 1e-9)

    def lost_s(self, before: dict[int, float], seconds: float) -> float:
        """Return the part of the last ``seconds``, in which ranks waited for one another, that other programs took.

        It is the time that a thread spent in the run queue, limited to the time in which other programs were active,
        because threads of the same rank also wait for a core. If ranks share cores and wait for one another, it is the
        loss of all of them together.

        Args:
            before: result of ``waits`` before these seconds.
        """
        if self._rank.kind != "cpu":
            return 0.0  # a GPU continues while this process waits for a core
        others_s, cores = self.others() * seconds, len(os.sched_getaffinity(0))
        waited_s = self._rank.most(longest_wait(before))
        return others_s / cores if self._rank.size * self._rank.threads > cores else min(waited_s, others_s)

    def _look(self) -> float:
        return self._rank.most(min(self._once() for _ in range(TURNS)))

    def _once(self) -> float:
        assert self._turn is not None
        self._rank.meet()
        start = self._now()
        self._turn()
        return max(self._now() - start, 1e-9)


def own_core_s() -> float:
    """Return a wall clock, with an arbitrary origin, that stops while this thread is in the run queue.

    It measures the time that a thread's work would take on its own core, even if the core is shared.
    """
    waited = waited_s()
    while True:
        now, before = time.perf_counter(), waited
        waited = waited_s()
        if waited == before:  # otherwise this thread was in the run queue between the two clocks
            return now - waited


def waited_s(thread: int | None = None) -> float:
    """Return the seconds that a thread of this process has spent in the run queue, from Linux; 0 if unknown.

    Args:
        thread: native id of the thread; None: this thread.
    """
    thread = thread or threading.get_native_id()
    try:
        file = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        words = os.read(file, 256).split()
    except OSError:  # the thread has ended
        return 0.0
    finally:
        os.close(file)
    return int(words[1]) / 1e9 if len(words) > 1 else 0.0


def waits() -> dict[int, float]:
    """Return native thread id -> seconds in the run queue so far, for all threads of this process."""
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return {}
    return {thread: waited_s(thread) for thread in threads}


def longest_wait(before: dict[int, float]) -> float:
    """Return the longest time that a thread has spent in the run queue since ``waits`` returned ``before``."""
    return max((now - before.get(thread, 0.0) for thread, now in waits().items()), default=0.0)


def busy_s() -> float:
    """Return the seconds that all cores have been busy so far, in system ticks of 10 ms; 0 if unknown."""
    try:
        user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    except OSError:
        return 0.0
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _mlp(place: torch.device) -> Callable[[], object]:
    x = torch.randn(TOKENS, HIDDEN, device=place, requires_grad=True)
    up = torch.randn(FF, HIDDEN, device=place, requires_grad=True)
    down = torch.randn(HIDDEN, FF, device=place, requires_grad=True)
    gradient = torch.randn(TOKENS, HIDDEN, device=place)

    def turn() -> None:
        inner = F.gelu(F.linear(F.layer_norm(x, (HIDDEN,)), up), approximate="tanh")
        torch.autograd.grad(x + F.linear(inner, down), (x, up, down), gradient)
        device.synchronize(place.type)

    return turn
