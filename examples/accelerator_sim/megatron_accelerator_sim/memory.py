"""The device's memory: the host's, under the device's label.

DLPack is the protocol by which libraries pass tensors to each other: address, shape, strides, type, and the device that
all of it is on. ``DEVICE`` is its code for devices of extensions, which torch reads as PrivateUse1. So a tensor that is
passed to torch itself with that code written in is one of the device, with a storage, strides and an owner, and no
byte is copied.

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
    """Return the device's view of a tensor in host memory."""
    return _labelled(tensor, DEVICE)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the host's view of a tensor on the device: what the CPU's kernels are given."""
    return _labelled(tensor, HOST)


def _labelled(tensor: torch.Tensor, label: int) -> torch.Tensor:
    capsule = torch._C._to_dlpack(tensor)
    header = _Header.from_address(_pointer(capsule, b"dltensor"))
    header.device_type, header.device_id = label, 0
    return torch._C._from_dlpack(capsule)
