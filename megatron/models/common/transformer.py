"""TransformerLayer, its feed-forward half and activation recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.config.decoder import SEPARATE_NORMS, SEQUENTIAL, has_window
from megatron.config.layer_types import EXPERTS, NO_MIXER, NO_MLP, layer_types
from megatron.config.recurrent import norm_placement_of
from megatron.models.common.attention import SelfAttention
from megatron.models.common.experts import MoE
from megatron.models.common.fp8_layers import use_fp8_products
from megatron.models.common.kv_cache import LayerKVCache
from megatron.models.common.latent_attention import LatentAttention
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.norms import add_and_norm, make_norm
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.recurrent_mixers import make_recurrent_mixer
from megatron.models.common.xielu import XIELU
from megatron.mpu.activation_storage import ActivationOffload, ActivationStorage
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.matrices import set_matrices
from megatron.mpu.random import checkpoint
from megatron.ops import gated_activation
from megatron.ops.activations import activation, is_gated
from tds.linear_function import accumulates_in_place
from tds.param_info import info_of
from tds.schedule.simulate import in_flight

# Activation recomputation.
#
# | ``ModelArgs`` | flag | recomputed in backward |
# |---|---|---|
# | ``checkpoint_activations`` | --checkpoint-activations | each ``checkpoint_num_layers`` layers, from their input |
# | ``recompute_attention`` | --recompute-granularity selective | the attention core of each layer, from query, key and value |  # noqa: E501
#
# Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 5.


class Recompute:
    """Activation checkpointing for the layers of one pipeline stage, or of one side of an encoder-decoder model.

    Args:
        count_slots: function that returns (maximum number of saved inputs, maximum number of forwards in flight),
            passed to ``ActivationStorage``. None: values for ``num_layers`` layers and one forward in flight.
        num_layers: number of layers. None: ``args.num_layers``.

    Attributes:
        interval: layers per checkpointed group; 0 keeps all activations.
    """

    def __init__(
        self,
        args: ModelArgs,
        parallel: ParallelContext,
        count_slots: Callable[[], tuple[int, int]] | None = None,
        num_layers: int | None = None,
    ) -> None:
        self.interval = args.checkpoint_num_layers if args.checkpoint_activations else 0
        self._streams = parallel.streams
        offload = ActivationOffload(
            is_partitioned=args.partition_activations,
            is_on_host=args.checkpoint_in_cpu,
            is_contiguous=args.contiguous_checkpointing,
            group=parallel.group,
        )
        num_groups = -(-(num_layers or args.num_layers) // max(self.interval, 1)) + args.mtp_num_layers
        self.storage = (
            None if offload.is_plain else ActivationStorage(offload, count_slots or (lambda: (num_groups, 1)))
        )

    def __call__(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Return ``function(*inputs)`` and save only ``inputs`` for backward."""
        return checkpoint(self._streams, function, *inputs, storage=self.storage)


def recompute_switches(config: Any) -> dict[str, Any]:
    """Return the recomputation fields of ``ModelArgs`` for a run of ``config``, a ``megatron.config.Config``."""
    parallel, num_micro_batches = config.parallel, config.batch.num_micro_batches
    num_stages, layout = parallel.num_stages, (parallel.placement, parallel.group_size)
    forwards_in_flight = [
        in_flight(num_stages, num_micro_batches, parallel.schedule, parallel.chunks, stage, *layout)
        for stage in range(num_stages)
    ]
    return {
        "checkpoint_activations": parallel.checkpoint_activations,
        "checkpoint_num_layers": parallel.checkpoint_num_layers,
        "recompute_attention": parallel.recompute_granularity == "selective",
        "partition_activations": parallel.partition_activations,
        "checkpoint_in_cpu": parallel.checkpoint_in_cpu,
        "contiguous_checkpointing": parallel.contiguous_checkpointing,
        "forwards_in_flight": tuple(forwards_in_flight) if parallel.has_pipeline else (1,),
    }


# The feed-forward half of a layer.


