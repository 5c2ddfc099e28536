"""Names of stages and layers at a boundary, for error messages."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tds.schedule import Placement


@dataclass(frozen=True)
class Place:
    """One side of a boundary: the output of a piece's last layer, or the input of its first layer."""

    stage: int
    side: str = "output"
    layer: str = ""
    chunk: int = 0

    def tensor(self, index: int, name: str = "") -> str:
        """Return a description of the tensor ``index`` of this side, for messages."""
        details = ", ".join(filter(None, [f"{name!r}" if name else "", f"of {self.layer}" if self.layer else ""]))
        return f"{self._stage} {self.side} {index}" + (f" ({details})" if details else "")

    def __str__(self) -> str:
        return f"{self._stage}" + (f" ({self.layer})" if self.layer else "")

    @property
    def _stage(self) -> str:
        return f"stage {self.stage}" + (f" chunk {self.chunk}" if self.chunk else "")


def output_place(module: Any, chunk: int, stage: int, placement: Placement) -> Place:
    """Return the output side of the piece that ``stage`` holds as ``chunk``."""
    bounds = _bounds(module, placement.piece(stage, chunk))
    return Place(stage, "output", layer_name(module, bounds[1] - 1) if bounds else "", chunk)


def input_place(module: Any, chunk: int, stage: int, placement: Placement) -> Place:
    """Return the input side of the piece that ``stage`` holds as ``chunk``."""
    bounds = _bounds(module, placement.piece(stage, chunk))
    return Place(stage, "input", layer_name(module, bounds[0]) if bounds else "", chunk)


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


def _bounds(module: Any, piece: int) -> tuple[int, int] | None:
    parts = getattr(module, "parts", None)
    return (parts[piece], parts[piece + 1]) if parts is not None and piece + 1 < len(parts) else None
