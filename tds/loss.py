"""Losses of a global batch (Weighted, LossMeter) and their all-reduce over replicas and stages."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from ctypes import c_float
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# The losses of a global batch: what a loss function may return, and how the micro-batches of one replica add up.
#
# | returned | trained on | reported |
# |---|---|---|
# | a tensor | its mean over micro-batches and replicas, as with DeepSpeed | the same |
# | ``Weighted(total, count)`` | the sum of all totals over the sum of all counts | the same |
# | a dict or namedtuple of these | "loss", or else the first | each by its name |
# | a tuple or list of these | the first | "loss", "loss_1", "loss_2", ... |
#
# A module without a loss function has it as its last layer, which returns the same forms; the labels travel to it with
# the inputs, through all layers. Both train to the same bits.
#
# What a module's ``get_additional_losses()`` gives (DeepSpeed's way to name more losses) is reported, too. All is added
# up in fp32, or fp64 where the loss is fp64.
#
# The weight of a micro-batch is known only when all have run, so each backward runs on ``loss / nominal`` and the
# gradients are multiplied by ``nominal / total`` once, when they are reduced. For a plain tensor ``nominal`` is the
# number of micro-batches, for ``Weighted`` a power of two that the engine chooses: dividing by it loses nothing.

LOSS_STRUCTURES = "one number (a tensor), tds.Weighted(total, count), or a dict, namedtuple or tuple of these by name"
NO_LOSS_FN = (
    "the model has no loss_fn, so what its last layer returns is the loss. Give PipelineModule(..., loss_fn=...) a "
    "function of (outputs, labels), or end the layers with one that takes the labels and returns the loss"
)


@dataclass(frozen=True)
class Weighted:
    """A loss to be averaged by weight, such as by tokens: all micro-batches' and replicas' totals over their counts.

    Args:
        total: the loss summed over what was counted; a tensor of one element.
        count: how many were counted; a number, or a tensor of one element.
    """

    total: torch.Tensor
    count: torch.Tensor | float


def has_loss_function(loss_fn: Callable[[Any, Any], Any] | None) -> bool:
    """False where the last layer's output is the loss; a function around one that is not there has ``is_identity``."""
    return loss_fn is not None and not getattr(loss_fn, "is_identity", False)


class LossMeter:
    """Adds up the losses of one call on the last stage.

    Args:
        nominal_weight: what ``Weighted`` totals are divided by in the backward.
        additional: gives more losses to report after each micro-batch, or None; a module's ``get_additional_losses``.
    """

    def __init__(
        self,
        num_micro_batches: int,
        nominal_weight: float,
        device: torch.device,
        additional: Callable[[], Mapping[str, Any] | None] | None = None,
    ) -> None:
        self.num_micro_batches = num_micro_batches
        self.nominal_weight = nominal_weight
        self.device = device
        self.additional = additional
        self.num_own = 0
        self.sums: dict[str, Sum] = {}

    @property
    def is_weighted(self) -> bool | None:
        """Whether the loss to train on is ``Weighted``; None ahead of the first one."""
        return next((each.is_weighted for each in self.sums.values()), None)

    def add(self, loss: Any, micro_batch: int) -> torch.Tensor:
        """Count one micro-batch's losses and return what its backward runs on, before loss scaling.

        Raises:
            TypeError, ValueError: none of the forms above, or another than before.
        """
        losses = named_losses(loss, micro_batch)
        trained, value = next(iter(losses.items()))
        num_own = len(losses)
        for name, more in ((self.additional() if self.additional is not None else None) or {}).items():
            if name in losses:
                raise ValueError(f'"{name}" of get_additional_losses() is also a loss of the loss function; rename one')
            losses[name] = more
        if self.sums and (list(losses) != list(self.sums) or num_own != self.num_own):
            raise ValueError(
                f"the losses must have the same names at each micro-batch, got {list(losses)} at micro-batch "
                f"{micro_batch} after {list(self.sums)}"
            )
        self.num_own = num_own
        for name, each in losses.items():
            if name not in self.sums:
                self.sums[name] = Sum(name, self.nominal_weight if is_weighted(each) else float(self.num_micro_batches))
            self.sums[name].add(each, micro_batch)
        total = value.total if isinstance(value, Weighted) else value
        _refuse_untrainable(total, trained, micro_batch)
        return _wide(total) / self.sums[trained].nominal


class Sum:
    """The sum of one loss over micro-batches, and that of its weights."""

    def __init__(self, name: str, nominal: float) -> None:
        self.name = name
        self.nominal = nominal
        self.is_weighted: bool | None = None
        self.total: torch.Tensor | None = None
        self.weight: torch.Tensor | float = 0.0

    def add(self, value: Any, micro_batch: int) -> None:
        """Add a tensor, a number or a ``Weighted``."""
        if self.is_weighted is None:
            self.is_weighted = is_weighted(value)
        elif self.is_weighted != is_weighted(value):
            raise ValueError(
                f'the loss "{self.name}" must always have the same form, got {_describe(value)} at micro-batch '
                f"{micro_batch} after {'tds.Weighted' if self.is_weighted else 'one number'}"
            )
        total, count = (value.total, value.count) if isinstance(value, Weighted) else (value, 1.0)
        seen = _wide(_number(total, self.name, "", micro_batch)).detach().reshape(())
        self.total = seen.clone() if self.total is None else self.total + seen
        if not isinstance(count, (int, float)):
            count = _number(count, self.name, "'s count", micro_batch).detach().to(torch.float64).reshape(())
        self.weight = self.weight + count

    def numbers(self, device: torch.device) -> torch.Tensor:
        """Return [total / nominal, weight / nominal, is fp64] in fp64."""
        if self.total is None:
            return torch.zeros(3, dtype=torch.float64, device=device)
        is_double = _filled(float(self.total.dtype is torch.float64), device)
        weight = _filled(self.weight, device) if isinstance(self.weight, (int, float)) else self.weight.to(device)
        return torch.stack([(self.total.to(device) / self.nominal).double(), weight / self.nominal, is_double])


