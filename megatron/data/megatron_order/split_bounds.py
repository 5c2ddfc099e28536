"""Document ranges of the three splits with Megatron's rounding of ``--split``."""

from __future__ import annotations

import re

import numpy as np

from megatron.data.split import SPLIT_NAMES


def split_bounds(num_documents: int, split: str) -> list[tuple[int, int]]:
    """Compute (start, stop) for the training, validation and test documents.

    Shares are added in float64, and halves are rounded to the even document. ``split.split_documents`` uses exact
    fractions and rounds halves up, which can differ by one document.
    """
    shares = [float(word) for word in re.findall(r"[.0-9]+", split)]
    shares += [0.0] * (len(SPLIT_NAMES) - len(shares))
    bounds = [0.0]
    for share in (np.array(shares) / np.sum(shares)).tolist():
        bounds.append(bounds[-1] + share)
    rounded = [round(bound * float(num_documents)) for bound in bounds]
    return list(zip(rounded[:-1], rounded[1:], strict=True))
