"""How long each piece of the model takes, given or measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tds.schedule.actions import Action, Backward, BackwardInput, Forward


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) for one micro-batch in each piece of the model; ``chunk * p + stage`` is a piece's index.

    A whole backward costs both of its halves, or what ``backward`` says: splitting has a price. ``transfer`` is from
    the end of an action to its message's arrival.

    Raises:
        ValueError: not one value for each piece, or one that is negative or not finite.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    transfer: float = 0.0
    backward: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        lengths = len(self.forward), len(self.backward_input), len(self.backward_weight)
        if lengths[0] == 0 or len(set(lengths)) > 1:
            raise ValueError(
                "costs need one forward, backward_input and backward_weight for each piece of the model, got "
                f"{lengths[0]}, {lengths[1]} and {lengths[2]} values"
            )
        if self.backward and len(self.backward) != lengths[0]:
            raise ValueError(
                f"costs need a backward for each of {lengths[0]} pieces, or none, got {len(self.backward)} values"
            )
        for name in ("forward", "backward_input", "backward_weight", "backward"):
            for piece, value in enumerate(getattr(self, name)):
                _check_time(f"{name} of piece {piece}", value)
        _check_time("transfer", self.transfer)

    @classmethod
    def even(cls, num_pieces: int, F: float = 1, B: float = 1, W: float = 1, transfer: float = 0) -> Costs:
        """Return the same times for every piece: forward, backward for the input, backward for the weights."""
        return cls((F,) * num_pieces, (B,) * num_pieces, (W,) * num_pieces, transfer)

    @property
    def num_pieces(self) -> int:
        return len(self.forward)

    def of(self, action: Action, piece: int) -> float:
        """Return the time of ``action`` in ``piece``."""
        if isinstance(action, Forward):
            return self.forward[piece]
        if isinstance(action, BackwardInput):
            return self.backward_input[piece]
        if isinstance(action, Backward):
            return self.whole_backward[piece]
        return self.backward_weight[piece]

    @property
    def whole_backward(self) -> tuple[float, ...]:
        """The times of a backward that is not split."""
        return self.backward or tuple(map(sum, zip(self.backward_input, self.backward_weight, strict=True)))


def _check_time(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"costs must be finite and not negative, got {value} for {name}")
