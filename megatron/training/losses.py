"""Losses in the forms that users of Megatron write, for the engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tds.loss import Weighted


def as_weighted(loss: Any) -> Any:
    """Return a plain pair (sum, count), as users of Megatron write it, as what ``tds`` calls ``Weighted``.

    Of a dictionary of losses each.
    """
    if isinstance(loss, Mapping):
        return {name: as_weighted(each) for name, each in loss.items()}
    is_pair = isinstance(loss, (tuple, list)) and not hasattr(loss, "_fields") and len(loss) == 2
    return Weighted(*loss) if is_pair else loss


def reading_pairs(loss_fn: Callable[[Any, Any], Any] | None) -> Callable[[Any, Any], Any]:
    """Return a loss function that gives what ``loss_fn`` does (None: the output), a plain pair as ``Weighted``."""

    def read(output: Any, labels: Any) -> Any:
        return as_weighted(output if loss_fn is None else loss_fn(output, labels))

    read.is_identity = loss_fn is None  # type: ignore[attr-defined]
    return read


def scalars(report: dict[str, Any], loss: Any) -> dict[str, torch.Tensor]:
    """Return what is to be averaged of a report: tensors of one element; the loss itself is reported apart."""
    return {
        name: value
        for name, value in report.items()
        if value is not loss and isinstance(value, torch.Tensor) and value.numel() == 1
    }
