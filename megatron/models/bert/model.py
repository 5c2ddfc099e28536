"""BertModel: encoder layers, heads, loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config import Config
from megatron.models.bert.data import NOTHING
from megatron.models.common.attention import SelfAttention
from megatron.models.common.language_model import (
    LazyLogits,
    Logits,
    PositionEmbedding,
    head_output,
    materialize_logits,
    model_loss,
)
from megatron.models.common.model_args import ModelArgs, fields_held
from megatron.models.common.norms import LayerNorm
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import Rule
from megatron.models.common.transformer import MLP, Recompute, recompute_switches, run_layers
from megatron.models.parts import ModelParts
from megatron.mpu.layers import VocabParallelEmbedding, vocab_range
from megatron.mpu.mappings import all_reduce, reduce_from_tensor_region
from megatron.mpu.shard import Shard, empty_weight, set_shard
from megatron.ops.activations import activation
from megatron.ops.attention import segment_mask
from megatron.ops.document_attention import document_starts, document_stops, way_of
from tds.linear_function import linear

if TYPE_CHECKING:
    from torch import Tensor

# BERT's loss: the mean over masked tokens and the mean over samples, added.
#
# Both means are over the global batch, and a batch in a loss is known to no micro-batch. So what is summed is
#
#     masked + next_sentence * predictions / samples      counted by masked tokens
#
# with the tokens to predict and the samples of the whole step, which follow from the numbers of its samples
# (``megatron.data.data_loader``). Divided by all masked tokens that is the sum of the two means, in any layout.
# Whole words may leave a token of what is to be predicted unmasked; then the second mean weighs that much more than 1.

Pair = tuple[torch.Tensor, torch.Tensor]
Outputs = Logits | tuple[Logits, torch.Tensor]
"""Logits of words, or these and the scores of the second segment [b, 2]."""


def whole_outputs(outputs: Outputs) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return ``outputs`` with the logits themselves."""
    if isinstance(outputs, (torch.Tensor, LazyLogits)):
        return materialize_logits(outputs)
    words, scores = outputs
    return materialize_logits(words), scores


def bert_loss(
    logits: Outputs,
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    is_random: torch.Tensor | None = None,
    step_predictions: torch.Tensor | None = None,
    *,
    sizes: BertModelArgs,
    place: ParallelContext,
) -> Pair | dict[str, Pair]:
    """Return (sum, count) over the masked tokens; with two heads both losses and, as "loss", what is trained on.

    Shapes:
        logits    [s, b, v/t] or what they are made of; or that and [b, 2]
        labels    [b, s] token ids, looked at where ``loss_mask`` [b, s] is not 0
        is_random [b], 1 where the second segment is from elsewhere
        step_predictions [2], tokens to predict and samples of the step; None: those of this batch
    """
    if isinstance(logits, (torch.Tensor, LazyLogits)):
        return model_loss(logits, labels, loss_mask, sizes, place)
    words, scores = logits
    if is_random is None:
        raise ValueError("a BERT with two heads needs is_random, whether the second segment is from elsewhere")
    masked, num_masked = model_loss(words, labels, loss_mask, sizes, place)
    wide = scores.dtype if scores.dtype == torch.float64 else torch.float32
    following = F.cross_entropy(scores.to(wide), is_random, reduction="sum")
    num_samples = num_masked.new_full((), len(is_random))
    if sizes.loss_average == "micro-batch" and torch.is_grad_enabled():
        # Each context rank divides by its own masked tokens, and the ranks' quotients are averaged.
        share = num_masked.clamp(min=1) * place.context.size / num_samples
    elif step_predictions is None:
        share = all_reduce(num_masked.clone(), place.context) / num_samples
    else:
        predictions, samples = step_predictions.to(wide)  # not fp64, which some devices lack
        share = predictions / samples
    if place.context.rank:  # the first token of a sample is on the first rank of the context group
        following, num_samples = following * 0.0, num_samples * 0.0
    return {
        "loss": (masked + following * share, num_masked),
        "mlm loss": (masked.detach(), num_masked),
        "nsp loss": (following.detach(), num_samples),
    }


