"""Cutting a corpus into training, validation and test documents by ``--split``."""

from __future__ import annotations

from fractions import Fraction

from megatron.errors import DataError

NAMES = ("train", "valid", "test")


def split_documents(num_documents: int, split: str) -> list[tuple[int, int]]:
    """Return (start, stop) of the documents of train, valid and test.

    Args:
        split: up to three weights, "949,50,1" or "949/50/1"; what is left out is 0. Boundaries lie at the rounded
            cumulative fractions.

    Raises:
        DataError: not such a text.
    """
    weights = _parse(split)
    bounds, total, reached = [0], sum(weights), Fraction(0)
    for weight in weights:
        reached += weight
        bounds.append(int(reached / total * num_documents + Fraction(1, 2)))
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def _parse(split: str) -> list[Fraction]:
    wrong = f"--split must be one to three weights, not negative and not all 0, such as 949,50,1; got {split!r}"
    try:
        weights = [Fraction(part.strip()) for part in split.replace("/", ",").split(",")]
    except (ValueError, ZeroDivisionError) as error:
        raise DataError(wrong) from error
    if len(weights) > len(NAMES) or min(weights) < 0 or sum(weights) == 0:
        raise DataError(wrong)
    return weights + [Fraction(0)] * (len(NAMES) - len(weights))
