"""A fake of the parts of Ray that ``megatron.data.preprocess.cluster`` uses, for tests without a cluster.

Tasks are generators that run in this process and are advanced in turn. ``lost_after`` makes tasks lose their worker.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any


class RayError(Exception):
    """Base class of Ray's system errors."""


class RayTaskError(RayError):
    """Error raised by a task."""


class NodeDiedError(RayError):
    """The machine of a task was lost."""


class RuntimeEnvSetupError(RayError):
    """The environment of a task cannot be created."""


class TaskUnschedulableError(RayError):
    """No machine can run a task."""


class FakeRay(types.SimpleNamespace):
    """Fake of the module ``ray``.

    Args:
        num_cpus: CPUs of the cluster.
        lost_after: index of a task, in order of starting -> number of reports after which its worker is lost.
    """

    def __init__(self, num_cpus: int = 2, lost_after: dict[int, int] | None = None) -> None:
        super().__init__()
        self.num_cpus, self.lost_after = num_cpus, lost_after or {}
        self.exceptions = types.SimpleNamespace(
            RayError=RayError,
            RayTaskError=RayTaskError,
            RuntimeEnvSetupError=RuntimeEnvSetupError,
            TaskUnschedulableError=TaskUnschedulableError,
        )
        self.started_tasks: list[tuple[Any, ...]] = []
        self.max_concurrent = 0
        self.cancelled: list[Any] = []
        self.is_shut_down = False
        self.options: dict[str, Any] = {}
        self.address: str | None = None

    def init(self, address: str, **options: Any) -> None:
        self.address, self.options = address, options

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}] * 2 + [{"Alive": False}]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.num_cpus)}

    def put(self, value: Any) -> Any:
        return value

    def remote(self, function: Callable[..., Iterator[Any]]) -> Any:
        def start(*arguments: Any) -> _Task:
            task_idx = len(self.started_tasks)
            self.started_tasks.append(arguments)
            return _Task(function(*arguments), self.lost_after.get(task_idx))

        handle = types.SimpleNamespace(remote=start)
        return types.SimpleNamespace(options=lambda **_: handle)

    def wait(self, tasks: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self.max_concurrent = max(self.max_concurrent, len(tasks))
        return tasks[-num_returns:][::-1], tasks[:-num_returns]

    def get(self, reference: Callable[[], Any]) -> Any:
        return reference()

    def cancel(self, task: Any, force: bool) -> None:
        self.cancelled.append(task)

    def shutdown(self) -> None:
        self.is_shut_down = True


class _Task:
    def __init__(self, reports: Iterator[Any], reports_left: int | None) -> None:
        self._reports, self._reports_left = reports, reports_left

    def __next__(self) -> Callable[[], Any]:
        if self._reports_left is not None:
            if not self._reports_left:
                return self._fail
            self._reports_left -= 1
        try:
            value = next(self._reports)
        except StopIteration:
            raise
        except Exception as error:
            wrapped = RayTaskError(f"{type(error).__name__}: {error}")
            return lambda: _raise(wrapped)
        return lambda: value

    def _fail(self) -> None:
        raise NodeDiedError("Task failed because the node it was running on is dead.\nmore of it")


def _raise(error: Exception) -> None:
    raise error
