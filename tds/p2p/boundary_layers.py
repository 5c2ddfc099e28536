"""Stage and layer names at a boundary, for error messages."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tds.schedule import Placement


@dataclass(frozen=True)
class BoundarySide:
    """One side of a boundary: the output of a virtual stage's last layer, or its first layer's input."""

    stage: int
    side: str = "output"
    layer: str = ""
    chunk: int = 0

    def describe_tensor(self, index: int, name: str = "") -> str:
        """Describe the tensor ``index`` for messages."""
        details = ", ".join(filter(None, [f"{name!r}" if name else "", f"of {self.layer}" if self.layer else ""]))
        return f"{self._stage_name} {self.side} {index}" + (f" ({details})" if details else "")

    def __str__(self) -> str:
        return f"{self._stage_name}" + (f" ({self.layer})" if self.layer else "")

    @property
    def _stage_name(self) -> str:
        return f"stage {self.stage}" + (f" chunk {self.chunk}" if self.chunk else "")


def output_side(module: Any, chunk: int, stage: int, placement: Placement) -> BoundarySide:
    """Name the output of the virtual stage that is ``chunk`` of ``stage``."""
    bounds = _bounds(module, placement.virtual_stage(stage, chunk))
    return BoundarySide(stage, "output", layer_name(module, bounds[1] - 1) if bounds else "", chunk)


def input_side(module: Any, chunk: int, stage: int, placement: Placement) -> BoundarySide:
    """Name the input of the virtual stage that is ``chunk`` of ``stage``."""
    bounds = _bounds(module, placement.virtual_stage(stage, chunk))
    return BoundarySide(stage, "input", layer_name(module, bounds[0]) if bounds else "", chunk)


def layer_name(module: Any, index: int) -> str:
    """Return "layer 3 (Dense)" for layer 3 of a pipeline module; "layer 3" if the module has no such layer."""
    specs = getattr(module, "_layer_specs", ())
    if not 0 <= index < len(specs):
        return f"layer {index}"
    layer = specs[index]
    while isinstance(layer, functools.partial):
        layer = layer.func
    layer_class = getattr(layer, "typename", None) or (layer if hasattr(layer, "__name__") else type(layer))
    return f"layer {index} ({layer_class.__name__})"


def _bounds(module: Any, virtual_stage: int) -> tuple[int, int] | None:
    bounds = getattr(module, "parts", None)
    return (
        (bounds[virtual_stage], bounds[virtual_stage + 1])
        if bounds is not None and virtual_stage + 1 < len(bounds)
        else None
    )
