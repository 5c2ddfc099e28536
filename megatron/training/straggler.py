"""Which rank is clearly slower than its peers, by numbers that every rank has anyway: its own work, its wait for data.

Own work is the time of forward and backward passes without waits for other stages. Where weights are cut, a rank waits
for its tensor group within that time: all ranks of the group then look alike, and are named together.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from megatron.mpu.topology import Topology

AS_REPLICA, AS_STAGE = 1.5, 2.0
"""Clearly slower is so many times its peers' work; stages differ by themselves."""
AT_LEAST_S = 0.02
"""More than its peers, a step; less is the noise of small models."""
ALIKE = 0.9


def slowest(per_step: Sequence[float], waited_s: Sequence[float], topology: Topology) -> str | None:
    """Say which rank holds the others up, or return None.

    A rank's peers are the same stage of other replicas, or the other stages where there is one replica.

    Args:
        per_step: seconds of own work of each rank in a step.
        waited_s: how much of it was wait for data.
    """
    rank = max(range(len(per_step)), key=per_step.__getitem__)
    peers = _peers(rank, topology)
    if not peers:
        return None
    usual = statistics.median(per_step[peer] for peer in peers)
    clearly = AS_REPLICA if topology.data > 1 else AS_STAGE
    if per_step[rank] < clearly * usual or per_step[rank] - usual < AT_LEAST_S:
        return None
    place = topology.coordinate(rank)
    alike = [r for r in _same_tensor_group(rank, topology) if per_step[r] > ALIKE * per_step[rank]]
    names = f"rank {rank}" if len(alike) == 1 else f"ranks {', '.join(map(str, alike))}"
    of_data = f", {waited_s[rank]:.3f} s of it waiting for data" if waited_s[rank] > AT_LEAST_S else ""
    return (
        f"slowest: {names} (stage {place.pipe}, data {place.data}) with {per_step[rank]:.3f} s of own work a step"
        f"{of_data}; its peers need {usual:.3f} s"
    )


def _peers(rank: int, topology: Topology) -> list[int]:
    own = topology.coordinate(rank)
    places = {other: topology.coordinate(other) for other in range(topology.world_size)}
    replicas = [r for r, place in places.items() if place.pipe == own.pipe and place.data != own.data]
    return replicas or [r for r, place in places.items() if place.pipe != own.pipe]


def _same_tensor_group(rank: int, topology: Topology) -> list[int]:
    own = topology.coordinate(rank)
    places = {other: topology.coordinate(other) for other in range(topology.world_size)}
    return [r for r, place in places.items() if (place.pipe, place.data) == (own.pipe, own.data)]
