"""What a model can be asked for, checked alike on every rank before any rank waits for another."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.errors import DataError
from megatron.generate.loop import Rows

USUAL_TOKENS = 64
"""New tokens of a row where no number is asked for."""


def check_rows(what: str, rows: Rows, vocab_size: int) -> None:
    """Check the tokens that a user gave.

    Raises:
        DataError: no rows, an empty one, or a token outside the vocabulary.
    """
    if not rows or not all(len(row) for row in rows):
        lengths = [len(row) for row in rows]
        raise DataError(f"{what} must be one or more rows of one or more tokens, got rows of lengths {lengths}")
    for number, row in enumerate(rows):
        wrong = [token for token in row if not 0 <= token < vocab_size]
        if wrong:
            raise DataError(
                f"tokens of {what} must be from 0 to {vocab_size - 1}, got {wrong[0]} in row {number}. "
                "Were they made with another tokenizer?"
            )


def limits_of(what: str, lengths: Sequence[int], max_new_tokens: int | None, positions: int | None) -> list[int]:
    """Return how many new tokens each row may have: ``max_new_tokens``, else the usual number where they fit.

    The last new token is chosen and not read, so it needs no position.

    Args:
        what: the rows' name in messages.
        lengths: tokens that stand before the new ones in each row.
        positions: how many the model learned; None: it has no end.

    Raises:
        DataError: a row with its new tokens has more tokens than there are positions.
    """
    if max_new_tokens is not None and max_new_tokens < 1:
        raise DataError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    limits = []
    for number, length in enumerate(lengths, 1):
        room = positions - length + 1 if positions is not None else None
        wanted = max_new_tokens or USUAL_TOKENS
        if room is not None and room < (max_new_tokens or 1):
            new = f" and {max_new_tokens} new ones, of which all but the last are read," if max_new_tokens else ""
            raise DataError(
                f"{what} {number} has {length} tokens; they{new} must fit into the {positions} positions that the "
                f"model learned (--max-position-embeddings). {_cure(room, max_new_tokens)}"
            )
        limits.append(wanted if room is None else min(wanted, room))
    return limits


def _cure(room: int, max_new_tokens: int | None) -> str:
    return f"Ask for at most {room} new tokens, or shorten it" if max_new_tokens and room > 0 else "Shorten it"


def check_length(what: str, lengths: Sequence[int], positions: int) -> None:
    """Check that rows that the model only reads have positions.

    Raises:
        DataError: a row has more tokens than the model learned positions.
    """
    for number, length in enumerate(lengths, 1):
        if length > positions:
            raise DataError(
                f"{what} {number} has {length} tokens and must fit into the {positions} positions that the model "
                "learned (--max-position-embeddings). Shorten it"
            )
