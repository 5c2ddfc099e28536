"""BERT costs. The units are GPT-2's, with a transform between the layers and the head.

| unit | in addition to GPT-2 of the same sizes |
|---|---|
| embedding | token types, a norm |
| layers | the upper half of the attention matrix |
| transform, instead of the final norm | a linear layer; with two heads two more, applied to one token per sample |
| head | a bias per word |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from megatron.costs import decoder_cost
from megatron.costs.cost import Product, SavedBytes, Work
from megatron.costs.decoder_cost import DecoderCosts, distribution_costs, dropout_costs, loss_costs, mask_reason
from megatron.costs.dimensions import known_vocab_size
from megatron.costs.memoize import memoized_list

_TOKEN_TYPES = 2


class Heads(Protocol):
    """``BertConfig`` attributes that determine the costs."""

    @property
    def binary_head(self) -> bool: ...
    @property
    def pads_samples(self) -> bool: ...


@dataclass(frozen=True)
class BertCosts(DecoderCosts):
    """BERT costs with ``model`` for samples of ``seq_length`` tokens."""

    is_causal: ClassVar[bool] = False
    owns_shared = False  # the embedding and the head read the table of the stage
    heads: Heads

    @property
    def unit_names(self) -> list[str]:
        embedding, *layers, _, head = super().unit_names
        return [embedding, *layers, "transform", head]

    @property
    def unit_costs(self) -> list[float]:
        model, h = self.model, self.model.hidden_size
        scores = 4 * self.seq_length * decoder_cost.attention_width(model)
        layer = decoder_cost.projections_flops(model) + decoder_cost.feed_forward_flops(model) + scores
        norm = decoder_cost.ELEMENTWISE * h / layer
        return [norm, *[1.0] * model.num_layers, norm + 2 * h * h / layer, decoder_cost.head_cost(model) / layer]

    def flops_per_token(self, *, causal: bool = False) -> float:
        """Return the forward and backward FLOPs per token. ``causal`` counts half of the attention matrix."""
        h, transform = self.model.hidden_size, self._transform_parameters() / self.seq_length
        second_head = 6.0 * transform if self.heads.binary_head else 0.0
        return super().flops_per_token(causal=causal) + 6.0 * h * h + second_head

    @memoized_list
    def unit_parameters(self, tensor: int = 1) -> list[int]:
        h = self.model.hidden_size
        embedding, *layers, _, head = super().unit_parameters(tensor)
        words = -(-known_vocab_size(self.model) // tensor)
        transform = h * h + 3 * h + (self._transform_parameters() if self.heads.binary_head else 0)
        return [embedding + (_TOKEN_TYPES + 2) * h, *layers, transform, head + words]

    @memoized_list
    def unit_work(self, samples: int, tensor: int, width: int) -> list[Work]:
        embedding, *layers, norm, head = super().unit_work(samples, tensor, width)
        h = self.model.hidden_size
        transform = Work(products=(Product(samples * self.local_length, h, h),), operations=2 * norm.operations)
        return [embedding, *layers, transform, head]

    @memoized_list
    def unit_saved_bytes(
        self, samples: int, tensor: int, width: int, sequence: int = 1, *, saves_gathered_inputs: bool = False
    ) -> list[SavedBytes]:
        embedding, *layers, _, head = super().unit_saved_bytes(
            samples, tensor, width, sequence, saves_gathered_inputs=saves_gathered_inputs
        )
        if self.heads.pads_samples and not self.uses_document_starts:
            # mask of padded keys, in the dtype of activations
            mask = samples * self.local_length * self.seq_length * width
            layers = [replace(layer, full=layer.full + mask) for layer in layers]
        hidden = samples * self.local_length * self.model.hidden_size * width // sequence
        return [embedding, *layers, SavedBytes(5 * hidden, 3 * hidden), head]

    def _transform_parameters(self) -> int:
        """Count the next-sentence head's parameters: the pooler and the linear layer for two scores."""
        h = self.model.hidden_size
        return h * h + h + 2 * h + 2


def costs(config: Any, is_on_cpu: bool = False) -> BertCosts:
    """Return the costs for the model in ``config``; saved activations depend on ``is_on_cpu``."""
    return BertCosts(
        config.model, config.batch.seq_length, config.family_config,
        uses_document_starts=mask_reason(config, "cpu" if is_on_cpu else "cuda", is_causal=False) is None,
        **dropout_costs(config, is_on_cpu), **distribution_costs(config), **loss_costs(config, is_on_cpu),
    )  # fmt: skip