@dataclass(frozen=True, kw_only=True)
class BertModelArgs(ModelArgs):
    """Sizes of an encoder that finds masked words; ``binary_head``: and tells whether two segments belong together."""

    family: str = "bert"
    binary_head: bool = True
    num_token_types: int = 2
    loss_average: str = "token"


def bert_model_args_from(model: Any, bert: Any, **overrides: Any) -> BertModelArgs:
    """Return the sizes held by the configuration sections ``model`` and ``bert``."""
    return BertModelArgs(**{**fields_held(BertModelArgs, model), **fields_held(BertModelArgs, bert), **overrides})


# The layers of BERT's encoder, and what comes before them.


class SharedWordEmbedding(nn.Module):
    """The sum of word, position and token type, with norm and dropout; ``word`` is a table that others have too.

    Shapes:
        tokens [b, s]
        token_types [b, s], 0 in the first segment of a sample, 1 in the second
        output [s, b, h], or this rank's part of it, by ``place``
    """

    word: VocabParallelEmbedding

    def __init__(self, sizes: BertModelArgs, place: ParallelContext) -> None:
        super().__init__()
        self.position = place.on_part(PositionEmbedding(sizes.max_position_embeddings, sizes.hidden_size))
        self.token_type = place.on_part(PositionEmbedding(sizes.num_token_types, sizes.hidden_size))
        self.norm = place.on_part(LayerNorm(sizes.hidden_size, sizes.layernorm_epsilon))
        self.hidden_dropout = sizes.hidden_dropout
        self.place = place

    def forward(self, tokens: torch.Tensor, token_types: torch.Tensor) -> torch.Tensor:
        words = self.word(tokens.t())  # [s, b, h] or [s/t, b, h]
        types = self.place.part(token_types.t())  # [s, b] or [s/t, b]
        positions = self.place.part(self.place.positions(token_types.shape[1], words.device))
        x = words + self.position(positions).unsqueeze(1) + self.token_type(types)
        return self.place.dropout(self.norm(x), self.hidden_dropout, training=self.training, layer=-1, site="embedding")


class BertEmbedding(SharedWordEmbedding):
    """The same with a word table of its own."""

    def __init__(self, sizes: BertModelArgs, place: ParallelContext) -> None:
        super().__init__(sizes, place)
        self.word = VocabParallelEmbedding(
            sizes.vocab_size, sizes.hidden_size, divisible_by=sizes.make_vocab_size_divisible_by, **place.cut
        )


class BertAttention(SelfAttention):
    """Self-attention in both directions.

    Shapes:
        x      [s, b, h]
        mask   of ``padding_mask``, or None
        output [s, b, h]
    """

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        query, key, value = self.split_heads(self.query_key_value(x), 3)  # 3 x [b, a/t, s, d]
        if mask is not None and mask.dtype == torch.int32:
            starts, stops = mask
            return self.dense(self.attend(self.within_documents, query, key, value, starts, stops))
        return self.dense(self.attend(self.function, query, key, value, mask=mask, is_causal=False))


def padding_mask(
    segments: torch.Tensor, x: torch.Tensor, sizes: BertModelArgs, place: ParallelContext
) -> torch.Tensor:  # fmt: skip
    """Return where this rank's queries may look, of segments [b, s], -1 in padding, which no other token sees.

    With context parallelism of segments [b, s/c], and collective.

    Shapes:
        x      hidden states, as layers read them
        output int32 [2, b, s], the first key and one more than the last, where nothing is dropped from attention and
               the device has a kernel; else bool [b, 1, s, s]; of queries [.., s/c] or all, by ``place``
    """
    queries, keys = place.queries_and_keys(segments)
    way = None if sizes.attention_dropout else way_of(x, keys.shape[1], sizes.kv_hidden_size, is_plain=False)
    if way is not None:
        starts = document_starts(keys)
        return place.own_queries(torch.stack((starts, document_stops(starts))), dim=2)
    return segment_mask(queries, keys)


