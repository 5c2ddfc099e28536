"""Rows of tokens of several lengths, which a cache reads together, and how far their logits lie from each alone."""

from __future__ import annotations

import torch

from megatron.models.common.generation import DecoderReader
from tests.helpers.model_samples import VOCAB

ROUNDING = 1e-13
LENGTHS, STEPS = [4, 1, 6], 5


def rows_of(lengths: list[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def differ(found: torch.Tensor | None, wanted: list[torch.Tensor]) -> float:
    assert found is not None
    whole = torch.stack(wanted)
    return float((found[:, :VOCAB] - whole[:, :VOCAB]).abs().max() / whole.abs().max())


def check_passes(reader: DecoderReader, rows: list[torch.Tensor], alone: list[torch.Tensor]) -> None:
    """Read the three ``rows``, of ``LENGTHS`` and then a token a pass, the second one left after two passes.

    Args:
        alone: the logits of each row by itself, without a cache: [s, v].
    """
    tokens = torch.full((3, max(LENGTHS)), 7)
    for row, length, own in zip(rows, LENGTHS, tokens, strict=True):
        own[:length] = row[:length]
    last = torch.tensor(LENGTHS) - 1
    found = reader.read(tokens, torch.arange(max(LENGTHS)).expand(tokens.shape), last)
    assert differ(found, [own[length - 1] for own, length in zip(alone, LENGTHS, strict=True)]) < ROUNDING
    held = [0, 1, 2]
    for step in range(STEPS):
        if step == 2:
            reader.keep([0, 2])
            held = [0, 2]
        places = [LENGTHS[row] + step for row in held]
        tokens = torch.stack([rows[row][place] for row, place in zip(held, places, strict=True)])[:, None]
        found = reader.read(tokens, torch.tensor(places)[:, None], torch.zeros(len(held), dtype=torch.long))
        assert differ(found, [alone[row][place] for row, place in zip(held, places, strict=True)]) < ROUNDING
