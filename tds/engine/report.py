"""Report: the interface by which an engine reports step times and losses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from tds.loss_reduction import MeanLosses

FORWARD, BACKWARD, REDUCTION, STEP, TRAIN_BATCH = "forward", "backward", "reduction", "step", "train_batch"
PHASES = (FORWARD, BACKWARD, REDUCTION, STEP, TRAIN_BATCH)
"""Timed parts of a step. ``TRAIN_BATCH`` minus the sum of the others is the time spent waiting for other stages."""


def untimed(_: str) -> AbstractContextManager[None]:
    """Return a context that measures nothing; the default of ``Call.time_phase``."""
    return nullcontext()


class Report(Protocol):
    """Receives an engine's times and losses."""

    def time_phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context that times one of ``PHASES``."""

    def step(self) -> AbstractContextManager[None]:
        """Return a context around one ``train_batch``."""

    def write_training(self, means: MeanLosses) -> None:
        """Report a step's losses, after the update."""

    def write_evaluation(self, means: MeanLosses) -> None:
        """Report an evaluation's losses."""


class NoReport:
    """Reports nothing."""

    def time_phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def write_training(self, means: MeanLosses) -> None:
        return None

    def write_evaluation(self, means: MeanLosses) -> None:
        return None