class BertLayer(nn.Module):
    """A post-norm layer: ``norm(x + dropout(attention(x)))``, then ``norm(x + dropout(mlp(x)))``.

    Shapes:
        x        [s, b, h]
        mask     of ``padding_mask``, or None
        output   [s, b, h]

    Args:
        layer: number of this layer in the whole model, from 0; part of the keys of its dropout masks.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.1; Devlin et al. 2019, "BERT".
    """

    def __init__(self, sizes: BertModelArgs, place: ParallelContext, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.hidden_dropout = sizes.hidden_dropout
        self.place = place
        self.attention = BertAttention(sizes, place, layer)
        self.post_attention_norm = place.on_part(LayerNorm(sizes.hidden_size, sizes.layernorm_epsilon))
        self.mlp = MLP(sizes, place, layer)
        self.post_mlp_norm = place.on_part(LayerNorm(sizes.hidden_size, sizes.layernorm_epsilon))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.post_attention_norm(x + self._dropout(self.attention(x, mask), "attention output"))
        return self.post_mlp_norm(x + self._dropout(self.mlp(x), "mlp output"))

    def _dropout(self, x: torch.Tensor, site: str) -> torch.Tensor:
        return self.place.dropout(x, self.hidden_dropout, training=self.training, layer=self.layer, site=site)


# From BERT's hidden states to its two answers: which words are masked, and whether the segments belong together.


class WholeLinear(nn.Module):
    """``Y = X A^T + b``. Every rank of the tensor group holds all of it and does the same.

    Shapes:
        input  [..., input_size]
        output [..., output_size]
    """

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        shape = (output_size, input_size)
        self.weight = empty_weight(shape, Shard(shape))
        self.bias = nn.Parameter(torch.zeros(output_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, fuse=False)


class Transform(nn.Module):
    """What lies between the last layer and the vocabulary: a product, activation, norm.

    Shapes:
        input, output [s, b, h], or this rank's part of it, by ``place``
    """

    def __init__(self, sizes: BertModelArgs, place: ParallelContext) -> None:
        super().__init__()
        self.dense = place.on_part(WholeLinear(sizes.hidden_size, sizes.hidden_size))
        self.activation = activation(sizes.activation)
        self.norm = place.on_part(LayerNorm(sizes.hidden_size, sizes.layernorm_epsilon))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.activation(self.dense(x)))


class NextSentence(nn.Module):
    """Whether the second segment goes on where the first stops, from the first token of a sample.

    Where the sequence is cut the first tensor rank has that token and hands it to the others, which do the same. With
    context parallelism the first rank of the context group has it; what the others make of theirs does not count.

    Shapes:
        input  [s, b, h], or this rank's part of it, by ``place``
        output [b, 2], scores of: it does, it is from elsewhere
    """

    gives_whole = True  # for the debugger: what it returns is the same on every rank

    def __init__(self, sizes: BertModelArgs, place: ParallelContext) -> None:
        super().__init__()
        self.place = place
        self.pooler = WholeLinear(sizes.hidden_size, sizes.hidden_size)
        self.classifier = WholeLinear(sizes.hidden_size, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.tanh(self.pooler(self._first_token(x))))

    def _first_token(self, x: torch.Tensor) -> torch.Tensor:
        if not self.place.sequence_parallel:
            return x[0]
        own = x[0] if self.place.group.rank == 0 else torch.zeros_like(x[0])
        return reduce_from_tensor_region(own, self.place.group)


class WordHead(nn.Module):
    """Logits by the word table, with a bias for each word, which is cut as the table is.

    Shapes:
        x      [s, b, h], the same on every rank, or this rank's part of it, by ``place``
        table  [v/t, h], padded rows last
        output [s, b, v/t], or what they are made of
    """

    def __init__(self, sizes: BertModelArgs, place: ParallelContext) -> None:
        super().__init__()
        self.sizes, self.place = sizes, place
        rows, start, num_real = vocab_range(sizes.vocab_size, place.group, sizes.make_vocab_size_divisible_by)
        self.bias = set_shard(nn.Parameter(torch.zeros(rows)), Shard((sizes.vocab_size,), 0, start, num_real))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> Logits:
        return head_output(x, table, self.sizes, self.place, self.bias)


def bert_rule(std: float) -> Rule:
    """Return ``std`` for all weights: what joins the residual stream is normed at once.

    Source: Devlin et al.'s code.
    """
    return lambda name, shape: std


# BERT on one pipeline rank.


class BertModel(nn.Module):
    """An encoder that finds masked words and, with ``binary_head``, tells whether two segments belong together.

    Shapes:
        tokens, token_types [b, s]
        segments [b, s] or None; given, -1 is padding, which no other token sees
        output logits [s, b, v/t], with ``binary_head`` also [b, 2]; with ``labels`` and the rest of what
            ``bert_loss`` takes its losses

    Source: Devlin et al. 2019, "BERT: Pre-training of deep bidirectional transformers for language understanding".
    """

    loss_weighting = "tokens"  # the loss function returns (sum, count)

    def __init__(self, sizes: BertModelArgs, place: ParallelContext | None = None) -> None:
        super().__init__()
        self.sizes = sizes
        self.place = place or ParallelContext()
        self.recompute = Recompute(sizes, self.place)
        self.embedding = BertEmbedding(sizes, self.place)
        self.layers = nn.ModuleList(BertLayer(sizes, self.place, i) for i in range(sizes.num_layers))
        self.transform = Transform(sizes, self.place)
        self.next_sentence = NextSentence(sizes, self.place) if sizes.binary_head else None
        self.head = WordHead(sizes, self.place)

    def forward(
        self,
        tokens: torch.Tensor,
        token_types: torch.Tensor,
        segments: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
        is_random: torch.Tensor | None = None,
        step_predictions: torch.Tensor | None = None,
    ) -> Outputs | Pair | dict[str, Pair]:
        x = self.embedding(tokens, token_types)  # [s, b, h]
        mask = None if segments is None else padding_mask(segments, x, self.sizes, self.place)
        x = run_layers(list(self.layers), x, mask, recompute=self.recompute)
        words = self.head(self.transform(x), self.embedding.word.weight)  # [s, b, v/t]
        logits = words if self.next_sentence is None else (words, self.next_sentence(x))
        if labels is None or loss_mask is None:
            return whole_outputs(logits)
        return bert_loss(logits, labels, loss_mask, is_random, step_predictions, sizes=self.sizes, place=self.place)


def model_args(config: Config, *, recomputes: bool = False) -> BertModelArgs:
    """Return the sizes of the model of ``config``; ``recomputes``: with the activation recomputation of its run."""
    switches = recompute_switches(config) if recomputes else {}
    return bert_model_args_from(config.model, config.own, **switches)


def weight_init(config: Config) -> Rule:
    """Return the standard deviation of the initial weights, by name."""
    return bert_rule(config.model.init_method_std)


def example_inputs(config: Config, words: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the inputs of a BERT without labels; ``words(length)`` draws tokens [b, length]."""
    tokens = words(config.batch.seq_length)
    nothing = torch.zeros_like(tokens)
    inputs = {"tokens": tokens, "token_types": nothing, "is_random": nothing[:, 0]}
    return inputs | ({"segments": nothing.int()} if config.own.pads_samples else {})


MODEL = ModelParts(args=model_args, model=BertModel, weight_init=weight_init, example_inputs=example_inputs)


def bert_fields(
    text: Tensor, labels: Tensor, parts: Tensor, is_random: Tensor | None = None, *, has_segments: bool
) -> dict[str, Tensor | None]:
    """Return tokens, token_types, segments, labels, loss_mask and, where it is given, is_random of a micro-batch.

    Shapes:
        text, labels, parts [b, s]; is_random [b]
        results alike; loss_mask is float32, segments are None without ``has_segments``, else -1 for padding, 0 else
    """
    fields: dict[str, Tensor | None] = {
        "tokens": text,
        "token_types": parts.clamp(min=0).long(),
        "segments": parts.clamp(max=0) if has_segments else None,
        "labels": labels.clamp(min=0),
        "loss_mask": (labels != NOTHING).float(),
    }
    return fields if is_random is None else {**fields, "is_random": is_random}
