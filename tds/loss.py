"""Global-batch losses: Weighted, LossMeter.

| returned by the loss function | loss to train on | reported |
|---|---|---|
| a tensor | its mean over micro-batches and replicas, as in DeepSpeed | the same |
| ``Weighted(total, count)`` | the sum of all totals over the sum of all counts | the same |
| a dict or namedtuple of these | "loss" if present, otherwise the first | each by its name |
| a tuple or list of these | the first | "loss", "loss_1", "loss_2", ... |

If a module has no loss function, its last layer computes the loss and returns the same structures; the labels are then
passed through all layers with the inputs. Both variants' results are bitwise equal.

The losses of a module's ``get_additional_losses()`` (DeepSpeed's interface for more named losses) are reported too. All
losses are summed in fp32, or in fp64 if the loss is fp64.

A micro-batch's weight is only known after all micro-batches have run. Each backward therefore runs on
``loss / nominal``, and the gradients are multiplied once by ``nominal / total`` when they are reduced. For a plain
tensor, ``nominal`` is the number of micro-batches (the mean over the replicas, if they have unequal numbers). For
``Weighted``, it is the engine's ``nominal_weight``, a power of two, so that the division is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tds.user_functions import LossFn

LOSS_STRUCTURES = "a tensor with one element, tds.Weighted(total, count), or a dict, namedtuple or tuple of these"
NO_LOSS_FN = (
    "the model has no loss_fn, so the output of its last layer is used as the loss. Pass a function of (outputs, "
    "labels) as PipelineModule(..., loss_fn=...), or add a last layer that takes the labels and returns the loss"
)


@dataclass(frozen=True)
class Weighted:
    """A loss averaged by weight, such as a mean over tokens.

    The mean is ``total``, summed over all micro-batches and replicas, divided by the summed ``count``.

    Args:
        total: the summed loss; a tensor with one element.
        count: the number of summands, such as tokens; a number, or a tensor with one element.
    """

    total: torch.Tensor
    count: torch.Tensor | float


@dataclass(frozen=True)
class WrappedLoss:
    """A loss function that calls another loss function and extends it, for example to record the losses.

    Args:
        function: called with (output, labels).
        inner: the loss function that ``function`` calls; None: the model's output is the loss.
    """

    function: LossFn
    inner: LossFn | None

    def __call__(self, output: Any, labels: Any) -> Any:
        return self.function(output, labels)


def has_loss_function(loss_fn: LossFn | None) -> bool:
    """Return True if a loss function is applied to the last layer's output; False if that output is the loss."""
    return has_loss_function(loss_fn.inner) if isinstance(loss_fn, WrappedLoss) else loss_fn is not None


@dataclass
class LossMeter:
    """Sums one call's losses on the last stage.

    Args:
        nominal_weight: divisor for ``Weighted`` totals in the backward.
        mean_num_micro_batches: divisor for other losses: the mean number of micro-batches over the replicas; None:
            ``num_micro_batches``.
        additional: a module's ``get_additional_losses``; returns more losses to report after each micro-batch, or None.

    Attributes:
        loss_sums: loss sums by name; the first one is the loss to train on. Filled by the first micro-batch.
        num_loss_fn_losses: number of losses from the loss function.
    """

    num_micro_batches: int
    nominal_weight: float
    device: torch.device
    additional: Callable[[], Mapping[str, Any] | None] | None = None
    mean_num_micro_batches: float | None = None
    loss_sums: dict[str, LossSum] = field(default_factory=dict, init=False)
    num_loss_fn_losses: int = field(default=0, init=False)

    def add(self, loss: Any, micro_batch: int) -> torch.Tensor:
        """Add one micro-batch's losses and return the backward's root, before loss scaling.

        Raises:
            TypeError, ValueError: the loss structure is not supported, or has changed since the last call.
        """
        losses = named_losses(loss, micro_batch)
        trained_name, num_loss_fn_losses = next(iter(losses)), len(losses)
        if self.additional is not None and (more_losses := self.additional()):
            losses = _with_additional(losses, more_losses)
        if not self.loss_sums:
            self.num_loss_fn_losses = num_loss_fn_losses
            nominal = {True: self.nominal_weight, False: float(self.mean_num_micro_batches or self.num_micro_batches)}
            self.loss_sums = {
                name: LossSum(name, is_weighted(x), nominal[is_weighted(x)]) for name, x in losses.items()
            }
        if (list(losses), num_loss_fn_losses) != (list(self.loss_sums), self.num_loss_fn_losses):
            raise self._names_error(losses, micro_batch)
        for name, value in losses.items():
            self.loss_sums[name].add(value, micro_batch)
        return _trainable_tensor(losses[trained_name], trained_name, micro_batch) / self.loss_sums[trained_name].nominal

    def _names_error(self, losses: dict[str, Any], micro_batch: int) -> ValueError:
        return ValueError(
            f"the losses must have the same names in every micro-batch, got {list(losses)} at micro-batch "
            f"{micro_batch} after {list(self.loss_sums)}"
        )


