"""Texts that a normalizer converts to the spelling of a control token."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import tokenizers

from megatron.tokenizer.control_tokens import UNK_NAMES


class HiddenSpellings:
    """Detects control tokens in encoded texts that do not spell them.

    Args:
        description: JSON text for the ``tokenizers`` library.
        control: name -> id of control tokens.
    """

    def __init__(self, description: str, control: Mapping[str, int]) -> None:
        self._ids = np.zeros(0, np.int32)
        if not control:
            return
        fields = json.loads(description)
        unknown = {*UNK_NAMES, fields["model"].get("unk_token")}
        if fields["model"].get("unk_id") is not None:
            unknown.add(fields["model"]["vocab"][fields["model"]["unk_id"]][0])
        ids = {token for name, token in control.items() if len(name) > 1 and name not in unknown}
        ids -= {token for name, token in control.items() if name in unknown}
        self._ids = np.array(sorted(ids) if fields.get("normalizer") is not None else [], np.int32)

    def texts_with(self, tokens: np.ndarray, lengths: np.ndarray) -> list[int]:
        """Return indices of texts whose tokens include a control token."""
        if not len(self._ids):
            return []
        positions = np.flatnonzero(np.isin(tokens, self._ids))
        return np.unique(np.searchsorted(np.cumsum(lengths), positions, side="right")).tolist()

    def split(self, text: str, encoding: tokenizers.Encoding) -> list[str]:
        """Split ``text`` after the first character of each part that became a control token."""
        control_ids = set(self._ids.tolist())
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        starts = sorted({start for token, (start, stop) in spans if token in control_ids and stop - start > 1})
        bounds = [0, *(start + 1 for start in starts), len(text)]
        return [text[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)]
