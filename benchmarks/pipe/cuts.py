"""Where a model can be cut into stages, which cuts each engine can make and which look best; and what a rank measures.

Costs are seconds of each layer, forward and backward, as one process measured them. They only choose who takes part.
"""

from __future__ import annotations

import cProfile
import io
import itertools
import multiprocessing
import os
import pstats
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.utils import partition_balanced, partition_uniform
from torch import nn

import tds
from benchmarks.pipe.model import Batch, Bounds, Case, Contender, Model, build, cut_by_cost, make_model, make_seat
from benchmarks.step_profile import measure
from benchmarks.turns import Team
from tds import action_times
from tds.schedule import LOOP, Costs, Forward, Placement, V, received, schedule_named, sent, simulate
from tds.schedule.simulate import placement_for

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


def stage_seconds(bounds: Bounds, costs: Sequence[float], num_stages: int, placement: str = LOOP) -> list[float]:
    """Return the seconds of each stage; none if ``costs`` are not those of the layers cut."""
    if not bounds or bounds[-1] != len(costs):
        return []
    pieces = [sum(costs[start:stop]) for start, stop in itertools.pairwise(bounds)]
    return _stages_of(pieces, num_stages, is_v=placement == V)


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


def best_chunks(
    costs: Sequence[float], num_stages: int, num_micro_batches: int, num_chunks: int, schedule: str
) -> Bounds:
    """Return the cut into ``num_chunks`` chunks a stage, as ``schedule`` has them lie, of the fastest simulated step.

    A forward is taken for a third of a layer's time, as each half of its backward.
    """
    placement = placement_for(schedule)
    order = schedule_named(schedule, num_chunks, placement)
    actions = [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]

    def step_s(bounds: Bounds) -> float:
        thirds = tuple(sum(costs[start:stop]) / 3 for start, stop in itertools.pairwise(bounds))
        return simulate(actions, Costs(thirds, thirds, thirds), num_chunks, placement).step_s

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
MANY_CHUNKS = ("interleaved", "zb-h1", "zb-v", "dualpipev")
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
        if case.tensor == 1 or placement_for(schedule) == LOOP:
            bounds = best_chunks(costs, p, m, CHUNKS, schedule)
            yield _ours(layers, bounds, format_cut(bounds, specs), schedule, CHUNKS)
    if case.tensor == 1:
        yield _ours(layers, "profile", "profile", "auto")


def _t5_pipelines(case: Case, costs: Sequence[float], num_cuts: int) -> Iterator[Contender]:
    """Yield our schedules alone, for no other engine trains an encoder-decoder; at the default cut, too."""
    p, m = case.num_stages, case.num_micro_batches
    specs = _specs(case, "t5", costs)
    cuts = all_cuts(len(specs), p)
    best = distinct(best_cuts(cuts, costs, p, m, len(cuts)), specs)[:num_cuts]
    shared = distinct([*best, cut_by_cost(case)], specs)
    yield from _all_of_ours("t5", specs, {"1f1b": shared, "zb-h1": shared}, best[0])
    for schedule in MANY_CHUNKS:
        by_cost = [cut_by_cost(case, CHUNKS)] if placement_for(schedule) == LOOP else []
        for bounds in distinct([best_chunks(costs, p, m, CHUNKS, schedule), *by_cost], specs):
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


# Seconds of each layer, Python's own profile of a step, and a recorded step beside its simulation.

REPEATS = 5
NUM_LINES = 40


def seconds_of_layers(chain: nn.Module, model: Model, batch: Batch) -> list[float]:
    """Return seconds of forward and backward of each layer for one micro-batch; the loss counts to the last."""
    layers = list(chain.children())
    rounds = []
    for _ in range(REPEATS + 1):
        x, labels = batch
        seconds = []
        for index, layer in enumerate(layers):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x = x.detach().requires_grad_()
            is_last = index == len(layers) - 1
            start = time.perf_counter()
            y = layer(x)
            out = model.loss_fn(y, labels) if is_last else y
            middle = time.perf_counter()
            gradient = torch.ones_like(out)
            after = time.perf_counter()
            out.backward(gradient)
            seconds.append(middle - start + time.perf_counter() - after)
            x = y
        rounds.append(seconds)
    for parameter in chain.parameters():
        parameter.grad = None
    return [statistics.median(each) for each in zip(*rounds[1:], strict=True)]


