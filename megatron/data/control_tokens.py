"""The ids beyond those of text that T5 needs: ends, starts, padding, one sentinel per span, one mode per denoiser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron.errors import DataError
from megatron.spans import KINDS, Denoiser, has_modes


class Vocabulary(Protocol):
    """What T5 must know of a tokenizer: ``megatron.tokenizer.Tokenizer``, or what stands in for one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod_id(self) -> int: ...

    @property
    def pad_id(self) -> int | None: ...

    @property
    def sentinel_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class T5Tokens:
    """Where T5's control tokens lie.

    Args:
        eos_id: ends inputs and targets, once a sample.
        start_id: what the decoder reads first in each document.
        sentinels: the id that stands for the first span of a document, for the second, and so on.
        modes: the id that opens the inputs, by the kind of the denoiser; empty with one denoiser.
        text_vocab_size: ids of text are below it; 0 where nobody knows.
    """

    eos_id: int
    start_id: int
    pad_id: int
    sentinels: tuple[int, ...]
    modes: Mapping[str, int] = field(default_factory=dict)
    text_vocab_size: int = 0

    @classmethod
    def appended(cls, vocab_size: int, num_sentinels: int, eos_id: int, num_modes: int = 0) -> T5Tokens:
        """Return sentinels vocab_size + num_sentinels - 1 ... vocab_size, and modes behind them for R, X, S."""
        top = vocab_size + num_sentinels
        return cls(
            eos_id=eos_id,
            start_id=eos_id,
            pad_id=eos_id,
            sentinels=tuple(range(top - 1, vocab_size - 1, -1)),
            modes=dict(zip(KINDS[:num_modes], range(top, top + num_modes), strict=True)),
            text_vocab_size=vocab_size,
        )

    @property
    def vocab_size(self) -> int:
        """How many ids the model must have."""
        used = (self.eos_id, self.start_id, self.pad_id, *self.sentinels, *self.modes.values())
        return max(self.text_vocab_size, max(used) + 1)

    @property
    def names(self) -> dict[int, str]:
        """Return what a person reads: sentinels are <1>, <2>, ... in the order of their spans, modes <R>, <X>, <S>."""
        sentinels = {token: f"<{number}>" for number, token in enumerate(self.sentinels, 1)}
        return sentinels | {token: f"<{kind}>" for kind, token in self.modes.items()}

    def require_sentinels(self, needed: int, asked_by: str) -> None:
        """Check that there is a sentinel for each of ``needed`` spans.

        Raises:
            DataError: there are too few.
        """
        if needed <= len(self.sentinels):
            return
        is_appended = not self.sentinels or min(self.sentinels) >= self.text_vocab_size
        cure = (
            f"Raise --vocab-extra-ids to {needed}"
            if is_appended
            else "Take a tokenizer with more of them, or one with none (then --vocab-extra-ids appends them)"
        )
        raise DataError(
            f"there must be a sentinel for each span, {needed} for {asked_by}; too few sentinels: "
            f"{'--vocab-extra-ids' if is_appended else 'the tokenizer'} gives {len(self.sentinels)}. "
            f"{cure}, raise --mean-span-length, or shorten --enc-seq-length."
        )


def t5_tokens(tokenizer: Vocabulary, vocab_extra_ids: int, denoisers: Sequence[Denoiser]) -> T5Tokens:
    """Return the tokenizer's own control tokens, and behind its vocabulary those that it lacks.

    Sentinels are the tokenizer's where it has any, else ``vocab_extra_ids`` new ids of which the highest is the first;
    behind them comes a mode token for each of several denoisers.

    Raises:
        DataError: the vocabulary has no end-of-document token.
    """
    own, size = tokenizer.sentinel_ids, tokenizer.vocab_size
    new = 0 if own else vocab_extra_ids
    pad_id = tokenizer.eod_id if tokenizer.pad_id is None else tokenizer.pad_id
    kinds = [denoiser.kind for denoiser in denoisers] if has_modes(denoisers) else []
    return T5Tokens(
        eos_id=tokenizer.eod_id,
        start_id=pad_id,
        pad_id=pad_id,
        sentinels=own or tuple(range(size + new - 1, size - 1, -1)),
        modes={kind: size + new + place for place, kind in enumerate(kinds)},
        text_vocab_size=size,
    )
