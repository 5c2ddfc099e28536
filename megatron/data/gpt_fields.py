"""Model inputs for a GPT micro-batch: tokens, labels, loss mask, positions and segment ids."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.ops.attention import positions_in_segments


def gpt2_fields(
    tokens: Tensor, *, segments: Tensor | None = None, loss_mask: Tensor | None = None, excluded: Tensor | None = None,
    eod_id: int | None = None, reset_position_ids: bool = False, reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> dict[str, Tensor | None]:  # fmt: skip
    """Build tokens, labels, loss_mask, position_ids and segment_ids for a micro-batch.

    Shapes:
        tokens [b, L+1], int64; segments [b, L+1], int32, each token's document, -1 for padding
        loss_mask [b, L+1], int32, 1 for tokens to predict; None: all tokens
        excluded [b, L+1], int32, 1 for tokens of excluded documents; None: no document is excluded
        all results [b, L]; loss_mask is float32; segment_ids is int32, or None without ``segments``, ``excluded`` and
        ``reset_attention_mask``

    An end-of-document token belongs to the document that it ends. ``eod_mask_loss`` masks the loss where the input is
    an end-of-document token, because its label is the unpredictable first token of another document.

    With ``segments``, document boundaries come only from ``segments``: positions restart at 0 in each document,
    segment_ids are returned, and the loss is masked on padding and where input and label belong to different
    documents. Padding attends only to padding.

    With ``excluded``, excluded documents and the tokens before and after them are in different segments, so that no
    other document attends to them, and the loss is masked where the input or the label is excluded. Positions do not
    change.

    Raises:
        ValueError: ``reset_position_ids``, ``reset_attention_mask`` or ``eod_mask_loss`` is set without ``eod_id``.
    """
    if eod_id is None and (reset_position_ids or reset_attention_mask or eod_mask_loss):
        raise ValueError(
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need an end-of-document token"
        )
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    is_eod = inputs == eod_id if eod_id is not None else torch.zeros_like(inputs, dtype=torch.bool)
    if segments is None:
        # An excluded document's end-of-document token is replaced, so the document ends where ``excluded`` changes.
        is_change = torch.zeros_like(is_eod) if excluded is None else excluded[:, :-1] != excluded[:, 1:]
        is_last = is_eod | is_change
        separates_documents = reset_attention_mask or excluded is not None
        segment_ends = is_last if reset_attention_mask else is_change
        segment_ids, has_loss = (
            _exclusive_cumsum(segment_ends) if separates_documents else None,
            torch.ones_like(is_eod),
        )
        positions = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs)
        if reset_position_ids:
            positions = positions - _document_starts(is_last, positions)
    else:
        segment_ids, label_segments = segments[:, :-1].contiguous(), segments[:, 1:]
        has_loss = (segment_ids == label_segments) & (label_segments >= 0)
        positions = positions_in_segments(segment_ids)
    if eod_mask_loss:
        has_loss &= ~is_eod
    if loss_mask is not None:
        has_loss = has_loss & (loss_mask[:, 1:] > 0)
    if excluded is not None:
        has_loss = has_loss & (excluded[:, :-1] == 0) & (excluded[:, 1:] == 0)
    return {
        "tokens": inputs,
        "labels": labels,
        "loss_mask": has_loss.float(),
        "position_ids": positions.contiguous(),
        "segment_ids": segment_ids,
    }


def _document_starts(is_eod: Tensor, positions: Tensor) -> Tensor:
    """Find the start of each position's document within the sample."""
    starts = torch.zeros_like(positions)
    starts[:, 1:] = torch.where(is_eod[:, :-1], positions[:, 1:], 0)
    return starts.cummax(dim=1).values


def _exclusive_cumsum(is_eod: Tensor) -> Tensor:
    is_eod_int = is_eod.to(torch.int32)
    return is_eod_int.cumsum(dim=1, dtype=torch.int32) - is_eod_int
