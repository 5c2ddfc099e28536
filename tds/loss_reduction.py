"""All-reduce a global batch's losses over replicas, and broadcast them along the pipeline.

The message has a fixed size, because only the last stage knows the number of losses and their names:

number of losses | of which from the loss function | check | check squared | 3 numbers for each of 32 losses | names

The check is a hash of the names. It is summed with the other numbers. All replicas have the same names if the mean
square equals the squared mean, which every rank can verify.
"""

from __future__ import annotations

import functools
import zlib
from ctypes import c_float
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tds.device import upload
from tds.loss import LossMeter

MAX_LOSSES = 32
MAX_NAME_BYTES = 1020
_HEADER_SIZE, _WORD_BYTES = 4, 6  # a float64 represents any 6-byte integer exactly
_NAMES_OFFSET = _HEADER_SIZE + 3 * MAX_LOSSES
_SIZE = _NAMES_OFFSET + MAX_NAME_BYTES // _WORD_BYTES
_CHECK_BITS = 20  # sums of squares are exact for up to 8,192 replicas


@dataclass(frozen=True)
class MeanLosses:
    """A global batch's mean losses.

    Attributes:
        values: all losses by name as Python floats, because reading tensors would wait for the device. The first one
            is the loss to train on.
        fp64_names: names of fp64 losses.
        num_loss_fn_losses: number of losses from the loss function.
    """

    values: dict[str, float]
    fp64_names: frozenset[str]
    num_loss_fn_losses: int
    device: torch.device

    def tensor(self, name: str) -> torch.Tensor:
        """Return the mean loss ``name`` as a tensor on the device."""
        dtype = torch.float64 if name in self.fp64_names else torch.float32
        return torch.full((), self.values[name], dtype=dtype, device=self.device)  # a copy would block the host

    @property
    def loss(self) -> torch.Tensor:
        """Mean loss to train on."""
        return self.tensor(next(iter(self.values)))

    @property
    def loss_fn_losses(self) -> dict[str, torch.Tensor]:
        """Mean losses from the loss function, by name."""
        return {name: self.tensor(name) for name in list(self.values)[: self.num_loss_fn_losses]}

    @property
    def additional(self) -> dict[str, torch.Tensor]:
        """Mean losses except the one to train on, by name."""
        return {name: self.tensor(name) for name in list(self.values)[1:]}


@dataclass
class LossReduction:
    """The reduced losses, equal on every rank. The host waits for them when they are first read."""

    message: torch.Tensor
    num_replicas: int
    _host_values: list[float] = field(default_factory=list, init=False)

    def read(self, *scalars: torch.Tensor) -> list[float]:
        """Wait once for the losses and for ``scalars`` on the same device, and return the scalars."""
        values = torch.cat([self.message, *(scalar.to(self.message.dtype).reshape(1) for scalar in scalars)]).tolist()
        self._host_values = values[:_SIZE]
        return values[_SIZE:]

    @property
    def factor(self) -> float:
        """Factor for the gradients summed over the replicas; 0 if the total weight is 0."""
        weight = self._values[_HEADER_SIZE + 1]
        return 1.0 / weight if weight > 0 else 0.0

    @property
    def factor_on_device(self) -> torch.Tensor:
        """``factor`` as an fp64 scalar on the losses' device, without a wait."""
        weight = self.message[_HEADER_SIZE + 1]
        return torch.where(weight > 0, 1.0 / weight, torch.zeros_like(weight))

    @property
    def _values(self) -> list[float]:
        if not self._host_values:
            self.read()
        return self._host_values

    def means(self) -> MeanLosses:
        """Compute the mean losses. A loss with a total weight of 0 is 0.

        Raises:
            ValueError: the losses have different names on different replicas.
        """
        _, num_loss_fn_losses, check, squares = (average / self.num_replicas for average in self._values[:_HEADER_SIZE])
        if squares != check**2:
            raise ValueError(
                f"the losses must have the same names on each of the {self.num_replicas} replicas, got different "
                "names. Always return every loss, as tds.Weighted(0, 0) if there is nothing to count."
            )
        mean_by_name, fp64_names = {}, set()
        for idx, name in enumerate(_decode_names(tuple(self._values[_NAMES_OFFSET:]))):
            total, weight, is_fp64 = self._values[_HEADER_SIZE + 3 * idx : _HEADER_SIZE + 3 * idx + 3]
            mean = total / weight if weight > 0 else 0.0
            mean_by_name[name] = mean if is_fp64 else c_float(mean).value  # rounded to fp32
            fp64_names.update([name] if is_fp64 else [])
        return MeanLosses(mean_by_name, frozenset(fp64_names), int(num_loss_fn_losses), self.message.device)


def all_reduce_loss(
    meter: LossMeter | None, device: torch.device, *, data_group: Any = None, data_size: int = 1,
    pipe_group: Any = None, pipe_size: int = 1, last_rank: int = 0,
) -> LossReduction:  # fmt: skip
    """All-reduce the losses over the replicas and broadcast them to all stages. Collective.

    Args:
        meter: this replica's losses on the last stage; None on all other stages.

    Raises:
        ValueError: there are too many losses, or their names are too long.
    """
    message = torch.zeros(_SIZE, dtype=torch.float64, device=device)
    if meter is not None:
        header, encoded_names = _encode_names(tuple(meter.loss_sums), meter.num_loss_fn_losses, device)
        payload = torch.cat([header, *(loss_sum.to_tensor(device) for loss_sum in meter.loss_sums.values())])
        message[: payload.numel()] = payload
        if data_size > 1:
            dist.all_reduce(message[:_NAMES_OFFSET], group=data_group)
        message[_NAMES_OFFSET:] = encoded_names
    if pipe_size > 1:
        dist.broadcast(message, src=last_rank, group=pipe_group)
    return LossReduction(message, data_size)


@functools.lru_cache(maxsize=16)
def _encode_names(
    names: tuple[str, ...], num_loss_fn_losses: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode (head of the message, names) as tensors on ``device``."""
    if len(names) > MAX_LOSSES:
        raise ValueError(f"at most {MAX_LOSSES} losses can be reported, got {len(names)}: {', '.join(names)}")
    text = "\n".join(names).encode()
    if len(text) >= MAX_NAME_BYTES or any("\n" in name for name in names):
        raise ValueError(
            f"the names of losses must have no line breaks and fewer than {MAX_NAME_BYTES} bytes in total, got "
            f"{len(text)}"
        )
    padded = text.ljust(MAX_NAME_BYTES, b"\n")
    encoded = [int.from_bytes(padded[i : i + _WORD_BYTES], "big") for i in range(0, MAX_NAME_BYTES, _WORD_BYTES)]
    check = zlib.crc32(text + bytes([num_loss_fn_losses])) % 2**_CHECK_BITS
    header = [len(names), num_loss_fn_losses, check, check**2]
    host_tensors = (torch.tensor(values, dtype=torch.float64) for values in (header, encoded))
    header_tensor, names_tensor = (upload(values, device) for values in host_tensors)
    return header_tensor, names_tensor


@functools.lru_cache(maxsize=16)
def _decode_names(encoded: tuple[float, ...]) -> list[str]:
    text = b"".join(int(word).to_bytes(_WORD_BYTES, "big") for word in encoded)
    return text.decode().rstrip("\n").split("\n")


def read_with_norm(optimizer: Any, reduction: LossReduction) -> None:
    """Wait once for losses and gradient norm, then set the norm and the factor on ``optimizer``. Collective."""
    (optimizer.raw_norm,) = reduction.read(optimizer.norm_of_sums())
    optimizer.gradient_factor = reduction.factor
