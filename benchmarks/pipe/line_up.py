"""Who takes part in a case: every engine with its own partition methods and with the cuts that look best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.pipe.case import Bounds, Case, Contender
from benchmarks.pipe.cuts import all_cuts, best_cuts, cuts_of_deepspeed, told
from benchmarks.pipe.model import make_model

ALONE = Contender(name="one process", kind="alone")
SIDE_BY_SIDE = Contender(name="side by side", kind="side by side")
SCHEDULES = ("1f1b", "zb-h1")
CHUNKS = 2


def line_up(case: Case, costs: Sequence[float], num_cuts: int) -> list[Contender]:
    """Return the contenders of ``case``.

    Args:
        costs: seconds of each layer of the finest cut, forward and backward.
        num_cuts: how many of its best-looking cuts each engine runs; DeepSpeed's those that it can make.
    """
    if case.tensor > 1:
        alone = Contender(name=ALONE.name, kind=ALONE.kind, layers="tensor")
        return [alone, *_pipelines(case, "tensor", costs, num_cuts)]
    return [ALONE, SIDE_BY_SIDE, *_named_methods(case), *_pipelines(case, "half", costs, num_cuts)]


def _named_methods(case: Case) -> Iterator[Contender]:
    """Yield the stock engine as most programs call it, on whole layers."""
    for method in ("parameters", "uniform"):
        yield Contender(name=f"stock {method}", kind="stock", layers="whole", partition=method)


def _pipelines(case: Case, layers: str, costs: Sequence[float], num_cuts: int) -> Iterator[Contender]:
    p, m = case.num_stages, case.num_micro_batches
    specs = make_model(case, layers).specs
    if len(specs) != len(costs):
        raise ValueError(f"costs must be one for each of the {len(specs)} layers, got {len(costs)}")
    cuts = all_cuts(len(specs), p)
    best = best_cuts(cuts, costs, p, m, num_cuts)
    methods = cuts_of_deepspeed(specs, p)
    of_stock = best_cuts(methods, costs, p, m, num_cuts)
    shared = [*best, *(bounds for bounds in of_stock[:1] if bounds not in best)]  # 1F1B is compared at the same cut
    for bounds in of_stock:
        yield Contender(name=f"stock {told(bounds, specs)}", kind="stock", layers=layers, partition=methods[bounds])
    if m >= 2 * p and case.tensor == 1:
        folded = cuts_of_deepspeed(specs, 2 * p)
        for bounds in best_cuts(folded, costs, p, m, max(1, num_cuts - 1), is_v=True):
            name = f"dualpipev {told(bounds, specs)}"
            yield Contender(name=name, kind="dualpipev", layers=layers, partition=folded[bounds])
    for bounds in shared:
        yield Contender(name=f"torch {told(bounds, specs)}", kind="torch", layers=layers, partition=bounds)
    for schedule in SCHEDULES:
        for bounds in shared if schedule == "1f1b" else best:
            yield _ours(layers, bounds, told(bounds, specs), schedule)
    yield _ours(layers, best[0], told(best[0], specs), "gpipe")
    ring = best_cuts(all_cuts(len(specs), p * CHUNKS), costs, p, m, 1)[0]
    yield _ours(layers, ring, told(ring, specs), "interleaved", CHUNKS)
    yield _ours(layers, best[0], told(best[0], specs), "auto")
    if case.tensor == 1:
        yield _ours(layers, "profile", "profile", "auto")


def _ours(layers: str, partition: Bounds | str, cut: str, schedule: str, chunks: int = 1) -> Contender:
    name = f"ours {schedule} {cut}"
    return Contender(name=name, kind="ours", layers=layers, partition=partition, schedule=schedule, chunks=chunks)
