"""Stand-ins with which one process does the work of rank 0 among thousands of ranks, and counts what it takes.

| stand-in | for | counts |
|---|---|---|
| ``CountingStore`` | the store of the process group, or of the launchers | messages, bytes |
| ``fake_world`` | all process groups, on torch's fake backend | groups, and the ranks in their lists |
| ``CountingGroup`` | a group whose other ranks all send what rank 0 sends | bytes that come to rank 0 |
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron.mpu.groups import Group
from megatron.mpu.topology import Topology
from megatron.torch_compat import fake_world as torch_fake_world


class CountingStore(dist.Store):
    """A store in this process that counts what its clients ask, as one with a connection for each would see it."""

    def __init__(self) -> None:
        super().__init__()
        self._store, self._lock = dist.HashStore(), threading.Lock()
        self.calls: Counter[str] = Counter()
        self.num_bytes = 0

    @property
    def messages(self) -> int:
        return self.calls.total()

    def _count(self, call: str, *parts: str | bytes) -> None:
        with self._lock:
            self.calls[call] += 1
            self.num_bytes += sum(map(len, parts))

    def set(self, key: str, value: Any) -> None:
        self._count("set", key, value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self._count("get", key, value)
        return value

    def add(self, key: str, value: int) -> int:
        self._count("add", key)
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        self._count("check", *keys)
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._count("wait", *keys)
        self._store.wait(keys, timeout)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        value = self._store.compare_set(key, expected, desired)
        self._count("compare_set", key, expected, desired, value)
        return value

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)


@dataclass
class Groups:
    """What was made of process groups: calls of ``new_group``, and the ranks in their lists."""

    calls: int = 0
    ranks: int = 0


@contextmanager
def fake_world(ranks: int) -> Iterator[Groups]:
    """Be rank 0 of ``ranks`` on torch's fake backend, whose operations move nothing."""
    made = Groups()
    with torch_fake_world(0, ranks):
        make = dist.new_group

        def new_group(of: Any = None, timeout: Any = None, backend: Any = None, **more: Any) -> Any:
            given = list(of if of is not None else more.pop("ranks", range(ranks)))
            made.calls, made.ranks = made.calls + 1, made.ranks + len(given)
            return make(given, timeout=timeout, backend="fake", **more)

        with mock.patch.object(dist, "new_group", new_group):
            yield made


@dataclass(frozen=True)
class CountingGroup(Group):
    """All ``ranks``, of which this is the first; what it gathers are so many copies of its own."""

    received: list[int] = field(default_factory=list, compare=False)

    @classmethod
    def of(cls, ranks: int) -> CountingGroup:
        return cls(tuple(range(ranks)), 0)

    def gather_objects(self, value: Any) -> list[Any]:
        content = pickle.dumps(value)
        self.received.append(self.size * len(content))
        return [ForkingPickler.loads(content) for _ in range(self.size)]

    def broadcast_object(self, value: Any) -> Any:
        return value


def layout_of(ranks: int) -> Topology:
    """Return the grid that is measured: 8 tensor ranks in a node, up to 10 stages, two replicas at least."""
    tensor = next(n for n in (8, 4, 2, 1) if ranks % n == 0 and ranks // n >= 4)
    pipe = next(n for n in (10, 8, 4, 2, 1) if ranks // tensor % n == 0 and ranks // tensor // n >= 2)
    return Topology.of_world(ranks, tensor, pipe)


def cpu_seconds(do: Callable[[], Any], times: int = 1) -> float:
    """Return the least processor time that a call of ``do`` takes: other processes of the machine do not count."""
    found = []
    for _ in range(times):
        began = time.process_time()
        do()
        found.append(time.process_time() - began)
    return min(found)


def lines_run(do: Callable[[], Any]) -> int:
    """Return how many lines of Python ``do`` runs: work that is counted, and so the same on every machine."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(before)
    return count
