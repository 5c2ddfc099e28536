"""``torch.distributed`` on the simulated device: most other ranks are simulated, too.

| element | implementation |
|---|---|
| group | knows its ranks and the requested backend |
| NCCL | uses one stream per communicator, which waits for the current stream; ``wait`` makes the current stream wait |
| gloo | completes immediately |
| sums | this rank's values times the group size |
| gathered tensors | copies of this rank's tensor |
| broadcasts, messages between hosts | sent to ranks that run as processes: the stages of one pipeline |

Tensors that a backend cannot send are recorded in ``wrong``.
"""

from __future__ import annotations

import inspect
import itertools
import pickle
import socket
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"

from tds import torch_api
from tests.cuda.device import Device, Operator, tensors_in
from tests.cuda.fake_cuda import EventType

FIRST_STREAM, FIRST_EVENT = 2**30, 2**40
"""First ids of NCCL's streams and events, above all others."""
COMPUTE_STREAM = 0
SOURCES = {
    "all_reduce": (0,), "broadcast": (0,), "all_gather": (1,), "all_gather_into_tensor": (1,),
    "all_gather_single": (1,), "all_to_all_single": (1,), "reduce_scatter_tensor": (1,),
    "reduce_scatter_single": (1,), "reduce": (0,), "isend": (0,), "send": (0,), "irecv": (), "recv": (),
}  # fmt: skip
"""Indices of the arguments that a collective reads. It writes the tensors of the first argument, except for a send."""


ORIGINAL = {
    name: getattr(dist, name)
    for name in (*SOURCES, "init_process_group", "new_group", "destroy_process_group")
    if hasattr(dist, name)  # torch 2.11 lacks the names that torch_compat replaces
}
"""Original functions of torch."""


class PeerConnection:
    """Messages to and from the process of another rank in one run, identified by keys."""

    def __init__(self, sock: socket.socket, run: int = 0) -> None:
        self._file, self._run = sock.makefile("rwb"), run
        self._received: dict[Any, deque[Any]] = defaultdict(deque)

    def send(self, key: Any, value: Any) -> None:
        pickle.dump((self._run, key, value), self._file)
        self._file.flush()

    def receive(self, key: Any) -> Any:
        while not self._received[key]:
            run, message_key, value = pickle.load(self._file)
            if run == self._run:  # otherwise a message of an earlier run
                self._received[message_key].append(value)
        return self._received[key].popleft()


class Work:
    """Handle of an asynchronous operation; like NCCL, it holds ``tensors`` until ``wait``."""

    def __init__(self, groups: Groups, event: int | None, tensors: Any = (), on_wait: Any = None) -> None:
        self._groups, self._event, self._tensors, self._on_wait = groups, event, tensors, on_wait

    def wait(self, timeout: Any = None) -> bool:
        if self._on_wait is not None:
            self._on_wait()
        if self._event is not None:
            self._groups.library.log_event(EventType.WAIT, self._event, self._groups.library.stream())
        self._tensors, self._on_wait = (), None
        return True

    def is_completed(self) -> bool:
        if self._event is not None:
            self._groups.library.log_event(EventType.QUERY, self._event, 0)
        return True


