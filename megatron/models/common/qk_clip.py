"""AttentionLogits: the largest attention logits of a step, and QK-clip."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn

from megatron.errors import ConfigError
from megatron.models.common.logit_meter import LogitMeter
from megatron.mpu.groups import Grid
from megatron.mpu.mappings import all_reduce
from megatron.optim.param_store import ParamStore

# QK-clip, after the update of a step in which head h had the largest logit S_h:
#
#     eta_h = min(1, threshold / S_h)
#
# | attention | weights | factor |
# |---|---|---|
# | query groups | queries of all heads of a group | eta^alpha with the smallest eta of the group's heads |
# | | the key of the group | eta^(1 - alpha), once |
# | multi-latent | queries, part that is not rotated | eta_h^alpha |
# | | queries, rotated part | eta_h |
# | | keys from the latent | eta_h^(1 - alpha) |
# | | rotated key, which all heads share | unchanged |
#
# Biases are scaled like their weights, so that all logits of the head are multiplied by eta. The factors are applied
# to the main params, before they are rounded to the dtype of the weights; momentum and moments are unchanged. S_h is a
# maximum over all samples of the global batch. It has no gradient and is not kept between steps.
#
# Source: Kimi Team 2025, "Kimi K2: open agentic intelligence", section 2.1, algorithm 1; for query groups Megatron-LM.


class MeasuredAttention(Protocol):
    """An attention layer whose logits are measured, with ``num_heads`` heads on this rank."""

    num_heads: int
    logit_meter: LogitMeter

    def query_key_factors(self, eta: torch.Tensor, alpha: float) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield (parameter, factor of each row) so that the logits of head h are multiplied by ``eta[h]``.

        Shapes:
            eta [a/t], at most 1
        """
        ...


class AttentionLogits:
    """The largest attention logits of this rank's layers, measured in training steps.

    Construction is collective: ranks exchange the number of their layers.

    Args:
        model: model settings.
        store: the main params that QK-clip scales.
        dtype: dtype of the logits: fp64 for a model in fp64, otherwise fp32.

    Attributes:
        is_enabled: measure the next step. With QK-clip every step is measured.
        table: [layers, a/t], the largest logits of the current or last step.

    Raises:
        ConfigError: the model has no layer that can measure its logits.
    """

    def __init__(
        self, module: nn.Module, model: Any, grid: Grid, store: ParamStore, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._layers: list[MeasuredAttention] = [
            cast(MeasuredAttention, child)
            for child in module.modules()
            if isinstance(getattr(child, "logit_meter", None), LogitMeter)
        ]
        if not sum(grid.host.gather_objects(len(self._layers))):
            raise ConfigError(
                "--qk-clip and --log-max-attention-logit need attention layers of megatron.models.common that are "
                f"built from the run's model arguments, found none in {type(module).__name__}. Remove the flags, or "
                "pass the model arguments of the configuration to the layers"
            )
        self.clips, self._threshold, self._alpha = model.qk_clip, model.qk_clip_threshold, model.qk_clip_alpha
        self._grid, self._store = grid, store
        num_heads = self._layers[0].num_heads if self._layers else 0
        self.table = torch.full((len(self._layers), num_heads), -torch.inf, dtype=dtype, device=device)
        self.is_enabled, self._is_reduced = True, False

    def start_step(self) -> None:
        """Reset the logits and, if enabled, measure all forwards until ``end_forwards``."""
        self.table.fill_(-torch.inf)
        self._is_reduced = False
        if self.clips or self.is_enabled:
            for layer, maxima in zip(self._layers, self.table, strict=True):
                layer.logit_meter.maxima = maxima

    def end_forwards(self) -> None:
        """Stop measuring. The logits are kept until the next step."""
        for layer in self._layers:
            layer.logit_meter.maxima = None

    @torch.no_grad()
    def clip(self) -> None:
        """Scale the main params of queries and keys after an update. Collective over ``data_context``.

        The host does not wait for the logits.
        """
        if not self._layers:
            return
        logits = self._reduce()
        is_clipped = (logits > self._threshold) & logits.isfinite()
        etas = torch.where(is_clipped, self._threshold / logits, torch.ones_like(logits))
        if self._store.offload.optimizer:
            etas = etas.cpu()
        for layer, eta in zip(self._layers, etas, strict=True):
            for parameter, factors in layer.query_key_factors(eta, self._alpha):
                self._store.scale_rows(parameter, factors)

    @torch.no_grad()
    def largest(self) -> float:
        """Return the largest logit of the step over all layers and ranks. Collective."""
        logits = self._reduce() if self._layers else self.table
        largest = torch.cat((logits.flatten(), logits.new_full((1,), -torch.inf))).amax(0, keepdim=True)
        return all_reduce(largest, self._grid.model, dist.ReduceOp.MAX).item()

    def _reduce(self) -> torch.Tensor:
        """Reduce the logits over the ranks with the same layers and heads, once per step. Collective."""
        if not self._is_reduced:
            all_reduce(self.table, self._grid.data_context, dist.ReduceOp.MAX)
            self._is_reduced = True
        return self.table
