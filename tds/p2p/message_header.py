"""Fixed-size message header: dtypes, shapes, gradient flags and structure.

| words | content |
|---|---|
| 4 | tds's magic number, number of tensors, container type, key bytes |
| 32 x 11 | per tensor: dtype, flags (1 needs a gradient, 2 partitioned), number of dimensions, shape |
| 128 | a dict's keys, as JSON |
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from tds.p2p.boundary import BoundaryError
from tds.p2p.boundary_layers import BoundarySide
from tds.p2p.structure import CONTAINERS, Structure
from tds.p2p.tensor_meta import TensorMeta

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
MAX_TENSORS = 32
MAX_DIMS = 8
MAX_KEY_BYTES = 1024
MAGIC = 0x746473
_PREFIX_SIZE = 4
_FIELDS_PER_TENSOR = 3 + MAX_DIMS
_KEYS_OFFSET = _PREFIX_SIZE + MAX_TENSORS * _FIELDS_PER_TENSOR
HEADER_SIZE = _KEYS_OFFSET + MAX_KEY_BYTES // 8


def encode_header(specs: Sequence[TensorMeta], structure: Structure, side: BoundarySide) -> torch.Tensor:
    """Encode a header as an int64 tensor on the CPU.

    Raises:
        BoundaryError: too many tensors, dimensions or key bytes for a header, or an unsupported dtype.
    """
    if len(specs) > MAX_TENSORS:
        raise BoundaryError(f"at most {MAX_TENSORS} tensors can cross a stage boundary, got {len(specs)} from {side}")
    keys = json.dumps(structure.keys).encode()
    if len(keys) > MAX_KEY_BYTES:
        raise BoundaryError(
            f"the keys of a dict at a stage boundary must fit into {MAX_KEY_BYTES} bytes, got {len(keys)} bytes for "
            f"{len(structure.keys)} keys from {side}, {structure.keys[0][:40]!r} first. Use shorter keys, or a tuple."
        )
    values = [MAGIC, len(specs), CONTAINERS.index(structure.container), len(keys)]
    for index, spec in enumerate(specs):
        if spec.dtype not in DTYPES or len(spec.shape) > MAX_DIMS:
            raise BoundaryError(
                f"a tensor at a stage boundary must have at most {MAX_DIMS} dimensions and a supported dtype, got "
                f"{spec} from {side.describe_tensor(index)}. Reshape it, or send it as another dtype."
            )
        flags = int(spec.needs_grad) | int(spec.partitioned) << 1
        shape = [*spec.shape, *[0] * (MAX_DIMS - len(spec.shape))]
        values += [DTYPES.index(spec.dtype), flags, len(spec.shape), *shape]
    header = torch.zeros(HEADER_SIZE, dtype=torch.int64)
    header[: len(values)] = torch.tensor(values)
    header[_KEYS_OFFSET:].view(torch.uint8)[: len(keys)] = torch.frombuffer(bytearray(keys), dtype=torch.uint8)
    return header


def decode_header(header: torch.Tensor) -> tuple[tuple[TensorMeta, ...], Structure]:
    """Decode a header into (tensor descriptions, structure)."""
    # One call, because reading a device tensor waits for the device.
    magic, num_tensors, container_idx, num_key_bytes, *values = header.tolist()
    if magic != MAGIC:
        raise RuntimeError(f"expected a header of tds, got {magic:#x}: the stages run different schedules")
    specs = []
    for start in range(0, num_tensors * _FIELDS_PER_TENSOR, _FIELDS_PER_TENSOR):
        dtype, flags, num_dims, *shape = values[start : start + _FIELDS_PER_TENSOR]
        specs.append(TensorMeta(DTYPES[dtype], tuple(shape[:num_dims]), bool(flags & 1), bool(flags & 2)))
    text = b"".join(word.to_bytes(8, sys.byteorder, signed=True) for word in values[_KEYS_OFFSET - _PREFIX_SIZE :])
    keys = json.loads(text[:num_key_bytes])
    return tuple(specs), Structure(CONTAINERS[container_idx], tuple(keys))