class Groups:
    """Replacement of torch's collectives, installed by ``install``.

    Args:
        connections: connections to the ranks that run as processes, by rank.

    Attributes:
        wrong: tensors that a backend cannot send: on the wrong device, or not contiguous.
        started: collectives by name and backend.
        on_missing: function that fills a host tensor which a simulated rank broadcasts.
    """

    def __init__(
        self, device: Device, rank: int, size: int, connections: dict[int, PeerConnection] | None = None
    ) -> None:
        self.device, self.library = device, device.library
        self.rank, self.size, self.connections = rank, size, connections or {}
        self.wrong: Counter[str] = Counter()
        self.started: Counter[str] = Counter()
        self.backend_names: dict[Any, str] = {}
        self.on_missing: Callable[[torch.Tensor], None] = lambda tensor: None
        self._retained_works: list[Any] = []
        self._streams: dict[Any, int] = {}
        self._events = itertools.count(FIRST_EVENT)

    def install(self) -> None:
        """Replace the functions of ``torch.distributed``."""
        init, new_group = ORIGINAL["init_process_group"], ORIGINAL["new_group"]

        def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
            init("fake", store=dist.HashStore(), rank=self.rank, world_size=self.size)
            self.backend_names[dist.group.WORLD] = str(backend)

        def make_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, **kwargs: Any) -> Any:
            group = new_group(ranks, backend="fake")
            self.backend_names[group] = backend or self.backend_names[dist.group.WORLD]
            return group

        functions: dict[str, Callable[..., Any]] = {
            name: self._collective(name) for name in SOURCES if name in ORIGINAL
        }
        functions |= {
            "init_process_group": init_process_group, "new_group": make_group, "get_backend": self.backend,
            "barrier": lambda group=None, **_: self._count("barrier", group),
            "all_gather_object": self._gather_objects, "broadcast_object_list": self._broadcast_objects,
            "gather_object": self._gather_object, "destroy_process_group": lambda group=None: None,
        }  # fmt: skip
        for name, function in functions.items():
            setattr(dist, name, function)
            setattr(c10d, name, function)
        c10d._set_pg_timeout = lambda *_: None
        torch_api.backend = lambda group, device: SimpleNamespace(name=lambda: self.backend(group))
        torch_api.sends_from_host = lambda group: self.backend(group) == "gloo"
        torch_api.open_world = torch_api.nccl_options = lambda *_: None
        torch_api.split_world = lambda pairs, device, backend, *_: self._split(make_group, pairs, backend)

    def _split(self, make_group: Callable[..., Any], pairs: list[list[int]], backend: str) -> Any:
        """Create a group for each of the disjoint ``pairs``; return the group of this rank, or None."""
        groups = [make_group(pair, backend=backend) for pair in pairs]
        self._count("split_group", None)
        return next((group for group, pair in zip(groups, pairs, strict=True) if self.rank in pair), None)

    def backend(self, group: Any = None) -> str:
        return self.backend_names.get(group or dist.group.WORLD, "nccl")

    def _count(self, name: str, group: Any) -> None:
        self.started[f"{name} {self.backend(group)}"] += 1

    def _ranks(self, group: Any) -> list[int]:
        return dist.get_process_group_ranks(group or dist.group.WORLD)

    # Objects.

    def _gather_objects(self, output: list[Any], value: Any, group: Any = None) -> None:
        self._count("all_gather_object", group)
        output[:] = [value] * len(output)

    def _gather_object(self, value: Any, output: Any = None, dst: int = 0, group: Any = None, **_: Any) -> None:
        self._count("gather_object", group)
        if output is not None:
            output[:] = [value] * len(output)

    def _broadcast_objects(self, objects: list[Any], src: int = 0, group: Any = None, **_: Any) -> None:
        self._count("broadcast_object_list", group)

    # Tensors.

    def _collective(self, name: str) -> Callable[..., Any]:
        names = list(inspect.signature(ORIGINAL[name]).parameters)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs |= dict(zip(names, args, strict=False))
            args = tuple(kwargs.pop(key) for key in names[:2] if key in kwargs)
            group, async_op = kwargs.pop("group", None), kwargs.pop("async_op", False)
            self._count(name, group)
            tensors = list(tensors_in(args))
            backend = self.backend(group)
            for tensor in tensors:
                is_fake = isinstance(tensor, FakeTensor)
                if is_fake != (backend != "gloo"):
                    self.wrong[
                        f"{name}: {backend} was given a tensor of {tensor.device} in {self.device.location()}"
                    ] += 1
                if not tensor.is_contiguous():
                    self.wrong[f"{name} was given a tensor that is not contiguous in {self.device.location()}"] += 1
            work = self._start(name, args, kwargs, group, tensors)
            if async_op or name in ("isend", "irecv"):
                return work
            work.wait()
            return None

        return call

    def _start(self, name: str, args: Any, kwargs: Any, group: Any, tensors: list[torch.Tensor]) -> Work:
        on_wait = self._apply(name, args, kwargs, group)
        if not tensors or not isinstance(tensors[0], FakeTensor):
            return Work(self, None, on_wait=on_wait)
        log_event, is_message = self.library.log_event, name in ("isend", "irecv", "send", "recv")
        if name == "irecv" and self.library.stream() == COMPUTE_STREAM:
            self.wrong[f"irecv waits for what is given to the computation in {self.device.location()}"] += 1
        stream = self._streams.setdefault((group, is_message), FIRST_STREAM + len(self._streams))
        start_event, end_event = next(self._events), next(self._events)
        sources = [t for idx in SOURCES[name] for t in tensors_in(args[idx])]
        targets = [] if name in ("isend", "send") else list(tensors_in(args[0]))
        reads = tuple(self.device.storage(t) for t in sources)
        writes = tuple(self.device.storage(t) for t in targets)
        log_event(EventType.RECORD, start_event, self.library.stream())
        log_event(EventType.WAIT, start_event, stream)
        self.device.operators.append(Operator(name, self.device.location(), reads, writes))
        log_event(EventType.OPERATOR, len(self.device.operators) - 1, stream)
        log_event(EventType.RECORD, end_event, stream)
        work = Work(self, end_event, tensors, on_wait)
        self._retained_works.append(work)  # works without a ``wait`` hold their tensors
        return work

    def _apply(self, name: str, args: Any, kwargs: Any, group: Any) -> Callable[[], None] | None:
        """Set the known values of a collective's outputs; return a function to be called by ``wait``, or None."""
        size = len(self._ranks(group))
        if name == "all_reduce":
            op = args[1] if len(args) > 1 else dist.ReduceOp.SUM
            if op == dist.ReduceOp.SUM:
                self._update_values(args[0], lambda values: values.mul_(size))
        elif name in ("all_gather", "all_gather_into_tensor", "all_gather_single"):
            self._gather(args[0], args[1], size)
        elif name == "broadcast":
            self._broadcast(args[0], args[1] if len(args) > 1 else 0, group)
        elif name in ("isend", "irecv", "send", "recv") and not isinstance(args[0], FakeTensor):
            peer, key = args[1], ("message", kwargs.get("tag", 0))
            if name in ("isend", "send"):
                self.connections[peer].send(key, args[0].clone())
            else:
                return lambda: args[0].copy_(self.connections[peer].receive(key))
        return None

    def _update_values(self, tensor: torch.Tensor, update: Callable[[torch.Tensor], Any]) -> None:
        if not isinstance(tensor, FakeTensor):
            update(tensor)
        elif tensor.untyped_storage().nbytes() <= self.device.small:
            update(self.device.values_of(tensor))

    def _gather(self, output: Any, local: torch.Tensor, size: int) -> None:
        if isinstance(local, FakeTensor):
            local = (
                self.device.values_of(local) if local.untyped_storage().nbytes() <= self.device.small else torch.ones(1)
            )
        if isinstance(output, torch.Tensor):
            if local.numel() * size == output.numel():
                self._update_values(
                    output, lambda values: values.copy_(torch.cat([local.reshape(-1)] * size).view_as(values))
                )
            return
        for target in output:
            if local.numel() == target.numel():
                self._update_values(target, lambda values: values.copy_(local.view_as(values)))

    def _broadcast(self, tensor: torch.Tensor, source: int, group: Any) -> None:
        ranks = self._ranks(group)
        key = "broadcast", tuple(ranks)
        is_known = not isinstance(tensor, FakeTensor) or tensor.untyped_storage().nbytes() <= self.device.small
        if not is_known:
            return
        values = self.device.values_of(tensor) if isinstance(tensor, FakeTensor) else tensor
        if source == self.rank:
            for rank, connection in self.connections.items():
                if rank in ranks:
                    connection.send(key, values.clone())
        elif source in self.connections:
            values.copy_(self.connections[source].receive(key))
        elif not isinstance(tensor, FakeTensor):
            self.on_missing(tensor)
