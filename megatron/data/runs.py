"""Arrays put together from stretches of another one, all at once."""

from __future__ import annotations

import numpy as np


def runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return starts[0], starts[0] + 1, ... (``lengths[0]`` numbers), then as many from starts[1] on, and so forth."""
    ends = lengths.cumsum()
    numbers = (starts - ends + lengths).repeat(lengths)
    numbers += np.arange(len(numbers))
    return numbers
