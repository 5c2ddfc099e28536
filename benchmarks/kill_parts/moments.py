"""When a run is killed, and who."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

START, LOAD, STEP, SAVE, END = "start", "load", "step", "save", "end"
PHASES = (START, LOAD, STEP, SAVE)
"""What kills aim at; a run that ends while a kill waits may also be hit in its end."""
WEIGHTS = (2, 2, 4, 4)
SPAN_S = {START: 1.2, LOAD: 0.15, STEP: 0.06, SAVE: 0.15}
"""A kill comes at random within this time after the phase has begun, so some come when the next one has begun."""
MOST_ENTRIES = 3
ONE, ALL, LAUNCHER = "one rank", "all ranks", "the launcher"
VICTIMS = (ONE, ALL, LAUNCHER)
VICTIM_WEIGHTS = (6, 4, 1)


@dataclass(frozen=True)
class Moment:
    """``delay_s`` after rank ``rank`` has come into ``phase`` for the ``entry``-th time the ``victims`` are killed."""

    phase: str
    entry: int
    delay_s: float
    victims: str
    rank: int


def draw_moments(draw: random.Random, num_ranks: int, number: int) -> Iterator[Moment]:
    """Yield ``number`` random moments."""
    for _ in range(number):
        phase = draw.choices(PHASES, WEIGHTS)[0]
        entry = draw.randint(1, MOST_ENTRIES) if phase in (STEP, SAVE) else 1
        victims = draw.choices(VICTIMS, VICTIM_WEIGHTS)[0]
        yield Moment(phase, entry, draw.uniform(0, SPAN_S[phase]), victims, draw.randrange(num_ranks))


def phase_of(at: str) -> str:
    """Return the phase in which a rank notes ``at`` (``megatron.training.failure``)."""
    if at.startswith("loading"):
        return LOAD
    if at.startswith("saving"):
        return SAVE
    if at.startswith(("step", "a step", "the first step")):
        return STEP
    if at.startswith("ending"):
        return END
    return START
