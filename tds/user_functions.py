"""Types of the functions that a script gives to a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BatchFn = Callable[[Any], tuple[Any, Any]]
"""From a micro-batch of the data iterator to (inputs of the first layer, labels of the loss function)."""

LossFn = Callable[[Any, Any], Any]
"""From (output of the last layer, labels) to the losses, in one of the forms of ``tds.loss.LOSS_STRUCTURES``."""
