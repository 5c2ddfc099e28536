"""Tensors of the simulated CUDA device, and a record of the operators that process them.

| tensor on | implementation | values |
|---|---|---|
| the host | ordinary tensor | known |
| "cuda" | fake tensor: shape, dtype, device | known for storages of up to ``SMALL`` bytes, otherwise unknown |

Messages between hosts and files are therefore real. The host reads 1 for unknown values. A step only takes the time of
its Python code. An operator with tensors on two devices fails, as on a GPU.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda.fake_cuda import EventType, FakeCuda

SMALL = 4096
"""Bytes of the largest storage whose values are known."""
PROJECT_PACKAGES = ("megatron", "tds", "deepspeed")
NON_WRITING_OPERATORS = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "lift_fresh",
    "alias",
    "_unsafe_view",
)
"""Operators that write nothing and launch no kernel."""
SIZED_BY_DATA = ("nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
OVERWRITING_OPERATORS = ("copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_")
"""Operators that write their first argument without reading it."""
MIN_DIMENSION, ALIGNMENT = 8, 16
"""Rows and columns below which a matrix may be unaligned; alignment in bytes that cuBLAS's fast kernels require."""
LOOKUP_OPERATORS = ("gather", "index_select", "index", "embedding")
"""Operators that read only the elements of their first argument that they return."""
SCATTER_OPERATORS = ("scatter", "scatter_add", "scatter_reduce")
"""Operators that access only the elements of their first argument that an index selects, if they work in place."""
HOST = -1
"""Stream index of the host."""


def location_of(frame: Any) -> str:
    """Return the innermost function of the project or DeepSpeed, as "tds/loss.py:read"; "" within autograd."""
    while frame is not None:
        name = frame.f_code.co_filename
        for package in PROJECT_PACKAGES:
            start = name.rfind(f"/{package}/")
            if start >= 0 and "/tests/" not in name[start:] and not name.endswith("/triton_launch.py"):
                return f"{name[start + 1 :]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def map_tensors(value: Any, function: Any) -> Any:
    """Return nested arguments with ``function`` applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    return value


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct ``tensors``; elements of a broadcast dimension count once."""
    num_bytes = 0
    for tensor in {id(t): t for t in tensors}.values():
        num_elements = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        num_bytes += num_elements * tensor.element_size()
    return num_bytes


def bytes_moved(name: str, args: Any, kwargs: Any, written: list[Any], outputs: list[Any]) -> int:
    """Return the bytes that an operator reads and writes: its inputs, ``outputs``, and ``written`` arguments."""
    inputs = list(tensors_in((args, [value for value in kwargs.values() if not any(value is t for t in written)])))
    if name.removesuffix("_") in LOOKUP_OPERATORS:
        return bytes_of(inputs[1:]) + 2 * bytes_of(outputs)
    if name.removesuffix("_") in SCATTER_OPERATORS and written:
        return bytes_of(inputs[1:]) + 2 * bytes_of(inputs[1:2]) * inputs[0].element_size() // inputs[1].element_size()
    if name in OVERWRITING_OPERATORS:
        inputs = inputs[1:]
    return bytes_of(inputs) + bytes_of([*written, *outputs])


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the indices and the names of the arguments that an operator writes."""
    arguments = func._schema.arguments
    writes = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    indices = tuple(i for i, a in enumerate(arguments) if writes[i])
    return indices, tuple(arguments[i].name for i in indices)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return True if all rows of a 16-bit matrix start at multiples of 16 bytes.

    Other dtypes, and matrices with few rows or columns, count as aligned.
    """
    if tensor.dim() < 2 or tensor.element_size() != 2 or min(tensor.shape) < MIN_DIMENSION:
        return True
    starts = [stride for stride in tensor.stride() if stride > 1] + [tensor.storage_offset()]
    return all(start * 2 % ALIGNMENT == 0 for start in starts)


@dataclass
class Operator:
    """Operator on the device: ids of the storages that it reads and writes, and the bytes that it moves.

    ``num_bytes`` is 0 for copies between host and device, collectives and accesses by the host.
    """

    name: str
    location: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    num_bytes: int = 0


