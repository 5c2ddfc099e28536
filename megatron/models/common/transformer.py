"""TransformerLayer, MLP, a run of layers with recompute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.config.decoder import has_window
from megatron.config.experts import has_experts
from megatron.models.common.attention import SelfAttention
from megatron.models.common.experts import MoE
from megatron.models.common.kv_cache import LayerKVCache
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.norms import make_norm
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.activation_storage import ActivationOffload, ActivationStorage
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.matrices import set_matrices
from megatron.mpu.random import checkpoint
from megatron.ops.activations import activation, is_gated
from tds.linear_function import accumulates_in_place
from tds.schedule.simulate import in_flight

# What a model recomputes in backward, and how it keeps what it recomputes from.
#
# | ``ModelArgs`` | flag | what is run again |
# |---|---|---|
# | ``checkpoint_activations`` | --checkpoint-activations | every ``checkpoint_num_layers`` layers, from their input |
# | ``recompute_attention`` | --recompute-granularity selective | the core of each attention, from query, key and value |  # noqa: E501
#
# Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 5.


class Recompute:
    """Runs layers so that backward runs them again; of one stage of a pipeline, or of one side of a model.

    Args:
        slots: as of ``ActivationStorage``; None: those of ``num_layers`` layers and one forward at a time.
        num_layers: None: those of ``sizes``.

    Attributes:
        every: layers between two kept inputs; 0 keeps all activations.
    """

    def __init__(
        self,
        sizes: ModelArgs,
        place: ParallelContext,
        slots: Callable[[], tuple[int, int]] | None = None,
        num_layers: int | None = None,
    ) -> None:
        self.every = sizes.checkpoint_num_layers if sizes.checkpoint_activations else 0
        self._streams = place.streams
        how = ActivationOffload(
            is_partitioned=sizes.partition_activations,
            is_on_host=sizes.checkpoint_in_cpu,
            is_contiguous=sizes.contiguous_checkpointing,
            group=place.group,
        )
        own = -(-(num_layers or sizes.num_layers) // max(self.every, 1))
        self.keeper = None if how.is_plain else ActivationStorage(how, slots or (lambda: (own, 1)))

    def __call__(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Return ``function(*inputs)``, which keeps ``inputs`` only."""
        return checkpoint(self._streams, function, *inputs, keeper=self.keeper)


def recompute_switches(config: Any) -> dict[str, Any]:
    """Return the fields of ``ModelArgs`` by which a run of ``config``, a ``megatron.config.Config``, recomputes."""
    parallel, number = config.parallel, config.batch.num_micro_batches
    stages, lie = parallel.num_stages, (parallel.placement, parallel.group_size)
    of_stage = [in_flight(stages, number, parallel.schedule, parallel.chunks, stage, *lie) for stage in range(stages)]
    return {
        "checkpoint_activations": parallel.checkpoint_activations,
        "checkpoint_num_layers": parallel.checkpoint_num_layers,
        "recompute_attention": parallel.recompute_granularity == "selective",
        "partition_activations": parallel.partition_activations,
        "checkpoint_in_cpu": parallel.checkpoint_in_cpu,
        "contiguous_checkpointing": parallel.contiguous_checkpointing,
        "forwards_in_flight": tuple(of_stage) if parallel.has_pipeline else (1,),
    }


# The feed-forward half of a layer.


