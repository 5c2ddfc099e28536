"""The device's memory: host memory with the label of the device.

DLPack is the protocol with which libraries exchange tensors: address, shape, strides, type and device. ``DEVICE`` is
its code for extension devices, which torch interprets as PrivateUse1. Exporting a tensor from torch, writing this code
into the header and importing it again therefore creates a tensor on the device, with storage, strides and owner,
without a copy.

Source: the DLPack specification, ``DLTensor`` and ``DLDeviceType``.
"""

from __future__ import annotations

import ctypes

import torch

HOST, DEVICE = 1, 12


class _Header(ctypes.Structure):
    """The first fields of a DLTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a device view of a tensor in host memory."""
    return _relabel(tensor, DEVICE)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host view of a tensor on the device, on which the CPU's kernels can run."""
    return _relabel(tensor, HOST)


def _relabel(tensor: torch.Tensor, label: int) -> torch.Tensor:
    capsule = torch._C._to_dlpack(tensor)
    header = _Header.from_address(_pointer(capsule, b"dltensor"))
    header.device_type, header.device_id = label, 0
    return torch._C._from_dlpack(capsule)
