"""Multi-token prediction (MTP): layers that predict tokens further ahead, and their losses.

With tokens t, layer k of D (counted from 1) combines the hidden state of position i with the embedding of token i + k
and predicts token i + k + 1:

    h_k[i] = norm(layer(eh_proj([enorm(embedding(t[i+k])); hnorm(h_{k-1}[i])])))        logits_k[i] = head(h_k[i])

h_0 is the decoder's output after its final norm. Embedding and head are the decoder's own.

The future tokens of a position are its labels and those of the positions after it, so the layers run where the labels
are: in the loss function, on the last pipeline stage. They run only if gradients are enabled; evaluation and generation
have the decoder's loss and logits.

| position i of layer k | input token | target |
|---|---|---|
| token i + k is in another document or after the end of the sample | 0 | not counted |
| only token i + k + 1 is in another document or after the end of the sample | token i + k | not counted |
| the main loss does not count position i + k: padding, prompt, masked end of document | token i + k | not counted |
| otherwise | token i + k | token i + k + 1, weighted by the loss mask of position i + k |

Segment ids identify the documents. The token after the last position has no segment id, so the loss mask decides
whether this token is a target.

A sample with N tokens in the main loss has fewer targets M_k in layer k. Each target is weighted by N / M_k, so that
the MTP loss of a sample is the mean over its targets times N, and the layer has the weight of the main loss in spite of
its missing targets. With W tokens in the main loss of a global batch, the loss to train on is

    1 / W x (sum of the main loss + factor / D x sum over k of the weighted sum of MTP loss k).

N and M_k are those of one sample, so the loss does not depend on micro-batches, replicas, context or tensor ranks. With
``--loss-average micro-batch`` they are those of all samples of the micro-batch. ``mtp_k_loss`` is reported as the
weighted mean over the targets of layer k in the global batch.

Source: DeepSeek-AI 2024, "DeepSeek-V3", section 2.2; Megatron-LM's ``--mtp-num-layers``, which weights by the numbers
of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.models.common.language_model import Logits, SumAndCount, model_loss
from megatron.models.common.masks import Masks
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.norms import make_norm
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.transformer import Recompute, TransformerLayer
from megatron.mpu.context_parallel import gather_rows, split_along_context
from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.mappings import scatter_to_sequence_region


class FutureTokens(NamedTuple):
    """Inputs and targets of one MTP layer: this rank's tokens of the sequence.

    Shapes:
        inputs    [b, s] token ids
        targets   [b, s] token ids; any value where the loss mask is 0
        loss_mask [b, s], weights of the targets; 0 for positions without a target
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor


def future_tokens(
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    segment_ids: torch.Tensor | None,
    args: ModelArgs,
    parallel: ParallelContext,
) -> list[FutureTokens]:
    """Return inputs and targets of each MTP layer. Collective over the context group, whose ranks hold other tokens.

    Shapes:
        labels, loss_mask, segment_ids [b, s/c]: this rank's chunks of the sequences
    """
    context = parallel.context
    local = [labels, loss_mask, *([] if segment_ids is None else [segment_ids])]
    table = torch.stack([x.double() for x in local], dim=-1)  # exact for token ids; one message
    full = gather_rows(table.transpose(0, 1), context).transpose(0, 1)  # [b, s, 2 or 3]
    tokens, mask = full[..., 0].to(labels.dtype), full[..., 1].to(loss_mask.dtype)
    # masked labels may be no token ids, for example -100
    tokens = tokens.masked_fill((tokens < 0) | (tokens >= args.vocab_size), 0)
    segments = None if segment_ids is None else full[..., 2]
    result = []
    for depth in range(1, args.mtp_num_layers + 1):
        is_own_token = _is_same_document(segments, mask, depth)
        is_own_target = is_own_token
        if segments is not None:  # the token after the last position has no segment id
            is_own_target = is_own_token & (_is_same_document(segments, mask, depth + 1) | _is_last(mask, depth))
        target_mask = _shift(mask, depth).masked_fill(~is_own_target, 0)
        fields = (
            _shift(tokens, depth - 1).masked_fill(~is_own_token, 0),
            _shift(tokens, depth),
            target_mask * _target_weights(mask, target_mask, args.loss_average),
        )
        result.append(FutureTokens(*(split_along_context(x, context) for x in fields)))
    return result


