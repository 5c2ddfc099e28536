"""Embeddings, output head and loss of a language model."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypedDict

import torch
from torch import nn

from megatron.config.loss_chunk import UNCHUNKED, tokens_per_chunk
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.norms import make_norm
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.token_losses import TokenLosses
from megatron.mpu.cross_entropy import validate_targets, vocab_parallel_cross_entropy
from megatron.mpu.embedding_lookup import embedding_lookup
from megatron.mpu.groups import Group
from megatron.mpu.layers import VocabParallelEmbedding, aligned_linear, vocab_range
from megatron.mpu.linear_cross_entropy import linear_cross_entropy
from megatron.mpu.mappings import enter_tensor_region
from megatron.mpu.shard import Shard, empty_weight
from megatron.ops.attention import softcap

# The output head.


class LazyLogits(NamedTuple):
    """Logits that have not been computed: the loss computes them in chunks of tokens, so that not all are in memory.

    The class is a tuple so that code that inspects module outputs finds the hidden states. Such code skips parameters,
    so ``weight`` and ``bias`` are not mistaken for activations.

    Args:
        chunk_tokens: tokens per chunk.
        softcap: soft-cap of the logits; 0: none.

    Shapes:
        x      [s, b, h], the same on every rank; its gradient is summed over the tensor group
        weight [v/t, h], padded rows last
        bias   [v/t] or None
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    chunk_tokens: int
    softcap: float = 0.0


Logits = torch.Tensor | LazyLogits
"""This rank's columns [s, b, v/t], or ``LazyLogits``."""


def head_output(
    x: torch.Tensor, weight: torch.Tensor, args: ModelArgs, parallel: ParallelContext, bias: torch.Tensor | None = None
) -> Logits:
    """Return ``logit_multiplier x weight^T + bias``; as ``LazyLogits`` if the loss is computed in chunks.

    The chunk size is chosen by ``megatron.config.loss_chunk``.

    Shapes:
        x      [s, b, h], the same on every rank, or this rank's shard of the sequence, depending on ``parallel``
        weight [v/t, h], padded rows last
        bias   [v/t]
    """
    x = x if args.logit_multiplier == 1.0 else x * args.logit_multiplier  # cheaper than scaling the logits
    x = enter_tensor_region(x, **parallel.layer_kwargs)  # [s, b, h]
    num_tokens, is_on_cpu = x.shape[0] * x.shape[1], x.device.type == "cpu"
    shape = num_tokens, args.vocab_size, args.hidden_size
    chunk_tokens = tokens_per_chunk(args.loss_chunk_tokens, *shape, is_on_cpu=is_on_cpu)
    lazy = LazyLogits(x, weight, bias, chunk_tokens, args.final_logit_softcapping)
    return materialize_logits(lazy) if chunk_tokens == UNCHUNKED else lazy


def tied_head_logits(x: torch.Tensor, weight: torch.Tensor, args: ModelArgs, parallel: ParallelContext) -> torch.Tensor:
    """Return this rank's columns of the logits of a head tied to the word embedding.

    Shapes:
        x      [s, b, h], the same on every rank, or this rank's shard of the sequence, depending on ``parallel``
        weight [v/t, h], padded rows last
        output [s, b, v/t]
    """
    head_input = enter_tensor_region(x * args.logit_multiplier, **parallel.layer_kwargs)
    return materialize_logits(LazyLogits(head_input, weight, None, UNCHUNKED, args.final_logit_softcapping))


def materialize_logits(logits: Logits) -> torch.Tensor:
    """Return the logits as a tensor [s, b, v/t]."""
    if isinstance(logits, torch.Tensor):
        return logits
    product = aligned_linear(logits.x, logits.weight, logits.bias)
    return softcap(product, logits.softcap) if logits.softcap else product


class Head(nn.Module):
    """Output head with its own weight, for models whose head is not tied to the embedding."""

    def __init__(self, args: ModelArgs, parallel: ParallelContext) -> None:
        super().__init__()
        self.model_args, self.parallel = args, parallel
        num_rows, start, num_words = vocab_range(args.vocab_size, parallel.group, args.make_vocab_size_divisible_by)
        shard = Shard((args.vocab_size, args.hidden_size), 0, start, num_words)
        self.weight = empty_weight((num_rows, args.hidden_size), shard)

    def forward(self, x: torch.Tensor) -> Logits:
        return head_output(x, self.weight, self.model_args, self.parallel)


# Word and position embedding.


class PositionEmbedding(nn.Module):
    """Learned position embedding. Every rank holds the full table.

    Shapes:
        input  [b, s] positions below ``max_position_embeddings``
        output [b, s, h]
    """

    def __init__(self, max_position_embeddings: int, hidden_size: int) -> None:
        super().__init__()
        shape = (max_position_embeddings, hidden_size)
        self.weight = empty_weight(shape, Shard(shape))

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return embedding_lookup(position_ids, self.weight)


