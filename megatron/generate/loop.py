"""The loop of generation: a token is chosen for each row and read in its turn, until all rows have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.errors import NumericsError
from megatron.generate.likeliest import NONE
from megatron.generate.part import Part
from megatron.generate.relay import tokens_to_all_stages

Rows = Sequence[Sequence[int]]
Choose = Callable[[torch.Tensor, list[int], int], torch.Tensor]
"""From (logits [b, v/t], numbers of their rows, number of the new token) to the tokens [b]."""
OnToken = Callable[[int, int], Any]
"""Called with (row, token) for each new token, on every rank."""


def generate(
    part: Part,
    read: Any,
    starts: Rows,
    *,
    limits: Sequence[int],
    eos_id: int | None,
    choose: Choose,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Return the new tokens of each row: up to and with ``eos_id``, or as many as its limit. Collective.

    Args:
        read: a ``Reader``, or what has its methods ``read`` and ``keep``.
        starts: the rows at the start, of any lengths above 0.
        limits: how many new tokens each row may have, at least 1.
        eos_id: ends a row; None: none does.

    Raises:
        NumericsError: a logit is not a number; on every rank.
    """
    new: list[list[int]] = [[] for _ in starts]
    rows = list(range(len(starts)))
    tokens, last = filled_up(starts)
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    for step in range(max(limits)):
        logits = read.read(tokens, positions, last)
        for row, token in zip(rows, _chosen(part, logits, choose, rows, step), strict=True):
            new[row].append(token)
            if on_token is not None:
                on_token(row, token)
        still = [place for place, row in enumerate(rows) if new[row][-1] != eos_id and len(new[row]) < limits[row]]
        if not still:
            break
        if len(still) < len(rows):
            read.keep(still)
            rows = [rows[place] for place in still]
        tokens = torch.tensor([[new[row][-1]] for row in rows])  # [b, 1]
        positions = torch.tensor([[len(starts[row]) + step] for row in rows])
        last = torch.zeros(len(rows), dtype=torch.long)
    return new


def _chosen(part: Part, logits: torch.Tensor | None, choose: Choose, rows: list[int], step: int) -> list[int]:
    """Return the tokens that the last stage chooses, on every rank."""
    own = None if logits is None else choose(logits, rows, step)
    tokens = tokens_to_all_stages(part, own, len(rows))
    if (tokens == NONE).any():
        raise NumericsError("logits must be numbers, got NaN. Are the weights finite? Load another checkpoint.")
    return tokens.tolist()


def filled_up(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows filled up at their end to one length with token 0, index of each row's last token).

    Shapes:
        output [b, s], [b]
    """
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    return tokens, torch.tensor([len(row) - 1 for row in rows])