def _shift(x: torch.Tensor, distance: int) -> torch.Tensor:
    """Return ``x`` [b, s] moved by ``distance`` positions to the front, with zeros at the end."""
    shifted = torch.zeros_like(x)
    shifted[:, : max(x.shape[1] - distance, 0)] = x[:, distance:]
    return shifted


def _target_weights(mask: torch.Tensor, target_mask: torch.Tensor, loss_average: str) -> torch.Tensor:
    """Return the weights [b, 1] of the targets of each sample, N / M_k; 0 for a sample without targets.

    Args:
        mask, target_mask: loss masks [b, s] of the decoder and of an MTP layer, for the full sequences.
        loss_average: "micro-batch": N and M_k are those of all samples together.
    """
    num_tokens, num_targets = (x.double().sum(dim=1, keepdim=True) for x in (mask, target_mask))
    if loss_average == "micro-batch":
        num_tokens, num_targets = (x.sum(dim=0, keepdim=True) for x in (num_tokens, num_targets))
    has_targets = num_targets > 0
    weights = torch.where(has_targets, num_tokens / num_targets.masked_fill(~has_targets, 1.0), 0.0)
    return weights.to(target_mask.dtype)


def _is_same_document(segments: torch.Tensor | None, like: torch.Tensor, distance: int) -> torch.Tensor:
    """Return a mask [b, s], True where the position ``distance`` ahead is in the sample and in the same document."""
    is_same = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    stop = max(like.shape[1] - distance, 0)
    is_same[:, :stop] = True if segments is None else segments[:, distance:] == segments[:, :stop]
    return is_same


def _is_last(like: torch.Tensor, depth: int) -> torch.Tensor:
    """Return a mask [s], True at the position whose target at ``depth`` is the token after the last position."""
    return torch.arange(like.shape[1], device=like.device) == like.shape[1] - 1 - depth


