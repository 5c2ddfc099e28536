"""How often a unit's products and its passes over memory count: by closed forms, or as whole layers took them.

What the operations of a unit add up to by themselves is less than the unit takes: between products numbers are passed
over more often than what is kept tells, by kernels of their own, and products are no squares. So the seconds of a
forward, and those of a backward, are ``products * those of its products + passes * one pass over what it keeps +
scores * one pass over the scores of its attention``, and the three numbers come from whole layers that ``--calibrate``
has timed; for layers cut over tensor ranks they are multiplied by what these took longer. A machine without measurement
has ``LAYER`` and ``HEAD``; a pass of the head is one over its logits.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any


@dataclass(frozen=True)
class Tempo:
    """Factors on the seconds of all products, of one pass over what is kept, and of one over the scores."""

    products: float
    passes: float
    scores: float = 0.0

    def times(self, factor: float) -> Tempo:
        """Return the factors of what takes so many times as long."""
        return Tempo(factor * self.products, factor * self.passes, factor * self.scores)

    def of(self, parts: tuple[float, float, float]) -> float:
        """Return the seconds of these products, pass and pass over scores."""
        products, passed, scored = parts
        return self.products * products + self.passes * passed + self.scores * scored


@dataclass(frozen=True)
class Tempos:
    """Of a forward and of a backward."""

    forward: Tempo
    backward: Tempo


Table = Mapping[str, Mapping[str, Tempos]]
"""Format of numbers -> kind of unit ("gpt2 layer", "t5 head") -> its tempos."""
CUT = ", cut over tensor ranks"
"""What the kind of a unit ends with whose layers are cut: smaller products, and ranks that wait for the slower one."""
LAYER = Tempos(Tempo(1.0, 2.0), Tempo(1.0, 3.0))
"""What is kept of a layer is written once in forward and read about once more by the operation that follows; backward
reads it, and writes a gradient for about as much. Norms, dropout and sums with the residual stream all pass so."""
HEAD = Tempos(Tempo(1.0, 3.0), Tempo(1.0, 2.0))


@dataclass(frozen=True)
class Sample:
    """Seconds of products and of the passes, those that all took together, and those that an error is measured by."""

    parts: tuple[float, float, float]
    seconds: float
    scale: float


def fitted(samples: Sequence[Sample]) -> Tempo:
    """Return the factors, none below 0, for which the sum of squares of errors over ``scale`` is least."""
    rows = [[part / one.scale for part in one.parts] for one in samples]
    wanted = [one.seconds / one.scale for one in samples]
    best, least = [0.0] * 3, sum(value**2 for value in wanted)
    for number in (1, 2, 3):
        for chosen in combinations(range(3), number):
            found = _least_squares([[row[n] for n in chosen] for row in rows], wanted)
            if found is None or min(found) < 0:
                continue
            error = sum(
                (_dot(found, [row[n] for n in chosen]) - value) ** 2 for row, value in zip(rows, wanted, strict=True)
            )
            if error < least:
                best, least = [dict(zip(chosen, found, strict=True)).get(n, 0.0) for n in range(3)], error
    return Tempo(*best)


def slowdown(samples: Sequence[Sample], tempo: Tempo) -> float:
    """Return how many times as long as ``tempo`` says the samples took: their median, 1 at least."""
    said = [(one.seconds, tempo.of(one.parts)) for one in samples]
    ratios = [own / other for own, other in said if other > 0]
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


def _least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float] | None:
    """Return the factors of the columns by their normal equations; None where these do not tell them apart."""
    columns = list(zip(*rows, strict=True))
    matrix = [[*[_dot(one, other) for other in columns], _dot(one, wanted)] for one in columns]
    for pivot, row in enumerate(matrix):
        if row[pivot] <= 1e-9 * _dot(columns[pivot], columns[pivot]):
            return None
        for other in matrix:
            if other is not row:
                factor = other[pivot] / row[pivot]
                other[:] = [value - factor * own for value, own in zip(other, row, strict=True)]
    return [row[-1] / row[pivot] for pivot, row in enumerate(matrix)]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def read(value: Mapping[str, Any]) -> Table:
    """Return the table of what ``asdict`` made of one.

    Raises:
        TypeError, KeyError, AttributeError: it is none.
    """
    return {
        dtype: {kind: Tempos(Tempo(**own["forward"]), Tempo(**own["backward"])) for kind, own in kinds.items()}
        for dtype, kinds in value.items()
    }


def numbers(table: Table) -> Iterator[tuple[str, float]]:
    """Yield every factor with its name."""
    for dtype, kinds in table.items():
        for kind, own in kinds.items():
            for way, tempo in asdict(own).items():
                yield from ((f"tempos of {dtype}, {kind}, {way}: {name}", value) for name, value in tempo.items())
