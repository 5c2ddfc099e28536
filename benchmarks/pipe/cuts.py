"""Where a model can be cut into stages, which cuts each engine can make, and which look best.

Costs are seconds of each layer, forward and backward, as one process measured them. They only choose who takes part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from deepspeed.pipe import LayerSpec
from deepspeed.runtime.utils import partition_balanced, partition_uniform

from benchmarks.pipe.case import Bounds

WEIGHT_OF_A_LAYER = {
    "Block": 1.0,
    "TransformerLayerPipe": 1.0,
    "EncoderLayerPipe": 1.0,
    "DecoderLayerPipe": 1.0,
    "Attention": 0.5,
    "Mlp": 0.5,
}


def all_cuts(num_layers: int, num_pieces: int) -> list[Bounds]:
    """Return all bounds of ``num_pieces`` pieces, none of them empty."""
    inner = itertools.combinations(range(1, num_layers), num_pieces - 1)
    return [(0, *each, num_layers) for each in inner]


def cuts_of_deepspeed(specs: Sequence[LayerSpec], num_pieces: int) -> dict[Bounds, str]:
    """Return the cuts that a ``partition_method`` of DeepSpeed's gives here, with a method that does.

    Methods: "uniform", "parameters", and "type:REGEX" for each set of the model's class names.
    """
    names = [spec.typename.__name__ for spec in specs]
    sizes = [sum(p.numel() for p in spec.build().parameters()) for spec in specs]
    found = {_bounds(partition_balanced(weights=sizes, num_parts=num_pieces)): "parameters"}
    found.setdefault(_bounds(partition_uniform(num_items=len(specs), num_parts=num_pieces)), "uniform")
    kinds = sorted(set(names))
    for size in range(1, len(kinds) + 1):
        for chosen in itertools.combinations(kinds, size):
            weights = [int(name in chosen) for name in names]
            method = "type:" + "|".join(f"^{name}$" for name in chosen)
            found.setdefault(_bounds(partition_balanced(weights=weights, num_parts=num_pieces)), method)
    return {bounds: method for bounds, method in found.items() if _has_no_empty_piece(bounds)}


def predicted_s(
    bounds: Bounds, costs: Sequence[float], num_stages: int, num_micro_batches: int, *, is_v: bool = False
) -> float:
    """Return about how long a step takes: the slowest stage all the time, the others once.

    With more pieces than stages they lie in a ring, or in a V (stage 0 has the first and the last).
    """
    pieces = [sum(costs[start:stop]) for start, stop in itertools.pairwise(bounds)]
    stages = _stages_of(pieces, num_stages, is_v=is_v)
    slowest = max(stages)
    chunks = len(pieces) / num_stages
    return num_micro_batches * slowest + (sum(stages) - slowest) / chunks + 1e-3 * max(pieces)


def stage_seconds(bounds: Bounds, costs: Sequence[float], num_stages: int) -> list[float]:
    """Return the seconds of each stage, its pieces in a ring; none if ``costs`` are not those of the layers cut."""
    if not bounds or bounds[-1] != len(costs):
        return []
    return _stages_of([sum(costs[start:stop]) for start, stop in itertools.pairwise(bounds)], num_stages)


def best_cuts(
    cuts: Iterable[Bounds],
    costs: Sequence[float],
    num_stages: int,
    num_micro_batches: int,
    number: int,
    *,
    is_v: bool = False,
) -> list[Bounds]:
    """Return the ``number`` cuts that look fastest, the fastest first."""
    return sorted(cuts, key=lambda each: predicted_s(each, costs, num_stages, num_micro_batches, is_v=is_v))[:number]


def format_cut(bounds: Bounds, specs: Sequence[LayerSpec]) -> str:
    """Return the cut in transformer layers, such as "5.5+2.5"; embedding and head count for nothing."""
    counts = [WEIGHT_OF_A_LAYER.get(spec.typename.__name__, 0.0) for spec in specs]
    return "+".join(f"{sum(counts[start:stop]):g}" for start, stop in itertools.pairwise(bounds))


def best_ring(
    costs: Sequence[float], num_stages: int, num_micro_batches: int, num_chunks: int, schedule: str
) -> Bounds:
    """Return the cut into ``num_chunks`` chunks a stage of the fastest step by simulation.

    A forward is taken for a third of a layer's time, as each half of its backward.
    """
    from tds.schedule import Costs, schedule_named, simulate

    order = schedule_named(schedule, num_chunks)
    actions = [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]

    def step_s(bounds: Bounds) -> float:
        thirds = tuple(sum(costs[start:stop]) / 3 for start, stop in itertools.pairwise(bounds))
        return simulate(actions, Costs(thirds, thirds, thirds), num_chunks).step_s

    return min(all_cuts(len(costs), num_stages * num_chunks), key=step_s)


def distinct(cuts: Iterable[Bounds], specs: Sequence[LayerSpec]) -> list[Bounds]:
    """Return the cuts whose names differ, of those alike the first: a norm to the left or right changes little."""
    found: dict[str, Bounds] = {}
    for bounds in cuts:
        found.setdefault(format_cut(bounds, specs), bounds)
    return list(found.values())


def _stages_of(pieces: Sequence[float], num_stages: int, *, is_v: bool = False) -> list[float]:
    stages = [0.0] * num_stages
    for index, piece in enumerate(pieces):
        place = index % num_stages
        is_way_back = is_v and index >= num_stages
        stages[num_stages - 1 - place if is_way_back else place] += piece
    return stages


def _bounds(found: Sequence[int]) -> Bounds:
    return tuple(int(bound) for bound in found)


def _has_no_empty_piece(bounds: Bounds) -> bool:
    return all(start < stop for start, stop in itertools.pairwise(bounds))
