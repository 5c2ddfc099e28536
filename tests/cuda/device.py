"""Tensors of the device without CUDA, and a watch over all that is done with them.

| a tensor of | is | and its numbers |
|---|---|---|
| the host | as always | are there |
| "cuda" | fake: shape, type, device | are there up to ``SMALL`` bytes of a storage, else nobody knows them |

So what hosts tell each other and write to disks is real, losses and counts that the host reads are numbers (1 where
they come of unknown ones), and a step costs what Python costs. An operator that is given tensors of two devices fails,
as it does on a GPU.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda.fake_cuda import EventType, FakeCuda

SMALL = 4096
"""Bytes of the largest storage whose numbers are known."""
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
)
"""Operators that write nothing."""
SIZED_BY_DATA = ("nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
MIN_DIMENSION, ALIGNMENT = 8, 16
"""Rows or columns of a matrix that is no matter; bytes that the fast kernels of cuBLAS load at once."""
HOST = -1
"""The host, as a stream."""


def location_of(frame: Any) -> str:
    """Return the innermost line of the project or DeepSpeed, as "tds/loss.py:read"; "" inside autograd."""
    while frame is not None:
        name = frame.f_code.co_filename
        for package in PROJECT_PACKAGES:
            start = name.rfind(f"/{package}/")
            if start >= 0 and "/tests/" not in name[start:]:
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
    """Return nested arguments with each tensor replaced by what ``function`` returns for it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    return value


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return which positional arguments an operator writes to, and which named ones."""
    arguments = func._schema.arguments
    writes = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    indices = tuple(i for i, a in enumerate(arguments) if writes[i])
    return indices, tuple(arguments[i].name for i in indices)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether rows of a matrix begin at multiples of 16 bytes, as those of other formats than 16 bits always do;
    a matrix of a few rows or columns costs nothing."""
    if tensor.dim() < 2 or tensor.element_size() != 2 or min(tensor.shape) < MIN_DIMENSION:
        return True
    starts = [stride for stride in tensor.stride() if stride > 1] + [tensor.storage_offset()]
    return all(start * 2 % ALIGNMENT == 0 for start in starts)


@dataclass
class Operator:
    """What one operator on the device has read and written, storages by number."""

    name: str
    location: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass
class PhaseStats:
    """What the watch has seen in one phase of a run; places as of ``location_of``.

    Attributes:
        reads: waits of the host for the device, by what and where.
        blocking: copies between host and device that hold the host.
        mixed: operators on the device that were given a tensor of the host with dimensions.
        launches: operators by name.
        unaligned: products of 16-bit matrices of which one begins, or has rows, off the multiples of 16 bytes.
        masks: calls of attention with a mask, and the elements of the largest one.
        by_blocks: calls of flex_attention, and the elements of the lists of blocks of each.
    """

    reads: Counter[str] = field(default_factory=Counter)
    blocking: Counter[str] = field(default_factory=Counter)
    mixed: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    unaligned: Counter[str] = field(default_factory=Counter)
    masks: Counter[str] = field(default_factory=Counter)
    largest_mask: int = 0
    by_blocks: list[int] = field(default_factory=list)


FAKE = FakeTensorMode(allow_non_fake_inputs=True)
"""One for a process and all that are forked from it, which know the shapes that it has seen."""


