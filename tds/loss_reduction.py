"""All-reduce of a global batch's losses over replicas, and broadcast along the pipeline.

The message has a fixed size, because only the last stage knows the number of losses and their names:

number of losses | of which from the loss function | check | check squared | 3 numbers for each of 32 losses | names

The check is a hash of the names. It is summed with the other numbers. All replicas have the same names if the mean of
the squares equals the square of the mean, which every rank can verify.
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
MAX_BYTES = 1020
_HEAD, _PART = 4, 6  # a float64 represents any 6-byte integer exactly
_NAMES = _HEAD + 3 * MAX_LOSSES
_SIZE = _NAMES + MAX_BYTES // _PART
_CHECK_BITS = 20  # sums of squares are exact for up to 8,192 replicas


@dataclass(frozen=True)
class MeanLosses:
    """The mean losses of a global batch.

    Attributes:
        numbers: all losses by name as Python floats, because reading tensors would wait for the device. The first one
            is the loss to train on.
        doubles: names of the losses in fp64.
        num_own: number of losses that come from the loss function.
    """

    numbers: dict[str, float]
    doubles: frozenset[str]
    num_own: int
    device: torch.device

    def tensor(self, name: str) -> torch.Tensor:
        """Return the mean of the loss ``name`` as a tensor on the device."""
        dtype = torch.float64 if name in self.doubles else torch.float32
        return torch.full((), self.numbers[name], dtype=dtype, device=self.device)  # a copy would block the host

    @property
    def loss(self) -> torch.Tensor:
        """Mean of the loss to train on."""
        return self.tensor(next(iter(self.numbers)))

    @property
    def own(self) -> dict[str, torch.Tensor]:
        """Means of the losses that come from the loss function, by name."""
        return {name: self.tensor(name) for name in list(self.numbers)[: self.num_own]}

    @property
    def additional(self) -> dict[str, torch.Tensor]:
        """Means of all losses except the one to train on, by name."""
        return {name: self.tensor(name) for name in list(self.numbers)[1:]}


@dataclass
class LossReduction:
    """The reduced losses, equal on every rank. The host waits for them when they are first read."""

    sent: torch.Tensor
    num_replicas: int
    _read: list[float] = field(default_factory=list, init=False)

    def read(self, *more: torch.Tensor) -> list[float]:
        """Wait once for the losses and for the scalars ``more`` of the same device, and return the scalars."""
        values = torch.cat([self.sent, *(scalar.to(self.sent.dtype).reshape(1) for scalar in more)]).tolist()
        self._read = values[:_SIZE]
        return values[_SIZE:]

    @property
    def factor(self) -> float:
        """Factor for the gradients summed over the replicas; 0 if the total weight is 0."""
        weight = self._numbers[_HEAD + 1]
        return 1.0 / weight if weight > 0 else 0.0

    @property
    def factor_on_device(self) -> torch.Tensor:
        """``factor`` as an fp64 scalar on the device of the losses, without a wait."""
        weight = self.sent[_HEAD + 1]
        return torch.where(weight > 0, 1.0 / weight, torch.zeros_like(weight))

    @property
    def _numbers(self) -> list[float]:
        if not self._read:
            self.read()
        return self._read

    def means(self) -> MeanLosses:
        """Return the mean losses. A loss with a total weight of 0 is 0.

        Raises:
            ValueError: the losses have different names on different replicas.
        """
        _, num_own, check, squares = (average / self.num_replicas for average in self._numbers[:_HEAD])
        if squares != check**2:
            raise ValueError(
                f"the losses must have the same names on each of the {self.num_replicas} replicas, got different "
                "names. Always return every loss, as tds.Weighted(0, 0) if there is nothing to count."
            )
        mean_by_name, doubles = {}, set()
        for idx, name in enumerate(_read(tuple(self._numbers[_NAMES:]))):
            total, weight, is_double = self._numbers[_HEAD + 3 * idx : _HEAD + 3 * idx + 3]
            mean = total / weight if weight > 0 else 0.0
            mean_by_name[name] = mean if is_double else c_float(mean).value  # rounded to fp32
            doubles.update([name] if is_double else [])
        return MeanLosses(mean_by_name, frozenset(doubles), int(num_own), self.sent.device)


def all_reduce_loss(
    meter: LossMeter | None, device: torch.device, *, data_group: Any = None, data_size: int = 1,
    pipe_group: Any = None, pipe_size: int = 1, last_rank: int = 0,
) -> LossReduction:  # fmt: skip
    """All-reduce the losses over the replicas and broadcast them to all stages. Collective.

    Args:
        meter: the losses of this replica on the last stage; None on all other stages.

    Raises:
        ValueError: there are too many losses, or their names are too long.
    """
    message = torch.zeros(_SIZE, dtype=torch.float64, device=device)
    if meter is not None:
        head, encoded_names = _written(tuple(meter.sums), meter.num_own, device)
        parts = torch.cat([head, *(loss_sum.numbers(device) for loss_sum in meter.sums.values())])
        message[: parts.numel()] = parts
        if data_size > 1:
            dist.all_reduce(message[:_NAMES], group=data_group)
        message[_NAMES:] = encoded_names
    if pipe_size > 1:
        dist.broadcast(message, src=last_rank, group=pipe_group)
    return LossReduction(message, data_size)


@functools.lru_cache(maxsize=16)
def _written(names: tuple[str, ...], num_own: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (head of the message, encoded names) as tensors on ``device``."""
    if len(names) > MAX_LOSSES:
        raise ValueError(f"at most {MAX_LOSSES} losses can be reported, got {len(names)}: {', '.join(names)}")
    text = "\n".join(names).encode()
    if len(text) >= MAX_BYTES or any("\n" in name for name in names):
        raise ValueError(
            f"the names of losses must have no line breaks and fewer than {MAX_BYTES} bytes in total, got {len(text)}"
        )
    padded = text.ljust(MAX_BYTES, b"\n")
    encoded = [int.from_bytes(padded[i : i + _PART], "big") for i in range(0, MAX_BYTES, _PART)]
    check = zlib.crc32(text + bytes([num_own])) % 2**_CHECK_BITS
    head = [len(names), num_own, check, check**2]
    host_tensors = (torch.tensor(values, dtype=torch.float64) for values in (head, encoded))
    head_tensor, names_tensor = (upload(values, device) for values in host_tensors)
    return head_tensor, names_tensor


@functools.lru_cache(maxsize=16)
def _read(written: tuple[float, ...]) -> list[str]:
    text = b"".join(int(part).to_bytes(_PART, "big") for part in written)
    return text.decode().rstrip("\n").split("\n")


def read_with_norm(optimizer: Any, agreement: LossReduction) -> None:
    """Wait once for losses and gradient norm, then set the norm and the factor on ``optimizer``. Collective."""
    (optimizer.raw_norm,) = agreement.read(optimizer.norm_of_sums())
    optimizer.gradient_factor = agreement.factor
