"""A T5 sample as the arrays that travel: framed, padded, each token with its document.

| key | type | holds |
|---|---|---|
| inputs | int64[s_e] | [mode,] text with sentinels, end, padding |
| targets | int64[s_d] | sentinels with spans, end, padding |
| enc_segments, dec_segments | int32[s_e], int32[s_d] | number of the document in the sample, from 0; -1: padding |

The mode token belongs to the first document, both ends to the last.
"""

from __future__ import annotations

import numpy as np

from megatron.data.control_tokens import T5Tokens
from megatron.data.corruption import Pair

PADDING = -1


def sample(
    pair: Pair, tokens: T5Tokens, enc_seq_length: int, dec_seq_length: int, mode: str | None = None
) -> dict[str, np.ndarray]:
    """Return the arrays of the table above; targets that are too long lose their last tokens."""
    head = [] if mode is None else [tokens.modes[mode]]
    first, last = [0] * len(head), int(pair.input_documents[-1])
    return {
        "inputs": _framed(head, pair.inputs, tokens.eos_id, enc_seq_length, tokens.pad_id),
        "targets": _framed([], pair.targets, tokens.eos_id, dec_seq_length, tokens.pad_id),
        "enc_segments": _framed(first, pair.input_documents, last, enc_seq_length, PADDING).astype(np.int32),
        "dec_segments": _framed([], pair.target_documents, last, dec_seq_length, PADDING).astype(np.int32),
    }


def _framed(head: list[int], values: np.ndarray, end: int, length: int, padding: int) -> np.ndarray:
    row = np.concatenate([np.array(head, np.int64), values, np.array([end], np.int64)])[:length]
    framed = np.full(length, padding, np.int64)
    framed[: len(row)] = row
    return framed
