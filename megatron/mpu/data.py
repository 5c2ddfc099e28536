"""broadcast_data, and Upload: an asynchronous copy of a micro-batch to the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from megatron import device
from megatron.mpu.groups import Group

# Copy a micro-batch from the host to the device while the device computes.


class Upload(dict[str, torch.Tensor]):
    """A micro-batch in host memory that is being copied to a device.

    The training script sees a dictionary of tensors on the host, as in a run on CPUs. ``broadcast_data`` uses the
    copies on the device. If the script replaces a tensor or changes it in place, the tensor is copied again.
    """

    def __init__(self, batch: Mapping[str, torch.Tensor], target_device: torch.device) -> None:
        super().__init__(batch)
        self._target_device = target_device
        self._copies, self._upload_event = device.start_upload(batch, target_device)
        self._batch = dict(batch)  # keeps the tensors alive, so that their ids are not reused
        self._versions = {name: (id(tensor), tensor._version) for name, tensor in batch.items()}
        self._is_awaited = False

    def get_on_device(self, name: str) -> torch.Tensor:
        """Return tensor ``name`` on the device. The device waits for the copy if necessary; the host does not."""
        tensor = self[name]
        if self._versions.get(name) != (id(tensor), tensor._version):
            return tensor.to(self._target_device, non_blocking=True)
        if not self._is_awaited:
            device.await_upload(self._copies.values(), self._target_device, self._upload_event)
            self._is_awaited = True
        return self._copies[name]


# Broadcast a batch that one rank has read to all ranks of its tensor-parallel group.

MAX_DIMS = 6


def broadcast_data(
    keys: Iterable[str], data: Mapping[str, torch.Tensor] | None, dtype: torch.dtype, group: Group,
    device: torch.device, host_group: Group | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Broadcast ``data[key]`` for each key to every rank of ``group``, on ``device``. Collective.

    The shapes are broadcast in host memory, so that no host waits for its device.

    Args:
        data: tensors, read on the group's first rank only; the other ranks may pass None.
        dtype: common dtype of these tensors.
        host_group: same ranks as ``group`` with a CPU backend, for the shapes; None: ``group`` has a CPU backend
            itself.

    Raises:
        KeyError: the first rank's ``data`` lacks a key.
        TypeError: a tensor on the first rank does not have ``dtype``.
    """
    if group.size > 1:
        return _broadcast(list(keys), data, dtype, group, device, host_group or group)
    return {name: _to_device(name, data, dtype, device) for name in keys}


def _broadcast(
    names: list[str],
    data: Mapping[str, torch.Tensor] | None,
    dtype: torch.dtype,
    group: Group,
    device: torch.device,
    host_group: Group,
) -> dict[str, torch.Tensor]:
    tensors = [_to_device(name, data, dtype, device) for name in names] if group.rank == 0 else []
    shapes = _broadcast_shapes(tensors, len(names), host_group)
    numels = [int(torch.Size(shape).numel()) for shape in shapes]
    if group.rank == 0:
        flat = torch.cat([tensor.contiguous().view(-1) for tensor in tensors])
    else:
        flat = torch.empty(sum(numels), dtype=dtype, device=device)
    dist.broadcast(flat, src=group.ranks[0], group=group.handle)
    return {name: x.view(shape) for name, x, shape in zip(names, flat.split(numels), shapes, strict=True)}


def _to_device(
    name: str, data: Mapping[str, torch.Tensor] | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    tensor = _checked_tensor(name, data, dtype)
    return (data.get_on_device(name) if isinstance(data, Upload) else tensor).to(device, non_blocking=True)


def _checked_tensor(name: str, data: Mapping[str, torch.Tensor] | None, dtype: torch.dtype) -> torch.Tensor:
    if data is None or name not in data:
        raise KeyError(f"the batch must contain {name!r}, got {sorted(data) if data is not None else None}")
    if data[name].dtype != dtype:
        raise TypeError(
            f"broadcast_data needs {dtype} for {name!r}, got {data[name].dtype}. Convert it in the data set."
        )
    return data[name]


def _broadcast_shapes(tensors: list[torch.Tensor], num_tensors: int, group: Group) -> list[tuple[int, ...]]:
    table = torch.full((num_tensors, MAX_DIMS), -1, dtype=torch.int64)
    for row, tensor in zip(table, tensors, strict=False):
        row[: tensor.dim()] = torch.tensor(tensor.shape)
    dist.broadcast(table, src=group.ranks[0], group=group.handle)
    return [tuple(size for size in row if size >= 0) for row in table.tolist()]