@dataclass
class LossSum:
    """One loss and its weights, summed over micro-batches."""

    name: str
    is_weighted: bool
    nominal: float
    total: torch.Tensor | float = 0.0
    weight: torch.Tensor | float = 0.0

    def add(self, value: Any, micro_batch: int) -> None:
        """Add a tensor, a number or a ``Weighted``."""
        if is_weighted(value) != self.is_weighted:
            raise self._form_error(value, micro_batch)
        total, count = (value.total, value.count) if self.is_weighted else (value, 1.0)
        self.total = self.total + _to_wide_dtype(_as_scalar(total, self.name, "", micro_batch)).detach().reshape(())
        if not isinstance(count, (int, float)):
            count = _as_scalar(count, self.name, "'s count", micro_batch).detach().to(torch.float64).reshape(())
        self.weight = self.weight + count

    def _form_error(self, value: Any, micro_batch: int) -> ValueError:
        return ValueError(
            f'the loss "{self.name}" must always have the same form, got {_describe(value)} at micro-batch '
            f"{micro_batch} after {'tds.Weighted' if self.is_weighted else 'a single number'}"
        )

    def to_tensor(self, device: torch.device) -> torch.Tensor:
        """Return [total / nominal, weight / nominal, is fp64] in fp64."""
        is_double = float(torch.as_tensor(self.total).dtype is torch.float64)
        return torch.stack(
            [_fp64_on(device, n) for n in (self.total / self.nominal, self.weight / self.nominal, is_double)]
        )


def _fp64_on(device: torch.device, value: torch.Tensor | float) -> torch.Tensor:
    """Convert ``value`` to fp64 on ``device``. A Python number is filled in there, since a copy would block."""
    if isinstance(value, torch.Tensor):
        return value.to(device).double()
    return torch.full((), value, dtype=torch.float64, device=device)


def _with_additional(losses: dict[str, Any], additional: Mapping[str, Any]) -> dict[str, Any]:
    for name in additional:
        if name in losses:
            raise ValueError(
                f'"{name}" of get_additional_losses() is also a loss of the loss function. Rename one of them'
            )
    return {**losses, **additional}


def named_losses(loss: Any, micro_batch: int) -> dict[str, Any]:
    """Name each loss; the first one is the loss to train on.

    Raises:
        TypeError: a loss function must not return this structure.
    """
    if isinstance(loss, torch.Tensor) or is_weighted(loss):
        return {"loss": loss}
    return _losses_by_name(loss, micro_batch)


def _losses_by_name(loss: Any, micro_batch: int) -> dict[str, Any]:
    if isinstance(loss, Mapping):
        losses = dict(loss)
    elif isinstance(loss, tuple) and hasattr(loss, "_fields"):
        losses = dict(zip(loss._fields, loss, strict=True))
    elif isinstance(loss, (tuple, list)):
        losses = {f"loss_{i}" if i else "loss": element for i, element in enumerate(loss)}
    else:
        losses = {}
    if not losses or not all(isinstance(name, str) and name for name in losses):
        raise TypeError(
            f"the loss function must return {LOSS_STRUCTURES}, got {_describe(loss)} at micro-batch {micro_batch}. "
            "Run a model without a loss by eval_batch(..., compute_loss=False)."
        )
    first = "loss" if "loss" in losses else next(iter(losses))
    return {first: losses.pop(first), **losses}


def is_weighted(loss: Any) -> bool:
    """Return True for ``Weighted``."""
    return isinstance(loss, Weighted)


def _as_scalar(value: Any, name: str, suffix: str, micro_batch: int) -> torch.Tensor:
    if isinstance(value, (int, float)):
        return torch.tensor(float(value))
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.is_complex():
        raise ValueError(
            f'the loss "{name}"{suffix} must be a single number, got {_describe(value)} at micro-batch {micro_batch}. '
            f"A loss function returns {LOSS_STRUCTURES}."
        )
    return value


def _trainable_tensor(value: Any, name: str, micro_batch: int) -> torch.Tensor:
    value = value.total if isinstance(value, Weighted) else value
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return _to_wide_dtype(value)
    raise TypeError(
        f'the loss to train on, "{name}", must be a tensor of a floating-point type, got {_describe(value)} at '
        f"micro-batch {micro_batch}"
    )


def _to_wide_dtype(value: torch.Tensor) -> torch.Tensor:
    return value if value.dtype is torch.float64 else value.float()


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (tuple, list, Mapping)) and not is_weighted(value):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else type(value).__name__
