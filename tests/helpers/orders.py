"""Schedules and sizes shared by tests."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from tds.schedule import Action, Order, schedule_named

QUICK = settings(max_examples=6, deadline=None)
FEW = settings(max_examples=6, deadline=None)
"""Hypothesis settings for tests whose largest example takes a second."""
SMALL = settings(max_examples=25, deadline=None)
STAGES = st.integers(1, 64)
MICRO_BATCHES = st.integers(1, 256)
ONE_CHUNK = ("1f1b", "gpipe", "zb-h1")
MANY_CHUNKS = ("interleaved", "zb-h1")
LARGE_PIPELINES = ((64, 256), (63, 255), (64, 3))
TIMES = st.integers(0, 20)


def actions_by_stage(order: Order, num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the actions of every stage."""
    return [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]


def schedule_by_stage(name: str, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> list[list[Action]]:
    """Return the actions of every stage in the schedule ``name``."""
    return actions_by_stage(schedule_named(name, num_chunks), num_stages, num_micro_batches)


def small_pipelines() -> list[tuple[str, int, int, int]]:
    """Return (name, stages, micro-batches, chunks) of every small pipeline: 1-8 stages, 1-16 micro-batches."""
    sizes_without_chunks = [(p, m) for p in range(1, 9) for m in range(1, 17)]
    single_chunk_cases = [(name, p, m, 1) for p, m in sizes_without_chunks for name in ONE_CHUNK]
    return single_chunk_cases + [
        (name, p, m, c) for name in MANY_CHUNKS for p, m in sizes_without_chunks if p > 1 for c in (2, 3, 4)
    ]
