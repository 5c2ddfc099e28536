"""Straggler: names the rank that is clearly slower than its peers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron.mpu.topology import Coordinate, Topology
from megatron.training.callbacks.speed_monitor import SpeedMonitor
from megatron.training.trainer import Callback

# By numbers that every rank has anyway: its own work, its wait for data.
#
# Own work is the time of forward and backward passes without waits for other stages. Where weights are cut, a rank
# waits for its tensor group within that time: all ranks of the group then look alike, and are named together.
#
# Who is slow once may be anybody. ``StragglerDetector`` names those who are so in several reports in a row.

AS_REPLICA, AS_STAGE = 1.5, 2.0
"""Clearly slower is so many times its peers' work; stages differ by themselves."""
AT_LEAST_S = 0.02
"""More than its peers, a step; less is the noise of small models."""
ALIKE = 0.9
IN_A_ROW = 3


class StragglerWarning(Callback):
    """Says on rank 0 who holds the others up; behind ``SpeedMonitor`` in the list, whose numbers it reads."""

    on_all_ranks = False

    def __init__(self) -> None:
        self._detector = StragglerDetector()

    def on_log(self, metrics: dict[str, Any]) -> None:
        monitor = self.trainer.find(SpeedMonitor)
        if monitor is None:
            return
        topology = self.trainer.world.grid.topology
        warning = self._detector.judge(slowest(monitor.ranks.own_s, monitor.ranks.waited_each_s, topology))
        if warning is not None:
            self.trainer.print_line(f"step {self.trainer.progress.step} | {warning}")


class Straggler(NamedTuple):
    """Who holds the others up: one rank, or its tensor group; ``place`` is their (stage, replica)."""

    place: tuple[int, int, int]
    text: str


class StragglerDetector:
    """Who was the slowest up to now, and in how many reports in a row."""

    def __init__(self) -> None:
        self._place: tuple[int, int, int] | None = None
        self._times = 0

    def judge(self, found: Straggler | None) -> str | None:
        """Take note of the slowest of one more report; return what to say of it: once in ``IN_A_ROW`` in a row."""
        place = None if found is None else found.place
        self._times = self._times + 1 if place == self._place else 1
        self._place = place
        return None if found is None or self._times % IN_A_ROW else found.text


def slowest(per_step: Sequence[float], waited_s: Sequence[float], topology: Topology) -> Straggler | None:
    """Return which rank holds the others up, or None.

    A rank's peers are the same stage of other replicas, or with other pieces of the sequences; else the other stages.

    Args:
        per_step: seconds of own work of each rank in a step.
        waited_s: how much of it was wait for data.
    """
    rank = max(range(len(per_step)), key=per_step.__getitem__)
    peers = _peers(rank, topology)
    if not peers:
        return None
    usual = statistics.median(per_step[peer] for peer in peers)
    clearly = AS_REPLICA if topology.data_context > 1 else AS_STAGE
    if per_step[rank] < clearly * usual or per_step[rank] - usual < AT_LEAST_S:
        return None
    place = topology.coordinate(rank)
    alike = [r for r in _same_tensor_group(rank, topology) if per_step[r] > ALIKE * per_step[rank]]
    names = f"rank {rank}" if len(alike) == 1 else f"ranks {', '.join(map(str, alike))}"
    context = f", context {place.context}" if topology.context > 1 else ""
    of_data = f", {waited_s[rank]:.3f} s of it waiting for data" if waited_s[rank] > AT_LEAST_S else ""
    text = (
        f"slowest: {names} (stage {place.pipe}, data {place.data}{context}) with {per_step[rank]:.3f} s of own work a "
        f"step{of_data}; its peers need {usual:.3f} s"
    )
    return Straggler((place.pipe, place.data, place.context), text)


def _peers(rank: int, topology: Topology) -> list[int]:
    own = topology.coordinate(rank)
    places = {other: topology.coordinate(other) for other in range(topology.world_size)}
    replicas = [r for r, place in places.items() if place.pipe == own.pipe and _replica(place) != _replica(own)]
    return replicas or [r for r, place in places.items() if place.pipe != own.pipe]


def _same_tensor_group(rank: int, topology: Topology) -> list[int]:
    own = topology.coordinate(rank)
    places = {other: topology.coordinate(other) for other in range(topology.world_size)}
    return [r for r, place in places.items() if (place.pipe, *_replica(place)) == (own.pipe, *_replica(own))]


def _replica(place: Coordinate) -> tuple[int, int]:
    """Return which samples a rank works on, and which pieces of them."""
    return place.data, place.context
