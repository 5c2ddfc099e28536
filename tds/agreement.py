"""How the ranks agree on the losses of a global batch: in one sum over replicas and one broadcast along the pipeline.

The message has one size whatever is in it, for only the last stage knows how many losses there are and their names:

    number of losses | of which from the loss function | check | check squared | 3 numbers for each of 32 losses | names

The check is a hash of the names. It is summed with the rest: its mean and the mean of its square tell every rank alike
whether all replicas mean the same.
"""

from __future__ import annotations

import functools
import zlib
from ctypes import c_float
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tds.loss import LossMeter

MAX_LOSSES = 32
MAX_BYTES = 1020
_HEAD, _PART = 4, 6  # a float64 holds any 6 bytes as a whole number
_NAMES = _HEAD + 3 * MAX_LOSSES
_SIZE = _NAMES + MAX_BYTES // _PART
_CHECK_BITS = 20  # squares of checks add up exactly over 8,192 replicas


class Means(NamedTuple):
    """The mean losses of a global batch: the one to train on, all of the loss function, and all but the first.

    ``numbers`` has all of them on the host, the first one first: to ask the tensors would be to wait for the device.
    """

    loss: torch.Tensor
    own: dict[str, torch.Tensor]
    additional: dict[str, torch.Tensor]
    numbers: dict[str, float]


class Agreement:
    """What all replicas' losses came to, the same on every rank; the host waits for it when it is first asked for."""

    def __init__(self, sent: torch.Tensor, num_replicas: int) -> None:
        self._sent = sent
        self._num_replicas = num_replicas
        self._device = sent.device
        self._read: list[float] = []

    def read(self, *more: torch.Tensor) -> list[float]:
        """Wait for the losses and for single numbers of the same device, all at once, and return the latter."""
        every = torch.cat([self._sent, *(each.to(self._sent.dtype).reshape(1) for each in more)]).tolist()
        self._read = every[:_SIZE]
        return every[_SIZE:]

    @property
    def factor(self) -> float:
        """What the gradients, summed over replicas, are to be multiplied by; 0 where nothing was counted."""
        weight = self._numbers[_HEAD + 1]
        return 1.0 / weight if weight > 0 else 0.0

    @property
    def _numbers(self) -> list[float]:
        if not self._read:
            self.read()
        return self._read

    def means(self) -> Means:
        """Return the means. A loss of which nothing was counted is 0.

        Raises:
            ValueError: replicas whose losses have different names.
        """
        number, num_own, check, squares = (each / self._num_replicas for each in self._numbers[:_HEAD])
        if squares != check**2:
            raise ValueError(
                f"the losses must have the same names on each of the {self._num_replicas} replicas, got "
                "different ones. Return each loss always, and as tds.Weighted(0, 0) where there is nothing to count."
            )
        names = _read(tuple(self._numbers[_NAMES:]))
        numbers = dict(zip(names, (self._mean(i) for i in range(int(number))), strict=True))
        values = {name: self._as_tensor(mean, i) for i, (name, mean) in enumerate(numbers.items())}
        own = dict(list(values.items())[: int(num_own)])
        return Means(values[names[0]], own, {name: values[name] for name in names[1:]}, numbers)

    def _mean(self, index: int) -> float:
        """Return a mean as its type holds it."""
        total, weight, is_double = self._numbers[_HEAD + 3 * index : _HEAD + 3 * index + 3]
        mean = total / weight if weight > 0 else 0.0
        return mean if is_double else c_float(mean).value

    def _as_tensor(self, mean: float, index: int) -> torch.Tensor:
        dtype = torch.float64 if self._numbers[_HEAD + 3 * index + 2] else torch.float32
        return torch.full((), mean, dtype=dtype, device=self._device)  # not a copy, which the host would wait for


def agree_on_loss(
    meter: LossMeter | None, *, data_group: Any, data_size: int, pipe_group: Any, pipe_size: int, last_rank: int,
    device: torch.device,
) -> Agreement:  # fmt: skip
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
    return Agreement(numbers, data_size)


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
    return torch.tensor(head, dtype=torch.float64).to(device), torch.tensor(written, dtype=torch.float64).to(device)


@functools.lru_cache(maxsize=16)
def _read(written: tuple[float, ...]) -> list[str]:
    text = b"".join(int(part).to_bytes(_PART, "big") for part in written)
    return text.decode().rstrip("\n").split("\n")