def seconds_by_profile(module: Any) -> list[float]:
    """Return seconds of each layer as our engine measures them to cut by, the medians of several looks. Collective."""
    rounds = [[layer.total_s for layer in module._profiled_cut().layers] for _ in range(REPEATS)]
    return [statistics.median(each) for each in zip(*rounds, strict=True)]


def hot_spots(run: Callable[[], Any]) -> str:
    """Return the functions in which ``run`` spends most time of its own, as a table."""
    profile = cProfile.Profile()
    profile.runcall(run)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(NUM_LINES)
    return text.getvalue()


# A recorded step of our engine against ``simulate`` with the costs of that same step.
#
# Each rank records its actions (``tds.action_times``). Costs are means over the micro-batches, of a forward or a half
# of a backward on each piece; a transfer is the median time from the end of the sender's action to the end of the wait
# for its message, of the messages that were waited for. Time after the last action (loss, optimizer) is added as
# measured.


@dataclass(frozen=True)
class Recorded:
    """One step of one rank: its ``Work``, seconds of train_batch, and seconds after the last action."""

    work: list[Any]
    step_s: float
    tail_s: float


def record_steps(engine: Any, steps: list[list[Batch]]) -> list[Recorded]:
    """Take steps of our engine and return what each was. Collective."""
    stage, run = engine._stage, engine._stage.run
    recorder = action_times.Recorder(stage.exchange)

    def recorded_run(*args: Any, **kwargs: Any) -> None:
        stage.recorder = recorder
        run(*args, **kwargs)
        stage.recorder = None

    stage.run = recorded_run
    found = []
    for batches in steps:
        start = time.perf_counter_ns()
        engine.train_batch(iter(batches))
        stop = time.perf_counter_ns()
        work = recorder.take()
        found.append(Recorded(work, (stop - start) * 1e-9, (stop - work[-1].ended_ns) * 1e-9))
    del stage.run
    return found


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step as measured and as simulated, with the costs that the simulation took."""

    measured_s: float
    simulated_s: float
    costs: Any

    @property
    def ratio(self) -> float:
        return self.measured_s / self.simulated_s


def compare(stages: Sequence[Recorded], num_chunks: int, placement: str = LOOP) -> Prediction:
    """Return one step of all stages beside its simulation."""
    costs = costs_of([each.work for each in stages], num_chunks, placement)
    actions = [[work.action for work in each.work] for each in stages]
    timeline = simulate(actions, costs, num_chunks, placement)
    tail_s = min(each.tail_s for each in stages)  # the others' holds their wait for the slowest
    return Prediction(max(each.step_s for each in stages), timeline.step_s + tail_s, costs)


def costs_of(stages: Sequence[Sequence[Any]], num_chunks: int, placement: str = LOOP) -> Any:
    """Return the costs of a recorded step: means over the micro-batches."""
    seconds = [action_times.durations_of(works) for works in stages]
    means = [{key: statistics.fmean(each) for key, each in stage.items()} for stage in seconds]
    lie = Placement(len(stages), num_chunks, placement)
    return replace(action_times.costs_of(means, num_chunks, placement), transfer=transfer_s(stages, lie))


def transfer_s(stages: Sequence[Sequence[Any]], placement: Placement) -> float:
    """Return the median time of a message that was waited for, from the end of the action that sent it."""
    sent_ns = {}
    for stage, works in enumerate(stages):
        for work in works:
            message = sent(work.action, stage, placement)
            if message is not None:
                piece = placement.piece(stage, work.action.chunk) + (1 if isinstance(work.action, Forward) else -1)
                sent_ns[message.kind, message.micro_batch, piece] = work.ended_ns
    found = []
    for stage, works in enumerate(stages):
        for work in works:
            message = received(work.action, stage, placement)
            if message is None or message.peer == stage or not work.waits:
                continue
            left = sent_ns[message.kind, message.micro_batch, placement.piece(stage, work.action.chunk)]
            began, ended = work.waits[-1]
            if began < left:
                found.append(max(0, ended - left) * 1e-9)
    return statistics.median(found) if found else 0.0


# The ranks of the contenders, each with one thread, which stay for a whole case.


class RankOf:
    """A rank of a contender: what it can be asked to measure.

    Each method is called in all ranks of the contender at once; ``step`` is the number of the first step.
    """

    def __init__(self, case: Case, contender: Contender, rank: int) -> None:
        warnings.simplefilter("ignore")
        self.case, self.contender, self.size = case, contender, contender.num_ranks(case)
        seat = make_seat(case, contender, rank)
        if contender.kind in ("stock", "dualpipev", "ours"):
            tds.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        self.built = build(contender, seat)

    def run(self, step: int, num_steps: int = 1) -> dict[str, Any]:
        """Take steps; return their seconds, this rank's processor time, and the loss of each."""
        batches = self._batches(step, num_steps)
        start, cpu_start = time.perf_counter(), time.process_time()
        losses = [self.built.step(each) for each in batches]
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        return {"seconds": seconds, "cpu_s": cpu_s, "losses": losses}

    def memory(self, step: int) -> dict[str, int]:
        """Take a step; return the bytes of tensors before it, and the most that it adds."""
        (batches,) = self._batches(step)
        before, added = measure(lambda: self.built.step(batches))
        return {"before_bytes": before, "added_bytes": added}

    def costs(self, step: int, num_steps: int) -> list[Recorded]:
        """Take steps of our engine; return what each was."""
        return record_steps(self.built.engine, self._batches(step, num_steps))

    def cut(self) -> tuple[int, ...]:
        """Return the bounds by which the engine has cut the model; none where nobody cuts."""
        return tuple(int(bound) for bound in getattr(self.built.part, "parts", self.contender.partition))

    def layers(self) -> list[float]:
        """Return seconds of each layer, forward and backward, for one micro-batch; the loss counts to the last."""
        if self.contender.partition == "profile":
            return seconds_by_profile(self.built.part)
        return seconds_of_layers(self.built.part, self.built.model, self.built.model.batches(self.case, 0)[0])

    def profile(self, step: int, num_steps: int) -> str:
        """Take steps under Python's profiler; return the table of where the time went."""
        batches = self._batches(step, num_steps)
        return hot_spots(lambda: [self.built.step(each) for each in batches])

    def _batches(self, step: int, num_steps: int = 1) -> list[list[Batch]]:
        """Return the micro-batches of steps, once all ranks have theirs."""
        batches = [self.built.model.batches(self.case, number) for number in range(step, step + num_steps)]
        if self.size > 1:
            dist.barrier()
        return batches


START_METHODS = ("forkserver", "spawn", "fork")
PRELOADED = ["torch.distributed.pipelining", "benchmarks.pipe.cuts"]
"""What the server that forks them imports once: a process is then ready in a fraction of a second."""


@contextmanager
def assembled(case: Case, contenders: Iterable[Contender], start_method: str) -> Iterator[dict[str, Team]]:
    """Yield the ranks of each contender, by name; afterwards none of their processes is left."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler that counts memory is talkative
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if start_method == "forkserver":
        multiprocessing.set_forkserver_preload(PRELOADED)
    teams: dict[str, Team] = {}
    with ExitStack() as stack:
        for each in contenders:
            size = each.num_ranks(case)
            team = Team(each.name, RankOf, (case, each), size=size, start_method=start_method, has_group=size > 1,
                        threads=1)  # fmt: skip
            stack.callback(team.close)
            team.ready()
            teams[each.name] = team
        yield teams