def _filled(value: float, device: torch.device) -> torch.Tensor:
    """Return a number in fp64; it is not copied to the device, for which the host would wait."""
    return torch.full((), value, dtype=torch.float64, device=device)


def named_losses(loss: Any, micro_batch: int) -> dict[str, Any]:
    """Return the losses by name, the one to train on first.

    Raises:
        TypeError: none of the forms that a loss function may return.
    """
    if isinstance(loss, torch.Tensor) or is_weighted(loss):
        return {"loss": loss}
    if isinstance(loss, Mapping):
        named = dict(loss)
    elif isinstance(loss, tuple) and hasattr(loss, "_fields"):
        named = dict(zip(loss._fields, loss, strict=True))
    elif isinstance(loss, (tuple, list)):
        named = {f"loss_{i}" if i else "loss": each for i, each in enumerate(loss)}
    else:
        named = {}
    if not named or not all(isinstance(name, str) and name for name in named):
        raise TypeError(
            f"the loss function must return {LOSS_STRUCTURES}, got {_describe(loss)} at micro-batch {micro_batch}. "
            "A model that has no loss can be run by eval_batch(..., compute_loss=False)."
        )
    first = "loss" if "loss" in named else next(iter(named))
    return {first: named.pop(first), **named}


def is_weighted(loss: Any) -> bool:
    """True for ``Weighted``."""
    return isinstance(loss, Weighted)


def _number(value: Any, name: str, what: str, micro_batch: int) -> torch.Tensor:
    if isinstance(value, (int, float)):
        return torch.tensor(float(value))
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.is_complex():
        raise ValueError(
            f'the loss "{name}"{what} must be one number, got {_describe(value)} at micro-batch {micro_batch}. '
            f"A loss function returns {LOSS_STRUCTURES}."
        )
    return value


def _refuse_untrainable(value: Any, name: str, micro_batch: int) -> None:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        raise TypeError(
            f'the loss to train on, "{name}", must be a tensor of a floating-point type, got {_describe(value)} at '
            f"micro-batch {micro_batch}"
        )


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value if value.dtype is torch.float64 else value.float()


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (tuple, list, Mapping)) and not is_weighted(value):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else type(value).__name__


# How the ranks agree on the losses of a global batch: in one sum over replicas and one broadcast along the pipeline.
#
# The message has one size whatever is in it, for only the last stage knows how many losses there are and their names:
#
# number of losses | of which from the loss function | check | check squared | 3 numbers for each of 32 losses | names
#
# The check is a hash of the names. It is summed with the rest: its mean and the mean of its square tell every rank
# alike whether all replicas mean the same.

MAX_LOSSES = 32
MAX_BYTES = 1020
_HEAD, _PART = 4, 6  # a float64 holds any 6 bytes as a whole number
_NAMES = _HEAD + 3 * MAX_LOSSES
_SIZE = _NAMES + MAX_BYTES // _PART
_CHECK_BITS = 20  # squares of checks add up exactly over 8,192 replicas


class MeanLosses(NamedTuple):
    """The mean losses of a global batch: the one to train on, all of the loss function, and all but the first.

    ``numbers`` has all of them on the host, the first one first: to ask the tensors would be to wait for the device.
    """

    loss: torch.Tensor
    own: dict[str, torch.Tensor]
    additional: dict[str, torch.Tensor]
    numbers: dict[str, float]


class LossReduction:
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

    def means(self) -> MeanLosses:
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
        return MeanLosses(values[names[0]], own, {name: values[name] for name in names[1:]}, numbers)

    def _mean(self, index: int) -> float:
        """Return a mean as its type holds it."""
        total, weight, is_double = self._numbers[_HEAD + 3 * index : _HEAD + 3 * index + 3]
        mean = total / weight if weight > 0 else 0.0
        return mean if is_double else c_float(mean).value

    def _as_tensor(self, mean: float, index: int) -> torch.Tensor:
        dtype = torch.float64 if self._numbers[_HEAD + 3 * index + 2] else torch.float32
        return torch.full((), mean, dtype=dtype, device=self._device)  # not a copy, which the host would wait for


def all_reduce_loss(
    meter: LossMeter | None, *, data_group: Any, data_size: int, pipe_group: Any, pipe_size: int, last_rank: int,
    device: torch.device,
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
    return torch.tensor(head, dtype=torch.float64).to(device), torch.tensor(written, dtype=torch.float64).to(device)


@functools.lru_cache(maxsize=16)
def _read(written: tuple[float, ...]) -> list[str]:
    text = b"".join(int(part).to_bytes(_PART, "big") for part in written)
    return text.decode().rstrip("\n").split("\n")


def read_with_norm(optimizer: Any, agreement: LossReduction) -> None:
    """Wait for losses and gradient norm at once, and hand ``optimizer`` norm and factor. Collective."""
    (optimizer.raw_norm,) = agreement.read(optimizer.norm_of_sums())
    optimizer.gradient_factor = agreement.factor
