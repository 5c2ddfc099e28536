"""The control tokens that BERT's samples are framed and masked with: the tokenizer's own, or appended ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

NAMES = {
    "cls_id": ("[CLS]", "<cls>", "<|cls|>", "<s>"),
    "sep_id": ("[SEP]", "<sep>", "<|sep|>", "</s>"),
    "mask_id": ("[MASK]", "<mask>", "<|mask|>"),
    "pad_id": ("[PAD]", "<pad>", "<|pad|>", "<|padding|>"),
}
"""Which names each may have, the first that the vocabulary has counts."""


class Vocabulary(Protocol):
    """What BERT must know of a tokenizer: ``megatron.tokenizer.Tokenizer``, or what stands in for one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def control_tokens(self) -> Mapping[str, int]: ...

    @property
    def unk_id(self) -> int | None: ...


@dataclass(frozen=True)
class BertTokens:
    """Where BERT's control tokens lie.

    Args:
        text_vocab_size: ids of text are below it.
        control_ids: those below it that are never masked and never put in place of a word, ascending: separators of
            documents and the like. The token for unknown words is none of them.
    """

    cls_id: int
    sep_id: int
    mask_id: int
    pad_id: int
    text_vocab_size: int
    control_ids: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        """How many ids the model must have."""
        return max(self.text_vocab_size, 1 + max(self.cls_id, self.sep_id, self.mask_id, self.pad_id))

    @cached_property
    def is_word(self) -> np.ndarray:
        """bool[text_vocab_size], whether an id is of text and no control token."""
        found = np.ones(self.text_vocab_size, bool)
        found[list(self.control_ids)] = False
        return found

    @cached_property
    def word_ids(self) -> np.ndarray:
        """int64, the ids of text."""
        return np.flatnonzero(self.is_word)


def bert_tokens(tokenizer: Vocabulary) -> BertTokens:
    """Return the tokenizer's own control tokens, and behind its vocabulary, in the order of NAMES, what it lacks."""
    known, size = tokenizer.control_tokens, tokenizer.vocab_size
    found: dict[str, int] = {}
    top = size
    for field, names in NAMES.items():
        own = next((known[name] for name in names if name in known), None)
        found[field] = top if own is None else own
        top += own is None
    controls = sorted({token for token in known.values() if token < size and token != tokenizer.unk_id})
    return BertTokens(**found, text_vocab_size=size, control_ids=tuple(controls))
