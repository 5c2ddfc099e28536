"""From raw samples to what a model trains on: inputs, labels, loss mask, positions, documents within a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.ops.positions import positions_in_segments

if TYPE_CHECKING:
    from megatron.data.control_tokens import T5Tokens


def gpt2_fields(
    tokens: Tensor,
    *,
    segments: Tensor | None = None,
    eod_id: int | None = None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> dict[str, Tensor | None]:
    """Return tokens, labels, loss_mask, position_ids and segment_ids of a micro-batch.

    Shapes:
        tokens [b, L+1], int64; segments [b, L+1], int32, the document of each token, -1 for padding
        all results [b, L]; loss_mask is float32, segment_ids int32 or None without ``reset_attention_mask``

    An end-of-document token belongs to the document that it ends. ``eod_mask_loss`` leaves out the loss where the input
    is such a token: what follows it is another document, which nothing can predict.

    With ``segments`` documents are kept apart by these alone: positions count from 0 in each, segment_ids are given,
    and there is no loss where the label is of another document than the input, nor on padding. Padding sees padding.

    Raises:
        ValueError: one of the three options without ``eod_id``.
    """
    if eod_id is None and (reset_position_ids or reset_attention_mask or eod_mask_loss):
        raise ValueError(
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need an end-of-document token"
        )
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    is_eod = inputs == eod_id if eod_id is not None else torch.zeros_like(inputs, dtype=torch.bool)
    if segments is None:
        segment_ids, has_loss = _exclusive_cumsum(is_eod) if reset_attention_mask else None, torch.ones_like(is_eod)
        positions = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs)
        if reset_position_ids:
            positions = positions - _document_starts(is_eod, positions)
    else:
        segment_ids, label_segments = segments[:, :-1].contiguous(), segments[:, 1:]
        has_loss = (segment_ids == label_segments) & (label_segments >= 0)
        positions = positions_in_segments(segment_ids)
    if eod_mask_loss:
        has_loss &= ~is_eod
    return {
        "tokens": inputs,
        "labels": labels,
        "loss_mask": has_loss.float(),
        "position_ids": positions.contiguous(),
        "segment_ids": segment_ids,
    }


def t5_fields(
    inputs: Tensor,
    targets: Tensor,
    enc_segments: Tensor,
    dec_segments: Tensor,
    *,
    tokens: T5Tokens,
    has_segments: bool,
) -> dict[str, Tensor | None]:
    """Return enc_tokens, dec_tokens, labels, loss_mask, enc_segments and dec_segments of a micro-batch.

    Shapes:
        inputs, enc_segments [b, s_e]; targets, dec_segments [b, s_d]
        results [b, s_e] and [b, s_d]; loss_mask is float32, both segments are None without ``has_segments``

    The decoder reads its targets one place late, behind ``start_id`` at the start of each document. Padding, whose
    segment is -1, has no loss; behind the last target it needs no segments, for nothing before it sees it.
    """
    is_start = torch.ones_like(targets, dtype=torch.bool)
    is_start[:, 1:] = dec_segments[:, 1:] != dec_segments[:, :-1]
    late = targets.roll(1, dims=1).masked_fill(is_start, tokens.start_id)
    is_padding = dec_segments < 0
    return {
        "enc_tokens": inputs,
        "dec_tokens": late.masked_fill(is_padding, tokens.pad_id),
        "labels": targets,
        "loss_mask": (~is_padding).float(),
        "enc_segments": enc_segments if has_segments else None,
        "dec_segments": dec_segments if has_segments else None,
    }


def _document_starts(is_eod: Tensor, positions: Tensor) -> Tensor:
    """Return, for each position, where its document starts in the sample."""
    starts = torch.zeros_like(positions)
    starts[:, 1:] = torch.where(is_eod[:, :-1], positions[:, 1:], 0)
    return starts.cummax(dim=1).values


def _exclusive_cumsum(is_eod: Tensor) -> Tensor:
    ended = is_eod.to(torch.int32)
    return ended.cumsum(dim=1, dtype=torch.int32) - ended
