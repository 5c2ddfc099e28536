"""A BERT sample as the arrays that travel, and what the model takes of a micro-batch of them.

| key | type | holds |
|---|---|---|
| text | int64[s] | cls, first segment, sep[, second segment, sep], padding |
| labels | int64[s] | what a token to predict was; -1 elsewhere |
| parts | int32[s] | 0 for the first segment, 1 for the second, each with its sep; -1: padding |
| is_random | int64[] | 1 where the second segment is from elsewhere |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron.data.bert_control import BertTokens
from megatron.data.bert_masking import NOTHING, Masked

if TYPE_CHECKING:
    from torch import Tensor

PADDING = -1


def sample(
    masked: Masked, seam: int, is_random: bool, tokens: BertTokens, length: int, has_pairs: bool
) -> dict[str, np.ndarray]:
    """Return the arrays of the table above for a text whose second segment begins at ``seam``."""
    first, second = 1, len(masked.tokens) + (2 if has_pairs else 1)  # places of the text, and of the last sep
    text, labels = np.full(length, tokens.pad_id, np.int64), np.full(length, NOTHING, np.int64)
    parts = np.full(length, PADDING, np.int32)
    for row, values in ((text, masked.tokens), (labels, masked.labels)):
        row[first : first + seam] = values[:seam]
        row[first + seam + 1 : second] = values[seam:]
    text[0], text[first + seam], text[second] = tokens.cls_id, tokens.sep_id, tokens.sep_id
    parts[: first + seam + 1], parts[first + seam + 1 : second + 1] = 0, 1
    return {"text": text, "labels": labels, "parts": parts, "is_random": np.array(int(is_random), np.int64)}


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