@dataclass
class PhaseStats:
    """Events in one phase of a run, counted by operator and location.

    Attributes:
        reads: waits of the host for the device.
        blocking: copies between host and device that block the host.
        mixed: operators on the device with an input tensor on the host that has dimensions.
        launches: launches by operator name.
        unaligned: products of 16-bit matrices that are not aligned to 16 bytes.
        masks: calls of attention with a mask, by location.
        largest_mask: number of elements of the largest mask.
        block_mask_sizes: number of elements of the block mask of each call of flex_attention.
    """

    reads: Counter[str] = field(default_factory=Counter)
    blocking: Counter[str] = field(default_factory=Counter)
    mixed: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    unaligned: Counter[str] = field(default_factory=Counter)
    masks: Counter[str] = field(default_factory=Counter)
    largest_mask: int = 0
    block_mask_sizes: list[int] = field(default_factory=list)


FAKE = FakeTensorMode(allow_non_fake_inputs=True)
"""Shared by all runs of a process and its forks, because it caches the results of operators by shape."""


class Device(TorchDispatchMode):
    """The simulated device, active in a ``with`` block.

    Attributes:
        stats: events of the current phase; a run replaces the object at the start of a phase.
        operators: all operators so far; rows of the library's log contain indices into this list.
        traces_backward: name the location of the forward operator for operators that autograd runs.
    """

    def __init__(self, library: FakeCuda) -> None:
        super().__init__()
        self.library = library
        self.small = SMALL
        self.fake = FAKE
        self.stats = PhaseStats()
        self.operators: list[Operator] = []
        self._known_values: dict[int, torch.Tensor] = {}
        self.traces_backward = False
        self._location_by_sequence: dict[int, str] = {}
        self._shared: set[int] = set()  # pinned memory that the device has accessed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.traces_backward and (location := location_of(sys._getframe(1))):
            self._location_by_sequence[torch._C._autograd._get_sequence_nr() - 1] = location
        fakes = [t for t in tensors_in((args, kwargs)) if isinstance(t, FakeTensor)]
        target = kwargs.get("device")
        if not fakes and (target is None or torch.device(target).type != "cuda"):
            self._check_host_access(func, args, kwargs)
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name == "prim::device":
            return args[0].fake_device
        if name == "_local_scalar_dense":
            return self._read(args[0], "item")
        if name == "record_stream":
            self.library.log_event(EventType.KEEP, self.storage(args[0]), args[1].stream_id)
            return None
        if name in ("_to_copy", "copy_"):
            copied = self._copy_across(func, name, args, kwargs)
            if copied is not None:
                return copied
        elif any(not isinstance(t, FakeTensor) and t.dim() for t in tensors_in((args, kwargs))):
            self.stats.mixed[f"{name} in {self.location()}"] += 1
        is_boolean_index = name in ("index", "index_put_", "index_put") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        has_unknown_repeats = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in SIZED_BY_DATA or is_boolean_index or (has_unknown_repeats and func._overloadname == "Tensor"):
            self.stats.reads[f"{name} in {self.location()}"] += 1
        with self.fake:
            if name in ("addmm", "baddbmm") and func._overloadname in ("dtype", "dtype_out"):
                # torch's implementation for fake tensors would take the argument out_dtype for beta
                out = kwargs["out"] if "out" in kwargs else args[0].to(args[3])
            else:
                out = func(*args, **kwargs)
        self._record(func, name, args, kwargs, fakes, out)
        return out

    def location(self) -> str:
        return location_of(sys._getframe(2))

    def storage(self, tensor: torch.Tensor) -> int:
        """Return the id of the storage of a tensor on the device."""
        storage_id: int = self.library.storage(tensor.untyped_storage()._cdata)
        return storage_id

    def pinned(self, tensor: torch.Tensor) -> int:
        """Return an id of the address in pinned memory where a host tensor starts; 0 if it is not in pinned memory."""
        if isinstance(tensor, FakeTensor) or not tensor.numel():
            return 0
        storage = tensor.untyped_storage().data_ptr()
        pinned_id: int = self.library.pinned(storage)
        return pinned_id and pinned_id * 2**40 + tensor.data_ptr() - storage

    # Reads by the host.

    def _read(self, tensor: torch.Tensor, method: str) -> Any:
        self.stats.reads[f"{method} in {self.location()}"] += 1
        self.library.log_event(EventType.HOST_STREAM, self.library.stream(), 0)
        return self.values_of(tensor).item()

    def record_host_read(self, tensor: torch.Tensor) -> None:
        """Record that the host reads a host tensor without calling an operator."""
        if self._shared and tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor):
            pinned_id = self.pinned(tensor)
            if pinned_id in self._shared and pinned_id:
                self.record_host_use("read", (pinned_id,))

    def tolist(self, tensor: torch.Tensor) -> Any:
        """Return ``tensor.tolist()`` and record the read."""
        self.stats.reads[f"tolist in {self.location()}"] += 1
        self.library.log_event(EventType.HOST_STREAM, self.library.stream(), 0)
        return self.values_of(tensor).tolist()

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a device tensor on the host: known values if its storage is small, otherwise ones."""
        if tensor.untyped_storage().nbytes() > SMALL:
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        return self._known_view(tensor)

    def _known_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the known values of a small storage, with the shape and strides of ``tensor``."""
        storage_id = self.storage(tensor)
        nbytes, size = tensor.untyped_storage().nbytes(), tensor.element_size()
        known_bytes = self._known_values.get(storage_id)
        if known_bytes is None or known_bytes.numel() < nbytes:
            fresh = torch.ones(max(1, -(-nbytes // size)), dtype=tensor.dtype)
            known_bytes = self._known_values[storage_id] = fresh.view(torch.uint8)
        flat = known_bytes[: known_bytes.numel() // size * size].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _forward_location(self) -> str:
        """Return the location of the forward operator whose gradient is computed; "" without ``traces_backward``."""
        node = torch._C._current_autograd_node() if self.traces_backward else None
        if node is None:
            return ""
        location = self._location_by_sequence.get(node._sequence_nr(), "")
        return f"{node.name()} of {location}"

    # Copies between host and device.

    def _copy_across(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Copy between host and device; return the result, or None if both tensors are on the same side."""
        if name == "copy_":
            target, source = args[0], args[1]
            is_asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if isinstance(target, FakeTensor) == isinstance(source, FakeTensor):
                return None
            out = target
        else:
            source, target_device = args[0], kwargs.get("device")
            is_asynchronous = kwargs.get("non_blocking", False)
            if target_device is None or (torch.device(target_device).type == "cuda") == isinstance(source, FakeTensor):
                return None
            out = None
        to_device = not isinstance(source, FakeTensor)
        if out is None and to_device:
            with self.fake:
                out = func(*args, **kwargs)
        elif out is None:
            dtype = kwargs.get("dtype") or source.dtype
            is_pinned = bool(is_asynchronous or kwargs.get("pin_memory"))
            out = torch.empty(source.shape, dtype=dtype, pin_memory=is_pinned)
        elif to_device:
            with self.fake:
                func(*args, **kwargs)
        host_tensor, device_tensor = (source, out) if to_device else (out, source)
        if to_device and device_tensor.untyped_storage().nbytes() <= SMALL:
            self._known_view(device_tensor).copy_(host_tensor)
        elif not to_device:
            out.copy_(self.values_of(source))
        location = self.location()
        direction = "to the device" if to_device else "to the host"
        if host_tensor.dim() and not (is_asynchronous and host_tensor.is_pinned()):
            self.stats.blocking[f"{direction} in {location}"] += 1
            if not to_device:
                self.stats.reads[f"copy in {location}"] += 1
        pinned_id = self.pinned(host_tensor)
        self._shared.add(pinned_id)
        read, written = (
            (pinned_id, self.storage(device_tensor)) if to_device else (self.storage(device_tensor), pinned_id)
        )
        self._append_operator(f"copy {direction}", (read,), (written,))
        if not (is_asynchronous and pinned_id):
            self.library.log_event(EventType.HOST_STREAM, self.library.stream(), 0)
        return out

    def _check_host_access(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record host operators that read or write pinned memory which the device accesses as well."""
        if not self._shared or func.is_view:
            return
        pinned_ids = {
            id(t): pinned_id
            for t in tensors_in((args, kwargs))
            if t.device.type == "cpu" and (pinned_id := self.pinned(t)) in self._shared
        }
        if not any(pinned_ids.values()):
            return
        indices, names = written_arguments(func)
        written = [t for i in indices if i < len(args) for t in tensors_in(args[i])]
        written += [t for key in names if key in kwargs for t in tensors_in(kwargs[key])]
        writes = {pinned_ids[id(t)] for t in written if id(t) in pinned_ids}
        self.record_host_use(func._schema.name, tuple(set(pinned_ids.values()) - writes), tuple(writes))

    def record_host_use(self, name: str, reads: tuple[int, ...], writes: tuple[int, ...] = ()) -> None:
        self.operators.append(Operator(name, location_of(sys._getframe(2)), reads, writes))
        self.library.log_event(EventType.OPERATOR, len(self.operators) - 1, HOST)

    # Operators on the device.

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, fakes: list[Any], out: Any) -> None:
        if func.is_view:
            return
        if name in NON_WRITING_OPERATORS:
            for output in tensors_in(out):
                self.storage(output)  # records the stream that allocates it, which may not be the first to use it
            return
        indices, names = written_arguments(func)
        written = [t for i in indices if i < len(args) for t in tensors_in(args[i])]
        written += [t for key in names if key in kwargs for t in tensors_in(kwargs[key])]
        storage_ids = {id(t): self.storage(t) for t in fakes}
        writes = {storage_ids[id(t)] for t in written if id(t) in storage_ids}
        outputs = [t for t in tensors_in(out) if isinstance(t, FakeTensor)]
        known = set(storage_ids.values())
        writes |= {self.storage(t) for t in outputs} - (known if written else set())
        reads = known - (
            {storage_ids[id(t)] for t in written if id(t) in storage_ids} if name.endswith("zero_") else set()
        )
        self._append_operator(name, tuple(reads), tuple(writes), bytes_moved(name, args, kwargs, written, outputs))
        self.stats.launches[name] += 1
        if name in PRODUCTS and not all(map(is_aligned, tensors_in((args, kwargs, out)))):
            self.stats.unaligned[f"{name} in {self.location()}"] += 1
        if all(t.untyped_storage().nbytes() <= SMALL for t in (*fakes, *outputs)):
            self._compute_known(func, args, kwargs, written, outputs)
        else:
            self._forget_values(written)

    def launch_triton(self, kernel: str, args: Any, writes: Any, updates: Any) -> None:
        """Record the launch of a Triton kernel, as ``megatron.triton_launch.hook``; nothing is computed."""
        name = kernel.rpartition(":")[2]
        tensors = list(tensors_in(args))
        if not all(isinstance(t, FakeTensor) for t in tensors):
            self.stats.mixed[f"{name} in {self.location()}"] += 1
        written = {id(t) for t in writes}
        reads = {self.storage(t) for t in tensors if id(t) not in written}
        num_bytes = bytes_of(tensors) + bytes_of(updates)
        self._append_operator(name, tuple(reads), tuple({self.storage(t) for t in (*writes, *updates)}), num_bytes)
        self.stats.launches[name] += 1
        self._forget_values([*writes, *updates])

    def _append_operator(self, name: str, reads: tuple[int, ...], writes: tuple[int, ...], num_bytes: int = 0) -> None:
        location = location_of(sys._getframe(2)) or self._forward_location()
        self.operators.append(Operator(name, location, reads, writes, num_bytes))
        self.library.log_event(EventType.OPERATOR, len(self.operators) - 1, self.library.stream())

    def _forget_values(self, written: Iterable[torch.Tensor]) -> None:
        """Mark the values of ``written`` tensors as unknown."""
        for tensor in written:
            if isinstance(tensor, FakeTensor):
                self._known_values.pop(self.storage(tensor), None)

    def _compute_known(self, func: Any, args: Any, kwargs: Any, written: list[Any], outputs: list[Any]) -> None:
        """Apply the operator to the known values."""

        def to_known(tensor: torch.Tensor) -> torch.Tensor:
            return self._known_view(tensor) if isinstance(tensor, FakeTensor) else tensor

        known_kwargs = {
            key: torch.device("cpu") if key == "device" else map_tensors(v, to_known) for key, v in kwargs.items()
        }
        try:
            result = func(*map_tensors(args, to_known), **known_kwargs)
        except (RuntimeError, NotImplementedError, IndexError):  # an operator for CUDA only, or unknown indices
            self._forget_values(written)
            return
        if not written:
            for tensor, values in zip(outputs, tensors_in(result), strict=False):
                self._known_view(tensor).copy_(values)
