"""Who takes part in a case: every engine with its own partition methods and with the cuts that look best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from deepspeed.pipe import LayerSpec

from benchmarks.pipe.case import Bounds, Case, Contender
from benchmarks.pipe.cuts import all_cuts, best_cuts, best_ring, cuts_of_deepspeed, distinct, format_cut
from benchmarks.pipe.model import make_model

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
    from benchmarks.pipe.t5_model import cut_by_cost

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
