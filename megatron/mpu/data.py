"""Hand a batch that one rank has read to all ranks of its tensor-parallel group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from megatron.mpu.groups import Group
from megatron.mpu.uploads import Upload

MAX_DIMENSIONS = 6


def broadcast_data(
    keys: Iterable[str],
    data: Mapping[str, torch.Tensor] | None,
    dtype: torch.dtype,
    group: Group,
    device: torch.device,
    host: Group | None = None,
) -> dict[str, torch.Tensor]:
    """Return ``data[key]`` for each key on every rank of ``group``, on ``device``. Collective.

    The host waits for the other hosts, which tell the shapes, and not for the device.

    Args:
        data: the tensors on the group's first rank; the others may pass None.
        dtype: the type that all of these tensors have.
        host: the same ranks over the host; None: ``group`` sends what lies there.

    Raises:
        TypeError: a tensor of the first rank has another type.
    """
    names = list(keys)
    if group.size == 1:
        return {name: _on_device(name, data, dtype, device) for name in names}
    tensors = [_on_device(name, data, dtype, device) for name in names] if group.rank == 0 else []
    shapes = _broadcast_shapes(tensors, len(names), host or group)
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    if group.rank == 0:
        flat = torch.cat([tensor.contiguous().view(-1) for tensor in tensors])
    else:
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    dist.broadcast(flat, src=group.ranks[0], group=group.handle)
    return {name: part.view(shape) for name, part, shape in zip(names, flat.split(sizes), shapes, strict=True)}


def _on_device(
    name: str, data: Mapping[str, torch.Tensor] | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    tensor = _checked(name, data, dtype)
    return (data.on_device(name) if isinstance(data, Upload) else tensor).to(device, non_blocking=True)


def _checked(name: str, data: Mapping[str, torch.Tensor] | None, dtype: torch.dtype) -> torch.Tensor:
    if data is None or name not in data:
        raise KeyError(f"the batch must hold {name!r}, got {sorted(data) if data is not None else None}")
    if data[name].dtype != dtype:
        raise TypeError(
            f"broadcast_data needs {dtype} for {name!r}, got {data[name].dtype}. Convert it in the data set."
        )
    return data[name]


def _broadcast_shapes(tensors: list[torch.Tensor], count: int, group: Group) -> list[tuple[int, ...]]:
    table = torch.full((count, MAX_DIMENSIONS), -1, dtype=torch.int64)
    for row, tensor in zip(table, tensors, strict=False):
        row[: tensor.dim()] = torch.tensor(tensor.shape)
    dist.broadcast(table, src=group.ranks[0], group=group.handle)
    return [tuple(size for size in row if size >= 0) for row in table.tolist()]
