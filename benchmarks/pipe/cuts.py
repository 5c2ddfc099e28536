"""Where a model can be cut into stages, which cuts each engine can make, and which look best.

Costs are seconds of each layer, forward and backward, as one process measured them. They only choose who takes part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from deepspeed.pipe import LayerSpec
from deepspeed.runtime.utils import partition_balanced, partition_uniform

from benchmarks.pipe.cases import Bounds, Case, Contender
from benchmarks.pipe.model import make_model

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


# Who takes part: every engine with its own partition methods and with the cuts that look best.

ALONE = Contender(name="one process", kind="alone", keeps_freed=True)
SIDE_BY_SIDE = Contender(name="side by side", kind="side by side", keeps_freed=True)
"""What our engine is measured by must keep freed memory as it does."""
ONE_CHUNK = ("1f1b", "zb-h1", "gpipe", "auto")
MANY_CHUNKS = ("interleaved", "zb-h1")
CHUNKS = 2


def line_up(
    case: Case, costs: Sequence[float], num_cuts: int, of_others: Sequence[float] | None = None
) -> list[Contender]:
    """Return the contenders of ``case``.

    Args:
        costs: seconds of each layer of the finest cut, forward and backward.
        of_others: the same where freed memory is not kept, by which the cuts of other engines are chosen; None: as
            ``costs``.
        num_cuts: how many of its best-looking cuts each engine runs; DeepSpeed's those that it can make.
    """
    if case.sizes.family == "t5":
        one, two = (replace(each, layers="t5") for each in (ALONE, SIDE_BY_SIDE))
        return [one, two, *_t5_pipelines(case, costs, num_cuts)]
    theirs = costs if of_others is None else of_others
    if case.tensor > 1:
        return [replace(ALONE, layers="tensor"), *_pipelines(case, "tensor", costs, theirs, num_cuts)]
    return [ALONE, SIDE_BY_SIDE, *_named_methods(case), *_pipelines(case, "half", costs, theirs, num_cuts)]


def _named_methods(case: Case) -> Iterator[Contender]:
    """Yield the stock engine as most programs call it, on whole layers."""
    for method in ("parameters", "uniform"):
        yield Contender(name=f"stock {method}", kind="stock", layers="whole", partition=method)


def _pipelines(
    case: Case, layers: str, costs: Sequence[float], theirs: Sequence[float], num_cuts: int
) -> Iterator[Contender]:
    p, m = case.num_stages, case.num_micro_batches
    specs = _specs(case, layers, costs)
    cuts = all_cuts(len(specs), p)
    best = best_cuts(cuts, costs, p, m, num_cuts)
    methods = cuts_of_deepspeed(specs, p)
    of_stock = best_cuts(methods, theirs, p, m, num_cuts)
    of_torch = best_cuts(cuts, theirs, p, m, num_cuts)
    shared = list(dict.fromkeys([*best, *of_torch, *of_stock[:1]]))  # 1F1B is compared at the same cut
    for bounds in of_stock:
        yield Contender(
            name=f"stock {format_cut(bounds, specs)}", kind="stock", layers=layers, partition=methods[bounds]
        )
    if m >= 2 * p and case.tensor == 1:
        folded = cuts_of_deepspeed(specs, 2 * p)
        for bounds in best_cuts(folded, theirs, p, m, max(1, num_cuts - 1), is_v=True):
            name = f"dualpipev {format_cut(bounds, specs)}"
            yield Contender(name=name, kind="dualpipev", layers=layers, partition=folded[bounds])
    for bounds in shared:
        yield Contender(name=f"torch {format_cut(bounds, specs)}", kind="torch", layers=layers, partition=bounds)
    gpipe = best[:1] if case.has_gpipe else []
    yield from _all_of_ours(layers, specs, {"1f1b": shared, "zb-h1": best, "gpipe": gpipe}, best[0])
    for schedule in MANY_CHUNKS:
        ring = best_ring(costs, p, m, CHUNKS, schedule)
        yield _ours(layers, ring, format_cut(ring, specs), schedule, CHUNKS)
    if case.tensor == 1:
        yield _ours(layers, "profile", "profile", "auto")


def _t5_pipelines(case: Case, costs: Sequence[float], num_cuts: int) -> Iterator[Contender]:
    """Yield our schedules alone, for no other engine trains an encoder-decoder; at the default cut, too."""
    from benchmarks.pipe.model import cut_by_cost

    p, m = case.num_stages, case.num_micro_batches
    specs = _specs(case, "t5", costs)
    cuts = all_cuts(len(specs), p)
    best = distinct(best_cuts(cuts, costs, p, m, len(cuts)), specs)[:num_cuts]
    shared = distinct([*best, cut_by_cost(case)], specs)
    yield from _all_of_ours("t5", specs, {"1f1b": shared, "zb-h1": shared}, best[0])
    for schedule in MANY_CHUNKS:
        rings = distinct([best_ring(costs, p, m, CHUNKS, schedule), cut_by_cost(case, CHUNKS)], specs)
        for bounds in rings:
            yield _ours("t5", bounds, format_cut(bounds, specs), schedule, CHUNKS)
    yield _ours("t5", "profile", "profile", "auto")


def _specs(case: Case, layers: str, costs: Sequence[float]) -> list[LayerSpec]:
    specs = make_model(case, layers).specs
    if len(specs) != len(costs):
        raise ValueError(f"costs must be one for each of the {len(specs)} layers, got {len(costs)}")
    return specs


def _all_of_ours(
    layers: str, specs: Sequence[LayerSpec], cuts: Mapping[str, Sequence[Bounds]], best: Bounds
) -> Iterator[Contender]:
    """Yield each of our schedules of one chunk at its ``cuts``, by name; those that have none there at the ``best``."""
    for schedule in ONE_CHUNK:
        for bounds in cuts.get(schedule, [best]):
            yield _ours(layers, bounds, format_cut(bounds, specs), schedule)


def _ours(layers: str, partition: Bounds | str, cut: str, schedule: str, chunks: int = 1) -> Contender:
    name = f"ours {schedule} {cut}"
    return Contender(name=name, kind="ours", layers=layers, partition=partition, schedule=schedule, chunks=chunks)
