"""Types for functions that a script passes to a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BatchFn = Callable[[Any], tuple[Any, Any]]
"""Maps an item from the data iterator to (first-layer inputs, labels for the loss function)."""

LossFn = Callable[[Any, Any], Any]
"""Maps (last layer's output, labels) to the losses, in a structure from ``tds.loss.LOSS_STRUCTURES``."""
