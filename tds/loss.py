"""The losses of a global batch: what a loss function may return, and how the micro-batches of one replica add up.

| returned | trained on | reported |
|---|---|---|
| a tensor | its mean over micro-batches and replicas, as with DeepSpeed | the same |
| ``Weighted(total, count)`` | the sum of all totals over the sum of all counts | the same |
| a dict or namedtuple of these | "loss", or else the first | each by its name |
| a tuple or list of these | the first | "loss", "loss_1", "loss_2", ... |

A module without a loss function has it as its last layer, which returns the same forms; the labels travel to it with
the inputs, through all layers. Both train to the same bits.

What a module's ``get_additional_losses()`` gives (DeepSpeed's way to name more losses) is reported, too. All is added
up in fp32, or fp64 where the loss is fp64.

The weight of a micro-batch is known only when all have run, so each backward runs on ``loss / nominal`` and the
gradients are multiplied by ``nominal / total`` once, when they are reduced. For a plain tensor ``nominal`` is the
number of micro-batches, for ``Weighted`` a power of two that the engine chooses: dividing by it loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

FORMS = "one number (a tensor), tds.Weighted(total, count), or a dict, namedtuple or tuple of these by name"
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
                f'the loss "{self.name}" must always have the same form, got {_told(value)} at micro-batch '
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
            f"the loss function must return {FORMS}, got {_told(loss)} at micro-batch {micro_batch}. "
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
            f'the loss "{name}"{what} must be one number, got {_told(value)} at micro-batch {micro_batch}. '
            f"A loss function returns {FORMS}."
        )
    return value


def _refuse_untrainable(value: Any, name: str, micro_batch: int) -> None:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        raise TypeError(
            f'the loss to train on, "{name}", must be a tensor of a floating-point type, got {_told(value)} at '
            f"micro-batch {micro_batch}"
        )


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value if value.dtype is torch.float64 else value.float()


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (tuple, list, Mapping)) and not is_weighted(value):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else type(value).__name__
