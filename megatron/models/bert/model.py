"""BertModel: encoder layers, heads and loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config import Config
from megatron.models.bert.data import NOT_PREDICTED
from megatron.models.common.attention import SelfAttention
from megatron.models.common.language_model import (
    LazyLogits,
    Logits,
    PositionEmbedding,
    head_output,
    materialize_logits,
    model_loss,
)
from megatron.models.common.model_args import ModelArgs, select_fields
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
from megatron.ops.document_attention import document_starts, document_stops, select_implementation
from tds.linear_function import linear

if TYPE_CHECKING:
    from torch import Tensor

# BERT's loss: the mean over masked tokens plus the mean over samples.
#
# Both means are over the global batch, whose size a micro-batch does not know. Each micro-batch therefore contributes
# the sum
#
#     masked + next_sentence * predictions / samples      with the number of masked tokens as its count
#
# where predictions and samples are the numbers of tokens to predict and of samples in the whole step, computed from the
# sample indices (``megatron.data.data_loader``). Divided by the number of all masked tokens, the total is the sum of
# the two means in every layout. With whole-word masking, slightly fewer tokens than planned may be masked; the second
# mean then has a weight slightly above 1.

SumAndCount = tuple[torch.Tensor, torch.Tensor]
Outputs = Logits | tuple[Logits, torch.Tensor]
"""Logits of words, or a pair of these and the next-sentence scores [b, 2]."""


def materialize_outputs(outputs: Outputs) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Convert the logits in ``outputs`` to a tensor."""
    if isinstance(outputs, (torch.Tensor, LazyLogits)):
        return materialize_logits(outputs)
    word_logits, scores = outputs
    return materialize_logits(word_logits), scores


def bert_loss(
    logits: Outputs,
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    is_random: torch.Tensor | None = None,
    step_predictions: torch.Tensor | None = None,
    *,
    args: BertModelArgs,
    parallel: ParallelContext,
) -> SumAndCount | dict[str, SumAndCount]:
    """Return the loss as (sum, count) over the masked tokens; with two heads both losses and the total "loss".

    Shapes:
        logits    [s, b, v/t] or ``LazyLogits``; with two heads a pair of these and [b, 2]
        labels    [b, s] token ids, used where ``loss_mask`` [b, s] is not 0
        is_random [b], 1 if the second segment does not follow the first
        step_predictions [2], tokens to predict and samples in the step; None: computed from this batch
    """
    if isinstance(logits, (torch.Tensor, LazyLogits)):
        return model_loss(logits, labels, loss_mask, args, parallel)
    word_logits, scores = logits
    if is_random is None:
        raise ValueError("a BERT with two heads requires is_random, which marks samples with a random second segment")
    masked_loss, num_masked = model_loss(word_logits, labels, loss_mask, args, parallel)
    dtype = scores.dtype if scores.dtype == torch.float64 else torch.float32
    next_sentence_loss = F.cross_entropy(scores.to(dtype), is_random, reduction="sum")
    num_samples = num_masked.new_full((), len(is_random))
    if args.loss_average == "micro-batch" and torch.is_grad_enabled():
        # The sum of both losses is divided by the masked tokens of the micro-batch, at least 1.
        predictions_per_sample = all_reduce(num_masked.clone(), parallel.context).clamp(min=1) / num_samples
    elif step_predictions is None:
        predictions_per_sample = all_reduce(num_masked.clone(), parallel.context) / num_samples
    else:
        predictions, samples = step_predictions.to(dtype)  # not fp64, which some devices lack
        predictions_per_sample = predictions / samples
    if parallel.context.rank:  # the first token of a sample is on the first rank of the context group
        next_sentence_loss, num_samples = next_sentence_loss * 0.0, num_samples * 0.0
    return {
        "loss": (masked_loss + next_sentence_loss * predictions_per_sample, num_masked),
        "mlm loss": (masked_loss.detach(), num_masked),
        "nsp loss": (next_sentence_loss.detach(), num_samples),
    }


@dataclass(frozen=True, kw_only=True)
class BertModelArgs(ModelArgs):
    """Sizes and switches for a masked language model; ``binary_head`` adds next-sentence prediction."""

    family: str = "bert"
    binary_head: bool = True
    num_token_types: int = 2
    loss_average: str = "token"


