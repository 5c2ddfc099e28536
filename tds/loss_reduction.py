"""All-reduce of a global batch's losses over replicas and broadcast along the pipeline.

The message has one size whatever is in it, for only the last stage knows how many losses there are and their names:

number of losses | of which from the loss function | check | check squared | 3 numbers for each of 32 losses | names

The check is a hash of the names. It is summed with the rest: its mean and the mean of its square tell every rank
alike whether all replicas mean the same.
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
_HEAD, _PART = 4, 6  # a float64 holds any 6 bytes as a whole number
_NAMES = _HEAD + 3 * MAX_LOSSES
_SIZE = _NAMES + MAX_BYTES // _PART
_CHECK_BITS = 20  # squares of checks add up exactly over 8,192 replicas


@dataclass(frozen=True)
class MeanLosses:
    """The mean losses of a global batch.

    Attributes:
        numbers: all of them on the host, by name, the one to train on first: to ask tensors would be to wait for the
            device.
        doubles: the names of those in fp64.
        num_own: how many come from the loss function.
    """

    numbers: dict[str, float]
    doubles: frozenset[str]
    num_own: int
    device: torch.device

    def tensor(self, name: str) -> torch.Tensor:
        """Return a mean on the device."""
        dtype = torch.float64 if name in self.doubles else torch.float32
        return torch.full((), self.numbers[name], dtype=dtype, device=self.device)  # a copy would be waited for

    @property
    def loss(self) -> torch.Tensor:
        """The one to train on."""
        return self.tensor(next(iter(self.numbers)))

    @property
    def own(self) -> dict[str, torch.Tensor]:
        """Those of the loss function."""
        return {name: self.tensor(name) for name in list(self.numbers)[: self.num_own]}

    @property
    def additional(self) -> dict[str, torch.Tensor]:
        """All but the one to train on."""
        return {name: self.tensor(name) for name in list(self.numbers)[1:]}


@dataclass
class LossReduction:
    """What all replicas' losses came to, the same on every rank; the host waits for it when it is first asked for."""

    sent: torch.Tensor
    num_replicas: int
    _read: list[float] = field(default_factory=list, init=False)

    def read(self, *more: torch.Tensor) -> list[float]:
        """Wait for the losses and for single numbers of the same device, all at once, and return the latter."""
        every = torch.cat([self.sent, *(each.to(self.sent.dtype).reshape(1) for each in more)]).tolist()
        self._read = every[:_SIZE]
        return every[_SIZE:]

    @property
    def factor(self) -> float:
        """What the gradients, summed over replicas, are to be multiplied by; 0 where nothing was counted."""
        weight = self._numbers[_HEAD + 1]
        return 1.0 / weight if weight > 0 else 0.0

    @property
    def factor_on_device(self) -> torch.Tensor:
        """``factor`` as a scalar in fp64 where the losses lie; nobody waits for it."""
        weight = self.sent[_HEAD + 1]
        return torch.where(weight > 0, 1.0 / weight, torch.zeros_like(weight))

    @property
    def _numbers(self) -> list[float]:
        if not self._read:
            self.read()
        return self._read

    def means(self) -> MeanLosses:
        """Return the means. A loss of which nothing was counted is 0.

        Raises:
            ValueError: replicas whose losses have different names.
        """
        _, num_own, check, squares = (each / self.num_replicas for each in self._numbers[:_HEAD])
        if squares != check**2:
            raise ValueError(
                f"the losses must have the same names on each of the {self.num_replicas} replicas, got "
                "different ones. Return each loss always, and as tds.Weighted(0, 0) where there is nothing to count."
            )
        numbers, doubles = {}, set()
        for place, name in enumerate(_read(tuple(self._numbers[_NAMES:]))):
            total, weight, is_double = self._numbers[_HEAD + 3 * place : _HEAD + 3 * place + 3]
            mean = total / weight if weight > 0 else 0.0
            numbers[name] = mean if is_double else c_float(mean).value  # as its type holds it
            doubles.update([name] if is_double else [])
        return MeanLosses(numbers, frozenset(doubles), int(num_own), self.sent.device)


def all_reduce_loss(
    meter: LossMeter | None, device: torch.device, *, data_group: Any = None, data_size: int = 1,
    pipe_group: Any = None, pipe_size: int = 1, last_rank: int = 0,
) -> LossReduction:  # fmt: skip
    """Return what the losses came to, the same on every rank of the pipelines. Collective.

    Args:
        meter: the losses of this replica on the last stage, None elsewhere.

    Raises:
        ValueError: too many losses or too long names.
    """
    numbers = torch.zeros(_SIZE, dtype=torch.float64, device=device)
    if meter is not None:
        head, written = _written(tuple(meter.sums), meter.num_own, device)
        parts = torch.cat([head, *(each.numbers(device) for each in meter.sums.values())])
        numbers[: parts.numel()] = parts
        if data_size > 1:
            dist.all_reduce(numbers[:_NAMES], group=data_group)
        numbers[_NAMES:] = written
    if pipe_size > 1:
        dist.broadcast(numbers, src=last_rank, group=pipe_group)
    return LossReduction(numbers, data_size)


@functools.lru_cache(maxsize=16)
def _written(names: tuple[str, ...], num_own: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is known of all losses ahead of their numbers, and the names as numbers."""
    if len(names) > MAX_LOSSES:
        raise ValueError(f"at most {MAX_LOSSES} losses can be reported, got {len(names)}: {', '.join(names)}")
    text = "\n".join(names).encode()
    if len(text) >= MAX_BYTES or any("\n" in name for name in names):
        raise ValueError(
            f"the names of losses must have no line breaks and together less than {MAX_BYTES} bytes, got {len(text)}"
        )
    parts = text.ljust(MAX_BYTES, b"\n")
    written = [int.from_bytes(parts[i : i + _PART], "big") for i in range(0, MAX_BYTES, _PART)]
    check = zlib.crc32(text + bytes([num_own])) % 2**_CHECK_BITS
    head = [len(names), num_own, check, check**2]
    made = (torch.tensor(numbers, dtype=torch.float64) for numbers in (head, written))
    known, named = (upload(numbers, device) for numbers in made)
    return known, named


@functools.lru_cache(maxsize=16)
def _read(written: tuple[float, ...]) -> list[str]:
    text = b"".join(int(part).to_bytes(_PART, "big") for part in written)
    return text.decode().rstrip("\n").split("\n")


def read_with_norm(optimizer: Any, agreement: LossReduction) -> None:
    """Wait for losses and gradient norm at once, and hand ``optimizer`` norm and factor. Collective."""
    (optimizer.raw_norm,) = agreement.read(optimizer.norm_of_sums())
    optimizer.gradient_factor = agreement.factor
