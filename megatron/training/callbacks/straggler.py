"""StragglerWarning: names the rank that is clearly slower than its peers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron.mpu.topology import Coordinate, Topology
from megatron.training.callbacks.speed_monitor import SpeedMonitor
from megatron.training.trainer import Callback

# The detection uses measurements that every rank takes anyway: its compute time and its wait for data.
#
# Compute time is the time of forward and backward passes without waits for other stages. With tensor parallelism it
# includes waits for the tensor group: all ranks of the group then have similar times, and are reported together.
#
# Any rank may be slow once. ``StragglerDetector`` warns only if the same rank is slow in several consecutive reports.

AS_REPLICA, AS_STAGE = 1.5, 2.0
"""A rank is clearly slower from this factor times the median compute time of its peers: the first one if the peers are
replicas, the second one if they are other stages, whose times differ by design."""
AT_LEAST_S = 0.02
"""Minimum difference to the peers in seconds per step; smaller differences are noise in small models."""
ALIKE = 0.9
IN_A_ROW = 3


class StragglerWarning(Callback):
    """Reports the slowest rank on rank 0; must be called after ``SpeedMonitor``, whose measurements it reads."""

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
    """The slowest rank, or its tensor group.

    Args:
        place: (stage, data-parallel rank, context-parallel rank).
        text: description for the log.
    """

    place: tuple[int, int, int]
    text: str


class StragglerDetector:
    """Counts the consecutive reports in which the same rank is the slowest."""

    def __init__(self) -> None:
        self._place: tuple[int, int, int] | None = None
        self._times = 0

    def judge(self, found: Straggler | None) -> str | None:
        """Record the slowest rank of a report; return its text after every ``IN_A_ROW`` consecutive reports of it."""
        position = None if found is None else found.place
        self._times = self._times + 1 if position == self._place else 1
        self._place = position
        return None if found is None or self._times % IN_A_ROW else found.text


def slowest(per_step: Sequence[float], waited_s: Sequence[float], topology: Topology) -> Straggler | None:
    """Return the rank that is clearly slower than its peers, or None.

    The peers of a rank are the ranks of its stage with another data-parallel or context-parallel rank. If there are
    none, the peers are the ranks of the other stages.

    Args:
        per_step: seconds of compute per step, by rank.
        waited_s: seconds per step of this time that were spent waiting for data, by rank.
    """
    rank = max(range(len(per_step)), key=per_step.__getitem__)
    peers = _peers(rank, topology)
    if not peers:
        return None
    usual = statistics.median(per_step[peer] for peer in peers)
    factor = AS_REPLICA if topology.data_context > 1 else AS_STAGE
    if per_step[rank] < factor * usual or per_step[rank] - usual < AT_LEAST_S:
        return None
    coordinate = topology.coordinate(rank)
    alike = [r for r in _same_tensor_group(rank, topology) if per_step[r] > ALIKE * per_step[rank]]
    names = f"rank {rank}" if len(alike) == 1 else f"ranks {', '.join(map(str, alike))}"
    context = f", context {coordinate.context}" if topology.context > 1 else ""
    data_text = f", {waited_s[rank]:.3f} s of it waiting for data" if waited_s[rank] > AT_LEAST_S else ""
    text = (
        f"slowest: {names} (stage {coordinate.pipe}, data {coordinate.data}{context}) with {per_step[rank]:.3f} s of "
        f"compute per step{data_text}; its peers need {usual:.3f} s"
    )
    return Straggler((coordinate.pipe, coordinate.data, coordinate.context), text)


def _peers(rank: int, topology: Topology) -> list[int]:
    coordinate = topology.coordinate(rank)
    coordinates = {other: topology.coordinate(other) for other in range(topology.world_size)}
    replicas = [
        r
        for r, other_coordinate in coordinates.items()
        if other_coordinate.pipe == coordinate.pipe and _replica(other_coordinate) != _replica(coordinate)
    ]
    return replicas or [r for r, other_coordinate in coordinates.items() if other_coordinate.pipe != coordinate.pipe]


def _same_tensor_group(rank: int, topology: Topology) -> list[int]:
    coordinate = topology.coordinate(rank)
    coordinates = {other: topology.coordinate(other) for other in range(topology.world_size)}
    return [
        r
        for r, other_coordinate in coordinates.items()
        if (other_coordinate.pipe, *_replica(other_coordinate)) == (coordinate.pipe, *_replica(coordinate))
    ]


def _replica(place: Coordinate) -> tuple[int, int]:
    """Return the data-parallel and context-parallel rank of a coordinate."""
    return place.data, place.context