class GatedLinear(ColumnParallelLinear):
    """Gate and value projections of a gated feed-forward layer.

    Both weights are stored in one matrix with interleaved rows (gate row 0, value row 0, gate row 1, ...), so that any
    contiguous shard of row pairs has equal parts of both.

    Shapes:
        input  [s, b, input_size], the same on every rank
        output 2 x [s, b, output_size/2t]
    """

    num_outputs = 2

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, uses_kernel: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one product with the even rows and one with the odd rows.

        A single product with the full weight returns gate and value as strided views, which only the kernel of
        ``gated_activation`` reads fast. If weight gradients are accumulated in place or products are in FP8, a single
        product is used nevertheless, and both views are copied to contiguous tensors.

        Args:
            uses_kernel: gate and value are passed to ``gated_activation``.
        """
        if uses_kernel or accumulates_in_place(self.weight) or info_of(self.weight).products is not None:
            (interleaved,) = self.products(x, (self.weight, self.bias))
            gated, values = gated_activation.split(interleaved)
            return (gated, values) if uses_kernel else (gated.contiguous(), values.contiguous())
        gate, value = self.weight.unflatten(0, (-1, 2)).unbind(1)  # 2 x [output_size/2t, input_size]
        gate_bias, value_bias = (None, None) if self.bias is None else self.bias.unflatten(0, (-1, 2)).unbind(1)
        gated, values = self.products(x, (gate, gate_bias), (value, value_bias))
        return gated, values


class MLP(nn.Module):
    """Feed-forward layer: ``down(activation(up(x)))``.

    With a gated activation it computes ``down(activation(gate(x)) * value(x))``. Gate and value may be clamped before,
    and the value may have an offset (``--activation-func-clamp-value``, ``--glu-linear-offset``).

    Shapes:
        input, output [s, b, h]

    Args:
        layer: layer index, part of the key of the dropout mask.
        dropout: dropout probability after the activation.
    """

    def __init__(self, args: ModelArgs, parallel: ParallelContext, layer: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        h, f = args.hidden_size, args.ff_hidden_size
        self.activation_name, self.is_gated = args.activation, is_gated(args.activation)
        self.layer, self.dropout = layer, dropout
        self.parallel = parallel
        linear_class, num_rows = (GatedLinear, 2 * f) if self.is_gated else (ColumnParallelLinear, f)
        self.up = linear_class(h, num_rows, bias=args.hidden_bias, **parallel.layer_kwargs)
        if self.is_gated:
            set_matrices(self.up.weight, (1, 1))
        self.activation = XIELU(parallel) if args.activation == "xielu" else activation(args.activation)
        self.clamp_value, self.value_offset = args.activation_func_clamp_value, args.glu_linear_offset
        self.gate_multiplier, self.output_multiplier = args.multipliers.mlp_gate, args.multipliers.mlp_output
        is_plain_gate = not self.clamp_value and not self.value_offset and self.gate_multiplier == 1.0
        self.has_gate_kernel = args.activation in gated_activation.NAMES and is_plain_gate
        self.down = RowParallelLinear(f, h, bias=args.hidden_bias, **parallel.layer_kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_gated:
            uses_kernel = self.uses_gate_kernel(x)
            gate, value = self.up(x, uses_kernel)  # 2 x [s, b, f/t]
            hidden = self.gate(gate, value, uses_kernel)  # [s, b, f/t]
        else:
            hidden = self.activation(self.up(x))  # [s, b, f/t]
        y = self.down(self._apply_dropout(hidden))
        return y if self.output_multiplier == 1.0 else y * self.output_multiplier

    def uses_gate_kernel(self, x: torch.Tensor) -> bool:
        """Return True if a Triton kernel computes the gated activation of ``x``."""
        return self.has_gate_kernel and self.parallel.uses_kernels(x)

    def gate(self, gate: torch.Tensor, value: torch.Tensor, uses_kernel: bool) -> torch.Tensor:
        """Return ``activation(gate) * (value + offset)``, after clamping gate and value if the model requires it."""
        if uses_kernel:
            return gated_activation.gated_activation(self.activation_name, gate, value)
        if self.gate_multiplier != 1.0:
            gate = gate * self.gate_multiplier
        if self.clamp_value:
            gate, value = gate.clamp(max=self.clamp_value), value.clamp(-self.clamp_value, self.clamp_value)
        return self.activation(gate) * (value + self.value_offset if self.value_offset else value)

    def _apply_dropout(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.parallel.streams.dropout(
            hidden,
            self.dropout,
            training=self.training,
            layer=self.layer,
            site="activation",
            is_sharded=self.parallel.group.size > 1,
        )


# A transformer layer.


class TransformerLayer(nn.Module):
    """Layer of a decoder: a mixer and a feed-forward half, each with norms, dropout and a residual connection.

    The mixer is attention, a recurrent mixer, or the sum of both. The layer's ``LayerType`` determines it; either half
    may be absent. ``f`` is the mixer or the feed-forward half in this table:

    | norm_placement | output |
    |---|---|
    | before | ``x + dropout(f(norm(x)))``; ``norm(x) + ...`` with ``--apply-residual-connection-post-layernorm`` |
    | after | ``x + dropout(norm(f(x)))``, as in OLMo 2 |
    | both | ``x + dropout(norm(f(norm(x))))``, as in Gemma 2 |

    The mixer is applied first, and its output is the input of the feed-forward half. With ``parallel_residual`` both
    have the same input: ``x + dropout(mixer(norm(x))) + dropout(mlp(norm(x)))``, where they share the norm
    (shared-norm) or each has its own (separate-norms).

    With ``residual_scale`` c, the output of ``f`` (or of its norm) is multiplied by ``c / sqrt(num_layers)`` before
    dropout.

    Shapes:
        x           [s, b, h], or this rank's shard of the sequence, depending on ``parallel``
        mask        from ``Masks``, or None for causal; ``window_mask`` is used instead in layers with a window
        starts      int32 [b, s], document starts of recurrent mixers (``Masks.get_starts``), or None for one document
        output      as x

    ``cache`` and ``positions`` are passed to the mixer.

    Args:
        layer: index of this layer in the full model, from 0; part of the keys of its dropout masks.
    """

    def __init__(self, args: ModelArgs, parallel: ParallelContext, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.hidden_dropout = args.hidden_dropout
        self.residual_multiplier = args.residual_multiplier
        self.is_residual_normed = args.apply_residual_connection_post_layernorm
        layer_type = layer_types(args)[layer]
        self.has_attention = layer_type.has_attention
        self.has_window = self.has_attention and has_window(args, layer)
        self.parallel = parallel
        has_mixer, has_mlp = layer_type.mixer != NO_MIXER, layer_type.feed_forward != NO_MLP
        norm_placement = norm_placement_of(args, layer_type)
        has_pre_norm, has_post_norm = (norm_placement in (placement, "both") for placement in ("before", "after"))
        self.input_norm = make_norm(args, parallel) if has_pre_norm and has_mixer else None
        attention_class = LatentAttention if args.multi_latent_attention else SelfAttention
        self.attention = attention_class(args, parallel.for_layer(layer), layer) if self.has_attention else None
        self.recurrent: nn.Module | None = None
        if layer_type.recurrent_mixer:
            self.recurrent = make_recurrent_mixer(layer_type.recurrent_mixer, args, parallel, layer)
        self.attention_output_norm = make_norm(args, parallel) if has_post_norm and has_mixer else None
        self.is_parallel = args.parallel_residual != SEQUENTIAL
        has_second_norm = has_pre_norm and args.parallel_residual in (SEQUENTIAL, SEPARATE_NORMS)
        self.post_attention_norm = make_norm(args, parallel) if has_second_norm and has_mlp else None
        self.mlp: nn.Module | None = None
        if has_mlp:
            self.mlp = MoE(args, parallel, MLP, layer) if layer_type.feed_forward == EXPERTS else MLP(args, parallel)
        self.mlp_output_norm = make_norm(args, parallel) if has_post_norm and has_mlp else None
        if args.is_fp8_layer(layer):
            use_fp8_products(self.attention, self.mlp, args.fp8_recipe)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, cache: LayerKVCache | None = None,
        positions: torch.Tensor | None = None, window_mask: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if self.attention is None and self.recurrent is None:
            return self._add_mlp(*self._norm(self.post_attention_norm, x))
        x, normed = self._norm(self.input_norm, x)
        branch = self._mix(normed, window_mask if self.has_window else mask, cache, positions, starts)
        branch = branch if self.attention_output_norm is None else self.attention_output_norm(branch)
        if self.mlp is None:
            return self._add(self._residual(x, normed), branch, "attention output")
        if self.is_parallel:
            return self._add_parallel_mlp(x, normed, branch)
        x, normed = self._add_and_norm(
            self.post_attention_norm, self._residual(x, normed), branch, site="attention output"
        )
        return self._add_mlp(x, normed)

    def _mix(
        self,
        normed: torch.Tensor,
        mask: torch.Tensor | None,
        cache: LayerKVCache | None,
        positions: torch.Tensor | None,
        starts: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output of attention, of the recurrent mixer, or their sum."""
        outputs = []
        if self.attention is not None:
            outputs.append(self.attention(normed, mask, cache, positions))
        if self.recurrent is not None:
            recurrent_cache = None if cache is None else cache.recurrent
            outputs.append(self.recurrent(normed, None, recurrent_cache, positions, starts))
        return outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]

    def _add_mlp(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Return the residual connection plus the output of the feed-forward half applied to ``normed``."""
        return self._add(self._residual(x, normed), self._mlp_branch(normed), "mlp output")

    def _add_parallel_mlp(self, x: torch.Tensor, normed: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """Return ``x`` plus the output of the mixer, ``branch``, and of the feed-forward half applied to ``x``."""
        mlp_branch = self._mlp_branch(normed if self.post_attention_norm is None else self.post_attention_norm(x))
        return self._add(self._add(x, branch, "attention output"), mlp_branch, "mlp output")

    def _mlp_branch(self, normed: torch.Tensor) -> torch.Tensor:
        assert self.mlp is not None
        branch: torch.Tensor = self.mlp(normed)
        return branch if self.mlp_output_norm is None else self.mlp_output_norm(branch)

    def _residual(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return normed if self.is_residual_normed else x

    def _add(self, residual: torch.Tensor, branch: torch.Tensor, site: str) -> torch.Tensor:
        """Return ``residual`` plus ``branch``, multiplied by ``residual_multiplier`` and after dropout."""
        return self.parallel.dropout(
            self._scale(branch),
            self.hidden_dropout,
            training=self.training,
            layer=self.layer,
            site=site,
            residual=residual,
        )

    def _scale(self, branch: torch.Tensor) -> torch.Tensor:
        return branch if self.residual_multiplier == 1.0 else branch * self.residual_multiplier

    def _add_and_norm(
        self, norm: nn.Module | None, residual: torch.Tensor, branch: torch.Tensor, site: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of ``_add``, and its norm."""
        has_dropout = self.training and self.hidden_dropout > 0.0
        if norm is None or has_dropout:
            return self._norm(norm, self._add(residual, branch, site))
        return add_and_norm(norm, residual, self._scale(branch), self.parallel)

    def _norm(self, norm: nn.Module | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``x`` for the residual connection, and its norm; ``x`` twice without a norm."""
        return (x, x) if norm is None else add_and_norm(norm, x, None, self.parallel)


# A sequence of transformer layers.


def run_layers(
    layers: Sequence[Callable[..., torch.Tensor]], x: torch.Tensor, *extra_inputs: Any, recompute: Recompute
) -> torch.Tensor:
    """Apply ``layers`` to ``x`` in order and return the output.

    Args:
        extra_inputs: further inputs of every layer, such as a mask.
        recompute: checkpoints each group of ``recompute.interval`` layers: only the input is saved for backward.
    """

    def run(group: Sequence[Callable[..., torch.Tensor]], x: torch.Tensor, *extra_inputs: Any) -> torch.Tensor:
        for layer in group:
            x = layer(x, *extra_inputs)
        return x

    interval = recompute.interval
    if not interval or not torch.is_grad_enabled():
        return run(layers, x, *extra_inputs)
    for start in range(0, len(layers), interval):
        x = recompute(partial(run, layers[start : start + interval]), x, *extra_inputs)
    return x
