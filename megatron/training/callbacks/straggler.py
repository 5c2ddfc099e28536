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

REPLICA_FACTOR, STAGE_FACTOR = 1.5, 2.0
"""A rank is reported if its compute time is at least this factor times the median of its peers. ``REPLICA_FACTOR``
applies if the peers are replicas, ``STAGE_FACTOR`` if they are other stages, whose times differ by design."""
MIN_DIFFERENCE_S = 0.02
"""Minimum difference to the peers in seconds per step; smaller differences are noise in small models."""
GROUP_FRACTION = 0.9
REPORTS_PER_WARNING = 3


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
        warning = self._detector.update(
            find_straggler(monitor.ranks.compute_s, monitor.ranks.waited_per_step_s, topology)
        )
        if warning is not None:
            self.trainer.print_line(f"step {self.trainer.progress.step} | {warning}")


class Straggler(NamedTuple):
    """The slowest rank, or its tensor group.

    Args:
        position: (stage, data-parallel rank, context-parallel rank).
        text: description for the log.
    """

    position: tuple[int, int, int]
    text: str


class StragglerDetector:
    """Counts consecutive reports with the same slowest rank."""

    def __init__(self) -> None:
        self._last_position: tuple[int, int, int] | None = None
        self._num_reports = 0

    def update(self, straggler: Straggler | None) -> str | None:
        """Record the slowest rank; return a warning after ``REPORTS_PER_WARNING`` consecutive reports on a rank."""
        position = None if straggler is None else straggler.position
        self._num_reports = self._num_reports + 1 if position == self._last_position else 1
        self._last_position = position
        return None if straggler is None or self._num_reports % REPORTS_PER_WARNING else straggler.text


def find_straggler(compute_s: Sequence[float], waited_s: Sequence[float], topology: Topology) -> Straggler | None:
    """Find the rank that is clearly slower than its peers, or None.

    A rank's peers are the ranks on its stage with another data-parallel or context-parallel rank. If there are none,
    the peers are the ranks on other stages.

    Args:
        compute_s: compute seconds per step, by rank.
        waited_s: seconds per step in this time that were spent waiting for data, by rank.
    """
    rank = max(range(len(compute_s)), key=compute_s.__getitem__)
    peers = _peers(rank, topology)
    if not peers:
        return None
    median_s = statistics.median(compute_s[peer] for peer in peers)
    factor = REPLICA_FACTOR if topology.data_context > 1 else STAGE_FACTOR
    if compute_s[rank] < factor * median_s or compute_s[rank] - median_s < MIN_DIFFERENCE_S:
        return None
    coordinate = topology.coordinate(rank)
    group_ranks = [
        other for other in _same_tensor_group(rank, topology) if compute_s[other] > GROUP_FRACTION * compute_s[rank]
    ]
    names = f"rank {rank}" if len(group_ranks) == 1 else f"ranks {', '.join(map(str, group_ranks))}"
    context = f", context {coordinate.context}" if topology.context > 1 else ""
    data_text = f", {waited_s[rank]:.3f} s of it waiting for data" if waited_s[rank] > MIN_DIFFERENCE_S else ""
    text = (
        f"slowest: {names} (stage {coordinate.pipe}, data {coordinate.data}{context}) with {compute_s[rank]:.3f} s of "
        f"compute per step{data_text}; its peers need {median_s:.3f} s"
    )
    return Straggler((coordinate.pipe, coordinate.data, coordinate.context), text)


def _peers(rank: int, topology: Topology) -> list[int]:
    coordinate = topology.coordinate(rank)
    coordinates = {other: topology.coordinate(other) for other in range(topology.world_size)}
    replicas = [
        r
        for r, other_coordinate in coordinates.items()
        if other_coordinate.pipe == coordinate.pipe and _replica_ranks(other_coordinate) != _replica_ranks(coordinate)
    ]
    return replicas or [r for r, other_coordinate in coordinates.items() if other_coordinate.pipe != coordinate.pipe]


def _same_tensor_group(rank: int, topology: Topology) -> list[int]:
    coordinate = topology.coordinate(rank)
    coordinates = {other: topology.coordinate(other) for other in range(topology.world_size)}
    return [
        r
        for r, other_coordinate in coordinates.items()
        if (other_coordinate.pipe, *_replica_ranks(other_coordinate)) == (coordinate.pipe, *_replica_ranks(coordinate))
    ]


def _replica_ranks(coordinate: Coordinate) -> tuple[int, int]:
    return coordinate.data, coordinate.context