class MTPLayer(nn.Module):
    """One MTP layer. Its transformer layer has the window and the experts of the decoder's last layer.

    Shapes:
        x       [s, b, h], or this rank's shard of the sequence, depending on ``parallel``
        tokens  [b, s] ids of the future tokens
        output  as x, after the final norm

    ``mask`` and ``positions`` are those of the decoder's last layer.

    Args:
        depth: k - 1, the index of this layer from 0; the keys of its dropout masks follow those of the decoder.
    """

    def __init__(self, args: ModelArgs, parallel: ParallelContext, depth: int) -> None:
        super().__init__()
        self.model_args, self.parallel = args, parallel
        h = args.hidden_size
        self.layer_idx = args.num_layers + depth
        self.enorm = make_norm(args, parallel)
        self.hnorm = make_norm(args, parallel)
        self.eh_proj = ColumnParallelLinear(2 * h, h, bias=False, gather_output=True, **parallel.layer_kwargs)
        self.layer = TransformerLayer(args, parallel, args.num_layers - 1)
        for module in self.layer.modules():
            if getattr(module, "layer", None) == args.num_layers - 1:
                module.layer = self.layer_idx  # type: ignore[assignment]
        self.final_norm = make_norm(args, parallel)

    @property
    def has_window(self) -> bool:
        return self.layer.has_window

    def forward(
        self,
        x: torch.Tensor,
        tokens: torch.Tensor,
        word: nn.Module,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        future = self.embed(word, tokens)
        both = torch.cat([self.enorm(future), self.hnorm(x)], dim=-1)  # [s, b, 2h]
        projected = self.eh_proj(both)  # [s, b, h], also with sequence parallelism
        if self.parallel.sequence_parallel:
            projected = scatter_to_sequence_region(projected, self.parallel.group)  # [s/t, b, h]
        return self.final_norm(self.layer(projected, mask, None, positions, mask))

    def embed(self, word: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Return the word embeddings of ``tokens`` [b, s] with the decoder's scale and dropout: [s, b, h].

        Learned positions are not added: the hidden states have them.
        """
        args = self.model_args
        x = word(tokens.t())  # [s, b, h], or this rank's shard of the sequence
        if args.scale_embeddings:
            x = x * float(torch.tensor(math.sqrt(args.hidden_size), dtype=x.dtype))
        x = x if args.embedding_multiplier == 1.0 else x * args.embedding_multiplier
        return self.parallel.dropout(
            x, args.hidden_dropout, training=self.training, layer=self.layer_idx, site="embedding"
        )


class MTPInput(NamedTuple):
    """Output of the last pipeline stage: the logits, and the inputs of the MTP layers, which the loss function runs.

    A tuple, so that code that inspects module outputs finds the hidden states.

    Args:
        x: the decoder's output after its final norm, [s, b, h] or this rank's shard of the sequence.
        segment_ids, positions: [b, s] or None, as inputs of the decoder's layers.
        word: the word embedding; None before the unit that holds it.
        layers: the MTP layers so far.
        logits: the decoder's logits; None before the head.
        head: function from hidden states to logits.
    """

    x: torch.Tensor
    segment_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    word: nn.Module | None = None
    layers: tuple[MTPLayer, ...] = ()
    logits: Logits | None = None
    head: Callable[[torch.Tensor], Logits] | None = None


def with_mtp_losses(
    loss: SumAndCount | dict[str, SumAndCount],
    mtp_input: MTPInput,
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    masks: Masks,
    recompute: Recompute,
    args: ModelArgs,
    parallel: ParallelContext,
) -> dict[str, SumAndCount]:
    """Return ``loss`` with the MTP losses by name; backward of "loss" also computes their gradients. Collective.

    Args:
        loss: result of ``model_loss`` for the decoder's logits.
        masks: the masks of the stage.
        recompute: if layers are recomputed, each MTP layer is recomputed from its input.

    Shapes:
        labels, loss_mask [b, s]
    """
    assert mtp_input.word is not None and mtp_input.head is not None  # set by the units before the loss
    losses = dict(loss) if isinstance(loss, dict) else {"loss": loss}
    loss_args = replace(args, z_loss=0.0)  # the z-loss is that of the decoder's logits
    x, segment_ids = mtp_input.x, mtp_input.segment_ids
    future = future_tokens(labels, loss_mask, segment_ids, args, parallel)
    mtp_sums = []
    for depth, (layer, tokens) in enumerate(zip(mtp_input.layers, future, strict=True), start=1):
        mask = masks.of_layer(args.num_layers + depth - 1).get_mask(x, segment_ids, layer.has_window)
        inputs = x, tokens.inputs, mtp_input.word, mask, mtp_input.positions
        x = recompute(layer, *inputs) if recompute.interval else layer(*inputs)
        loss_sum, count = model_loss(mtp_input.head(x), tokens.targets, tokens.loss_mask, loss_args, parallel)
        mtp_sums.append(loss_sum)
        losses[f"mtp_{depth}_loss"] = loss_sum.detach(), count
    total, count = losses["loss"]
    losses["loss"] = attach(total, args.mtp_loss_scaling_factor / args.mtp_num_layers, mtp_sums), count
    return losses


def attach(total: torch.Tensor, factor: float, mtp_sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the value of ``total``, with the gradient of ``total + factor * sum(mtp_sums)``.

    All are sums over the tokens of a micro-batch, and are divided together by the tokens of the main loss.
    """
    attached: torch.Tensor = _AttachLoss.apply(total, factor * torch.stack(list(mtp_sums)).sum())
    return attached


class _AttachLoss(torch.autograd.Function):
    """Identity function of ``loss`` whose backward also backpropagates ``extra``.

    Unlike a sum, it keeps the value of ``loss`` finite if only ``extra`` overflows in fp16.
    """

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], grads[0]


def num_units(args: Any) -> int:
    """Return the number of pipeline units between final norm and head: the embedding and the MTP layers, or none."""
    depth: int = getattr(args, "mtp_num_layers", 0)  # absent in the arguments of a custom model
    return 1 + depth if depth else 0
