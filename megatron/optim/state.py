"""The optimizer's state in the form of torch's optimizers, which DeepSpeed's checkpoints contain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from megatron.optim.grad_scaler import GradScaler


class Holder(Protocol):
    """What of the optimizer is read and set here."""

    param_groups: list[dict[str, Any]]
    inner: torch.optim.Optimizer
    scaler: GradScaler


def state_of(optimizer: Holder) -> dict[str, Any]:
    """Return torch's ``state`` and ``param_groups``, the ``masters`` in the order of the groups, and the ``scaler``.

    The tensors are the optimizer's own, not copies.
    """
    masters = [master.detach() for master in _masters(optimizer)]
    return {**optimizer.inner.state_dict(), "masters": masters, "scaler": optimizer.scaler.state()}


@torch.no_grad()
def take_state(optimizer: Holder, state: Mapping[str, Any]) -> None:
    """Copy what ``state_of`` returned into masters, states and a dynamic loss scale; rates and decay stay those of now.

    Raises:
        ValueError: it is of other parameters; nothing has been changed then.
    """
    masters = _masters(optimizer)
    if problem := _problem(masters, state):
        raise ValueError(problem)
    optimizer.inner.state.clear()
    for number, values in state["state"].items():
        master = masters[number]
        dtypes = {"step": None, **getattr(optimizer.inner, "state_dtypes", {})}
        kept = {key: _beside(master, dtypes.get(key, master.dtype), value) for key, value in values.items()}
        optimizer.inner.state[master] = kept
    for master, saved in zip(masters, state["masters"], strict=True):
        master.copy_(saved)
    optimizer.scaler.load(state["scaler"])


def _masters(optimizer: Holder) -> list[torch.nn.Parameter]:
    return [master for group in optimizer.param_groups for master in group["params"]]


def _problem(masters: Sequence[torch.Tensor], state: Mapping[str, Any]) -> str | None:
    if missing := {"state", "masters", "scaler"} - set(state):
        return f"it must be a state of this project's optimizer, got one without {', '.join(sorted(missing))}"
    shapes, now = [tuple(saved.shape) for saved in state["masters"]], [tuple(master.shape) for master in masters]
    if len(shapes) != len(now):
        return f"the optimizer must have the parameters that it was saved with: saved {len(shapes)}, now {len(now)}"
    for number, (saved, here) in enumerate(zip(shapes, now, strict=True)):
        if saved != here:
            return f"parameter {number} of the optimizer was saved as {list(saved)}, now {list(here)}"
    return None


def _beside(master: torch.Tensor, dtype: torch.dtype | None, value: Any) -> Any:
    """Return a copy of ``value`` on the device of ``master``, in ``dtype``, or its own."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device=master.device, dtype=dtype, copy=True)