class GatedLinear(ColumnParallelLinear):
    """The two products of a gated feed-forward half: its gate and its value.

    Their weights are one matrix whose rows take turns (the first of the gate, the first of the value, the second of the
    gate), so that any contiguous cut into pairs gives each rank as much of both.

    Shapes:
        input  [s, b, input_size], the same on every rank
        output 2 x [s, b, output_size/2t]
    """

    num_outputs = 2

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Compute two products with every second row each: one product would leave two strided tensors.

        Where the product accumulates the gradient in place it is one with the full weight, and two copies.
        """
        if accumulates_in_place(self.weight):
            (both,) = self.products(x, (self.weight, self.bias))
            gated, values = both.unflatten(-1, (-1, 2)).unbind(-1)
            return gated.contiguous(), values.contiguous()
        gate, value = self.weight.unflatten(0, (-1, 2)).unbind(1)  # 2 x [output_size/2t, input_size]
        gate_bias, value_bias = (None, None) if self.bias is None else self.bias.unflatten(0, (-1, 2)).unbind(1)
        gated, values = self.products(x, (gate, gate_bias), (value, value_bias))
        return gated, values


class MLP(nn.Module):
    """Up to the feed-forward size, activation, down again: ``down(activation(up(x)))``.

    A gated one has two products up, ``down(activation(gate(x)) * value(x))``.

    Shapes:
        input, output [s, b, h]

    Args:
        layer: number of the layer, part of the key of the dropout mask.
        dropout: of what the activation returns.
    """

    def __init__(self, sizes: ModelArgs, place: ParallelContext, layer: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        h, f = sizes.hidden_size, sizes.ff_hidden_size
        self.is_gated = is_gated(sizes.activation)
        self.layer, self.dropout = layer, dropout
        self.place = place
        kind, rows = (GatedLinear, 2 * f) if self.is_gated else (ColumnParallelLinear, f)
        self.up = kind(h, rows, bias=sizes.hidden_bias, **place.cut)
        if self.is_gated:
            set_matrices(self.up.weight, (1, 1))
        self.activation = activation(sizes.activation)
        self.down = RowParallelLinear(f, h, bias=sizes.hidden_bias, **place.cut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_gated:
            gate, value = self.up(x)  # 2 x [s, b, f/t]
            hidden = self.activation(gate) * value
        else:
            hidden = self.activation(self.up(x))  # [s, b, f/t]
        return self.down(self._dropped(hidden))

    def _dropped(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.place.streams.dropout(
            hidden,
            self.dropout,
            training=self.training,
            layer=self.layer,
            site="activation",
            is_cut=self.place.group.size > 1,
        )


# One transformer layer: attention and feed-forward, each with norm, dropout and residual.


class TransformerLayer(nn.Module):
    """A layer: ``x + dropout(attention(norm(x)))``, then ``x + dropout(mlp(norm(x)))``, with norms where it has them.

    | norm_placement | a part |
    |---|---|
    | before | ``x + dropout(part(norm(x)))``; with ``--apply-residual-connection-post-layernorm`` norm(x) + ... |
    | after | ``x + dropout(norm(part(x)))``, as in OLMo 2 |
    | both | ``x + dropout(norm(part(norm(x))))``, as in Gemma 2 |

    With ``residual_scale`` c what is added is ``c / sqrt(L)`` times that.

    Shapes:
        x           [s, b, h], or this rank's part of it, by ``place``
        mask        of ``Masks``, or None for causal; ``window_mask`` is that of a layer with a window
        output      as x

    ``cache`` and ``positions`` as in ``SelfAttention``.

    Args:
        layer: number of this layer in the whole model, from 0; part of the keys of its dropout masks.
    """

    def __init__(self, sizes: ModelArgs, place: ParallelContext, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.hidden_dropout = sizes.hidden_dropout
        self.multiplier = sizes.residual_multiplier
        self.is_residual_normed = sizes.apply_residual_connection_post_layernorm
        self.has_window = has_window(sizes, layer)
        self.place = place
        before, after = (sizes.norm_placement in (each, "both") for each in ("before", "after"))
        self.input_norm = make_norm(sizes, place) if before else None
        self.attention = SelfAttention(sizes, place, layer)
        self.attention_output_norm = make_norm(sizes, place) if after else None
        self.post_attention_norm = make_norm(sizes, place) if before else None
        self.mlp = MoE(sizes, place, MLP) if has_experts(sizes, layer) else MLP(sizes, place)
        self.mlp_output_norm = make_norm(sizes, place) if after else None

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, cache: LayerKVCache | None = None,
        positions: torch.Tensor | None = None, window_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        normed = x if self.input_norm is None else self.input_norm(x)
        part = self.attention(normed, window_mask if self.has_window else mask, cache, positions)
        part = part if self.attention_output_norm is None else self.attention_output_norm(part)
        x = self._residual(x, normed) + self._dropout(part, "attention output")
        normed = x if self.post_attention_norm is None else self.post_attention_norm(x)
        part = self.mlp(normed)
        part = part if self.mlp_output_norm is None else self.mlp_output_norm(part)
        return self._residual(x, normed) + self._dropout(part, "mlp output")

    def _residual(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return normed if self.is_residual_normed else x

    def _dropout(self, x: torch.Tensor, site: str) -> torch.Tensor:
        x = x if self.multiplier == 1.0 else x * self.multiplier
        return self.place.dropout(x, self.hidden_dropout, training=self.training, layer=self.layer, site=site)


# A run of transformer layers, recomputed in backward where that is asked for.


def run_layers(
    layers: Sequence[Callable[..., torch.Tensor]], x: torch.Tensor, *others: Any, recompute: Recompute
) -> torch.Tensor:
    """Return ``x`` after all ``layers``.

    Args:
        others: what every layer takes besides, such as a mask.
        recompute: runs each ``recompute.every`` layers, of which backward then has the input only.
    """

    def run(part: Sequence[Callable[..., torch.Tensor]], x: torch.Tensor, *others: Any) -> torch.Tensor:
        for layer in part:
            x = layer(x, *others)
        return x

    every = recompute.every
    if not every or not torch.is_grad_enabled():
        return run(layers, x, *others)
    for start in range(0, len(layers), every):
        x = recompute(partial(run, layers[start : start + every]), x, *others)
    return x