class Device(TorchDispatchMode):
    """The device, within a ``with`` block.

    Attributes:
        seen: of this phase; a run puts another one in its place where the next begins.
        operators: all that ran, in the order of the log, whose rows name them by their place here.
    """

    def __init__(self, library: FakeCuda) -> None:
        super().__init__()
        self.library = library
        self.small = SMALL
        self.fake = FAKE
        self.seen = PhaseStats()
        self.operators: list[Operator] = []
        self._known_values: dict[int, torch.Tensor] = {}
        self._shared: set[int] = set()  # page-locked memory that the device has read or written beside the host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
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
            self.seen.mixed[f"{name} in {self.location()}"] += 1
        is_boolean_index = name in ("index", "index_put_", "index_put") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if (
            name in SIZED_BY_DATA
            or is_boolean_index
            or (name == "repeat_interleave" and func._overloadname == "Tensor")
        ):
            self.seen.reads[f"{name} in {self.location()}"] += 1
        with self.fake:
            out = func(*args, **kwargs)
        self._record(func, name, args, kwargs, fakes, out)
        return out

    def location(self) -> str:
        return location_of(sys._getframe(2))

    def storage(self, tensor: torch.Tensor) -> int:
        """Return the number of the storage of a tensor of the device."""
        storage_id: int = self.library.storage(tensor.untyped_storage()._cdata)
        return storage_id

    def pinned(self, tensor: torch.Tensor) -> int:
        """Return a number for the place in page-locked memory where a tensor of the host begins; 0: it is elsewhere."""
        if isinstance(tensor, FakeTensor) or not tensor.numel():
            return 0
        storage = tensor.untyped_storage().data_ptr()
        pinned_id: int = self.library.pinned(storage)
        return pinned_id and pinned_id * 2**40 + tensor.data_ptr() - storage

    # What the host asks.

    def _read(self, tensor: torch.Tensor, method: str) -> Any:
        self.seen.reads[f"{method} in {self.location()}"] += 1
        self.library.log_event(EventType.HOST_STREAM, self.library.stream(), 0)
        return self.values_of(tensor).item()

    def record_host_read(self, tensor: torch.Tensor) -> None:
        """Take note that the host reads a tensor of its own without an operator."""
        if self._shared and tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor):
            pinned_id = self.pinned(tensor)
            if pinned_id in self._shared and pinned_id:
                self.record_host_use("read", (pinned_id,))

    def tolist(self, tensor: torch.Tensor) -> Any:
        """Return what ``tensor.tolist()`` gives."""
        self.seen.reads[f"tolist in {self.location()}"] += 1
        self.library.log_event(EventType.HOST_STREAM, self.library.stream(), 0)
        return self.values_of(tensor).tolist()

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a tensor of the device, on the host: known ones where it is small, else ones."""
        if tensor.untyped_storage().nbytes() > SMALL:
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        return self._known_view(tensor)

    def _known_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the known numbers of a small storage as ``tensor`` has them."""
        storage_id = self.storage(tensor)
        nbytes, size = tensor.untyped_storage().nbytes(), tensor.element_size()
        known_bytes = self._known_values.get(storage_id)
        if known_bytes is None or known_bytes.numel() < nbytes:
            fresh = torch.ones(max(1, -(-nbytes // size)), dtype=tensor.dtype)
            known_bytes = self._known_values[storage_id] = fresh.view(torch.uint8)
        flat = known_bytes[: known_bytes.numel() // size * size].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    # What moves between host and device.

    def _copy_across(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return what a copy between host and device gives; None where it is none."""
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
            self.seen.blocking[f"{direction} in {location}"] += 1
            if not to_device:
                self.seen.reads[f"copy in {location}"] += 1
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
        """Take note where the host looks at page-locked memory that the device reads or writes, or changes it."""
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

    # What the device does.

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, fakes: list[Any], out: Any) -> None:
        if func.is_view:
            return
        if name in NON_WRITING_OPERATORS:
            for output in tensors_in(out):
                self.storage(output)  # of the stream that asks for the memory, which may not be the first to use it
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
        self._append_operator(name, tuple(reads), tuple(writes))
        self.seen.launches[name] += 1
        if name in PRODUCTS and not all(map(is_aligned, tensors_in((args, kwargs, out)))):
            self.seen.unaligned[f"{name} in {self.location()}"] += 1
        if all(t.untyped_storage().nbytes() <= SMALL for t in (*fakes, *outputs)):
            self._compute_known(func, args, kwargs, written, outputs)

    def _append_operator(self, name: str, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        self.operators.append(Operator(name, location_of(sys._getframe(2)), reads, writes))
        self.library.log_event(EventType.OPERATOR, len(self.operators) - 1, self.library.stream())

    def _compute_known(self, func: Any, args: Any, kwargs: Any, written: list[Any], outputs: list[Any]) -> None:
        """Do the same with the known numbers."""

        def to_known(tensor: torch.Tensor) -> torch.Tensor:
            return self._known_view(tensor) if isinstance(tensor, FakeTensor) else tensor

        known_kwargs = {
            key: torch.device("cpu") if key == "device" else map_tensors(v, to_known) for key, v in kwargs.items()
        }
        try:
            result = func(*map_tensors(args, to_known), **known_kwargs)
        except (
            RuntimeError,
            NotImplementedError,
            IndexError,
        ):  # CUDA's own kernel, or unknown ids
            return
        if not written:
            for tensor, values in zip(outputs, tensors_in(result), strict=False):
                self._known_view(tensor).copy_(values)
