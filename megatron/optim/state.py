"""The optimizer's state in the format of torch's optimizers, which DeepSpeed's checkpoints contain.

| key | value |
|---|---|
| ``state``, ``param_groups`` | the same entries of the inner optimizer's ``state_dict`` |
| ``masters`` | the main params, in the order of the groups |
| ``scaler`` | the loss scale |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from megatron.optim.grad_scaler import GradScaler


class StateOwner(Protocol):
    """Interface of the optimizer whose state is saved and loaded."""

    param_groups: list[dict[str, Any]]
    inner: torch.optim.Optimizer

    @property
    def scaler(self) -> GradScaler:
        """The loss scale."""


def state_of(optimizer: StateOwner) -> dict[str, Any]:
    """Return the optimizer state, whose tensors share memory with ``optimizer``."""
    main_params = [main_param.detach() for main_param in _main_params(optimizer)]
    return {**optimizer.inner.state_dict(), "masters": main_params, "scaler": optimizer.scaler.state()}


@torch.no_grad()
def load_state(optimizer: StateOwner, state: Mapping[str, Any]) -> None:
    """Copy a state into the main params, the inner optimizer and a dynamic loss scale.

    Learning rates and weight decay of ``optimizer`` do not change.

    Raises:
        ValueError: the state belongs to other parameters; nothing is changed then.
    """
    main_params = _main_params(optimizer)
    if problem := _state_problem(main_params, state):
        raise ValueError(problem)
    optimizer.inner.state.clear()
    dtypes = {"step": None, **getattr(optimizer.inner, "state_dtypes", {})}
    for index, values in state["state"].items():
        main_param = main_params[index]
        optimizer.inner.state[main_param] = {
            key: _copied(value, main_param.device, dtypes.get(key, main_param.dtype)) for key, value in values.items()
        }
    for main_param, saved in zip(main_params, state["masters"], strict=True):
        main_param.copy_(saved)
    optimizer.scaler.load(state["scaler"])


def _main_params(optimizer: StateOwner) -> list[torch.nn.Parameter]:
    return [main_param for group in optimizer.param_groups for main_param in group["params"]]


def _state_problem(main_params: Sequence[torch.Tensor], state: Mapping[str, Any]) -> str | None:
    if missing := {"state", "masters", "scaler"} - set(state):
        return f"the state must be saved by this project's optimizer, got one without {', '.join(sorted(missing))}"
    saved, current = [[tuple(tensor.shape) for tensor in tensors] for tensors in (state["masters"], main_params)]
    if len(saved) != len(current):
        return f"the number of the optimizer's parameters changed: saved {len(saved)}, now {len(current)}"
    for index, (saved_shape, shape) in enumerate(zip(saved, current, strict=True)):
        if saved_shape != shape:
            return (
                f"the shape of the optimizer's parameter {index} changed: saved {list(saved_shape)}, now {list(shape)}"
            )
    return None


def _copied(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Copy a tensor to ``device`` in ``dtype`` (None: no conversion); return other values unchanged."""
    return value.to(device=device, dtype=dtype, copy=True) if isinstance(value, torch.Tensor) else value
