"""The loop of greedy decoding: the likeliest token is appended to each row until all have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Rows = Sequence[Sequence[int]]
NextTokens = Callable[[torch.Tensor, torch.Tensor], list[int]]


def greedy(next_tokens: NextTokens, starts: Rows, *, max_new_tokens: int, eos_id: int | None) -> list[list[int]]:
    """Return the new tokens of each row: up to and with ``eos_id``, or ``max_new_tokens`` of them.

    Args:
        next_tokens: from (tokens [b, s], index of each row's last token [b]) to the token that follows it. Rows are
            filled up at the end, so what lies behind a row's last token must not act on it.
        starts: the rows at the start, of any lengths above 0.
        eos_id: ends a row; None: none does.
    """
    rows = [list(start) for start in starts]
    is_open = [True] * len(rows)
    for _ in range(max_new_tokens):
        chosen = next_tokens(*filled_up(rows))
        for index, row in enumerate(rows):
            if is_open[index]:
                row.append(chosen[index])
                is_open[index] = chosen[index] != eos_id
        if not any(is_open):
            break
    return [row[len(start) :] for row, start in zip(rows, starts, strict=True)]


def filled_up(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows filled up to one length with token 0, index of each row's last token).

    Shapes:
        output [b, s], [b]
    """
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    return tokens, torch.tensor([len(row) - 1 for row in rows])


def check_rows(what: str, rows: Rows, vocab_size: int, max_new_tokens: int) -> None:
    """Check what a user gave, alike on every rank, before any rank waits for another.

    Raises:
        ValueError: no rows, an empty one, a token outside the vocabulary, or no new tokens wanted.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not rows or not all(len(row) for row in rows):
        lengths = [len(row) for row in rows]
        raise ValueError(f"{what} must be one or more rows of one or more tokens, got rows of lengths {lengths}")
    for number, row in enumerate(rows):
        wrong = [token for token in row if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(
                f"tokens of {what} must be from 0 to {vocab_size - 1}, got {wrong[0]} in row {number}. "
                "Were they made with another tokenizer?"
            )


def check_positions(what: str, length: int, positions: int) -> None:
    """Check that so many tokens have positions in a model that learned ``positions`` of them.

    Raises:
        ValueError: they have not.
    """
    if length > positions:
        raise ValueError(
            f"{what} must not be longer than --max-position-embeddings, got {length} tokens and {positions} positions. "
            "Shorten the rows, or ask for fewer new tokens."
        )
