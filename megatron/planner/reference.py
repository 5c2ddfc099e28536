"""Reference workload that measures the current speed of a rank, to correct benchmarks for changes in speed.

If other programs run on a machine, or other guests on its host, its speed can change by half within seconds. The time
of the reference is therefore measured before and after every benchmark, and the benchmark's time is divided by it. A
calibration scales all times to its median reading of the reference (``Machine.reference_s``). A training step can be
compared with the plan by scaling its time in the same way.

The reference is the forward and backward pass of a small MLP, which has a mixture of matmuls and memory passes similar
to that of a training step. The time of a matmul whose data fit into the caches correlates less with step times
(docs/experiments.md).

On GPUs, times are not scaled: other programs do not change the GPU's clocks, and such a small workload would only
measure launch overhead.
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
NUM_REPETITIONS = 2
"""Repetitions per measurement; the minimum is used because the first one runs with cold caches."""


class Reference:
    """Measures the speed of all ranks together. A reading is the time on the slowest rank. All methods are collective.

    Args:
        now: the clock that times the benchmarks.
        num_measurements: measurements per reading, which is their median. One measurement takes a few ms, which is too
            short to average over the activity of other guests on the host.
    """

    def __init__(self, rank: Rank, now: Callable[[], float], num_measurements: int = 1) -> None:
        self._rank, self._now, self._num_measurements = rank, now, num_measurements
        self._workload = _mlp(rank.device) if rank.device_type == "cpu" else None
        self._start = time.perf_counter(), busy_s(), time.process_time()
        self.readings: list[float] = []
        for _ in range(3):  # warm-up: first touch of memory, selection of kernels
            self.read()
        self.readings = [self.readings[-1]]

    @property
    def first_s(self) -> float:
        """The first reading, in seconds; ``scale`` converts times to this reading's speed."""
        return self.readings[0]

    @property
    def median_s(self) -> float:
        """The median of all readings so far, in seconds."""
        return statistics.median(self.readings)

    def read(self) -> float:
        """Run the reference and return its time on the slowest rank, in seconds; 1 on a GPU."""
        measurements = [self._measure() for _ in range(self._num_measurements)] if self._workload is not None else [1.0]
        self.readings.append(statistics.median(measurements))
        return self.readings[-1]

    def read_mean(self) -> float:
        """Take a new reading; return the mean of the previous and the new reading, in seconds."""
        before = self.readings[-1]
        return (before + self.read()) / 2

    def scale(self) -> float:
        """Take a new reading; return the factor by which to multiply times measured since the previous reading."""
        return self.first_s / self.read_mean()

    def other_cores(self) -> float:
        """Return the average number of cores that other programs have used since this object was created."""
        wall, busy, cpu = self._start
        others_s = busy_s() - busy - self._rank.sum_over_ranks(time.process_time() - cpu)
        return max(0.0, others_s) / max(time.perf_counter() - wall, 1e-9)

    def lost_s(self, before: dict[int, float], seconds: float) -> float:
        """Return the seconds that a measurement with communication lost to other programs.

        The loss is the longest time that a thread spent in the run queue, but at most the core time of other programs,
        because threads of the same rank also wait for each other. If ranks share cores, the loss is the core time of
        other programs divided by the number of cores.

        Args:
            before: ``queue_times`` at the start of the measurement.
            seconds: duration of the measurement, which ends now.
        """
        if self._rank.device_type != "cpu":
            return 0.0  # a GPU continues while this process waits for a core
        others_s, cores = self.other_cores() * seconds, len(os.sched_getaffinity(0))
        waited_s = self._rank.max_over_ranks(longest_queue_time(before))
        return others_s / cores if self._rank.size * self._rank.threads > cores else min(waited_s, others_s)

    def _measure(self) -> float:
        return self._rank.max_over_ranks(min(self._time_once() for _ in range(NUM_REPETITIONS)))

    def _time_once(self) -> float:
        assert self._workload is not None
        self._rank.barrier()
        start = self._now()
        self._workload()
        return max(self._now() - start, 1e-9)


def core_time_s() -> float:
    """Return the wall-clock seconds since an arbitrary origin, minus this thread's time in the run queue.

    On a shared core, differences of this clock are the times that the thread's work would take on a dedicated core.
    """
    waited = queue_time_s()
    while True:
        now, before = time.perf_counter(), waited
        waited = queue_time_s()
        if waited == before:  # otherwise this thread was in the run queue between the two clocks
            return now - waited


def queue_time_s(thread: int | None = None) -> float:
    """Return the seconds that a thread has spent in Linux's run queue so far; 0 if unknown.

    Args:
        thread: native id; None: this thread.
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


def queue_times() -> dict[int, float]:
    """Map the native id of each thread in this process to the seconds in the run queue so far."""
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return {}
    return {thread: queue_time_s(thread) for thread in threads}


def longest_queue_time(before: dict[int, float]) -> float:
    """Return the longest time that any thread has spent in the run queue since ``queue_times`` returned ``before``."""
    return max((now - before.get(thread, 0.0) for thread, now in queue_times().items()), default=0.0)


def busy_s() -> float:
    """Return the busy seconds of all cores so far, with a resolution of 10 ms; 0 if unknown."""
    try:
        user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    except OSError:
        return 0.0
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _mlp(target_device: torch.device) -> Callable[[], object]:
    x = torch.randn(TOKENS, HIDDEN, device=target_device, requires_grad=True)
    up = torch.randn(FF, HIDDEN, device=target_device, requires_grad=True)
    down = torch.randn(HIDDEN, FF, device=target_device, requires_grad=True)
    gradient = torch.randn(TOKENS, HIDDEN, device=target_device)

    def run() -> None:
        inner = F.gelu(F.linear(F.layer_norm(x, (HIDDEN,)), up), approximate="tanh")
        torch.autograd.grad(x + F.linear(inner, down), (x, up, down), gradient)
        device.synchronize(target_device.type)

    return run
