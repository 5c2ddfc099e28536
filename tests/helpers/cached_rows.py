"""Check that rows of several lengths, read together with a cache, have the logits of separate reads."""

from __future__ import annotations

import torch

from megatron.models.common.generation import DecoderReader
from tests.helpers.model_samples import VOCAB

ROUNDING = 1e-13
LENGTHS, STEPS = [4, 1, 6], 5


def rows_of(lengths: list[int], seed: int) -> list[torch.Tensor]:
    """Return a row of random tokens for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def differ(found: torch.Tensor | None, wanted: list[torch.Tensor]) -> float:
    """Return the largest difference between logits, relative to the largest expected logit; padding is ignored."""
    assert found is not None
    expected = torch.stack(wanted)
    return float((found[:, :VOCAB] - expected[:, :VOCAB]).abs().max() / expected.abs().max())


def check_passes(reader: DecoderReader, rows: list[torch.Tensor], alone: list[torch.Tensor]) -> None:
    """Check the logits of a first pass over three rows with ``LENGTHS`` tokens, then of passes over one token per row.

    The second row is dropped after two passes.

    Args:
        alone: expected logits [s, v] of each row, computed separately and without a cache.
    """
    tokens = torch.full((3, max(LENGTHS)), 7)
    for row, length, padded in zip(rows, LENGTHS, tokens, strict=True):
        padded[:length] = row[:length]
    last_positions = torch.tensor(LENGTHS) - 1
    logits = reader.read(tokens, torch.arange(max(LENGTHS)).expand(tokens.shape), last_positions)
    assert differ(logits, [padded[length - 1] for padded, length in zip(alone, LENGTHS, strict=True)]) < ROUNDING
    active_rows = [0, 1, 2]
    for step in range(STEPS):
        if step == 2:
            reader.keep([0, 2])
            active_rows = [0, 2]
        positions = [LENGTHS[row] + step for row in active_rows]
        tokens = torch.stack([rows[row][position] for row, position in zip(active_rows, positions, strict=True)])[
            :, None
        ]
        logits = reader.read(tokens, torch.tensor(positions)[:, None], torch.zeros(len(active_rows), dtype=torch.long))
        assert (
            differ(logits, [alone[row][position] for row, position in zip(active_rows, positions, strict=True)])
            < ROUNDING
        )
