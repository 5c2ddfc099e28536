"""Types of the functions that a script passes to a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BatchFn = Callable[[Any], tuple[Any, Any]]
"""Maps an item of the data iterator to (inputs of the first layer, labels of the loss function)."""

LossFn = Callable[[Any, Any], Any]
"""Maps (output of the last layer, labels) to the losses, in one of the structures of ``tds.loss.LOSS_STRUCTURES``."""