class Embedding(nn.Module):
    """Word embedding, with learned positions, norm and scale where the model has them, and dropout.

    Shapes:
        tokens       [b, s]
        position_ids [b, s], or None for 0 ... s-1; used only by learned positions
        output [s, b, h], or this rank's shard of the sequence, depending on ``parallel``
    """

    def __init__(self, args: ModelArgs, parallel: ParallelContext) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(
            args.vocab_size, args.hidden_size, divisible_by=args.make_vocab_size_divisible_by, **parallel.layer_kwargs
        )
        self.position: nn.Module | None = None
        if args.has_learned_positions:
            self.position = parallel.mark_sequence_parallel(
                PositionEmbedding(args.max_position_embeddings, args.hidden_size)
            )
        self.norm = make_norm(args, parallel) if args.embed_layernorm else None
        self.scale = math.sqrt(args.hidden_size) if args.scale_embeddings else None
        self.multiplier = args.embedding_multiplier
        self.has_norm_or_scale = self.norm is not None or self.scale is not None
        self.hidden_dropout = args.hidden_dropout
        self.parallel = parallel

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        is_sequence_sharded = self.parallel.sequence_parallel
        x = self.word(tokens.t() if is_sequence_sharded else tokens)  # [s/t, b, h] if sharded, otherwise [b, s, h]
        if self.has_norm_or_scale:
            x = self._scale_and_normalize(x)
        if self.position is not None:
            positions = position_ids if position_ids is not None else self._default_positions(tokens)
            x = x + self.position(self.parallel.shard_sequence(positions.t()) if is_sequence_sharded else positions)
        x = x if self.multiplier == 1.0 else x * self.multiplier
        x = x if is_sequence_sharded else x.transpose(0, 1).contiguous()  # [s, b, h]
        return self.parallel.dropout(x, self.hidden_dropout, training=self.training, layer=-1, site="embedding")

    def _scale_and_normalize(self, x: torch.Tensor) -> torch.Tensor:
        """Scale and normalise the word embeddings; the scale is rounded to their dtype, as in Gemma."""
        if self.scale is not None:
            x = x * float(torch.tensor(self.scale, dtype=x.dtype))
        return x if self.norm is None else self.norm(x)

    def _default_positions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the positions of ``tokens`` [b, s] in the full sequence."""
        return self.parallel.positions(tokens.shape[1], tokens.device).expand(tokens.shape)


# The language-model loss: a sum and a count, so that every split into micro-batches gives the same mean.


class _LossOptions(TypedDict):
    """Options that both cross-entropies have: the sharding of the vocabulary, the z-loss, and the use of kernels."""

    vocab_size: int
    divisible_by: int
    group: Group
    z_loss: float
    has_kernels: bool


SumAndCount = tuple[torch.Tensor, torch.Tensor]
"""A sum over tokens and the number of tokens."""


def model_loss(
    logits: Logits, labels: torch.Tensor, loss_mask: torch.Tensor, args: ModelArgs, parallel: ParallelContext,
    token_losses: TokenLosses | None = None,
) -> Any:  # fmt: skip
    """Return the sum of the unmasked token losses and the number of unmasked tokens. Collective.

    Args:
        token_losses: records the loss of each token; None: token losses are not recorded.

    Shapes:
        logits    [s, b, v/t], or ``LazyLogits``
        labels    [b, s] token ids
        loss_mask [b, s], 0 for tokens that are masked out
        output    (sum, count), scalars in fp32 (fp64 for fp64 logits); with a z-loss and gradients enabled, a
                  dictionary with such a pair for "loss" and for "z_loss"

    Raises:
        ValueError: an unmasked token has a label outside the vocabulary. On devices other than the CPU, the sum
            is NaN instead.
    """
    targets, weights = labels.transpose(0, 1), loss_mask.transpose(0, 1)  # 2 x [s, b]
    z_loss = args.z_loss if torch.is_grad_enabled() else 0.0
    options = _LossOptions(
        vocab_size=args.vocab_size, divisible_by=args.make_vocab_size_divisible_by, group=parallel.group, z_loss=z_loss,
        has_kernels=parallel.streams.has_kernels,
    )  # fmt: skip
    recorder = token_losses if token_losses is not None and token_losses.is_recording else None
    micro_batch = parallel.streams.position.micro_batch
    if isinstance(logits, LazyLogits):
        weights = weights.to(torch.promote_types(logits.x.dtype, torch.float32))
        losses = torch.empty_like(weights, memory_format=torch.contiguous_format) if recorder is not None else None
        total, count = (
            linear_cross_entropy(
                logits.x, logits.weight, targets, weights,
                bias=logits.bias, chunk_tokens=logits.chunk_tokens, cap=logits.softcap, losses=losses, **options,
            ),
            weights.sum(),
        )  # fmt: skip
        if recorder is not None and losses is not None:
            recorder.record(micro_batch, losses, weights)
        return _named_losses(total[0], total[1], count) if z_loss else (total, count)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    weights = validate_targets(weights.to(dtype), targets, args.vocab_size)
    losses, count = vocab_parallel_cross_entropy(logits, targets, **options), loss_mask.to(dtype).sum()
    if recorder is not None:
        recorder.record(micro_batch, losses[0] if z_loss else losses, weights)
    if z_loss:
        return _named_losses((losses[0] * weights).sum(), (losses[1] * weights).sum(), count)
    return (losses * weights).sum(), count  # losses, weights [s, b]


def _named_losses(loss_sum: torch.Tensor, z_loss_sum: torch.Tensor, count: torch.Tensor) -> dict[str, SumAndCount]:
    return {"loss": (loss_sum, count), "z_loss": (z_loss_sum, count)}


# An embedding table that is also the weight of the output head, with one gradient for both uses.


def shared_table(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``weight`` twice: for look-ups with ``sparse=True``, and for all other uses.

    Backward adds the sparse rows to the other gradient in place. By default, autograd allocates a table of zeros for
    each look-up and another one for the sum; on a CPU, these allocations in each step take longer than a layer. Do not
    use it for 16-bit tables: torch accumulates sparse rows in the dtype of the table, see
    ``megatron.mpu.embedding_lookup``.

    Shapes:
        weight, both outputs [v, h]
    """
    return _SharedTable.apply(weight)


class _SharedTable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> torch.Tensor | None:
        sparse_grad, grad = grads
        if sparse_grad is None:
            return grad
        return sparse_grad.to_dense() if grad is None else grad.add_(sparse_grad)
