"""Check that rows of several lengths, read together with a cache, have the logits of separate reads."""

from __future__ import annotations

import torch

from megatron.models.common.generation import CachedDecoder
from tests.helpers.model_samples import VOCAB

TOLERANCE = 1e-13
LENGTHS, NUM_STEPS = [4, 1, 6], 5


def random_rows(lengths: list[int], seed: int) -> list[torch.Tensor]:
    """Return a row of random tokens for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def relative_difference(logits: torch.Tensor | None, expected_rows: list[torch.Tensor]) -> float:
    """Return the largest difference between logits, relative to the largest expected logit; padding is ignored."""
    assert logits is not None
    expected = torch.stack(expected_rows)
    return float((logits[:, :VOCAB] - expected[:, :VOCAB]).abs().max() / expected.abs().max())


def check_cached_logits(reader: CachedDecoder, rows: list[torch.Tensor], expected_logits: list[torch.Tensor]) -> None:
    """Check the logits of a first pass over three rows with ``LENGTHS`` tokens, then of passes over one token per row.

    The second row is dropped after two passes.

    Args:
        expected_logits: expected logits [s, v] of each row, computed separately and without a cache.
    """
    tokens = torch.full((3, max(LENGTHS)), 7)
    for row, length, padded_row in zip(rows, LENGTHS, tokens, strict=True):
        padded_row[:length] = row[:length]
    last_positions = torch.tensor(LENGTHS) - 1
    logits = reader.read(tokens, torch.arange(max(LENGTHS)).expand(tokens.shape), last_positions)
    assert (
        relative_difference(
            logits, [padded_row[length - 1] for padded_row, length in zip(expected_logits, LENGTHS, strict=True)]
        )
        < TOLERANCE
    )
    active_rows = [0, 1, 2]
    for step in range(NUM_STEPS):
        if step == 2:
            reader.keep([0, 2])
            active_rows = [0, 2]
        positions = [LENGTHS[row] + step for row in active_rows]
        tokens = torch.stack([rows[row][position] for row, position in zip(active_rows, positions, strict=True)])[
            :, None
        ]
        logits = reader.read(tokens, torch.tensor(positions)[:, None], torch.zeros(len(active_rows), dtype=torch.long))
        assert (
            relative_difference(
                logits, [expected_logits[row][position] for row, position in zip(active_rows, positions, strict=True)]
            )
            < TOLERANCE
        )
