"""DecoderModel: GPT-2, LLaMA, MPT and every other decoder without pipeline stages, configured by ``ModelArgs``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron.config import Config
from megatron.config.layer_types import num_residual_additions
from megatron.models.common.language_model import Embedding, Head, Logits, head_output, materialize_logits, model_loss
from megatron.models.common.masks import Masks
from megatron.models.common.model_args import ModelArgs, model_args_from
from megatron.models.common.mtp import MTPInput, MTPLayer, with_mtp_losses
from megatron.models.common.norms import make_norm
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import Rule, gpt2_rule
from megatron.models.common.token_losses import TokenLosses
from megatron.models.common.transformer import Recompute, TransformerLayer, recompute_switches, run_layers
from megatron.models.parts import DecoderLayers, ModelParts


class DecoderModel(nn.Module):
    """Decoder-only language model, sharded over the tensor-parallel group of ``parallel``.

    Shapes:
        tokens [b, s]
        position_ids [b, s], or None for 0 ... s-1; used only by learned and rotary positions. Learned positions must be
            below ``max_position_embeddings``, rotary positions below ``max(max_position_embeddings, s)``
        segment_ids [b, s] or None; if given, attention stays within documents
        output logits [s, b, v/t]; with ``labels`` and ``loss_mask`` [b, s] the pair (loss sum, token count), or a
            dictionary of such pairs (``model_loss``, ``with_mtp_losses``)

    Raises:
        ValueError: a position is out of range. Rotary positions are checked only on a CPU, because the check would
            synchronize with other devices.

    Source: Radford et al. 2019, "Language models are unsupervised multitask learners"; Touvron et al. 2023, "LLaMA:
    open and efficient foundation language models"; MosaicML 2023, "Introducing MPT-7B".
    """

    loss_weighting = "tokens"  # the loss function returns (sum, count)
    token_losses: TokenLosses | None = None
    """Records the token losses of training steps; None: they are not recorded."""

    def __init__(self, args: ModelArgs, parallel: ParallelContext | None = None) -> None:
        super().__init__()
        self.model_args = args
        self.parallel = parallel or ParallelContext()
        self.recompute = Recompute(args, self.parallel)
        self.masks = Masks(args, self.parallel)
        self.embedding = Embedding(args, self.parallel)
        self.layers = nn.ModuleList(TransformerLayer(args, self.parallel, i) for i in range(args.num_layers))
        self.final_norm = make_norm(args, self.parallel)
        mtp_layers = [MTPLayer(args, self.parallel, depth) for depth in range(args.mtp_num_layers)]
        self.mtp = nn.ModuleList(mtp_layers) if mtp_layers else None
        self.head = Head(args, self.parallel) if args.untie_embeddings else None

    def units(self) -> list[nn.Module]:
        """Return the modules that compute logits, in order. For a tied head, the last one is the embedding."""
        return [self.embedding, *self.layers, self.final_norm, self.embedding if self.head is None else self.head]

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None, segment_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None, loss_mask: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        x = self.embedding(tokens, position_ids)  # [s, b, h]
        x = self.final_norm(self._run_layers(x, position_ids, segment_ids))
        logits = self._apply_head(x)
        if labels is None or loss_mask is None:
            return materialize_logits(logits)  # [s, b, v/t]
        loss = model_loss(logits, labels, loss_mask, self.model_args, self.parallel, self.token_losses)
        if self.mtp is None or not torch.is_grad_enabled():
            return loss
        positions = None if self.model_args.rotary is None else position_ids
        layers = tuple(layer for layer in self.mtp if isinstance(layer, MTPLayer))
        return with_mtp_losses(
            loss,
            MTPInput(x, segment_ids, positions, self.embedding.word, layers, logits, self._apply_head),
            labels,
            loss_mask,
            masks=self.masks,
            recompute=self.recompute,
            args=self.model_args,
            parallel=self.parallel,
        )

    def _apply_head(self, x: torch.Tensor) -> Logits:
        if self.head is not None:
            return self.head(x)
        return head_output(x, self.embedding.word.weight, self.model_args, self.parallel)

    def _run_layers(
        self, x: torch.Tensor, position_ids: torch.Tensor | None, segment_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Apply the transformer layers; those with another communication over context ranks have other masks."""
        layers: list[Callable[..., torch.Tensor]] = list(self.layers)
        masks_by_layer = [self.masks.of_layer(layer_idx) for layer_idx in range(len(layers))]
        all_masks = list(dict.fromkeys(masks_by_layer))
        is_causal_only = segment_ids is None and self.model_args.rotary is None
        if is_causal_only and not any(masks.is_always_needed for masks in all_masks):
            return run_layers(layers, x, recompute=self.recompute)
        inputs = {masks: self._layer_inputs(masks, x, position_ids, segment_ids) for masks in all_masks}
        if len(inputs) <= 1:
            return run_layers(layers, x, *(inputs[all_masks[0]] if all_masks else ()), recompute=self.recompute)

        def with_inputs(layer: Callable[..., torch.Tensor], masks: Masks) -> Callable[..., torch.Tensor]:
            return lambda x: layer(x, *inputs[masks])

        bound_layers = [with_inputs(layer, masks) for layer, masks in zip(layers, masks_by_layer, strict=True)]
        return run_layers(bound_layers, x, recompute=self.recompute)

    def _layer_inputs(
        self, masks: Masks, x: torch.Tensor, position_ids: torch.Tensor | None, segment_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the layers' further inputs: mask, None for the cache, positions, mask of layers with a window, starts.

        Only models with recurrent mixers have document starts.
        """
        mask = masks.get_mask(x, segment_ids) if masks.has_attention else None
        positions = None if self.model_args.rotary is None else position_ids
        self._check_positions(positions)
        window_mask = mask
        if masks.window and masks.has_attention:
            window_mask = masks.get_mask(x, segment_ids, has_window=True)
        starts = (masks.get_starts(segment_ids),) if masks.has_recurrent_layers else ()
        return (mask, None, positions, window_mask, *starts)

    def _check_positions(self, position_ids: torch.Tensor | None) -> None:
        if position_ids is None or position_ids.device.type != "cpu":
            return
        lowest, highest = (int(position) for position in position_ids.aminmax())
        length = max(self.model_args.max_position_embeddings, position_ids.shape[-1] * self.parallel.context.size)
        if lowest < 0 or highest >= length:
            raise ValueError(
                f"position_ids must be from 0 to {length - 1}, got {lowest} to {highest}. Raise the model's "
                "max_position_embeddings (--max-position-embeddings), or use positions in this range"
            )


def model_args(config: Config, *, for_training: bool = False) -> ModelArgs:
    """Return the ``ModelArgs`` of ``config``.

    Args:
        for_training: apply the run's settings of activation recomputation and FP8.
    """
    switches = {**recompute_switches(config), **config.precision.fp8_layers()} if for_training else {}
    return model_args_from(config.model, family=config.family, **switches)


def weight_init(config: Config) -> Rule:
    """Return the rule for the standard deviation of the initial weights."""
    model = config.model
    return gpt2_rule(model.init_method_std, num_residual_additions(model) / 2, model.width_multiplier)


def example_inputs(config: Config, draw_tokens: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return example inputs of a decoder without labels; ``draw_tokens(length)`` draws tokens [b, length]."""
    tokens = draw_tokens(config.batch.seq_length)
    if not config.model.has_position_ids:
        return {"tokens": tokens}
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return {"tokens": tokens, "position_ids": positions.repeat(tokens.shape[0], 1)}


MODEL = ModelParts(
    args=model_args,
    model=DecoderModel,
    weight_init=weight_init,
    example_inputs=example_inputs,
    generation=DecoderLayers(embedding=Embedding, layer=TransformerLayer, norm=make_norm),
)
