"""LocalGradReducer: gradients of a single replica, which are not reduced."""

from __future__ import annotations

import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.optim.gradients.reducer import GradReducer
from megatron.optim.param_store import ParamStore
from tds.grad_norm import accurate_dtype
from tds.gradients import WIDE_DTYPES
from tds.linear_function import add_product


class LocalGradReducer(GradReducer):
    """Accumulates 16-bit gradients in fp32 and frees the originals; other gradients stay in ``param.grad``."""

    def __init__(self, store: ParamStore, model: Group = SINGLE, tensor: Group = SINGLE) -> None:
        super().__init__(store, model, tensor)
        self._fp32_grads: dict[torch.nn.Parameter, torch.Tensor] = {}

    def register(self, parameter: torch.nn.Parameter) -> None:
        super().register(parameter)
        if parameter.dtype not in WIDE_DTYPES:
            parameter.register_post_accumulate_grad_hook(self._accumulate)

    def grad(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter.dtype not in WIDE_DTYPES:
            if parameter not in self._fp32_grads:
                self._fp32_grads[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
            return self._fp32_grads[parameter]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def add_product(self, parameter: torch.nn.Parameter, rows: torch.Tensor, inputs: torch.Tensor) -> None:
        self.fused_params.add(parameter)
        grad = parameter.grad if parameter.dtype in WIDE_DTYPES else self._fp32_grads.get(parameter)
        is_first = grad is None
        if grad is None:
            grad = torch.empty_like(parameter, dtype=accurate_dtype(parameter.dtype), requires_grad=False)
            if parameter.dtype in WIDE_DTYPES:
                parameter.grad = grad
            else:
                self._fp32_grads[parameter] = grad
        add_product(grad, rows.t(), inputs, is_first=is_first)

    def clear(self) -> None:
        super().clear()
        self._fp32_grads.clear()

    def _accumulate(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        if parameter in self._fp32_grads:
            self._fp32_grads[parameter].add_(parameter.grad)  # type: ignore[index]
        else:
            self._fp32_grads[parameter] = parameter.grad.float()  # type: ignore[index]
        parameter.grad = None
