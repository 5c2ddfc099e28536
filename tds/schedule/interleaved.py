"""Interleaved 1F1B: each stage has several chunks of layers, so the pipeline fills and drains in smaller pieces.

Micro-batches go in rounds of p, the last one short if p does not divide m. All stages take forwards in one sequence
(round, chunk, micro-batch) and backwards in one (round, chunk from the last, micro-batch), so messages never cross.
How the two are woven together is found by running the pipeline in ticks. A stage may hold 2 (p-i-1) + (c-1) p + 1
forwards, as in Megatron: with fewer it takes the next forward, else a backward. With whole rounds it waits for that
forward, which gives Megatron's order. With a short round such waiting can stop all stages for good, each waiting for
what another has not started, so there a stage takes a backward meanwhile. This never stops: if no backward can start,
all stages have done the same k, and the last has yet to do the last chunk's forward of that micro-batch; so it holds
at most (c-1) p, takes its next forward as soon as the stage before has done it, and so do all the others, up to the
first.

Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 2.2.
"""

from __future__ import annotations

import functools

from tds.schedule.actions import Action, Backward, Forward
from tds.schedule.sizes import check_sizes

FORWARD_TICKS, BACKWARD_TICKS = 1, 2
Place = tuple[int, int]
"""(micro-batch, chunk)"""


def interleaved(num_stages: int, num_micro_batches: int, stage: int, num_chunks: int) -> list[Action]:
    """Return the order of ``stage`` with ``num_chunks`` chunks of layers; any number of micro-batches."""
    check_sizes(num_stages, num_micro_batches, stage, num_chunks)
    return list(_all_stages(num_stages, num_micro_batches, num_chunks)[stage])


def in_rounds(num_stages: int, num_micro_batches: int, num_chunks: int) -> list[Place]:
    """Return the sequence of forwards that all stages share."""
    return [
        (micro_batch, chunk)
        for start in range(0, num_micro_batches, num_stages)
        for chunk in range(num_chunks)
        for micro_batch in range(start, min(start + num_stages, num_micro_batches))
    ]


@functools.lru_cache(maxsize=16)
def _all_stages(num_stages: int, num_micro_batches: int, num_chunks: int) -> tuple[tuple[Action, ...], ...]:
    return _Weaver(num_stages, num_micro_batches, num_chunks).run()


class _Weaver:
    """Runs the pipeline in ticks and notes what each stage does.

    All stages share the two sequences, so what is done is a pair of numbers for each stage, and what a step needs is
    the same step on the neighbour, or an earlier one at the other end of the pipeline.
    """

    def __init__(self, num_stages: int, num_micro_batches: int, num_chunks: int) -> None:
        self.last = num_stages - 1
        self.rounds_are_whole = num_micro_batches % num_stages == 0
        self.forwards = in_rounds(num_stages, num_micro_batches, num_chunks)
        self.backwards = [(micro_batch, num_chunks - 1 - chunk) for micro_batch, chunk in self.forwards]
        forward_at = {place: i for i, place in enumerate(self.forwards)}
        backward_at = {place: i for i, place in enumerate(self.backwards)}
        # How many forwards the last stage must have done ahead of each forward of stage 0 ...
        self.entry = [forward_at[i, chunk - 1] + 1 if chunk else 0 for i, chunk in self.forwards]
        # ... and how many (forwards of its own, backwards of stage 0) the last stage needs ahead of each backward.
        top = num_chunks - 1
        self.turn = [
            (forward_at[i, top] + 1, backward_at[i, chunk + 1] + 1 if chunk < top else 0) for i, chunk in self.backwards
        ]
        self.limits = [2 * (self.last - i) + top * num_stages + 1 for i in range(num_stages)]
        self.forwards_done = [0] * num_stages
        self.backwards_done = [0] * num_stages
        self.running: list[type[Action] | None] = [None] * num_stages
        self.free_at = [0] * num_stages
        self.actions: list[list[Action]] = [[] for _ in range(num_stages)]

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of each stage."""
        tick = 0
        while True:
            self._end_what_is_due(tick)
            if self.backwards_done[0] == len(self.backwards):
                return tuple(map(tuple, self.actions))
            for stage, kind in enumerate(self.running):
                if kind is None:
                    self.running[stage] = kind = self._start(stage)
                    self.free_at[stage] = tick + (FORWARD_TICKS if kind is Forward else BACKWARD_TICKS)
            tick += 1

    def _end_what_is_due(self, tick: int) -> None:
        for stage, kind in enumerate(self.running):
            if kind is not None and self.free_at[stage] == tick:
                done = self.forwards_done if kind is Forward else self.backwards_done
                done[stage] += 1
                self.running[stage] = None

    def _start(self, stage: int) -> type[Action] | None:
        """Begin what ``stage`` can do now; return which kind it is."""
        forwards, backwards = self.forwards_done[stage], self.backwards_done[stage]
        wants_forward = forwards - backwards < self.limits[stage] and forwards < len(self.forwards)
        if wants_forward and self._has_forward(stage):
            self.actions[stage].append(Forward(*self.forwards[forwards]))
            return Forward
        if not (wants_forward and self.rounds_are_whole) and self._has_backward(stage):
            self.actions[stage].append(Backward(*self.backwards[backwards]))
            return Backward
        return None

    def _has_forward(self, stage: int) -> bool:
        index = self.forwards_done[stage]
        if stage > 0:
            return self.forwards_done[stage - 1] > index
        return self.forwards_done[self.last] >= self.entry[index]

    def _has_backward(self, stage: int) -> bool:
        index = self.backwards_done[stage]
        if index == len(self.backwards):
            return False
        if stage < self.last:
            return self.backwards_done[stage + 1] > index
        forwards, backwards = self.turn[index]
        return self.forwards_done[stage] >= forwards and self.backwards_done[0] >= backwards
