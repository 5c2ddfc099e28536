"""The speed of a rank at a moment: a fixed piece of work, timed beside everything else that is timed.

A machine that other programs or other guests of its host use changes its speed by half within seconds, and what is
timed in a slow second is no property of the work. So each time is taken as a multiple of the reference that was timed
ahead of it and behind it, and a calibration gives all of them at one speed: that of its median reading
(``Machine.reference_s``). What a training takes can then be compared at the speed of its machine's calibration.

The reference is the MLP of a small layer, forward and backward, since that has a step's mixture of products and of
passes over memory. A product alone, which stays in the caches, follows a step's speed less well (docs/experiments.md).

On GPUs nothing is scaled: their clocks are their own, and so short a piece of work would tell the time of its starts.
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
"""Of one look, of which the shorter counts: the first finds the caches full of other work."""


class Reference:
    """Reads the speed of all ranks at once; the slowest rank's reading counts on each. Its methods are collective.

    Args:
        now: the clock that what is scaled is timed by.
        looks: of a reading the median of so many counts: one takes some ms, in which a guest of the same host may be
            at work or not, and what is timed beside it may take seconds.
    """

    def __init__(self, rank: Rank, now: Callable[[], float], looks: int = 1) -> None:
        self._rank, self._now, self._looks = rank, now, looks
        self._turn = _mlp(rank.place) if rank.kind == "cpu" else None
        self._began = time.perf_counter(), busy_s(), time.process_time()
        self.readings: list[float] = []
        for _ in range(3):  # first touch of memory, choice of kernels
            self.read()
        self.readings = [self.readings[-1]]

    @property
    def unit_s(self) -> float:
        """The reading at whose speed ``scale`` gives all times: the first."""
        return self.readings[0]

    @property
    def usual_s(self) -> float:
        """The median reading so far."""
        return statistics.median(self.readings)

    def read(self) -> float:
        """Return the seconds of the reference now, on the slowest rank; 1 on a GPU."""
        found = [self._look() for _ in range(self._looks)] if self._turn is not None else [1.0]
        self.readings.append(statistics.median(found))
        return self.readings[-1]

    def beside(self) -> float:
        """Return the mean of the last reading, ahead of what was timed since, and of one behind it."""
        ahead = self.readings[-1]
        return (ahead + self.read()) / 2

    def scale(self) -> float:
        """Return by what to multiply the seconds of what was timed since the last reading."""
        return self.unit_s / self.beside()

    def others(self) -> float:
        """Return how many cores other programs have had since this was made, on average."""
        wall, busy, cpu = self._began
        others_s = busy_s() - busy - self._rank.sum(time.process_time() - cpu)
        return max(0.0, others_s) / max(time.perf_counter() - wall, 1e-9)

    def lost_s(self, before: dict[int, float], seconds: float) -> float:
        """Return how many of the last ``seconds``, in which ranks waited for one another, went to other programs.

        It is what a thread stood in the run queue, as far as other programs were at work: threads of one rank wait for
        a core, too. Where ranks share cores, and wait for one another, it is what all lose together.

        Args:
            before: what ``waits`` gave ahead of them.
        """
        if self._rank.kind != "cpu":
            return 0.0  # it goes on while this process waits
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
    """Return the wall clock, from any beginning, less what this thread has stood in the run queue.

    So it is the time that the work of one thread takes on a core of its own, also where others share it.
    """
    waited = waited_s()
    while True:
        now, before = time.perf_counter(), waited
        waited = waited_s()
        if waited == before:  # else this thread stood there between the two clocks
            return now - waited


def waited_s(thread: int | None = None) -> float:
    """Return the seconds that a thread of this process has stood in the run queue, as Linux counts them; 0 if unknown.

    Args:
        thread: its number for the system; None: this thread.
    """
    thread = thread or threading.get_native_id()
    try:
        file = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        words = os.read(file, 256).split()
    except OSError:  # the thread is gone
        return 0.0
    finally:
        os.close(file)
    return int(words[1]) / 1e9 if len(words) > 1 else 0.0


def waits() -> dict[int, float]:
    """Return what each thread of this process has stood in the run queue so far."""
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return {}
    return {thread: waited_s(thread) for thread in threads}


def longest_wait(before: dict[int, float]) -> float:
    """Return the most that a thread of this process has stood in the run queue since ``waits`` gave ``before``."""
    return max((now - before.get(thread, 0.0) for thread, now in waits().items()), default=0.0)


def busy_s() -> float:
    """Return the seconds that all cores have been at work so far, in ticks of the system, 10 ms; 0 if unknown."""
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