def bert_model_args_from(model: Any, bert: Any, **overrides: Any) -> BertModelArgs:
    """Build ``BertModelArgs`` from the configuration sections ``model`` and ``bert``."""
    return BertModelArgs(**{**select_fields(BertModelArgs, model), **select_fields(BertModelArgs, bert), **overrides})


# Embedding and encoder layers.


class SharedWordEmbedding(nn.Module):
    """Sum of word, position and token type embeddings, with norm and dropout; ``word`` is a shared table.

    Shapes:
        tokens [b, s]
        token_types [b, s], 0 in a sample's first segment, 1 in the second
        output [s, b, h], or this rank's sequence shard, depending on ``parallel``
    """

    word: VocabParallelEmbedding

    def __init__(self, args: BertModelArgs, parallel: ParallelContext) -> None:
        super().__init__()
        self.position = parallel.mark_sequence_parallel(
            PositionEmbedding(args.max_position_embeddings, args.hidden_size)
        )
        self.token_type = parallel.mark_sequence_parallel(PositionEmbedding(args.num_token_types, args.hidden_size))
        self.norm = parallel.mark_sequence_parallel(LayerNorm(args.hidden_size, args.layernorm_epsilon))
        self.hidden_dropout = args.hidden_dropout
        self.parallel = parallel

    def forward(self, tokens: torch.Tensor, token_types: torch.Tensor) -> torch.Tensor:
        words = self.word(tokens.t())  # [s, b, h] or [s/t, b, h]
        types = self.parallel.shard_sequence(token_types.t())  # [s, b] or [s/t, b]
        positions = self.parallel.shard_sequence(self.parallel.positions(token_types.shape[1], words.device))
        x = words + self.position(positions).unsqueeze(1) + self.token_type(types)
        return self.parallel.dropout(
            self.norm(x), self.hidden_dropout, training=self.training, layer=-1, site="embedding"
        )


class BertEmbedding(SharedWordEmbedding):
    """``SharedWordEmbedding`` with its own word table."""

    def __init__(self, args: BertModelArgs, parallel: ParallelContext) -> None:
        super().__init__(args, parallel)
        self.word = VocabParallelEmbedding(
            args.vocab_size, args.hidden_size, divisible_by=args.make_vocab_size_divisible_by, **parallel.layer_kwargs
        )


class BertAttention(SelfAttention):
    """Bidirectional self-attention.

    Shapes:
        x      [s, b, h]
        mask   from ``padding_mask``, or None
        output [s, b, h]
    """

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        query, key, value = self.split_heads(self.query_key_value(x), 3)  # 3 x [b, a/t, s, d]
        if mask is not None and mask.dtype == torch.int32:
            starts, stops = mask
            return self.dense(self.attend(self.document_function, query, key, value, starts, stops))
        return self.dense(self.attend(self.attention_function, query, key, value, mask=mask, is_causal=False))


def padding_mask(
    segments: torch.Tensor, x: torch.Tensor, args: BertModelArgs, parallel: ParallelContext
) -> torch.Tensor:  # fmt: skip
    """Build the attention mask for this rank's queries from segments [b, s] with -1 for padding.

    Other tokens do not attend to padding. With context parallelism, segments are [b, s/c] and the function is
    collective.

    Shapes:
        x      hidden states, the input of the layers
        output int32 [2, b, s], key start and stop by query, if the device has a kernel and there is no attention
               dropout; otherwise bool [b, 1, s, s]. With context parallelism, the queries are this rank's (see
               ``ParallelContext.query_positions``)
    """
    queries, keys = parallel.query_and_key_segments(segments)
    kernel = (
        None if args.attention_dropout else select_implementation(x, keys.shape[1], args.kv_hidden_size, is_plain=False)
    )
    if kernel is not None:
        starts = document_starts(keys)
        return parallel.select_local_queries(torch.stack((starts, document_stops(starts))), dim=2)
    return segment_mask(queries, keys)


