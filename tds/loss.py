"""Losses of a global batch (Weighted, LossMeter) and their all-reduce over replicas and stages."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from ctypes import c_float
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tds.device import upload

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
# number of micro-batches (of a replica on the mean: they may have unequal numbers), for ``Weighted`` a power of two
# that the engine chooses: dividing by it loses nothing.

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


@dataclass
class LossMeter:
    """Adds up the losses of one call on the last stage.

    Args:
        nominal_weight: what ``Weighted`` totals are divided by in the backward.
        mean_micro_batches: what others are divided by: the micro-batches of a replica on the mean; None: of this one.
        additional: gives more losses to report after each micro-batch, or None; a module's ``get_additional_losses``.

    Attributes:
        sums: by name, the loss to train on first; filled by the first micro-batch.
        num_own: how many of them come from the loss function.
    """

    num_micro_batches: int
    nominal_weight: float
    device: torch.device
    additional: Callable[[], Mapping[str, Any] | None] | None = None
    mean_micro_batches: float | None = None
    sums: dict[str, Sum] = field(default_factory=dict, init=False)
    num_own: int = field(default=0, init=False)

    def add(self, loss: Any, micro_batch: int) -> torch.Tensor:
        """Count one micro-batch's losses and return what its backward runs on, before loss scaling.

        Raises:
            TypeError, ValueError: none of the forms above, or another than before.
        """
        losses = named_losses(loss, micro_batch)
        trained, num_own = next(iter(losses)), len(losses)
        if self.additional is not None and (more := self.additional()):
            losses = _with_additional(losses, more)
        if not self.sums:
            self.num_own = num_own
            nominal = {True: self.nominal_weight, False: float(self.mean_micro_batches or self.num_micro_batches)}
            self.sums = {name: Sum(name, is_weighted(x), nominal[is_weighted(x)]) for name, x in losses.items()}
        if (list(losses), num_own) != (list(self.sums), self.num_own):
            raise self._other_names(losses, micro_batch)
        for name, each in losses.items():
            self.sums[name].add(each, micro_batch)
        return _trainable(losses[trained], trained, micro_batch) / self.sums[trained].nominal

    def _other_names(self, losses: dict[str, Any], micro_batch: int) -> ValueError:
        return ValueError(
            f"the losses must have the same names at each micro-batch, got {list(losses)} at micro-batch "
            f"{micro_batch} after {list(self.sums)}"
        )


@dataclass
class Sum:
    """The sum of one loss over micro-batches, and that of its weights."""

    name: str
    is_weighted: bool
    nominal: float
    total: torch.Tensor | float = 0.0
    weight: torch.Tensor | float = 0.0

    def add(self, value: Any, micro_batch: int) -> None:
        """Add a tensor, a number or a ``Weighted``."""
        if is_weighted(value) != self.is_weighted:
            raise self._other_form(value, micro_batch)
        total, count = (value.total, value.count) if self.is_weighted else (value, 1.0)
        self.total = self.total + _wide(_number(total, self.name, "", micro_batch)).detach().reshape(())
        if not isinstance(count, (int, float)):
            count = _number(count, self.name, "'s count", micro_batch).detach().to(torch.float64).reshape(())
        self.weight = self.weight + count

    def _other_form(self, value: Any, micro_batch: int) -> ValueError:
        return ValueError(
            f'the loss "{self.name}" must always have the same form, got {_describe(value)} at micro-batch '
            f"{micro_batch} after {'tds.Weighted' if self.is_weighted else 'one number'}"
        )

    def numbers(self, device: torch.device) -> torch.Tensor:
        """Return [total / nominal, weight / nominal, is fp64] in fp64."""
        is_double = float(torch.as_tensor(self.total).dtype is torch.float64)
        return torch.stack([_on(device, n) for n in (self.total / self.nominal, self.weight / self.nominal, is_double)])


def _on(device: torch.device, value: torch.Tensor | float) -> torch.Tensor:
    """Return ``value`` in fp64; a number of the host is not copied to the device, for which the host would wait."""
    if isinstance(value, torch.Tensor):
        return value.to(device).double()
    return torch.full((), value, dtype=torch.float64, device=device)


def _with_additional(losses: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    for name in more:
        if name in losses:
            raise ValueError(f'"{name}" of get_additional_losses() is also a loss of the loss function; rename one')
    return {**losses, **more}


def named_losses(loss: Any, micro_batch: int) -> dict[str, Any]:
    """Return the losses by name, the one to train on first.

    Raises:
        TypeError: none of the forms that a loss function may return.
    """
    if isinstance(loss, torch.Tensor) or is_weighted(loss):
        return {"loss": loss}
    return _named_parts(loss, micro_batch)


def _named_parts(loss: Any, micro_batch: int) -> dict[str, Any]:
    """Return the losses of a dict, a namedtuple, a tuple or a list by name."""
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


def _trainable(value: Any, name: str, micro_batch: int) -> torch.Tensor:
    """Return what of a loss a backward runs on."""
    value = value.total if isinstance(value, Weighted) else value
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return _wide(value)
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
