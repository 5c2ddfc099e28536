"""The loss of a global batch: the mean over all its tokens, or over micro-batches and replicas.

A loss function returns either of

* a scalar: averaged over micro-batches and replicas, as DeepSpeed does;
* a pair (sum, count): averaged over everything counted in the global batch, however micro-batches and replicas
  share it out.

The weight of a micro-batch is known only when all have run, so each backward runs on ``loss / nominal`` and the
gradients are multiplied by ``nominal / total`` once, when they are reduced. For a scalar ``nominal`` is the number of
micro-batches, for pairs a power of two that the engine chooses: dividing by it loses nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class LossMeter:
    """Adds up the losses of one call on the last stage; in fp32, or fp64 if the loss is fp64, never in 16 bits."""

    def __init__(self, num_micro_batches: int, nominal_weight: float, device: torch.device) -> None:
        self.num_micro_batches = num_micro_batches
        self.nominal_weight = nominal_weight
        self.device = device
        self.nominal = float(num_micro_batches)
        self.total: torch.Tensor | None = None
        self.weight: torch.Tensor | float = 0.0
        self.is_pair: bool | None = None

    def add(self, loss: Any, micro_batch: int) -> torch.Tensor:
        """Count one micro-batch's loss and return what its backward runs on, before loss scaling.

        Raises:
            TypeError, ValueError: not a scalar and not a pair of scalars, or another form than before.
        """
        value, count = split_loss(loss, micro_batch)
        is_pair = count is not None
        if self.is_pair is None:
            self.is_pair = is_pair
            self.nominal = self.nominal_weight if is_pair else float(self.num_micro_batches)
        elif self.is_pair != is_pair:
            raise ValueError(
                f"the loss function must always return the same form, got {_form(is_pair)} at micro-batch "
                f"{micro_batch} after {_form(self.is_pair)}"
            )
        wide = value if value.dtype is torch.float64 else value.float()
        seen = wide.detach().reshape(())
        self.total = seen.clone() if self.total is None else self.total + seen
        self.weight = self.weight + (1.0 if count is None else count.detach().to(torch.float64).reshape(()))
        return wide / self.nominal

    def local_numbers(self) -> torch.Tensor:
        """Return this replica's [loss / nominal, weight / nominal, is fp64] in fp64."""
        if self.total is None:
            return torch.zeros(3, dtype=torch.float64, device=self.device)
        weight = torch.as_tensor(self.weight, dtype=torch.float64, device=self.device)
        is_double = torch.tensor(float(self.total.dtype is torch.float64), dtype=torch.float64, device=self.device)
        return torch.stack([(self.total / self.nominal).double(), weight / self.nominal, is_double])


def split_loss(loss: Any, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (loss, None) for a scalar and (sum, count) for a pair."""
    if isinstance(loss, torch.Tensor):
        return _scalar(loss, "the loss", micro_batch), None
    if isinstance(loss, (tuple, list)) and len(loss) == 2:
        total, count = loss
        if isinstance(count, (int, float)):
            count = torch.tensor(float(count), dtype=torch.float64)
        return _scalar(total, "the loss's sum", micro_batch), _scalar(count, "the loss's count", micro_batch)
    raise TypeError(
        f"the loss function must return a scalar or a pair (sum, count), got {_told(loss)} at micro-batch {micro_batch}"
    )


def _scalar(value: Any, name: str, micro_batch: int) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise ValueError(f"{name} must be one number, got {_told(value)} at micro-batch {micro_batch}")
    return value


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{type(value).__name__}"


def _form(is_pair: bool) -> str:
    return "a pair (sum, count)" if is_pair else "a scalar"


def agree_on_loss(
    numbers: torch.Tensor | None, *, data_group: Any, data_size: int, pipe_group: Any, pipe_size: int, last_rank: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (mean loss, factor for the gradients), the same on every rank of the pipelines. Collective.

    A batch in which nothing is counted has loss 0 and gradients 0.

    Args:
        numbers: ``LossMeter.local_numbers()`` on the last stage, None elsewhere.
    """
    if numbers is None:
        numbers = torch.zeros(3, dtype=torch.float64, device=device)
    elif data_size > 1:
        dist.all_reduce(numbers, group=data_group)
    if pipe_size > 1:
        dist.broadcast(numbers, src=last_rank, group=pipe_group)
    loss, weight, is_double = numbers.unbind()
    factor = torch.where(weight > 0, 1.0 / weight, torch.zeros_like(weight))
    mean = torch.where(weight > 0, loss / weight, torch.zeros_like(loss))
    return mean if bool(is_double) else mean.float(), factor