class BertLayer(nn.Module):
    """Post-norm layer: ``norm(x + dropout(attention(x)))``, then ``norm(x + dropout(mlp(x)))``.

    Shapes:
        x        [s, b, h]
        mask     from ``padding_mask``, or None
        output   [s, b, h]

    Args:
        layer: layer index in the full model, from 0; part of the dropout keys.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.1; Devlin et al. 2019, "BERT".
    """

    def __init__(self, args: BertModelArgs, parallel: ParallelContext, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.hidden_dropout = args.hidden_dropout
        self.parallel = parallel
        self.attention = BertAttention(args, parallel, layer)
        self.post_attention_norm = parallel.mark_sequence_parallel(LayerNorm(args.hidden_size, args.layernorm_epsilon))
        self.mlp = MLP(args, parallel, layer)
        self.post_mlp_norm = parallel.mark_sequence_parallel(LayerNorm(args.hidden_size, args.layernorm_epsilon))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.post_attention_norm(x + self._dropout(self.attention(x, mask), "attention output"))
        return self.post_mlp_norm(x + self._dropout(self.mlp(x), "mlp output"))

    def _dropout(self, x: torch.Tensor, site: str) -> torch.Tensor:
        return self.parallel.dropout(x, self.hidden_dropout, training=self.training, layer=self.layer, site=site)


# The two heads: masked words and next-sentence prediction.


class UnshardedLinear(nn.Module):
    """Unsharded linear layer ``Y = X A^T + b``. Every tensor rank holds the full weights and computes the full output.

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
    """Linear layer, activation and norm between the last layer and the word head.

    Shapes:
        input, output [s, b, h], or this rank's sequence shard, depending on ``parallel``
    """

    def __init__(self, args: BertModelArgs, parallel: ParallelContext) -> None:
        super().__init__()
        self.dense = parallel.mark_sequence_parallel(UnshardedLinear(args.hidden_size, args.hidden_size))
        self.activation = activation(args.activation)
        self.norm = parallel.mark_sequence_parallel(LayerNorm(args.hidden_size, args.layernorm_epsilon))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.activation(self.dense(x)))


class NextSentence(nn.Module):
    """Next-sentence prediction from a sample's first token.

    With sequence parallelism, the first tensor rank has that token and sends it to the others, which all compute the
    scores. With context parallelism, the first rank in the context group has it; other ranks' scores are ignored.

    Shapes:
        input  [s, b, h], or this rank's sequence shard, depending on ``parallel``
        output [b, 2], scores for the classes "the second segment follows the first" and "random second segment"
    """

    has_replicated_output = True  # read by the debugger: the output is the same on every rank

    def __init__(self, args: BertModelArgs, parallel: ParallelContext) -> None:
        super().__init__()
        self.parallel = parallel
        self.pooler = UnshardedLinear(args.hidden_size, args.hidden_size)
        self.classifier = UnshardedLinear(args.hidden_size, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.tanh(self.pooler(self._first_token(x))))

    def _first_token(self, x: torch.Tensor) -> torch.Tensor:
        if not self.parallel.sequence_parallel:
            return x[0]
        first_token = x[0] if self.parallel.group.rank == 0 else torch.zeros_like(x[0])
        return reduce_from_tensor_region(first_token, self.parallel.group)


class WordHead(nn.Module):
    """Head tied to the word table, with a bias per word that is sharded like the table.

    Shapes:
        x      [s, b, h], the same on every rank, or this rank's sequence shard, depending on ``parallel``
        table  [v/t, h], padded rows last
        output [s, b, v/t], or ``LazyLogits``
    """

    def __init__(self, args: BertModelArgs, parallel: ParallelContext) -> None:
        super().__init__()
        self.model_args, self.parallel = args, parallel
        num_rows, start, num_words = vocab_range(args.vocab_size, parallel.group, args.make_vocab_size_divisible_by)
        self.bias = set_shard(nn.Parameter(torch.zeros(num_rows)), Shard((args.vocab_size,), 0, start, num_words))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> Logits:
        return head_output(x, table, self.model_args, self.parallel, self.bias)


def bert_rule(std: float) -> Rule:
    """Return an initialization rule with ``std`` for all weights.

    Post-norm layers do not need a smaller standard deviation for projections into the residual stream.

    Source: Devlin et al.'s code.
    """
    return lambda name, shape: std


# BERT without pipeline stages.


class BertModel(nn.Module):
    """Encoder that predicts masked words and, with ``binary_head``, whether the second segment follows the first.

    Shapes:
        tokens, token_types [b, s]
        segments [b, s] or None; if given, -1 is padding, to which other tokens do not attend
        output logits [s, b, v/t], with ``binary_head`` also [b, 2]; with ``labels`` and the other arguments of
            ``bert_loss``, its losses

    Source: Devlin et al. 2019, "BERT: Pre-training of deep bidirectional transformers for language understanding".
    """

    loss_weighting = "tokens"  # the loss function returns (sum, count)

    def __init__(self, args: BertModelArgs, parallel: ParallelContext | None = None) -> None:
        super().__init__()
        self.model_args = args
        self.parallel = parallel or ParallelContext()
        self.recompute = Recompute(args, self.parallel)
        self.embedding = BertEmbedding(args, self.parallel)
        self.layers = nn.ModuleList(BertLayer(args, self.parallel, i) for i in range(args.num_layers))
        self.transform = Transform(args, self.parallel)
        self.next_sentence = NextSentence(args, self.parallel) if args.binary_head else None
        self.head = WordHead(args, self.parallel)

    def forward(
        self,
        tokens: torch.Tensor,
        token_types: torch.Tensor,
        segments: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
        is_random: torch.Tensor | None = None,
        step_predictions: torch.Tensor | None = None,
    ) -> Outputs | SumAndCount | dict[str, SumAndCount]:
        x = self.embedding(tokens, token_types)  # [s, b, h]
        mask = None if segments is None else padding_mask(segments, x, self.model_args, self.parallel)
        x = run_layers(list(self.layers), x, mask, recompute=self.recompute)
        word_logits = self.head(self.transform(x), self.embedding.word.weight)  # [s, b, v/t]
        logits = word_logits if self.next_sentence is None else (word_logits, self.next_sentence(x))
        if labels is None or loss_mask is None:
            return materialize_outputs(logits)
        return bert_loss(
            logits, labels, loss_mask, is_random, step_predictions, args=self.model_args, parallel=self.parallel
        )


def model_args(config: Config, *, for_training: bool = False) -> BertModelArgs:
    """Build ``BertModelArgs`` from ``config``.

    Args:
        for_training: apply the run's settings of activation recomputation.
    """
    switches = recompute_switches(config) if for_training else {}
    return bert_model_args_from(config.model, config.family_config, **switches)


def weight_init(config: Config) -> Rule:
    """Return the rule for the standard deviation of initial weights."""
    return bert_rule(config.model.init_method_std)


def example_inputs(config: Config, draw_tokens: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make example inputs for BERT without labels; ``draw_tokens(length)`` draws tokens [b, length]."""
    tokens = draw_tokens(config.batch.seq_length)
    zeros = torch.zeros_like(tokens)
    inputs = {"tokens": tokens, "token_types": zeros, "is_random": zeros[:, 0]}
    return inputs | ({"segments": zeros.int()} if config.family_config.pads_samples else {})


MODEL = ModelParts(args=model_args, model=BertModel, weight_init=weight_init, example_inputs=example_inputs)


def bert_fields(
    text: Tensor, labels: Tensor, parts: Tensor, is_random: Tensor | None = None, *, has_segments: bool
) -> dict[str, Tensor | None]:
    """Return a micro-batch's tokens, token_types, segments, labels, loss_mask and, if given, is_random.

    Shapes:
        text, labels, parts [b, s]; is_random [b]
        results with the same shapes; loss_mask is float32; segments are None without ``has_segments``, otherwise -1 for
            padding and 0 elsewhere
    """
    fields: dict[str, Tensor | None] = {
        "tokens": text,
        "token_types": parts.clamp(min=0).long(),
        "segments": parts.clamp(max=0) if has_segments else None,
        "labels": labels.clamp(min=0),
        "loss_mask": (labels != NOT_PREDICTED).float(),
    }
    return fields if is_random is None else {**fields, "is_random": is_random}
