"""Optimizer states in 8 bits, stored as torchao's ``OptimState8bit``.

A state is divided into blocks of 256 consecutive elements. Each element is a code of 8 bits, an index into a map of 256
values from -1 (or 0, for squares) to 1, and each block has a scale in fp32: 1.016 bytes per element. The values of the
map are dense near 0, like floating-point numbers.

The scale is the element of the block with the largest absolute value, with its sign. torchao takes the absolute value,
but its signed map contains 1 and not -1, so that a negative largest element would be reduced by 0.7 %. With the signed
scale that element is exact, and quantizing dequantized values changes nothing. Checkpoints therefore contain the values
in fp32: they load into every layout and every dtype of states, and a resumed run in the same layout has the same bits.

Blocks start at the first element of this rank's main param. If the row lengths of a weight and of its shards are
multiples of 256, all layouts have the same blocks, and results with ZeRO are bitwise equal. Otherwise the rounding
depends on the layout.

Weights with fewer than 4,096 elements, over all ranks, and main params with a number that is not a multiple of 256 have
states in their own dtype, as in torchao.

Source: Dettmers et al. 2022, "8-bit optimizers via block-wise quantization", section 2.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from megatron.errors import ConfigError
from megatron.mpu.shard import shard_of

BLOCK_NUMEL = 256
MIN_NUMEL = 4096


def can_be_quantized(main_param: torch.Tensor) -> bool:
    """Return True if the states of ``main_param`` are divided into full blocks and are worth quantizing."""
    is_large = math.prod(shard_of(main_param).global_shape) >= MIN_NUMEL  # also for the small shards of ZeRO
    return is_large and main_param.numel() % BLOCK_NUMEL == 0


def is_quantized(state: Any) -> bool:
    """Return True if an entry of an optimizer's state is stored in 8 bits."""
    return isinstance(state, torch.Tensor) and hasattr(state, "codes")


def check_torchao() -> None:
    """Import torchao.

    Raises:
        ConfigError: it is not installed, or does not support this version of torch.
    """
    _import_format()


def zeros(main_param: torch.Tensor, *, is_signed: bool) -> Any:
    """Return a quantized state of zeros with the shape and device of ``main_param``.

    Args:
        is_signed: the state has negative values: first moments, not second ones.
    """
    codes = torch.full(main_param.shape, _zero_code(is_signed), dtype=torch.uint8, device=main_param.device)
    scale = torch.zeros(codes.numel() // BLOCK_NUMEL, device=codes.device)
    qmap, _ = _code_map(is_signed, codes.device)
    return _import_format().OptimState8bit(codes, scale, qmap, is_signed, dtype=main_param.dtype)


def load(state: Any, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """Dequantize the elements ``start ... stop``, which are full blocks, in fp32; flat unless all are loaded."""
    values = state.qmap[state.codes.view(-1)[start:stop].int()].view(-1, BLOCK_NUMEL)
    scale = state.scale[start // BLOCK_NUMEL : None if stop is None else stop // BLOCK_NUMEL]
    flat: torch.Tensor = values.mul_(scale.unsqueeze(1)).view(-1)
    return flat.view(state.codes.shape) if len(flat) == state.codes.numel() else flat


def store(state: Any, values: torch.Tensor, start: int = 0) -> None:
    """Quantize ``values``, full blocks, into the elements of ``state`` from ``start`` on."""
    blocks = values.detach().reshape(-1, BLOCK_NUMEL).to(state.scale)
    scale = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    _, bounds = _code_map(state.signed, blocks.device)
    codes = torch.bucketize(blocks / torch.where(scale == 0, 1.0, scale), bounds, out_int32=True)
    state.codes.view(-1)[start : start + blocks.numel()].copy_(codes.view(-1))
    state.scale[start // BLOCK_NUMEL : (start + blocks.numel()) // BLOCK_NUMEL].copy_(scale.squeeze(1))


@functools.cache
def _import_format() -> Any:
    try:
        from torchao.optim import subclass_8bit
    except ImportError as error:
        raise ConfigError(
            f"--exp-avg-dtype 8bit and --exp-avg-sq-dtype 8bit need the package torchao: {error}. Install it (pip "
            "install torchao), or use bf16"
        ) from error
    return subclass_8bit


@functools.cache
def _code_map(is_signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of the codes [256], ascending, and the bounds between neighbouring ones [255]."""
    package = _import_format()
    values = torch.tensor(package.get_qmap_signed() if is_signed else package.get_qmap_unsigned())
    return values.to(device), ((values[1:] + values[:-1]) / 2).to(device)


def _zero_code(is_signed: bool) -> int:
    values, _ = _code_map(is_signed, torch.device("cpu"))
    return int((values == 0).nonzero())
