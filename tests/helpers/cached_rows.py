"""Rows of tokens of several lengths, which a cache reads together, and how far their logits lie from each alone."""

from __future__ import annotations

import torch

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
