"""A forward beside a backward gives the same numbers, and each waits for what is its own."""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tds.engine import build
from tds.engine.overlapped import ForwardThread, OverlappingStage, waits_behind
from tds.engine.stage import SchedulePlan
from tds.gradients import runs_beside_backward
from tds.p2p.communicator import P2PCommunicator
from tds.pipe import LayerSpec
from tds.schedule import BackwardInput, BackwardWeight, Forward, Placement, schedule_named
from tds.timers import Recorder, Work
from tests.helpers.harness import fork_ranks, run_ranks
from tests.helpers.toys import Dense, Toy, check_equal, make_engine, run_toys, train

ON = {"overlap_forward_backward": True}
IN_A_LOOP = {"chunks": 2}
IN_A_V = {"chunks": 2, "placement": "v"}


def toy_of(schedule: str, micro_batches: int = 6, **more: Any) -> Toy:
    options = IN_A_LOOP if schedule == "interleaved" else IN_A_V if schedule in ("zb-v", "dualpipev") else {}
    pipeline = {"schedule": schedule, **ON}
    more.setdefault("layers", 8 if options else 5)
    return Toy(micro_batches=micro_batches, options=options, pipeline=pipeline, **more)


class _Seen:
    """Counts the pairs of a rank, and the threads that receive at once."""

    def __init__(self) -> None:
        self.pairs = 0
        own = OverlappingStage._do_pair

        def counted(stage: Any, *args: Any) -> None:
            self.pairs += 1
            own(stage, *args)

        OverlappingStage._do_pair = counted  # type: ignore[method-assign]
        self.receiving = self.receivers = 0
        take = P2PCommunicator._take

        def slowly(*args: Any) -> torch.Tensor:
            self.receiving += 1
            self.receivers = max(self.receivers, self.receiving)
            time.sleep(0.001)
            found = take(*args)
            self.receiving -= 1
            return found

        P2PCommunicator._take = slowly  # type: ignore[method-assign]


def _both(rank: int, toys: list[Toy], num_stages: int) -> tuple[list[Any], list[Any], int]:
    """Return what the toys give with pairs and without, and the pairs."""
    seen = _Seen()
    off = [replace(toy, pipeline={"schedule": toy.pipeline["schedule"]}) for toy in toys]
    found = run_toys(rank, toys, num_stages), run_toys(rank, off, num_stages), seen.pairs
    assert seen.receivers == 1, "the backward of a pair receives once its forward has"
    return found


def check_same(ranks: list[Any], toys: list[Toy]) -> None:
    """Compare with the same ranks without pairs, to the bit, and with one process."""
    for number, toy in enumerate(toys):
        check_equal([on[number] for on, _, _ in ranks], toy, tolerance=1e-12 if toy.dtype is torch.float64 else 1e-4)
        for on, off, _ in ranks:
            (loss, got, norm), (wanted_loss, wanted, wanted_norm) = on[number], off[number]
            assert torch.equal(loss, wanted_loss) and norm == wanted_norm, toy
            assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in got), toy


QUICK = [toy_of("dualpipev", 5, loss="pair", layers=4)]
SLOW = [
    *(
        toy_of(name, m, kind=kind)
        for name in ("1f1b", "interleaved", "zb-v", "dualpipev")
        for m in (1, 2, 4, 7)
        for kind in ("chain", "tied")
    ),
    *(toy_of("1f1b", m, kind="many") for m in (3, 8)),
    toy_of("1f1b", 8, kind="sharing", dtype=torch.float32),
]


def test_pairs_give_what_passes_in_turn_give_to_the_bit() -> None:
    ranks = run_ranks(2, _both, QUICK, 2)
    check_same(ranks, QUICK)
    assert all(pairs >= 5 for *_, pairs in ranks), [pairs for *_, pairs in ranks]


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 4])
def test_pairs_of_every_schedule_give_what_passes_in_turn_give_to_the_bit(num_stages: int) -> None:
    ranks = run_ranks(num_stages, _both, SLOW, num_stages, deadline_s=300.0)
    check_same(ranks, SLOW)
    assert all(pairs >= 10 for *_, pairs in ranks), [pairs for *_, pairs in ranks]


# What two threads could do to each other.


class Slow(nn.Module):
    """A layer whose passes sleep for random times, and which counts those that run at once."""

    at_work = [0, 0]
    both = 0

    def __init__(self, seed: int, wide: int, dtype: torch.dtype, longest_s: float) -> None:
        super().__init__()
        self.inner, self.random, self.longest_s = Dense(seed, wide, dtype), random.Random(seed), longest_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pause(0)
        y = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.pause(1))
        return y

    def pause(self, number: int) -> None:
        Slow.at_work[number] += 1
        time.sleep(self.random.uniform(0, self.longest_s))
        Slow.both += all(Slow.at_work)
        Slow.at_work[number] -= 1


class SlowToy(Toy):
    """A toy of such layers."""

    longest_s = 0.004

    def specs(self) -> list[Any]:
        return [LayerSpec(Slow, 10 + i, self.wide, self.dtype, self.longest_s) for i in range(self.layers)]


def _stressed(rank: int, toys: list[Toy], num_stages: int) -> tuple[list[Any], list[Any], int]:
    on, off, _ = _both(rank, toys, num_stages)
    return on, off, Slow.both


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 4])
def test_random_pauses_in_both_threads_change_no_bit(num_stages: int) -> None:
    toys: list[Toy] = [
        SlowToy(**{**vars(toy_of(name, m)), "rows": rows})
        for name in ("1f1b", "interleaved", "zb-v", "dualpipev")
        for m, rows in ((6, 3), (12, 3))
    ]
    ranks = run_ranks(num_stages, _stressed, toys, num_stages, deadline_s=300.0)
    check_same(ranks, toys)
    assert all(both > 20 for *_, both in ranks), [both for *_, both in ranks]


class Failing(nn.Module):
    """A layer of which one pass of one micro-batch fails on the last stage."""

    def __init__(self, seed: int, wide: int, dtype: torch.dtype, where: str) -> None:
        super().__init__()
        self.inner, self.where, self.count = Dense(seed, wide, dtype), where, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        y = self.inner(x)
        if self.count == 4 and "forward" in self.where:
            raise KeyError("the fourth forward")
        if self.count == 3 and "backward" in self.where:
            y.register_hook(self.fail)
        return y

    def fail(self, _: torch.Tensor) -> None:
        raise ArithmeticError("the third backward")


class FailingToy(Toy):
    where = ""

    def specs(self) -> list[Any]:
        last = LayerSpec(Failing, 20, self.wide, self.dtype, self.where)
        return [*[LayerSpec(Dense, 10 + i, self.wide, self.dtype) for i in range(3)], last]


def _errors(rank: int, where: str, folder: Path) -> None:
    """Write what the first call and the next one raise, and leave at once: a peer sees a closed connection."""
    toy = FailingToy(**vars(toy_of("1f1b", 6, layers=4)))
    toy.where = where
    engine = make_engine(toy, 2)
    texts = []
    for _ in range(2):
        try:
            train(engine, toy)
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    (folder / f"{rank}").write_text(json.dumps([*texts, len(engine._stage._in_flight)]))
    os._exit(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("forward", "KeyError: 'the fourth"),
        ("backward", "ArithmeticError: the third"),
        ("forward backward", "KeyError"),
    ],
)
def test_an_error_of_either_thread_ends_the_call_on_all_stages(where: str, wanted: str, tmp_path: Path) -> None:
    codes, _, reports = fork_ranks(2, _errors, where, tmp_path)
    assert codes == [3, 3], reports
    first, last = (json.loads((tmp_path / f"{rank}").read_text()) for rank in (0, 1))
    assert last[0].startswith(wanted) and first[0].startswith("PeerLost"), (first, last)
    for _, after, num_in_flight in (first, last):
        assert "cannot go on" in after and "ended in the middle" in after and num_in_flight == 0


def test_a_thread_runs_one_forward_at_a_time_and_raises_where_it_is_joined() -> None:
    thread, seen = ForwardThread(1), []

    def note() -> None:
        seen.append((runs_beside_backward(), thread.is_here, torch.get_num_threads(), torch.is_grad_enabled()))

    def fail() -> None:
        raise KeyError("forward")

    thread.start(note)
    thread.join()
    thread.start(fail)
    with pytest.raises(KeyError, match="forward"):
        thread.join()
    thread.start(note)
    thread.join()
    assert seen == [(True, True, 1, True)] * 2
    assert not runs_beside_backward() and not thread.is_here


def _measured(rank: int) -> tuple[list[Work], float, float]:
    """Return the actions of a step, and its time and the waits that count as idle, in seconds."""
    toy = SlowToy(**vars(toy_of("dualpipev", 6)))
    toy.longest_s = 0.01
    engine = make_engine(toy, 2)
    train(engine, toy)
    engine._stage.recorder = Recorder(engine._stage.exchange)
    engine.rows_of_steps("test")
    stage, run = engine._stage, engine._stage.run

    def recorded(*args: Any) -> None:
        stage.recorder = recorder
        run(*args)

    recorder, stage.run = engine._stage.recorder, recorded
    train(engine, toy)
    ((began, ended, waited),) = engine.rows_of_steps("test")
    return recorder.take(), (ended - began) * 1e-9, waited * 1e-9


@pytest.mark.slow
def test_both_actions_of_a_pair_are_recorded_and_no_time_counts_twice() -> None:
    for works, step_s, waited_s in run_ranks(2, _measured):
        beside = [(work, after) for work, after in pairwise(works) if work.is_beside]
        assert len(beside) >= 6 and len(works) == 2 * 2 * 6 + sum(isinstance(w.action, BackwardWeight) for w in works)
        for work, after in beside:
            assert isinstance(work.action, Forward) and not after.is_beside
            assert work.started_ns <= after.began_ns <= after.ended_ns
        overlapping = [after for work, after in beside if after.started_ns < work.ended_ns]
        assert len(overlapping) >= 3
        spans = [(work.started_ns, work.ended_ns) for work in works]
        busy = sum(end - start for start, end in spans)
        covered, until = 0, 0
        for start, end in sorted(spans):
            covered += max(end - max(start, until), 0)
            until = max(until, end)
        assert busy > covered  # pairs
        assert step_s - waited_s == pytest.approx(covered * 1e-9, rel=0.1)


def test_a_backward_that_waits_while_its_forward_runs_is_not_idle() -> None:
    assert waits_behind(20, [(0, 10), (12, 20), (15, 24), (30, 35)]) == [(20, 24), (30, 35)]


def test_in_a_pair_the_forward_alone_swaps_linear_layers() -> None:
    """They are one for a process: a backward that puts them back would do so in the midst of the forward."""
    stage, swapped = object.__new__(OverlappingStage), nullcontext()
    stage.splitter = SimpleNamespace(active=lambda: swapped)
    stage._program = SimpleNamespace(put_off={(0, 0), (1, 0)})
    stage._beside = Forward(1)
    assert stage._splitting(Forward(1)) is swapped and stage._splitting(BackwardInput(0)) is not swapped
    stage._beside = None
    assert stage._splitting(BackwardInput(0)) is swapped


# What is asked for where it cannot be.


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"schedule": "auto", **ON}, "needs a schedule by name.* Use 1f1b, interleaved, zb-v, dualpipev, or leave"),
        ({"overlap_forward_backward": "yes"}, "must be true or false, got 'yes'"),
    ],
)
def test_what_cannot_run_beside_a_backward_is_refused_with_the_way_out(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build.overlaps_passes(_engine(section))


def test_one_stage_recompute_and_devices_run_in_turn(caplog: pytest.LogCaptureFixture) -> None:
    assert build.overlaps_passes(_engine(ON)) and not build.overlaps_passes(_engine({}))
    assert not build.overlaps_passes(_engine(ON, num_stages=1)) and not caplog.text
    with caplog.at_level("INFO", logger="tds"):
        assert not build.overlaps_passes(_engine(ON, device="meta"))
        assert not build.overlaps_passes(_engine(ON, recomputed=1))
    for why in ("on meta", "with recompute"):
        assert f"acts on CPUs, without recompute; {why} passes run in turn, with the same numbers" in caplog.text


def _engine(section: dict[str, Any], recomputed: int = 0, *, num_stages: int = 2, device: str = "cpu") -> Any:
    module = SimpleNamespace(activation_checkpoint_interval=recomputed)
    return SimpleNamespace(pipeline_section=section, num_stages=num_stages, module=module, device=device, global_rank=0)


def test_a_schedule_without_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="got gpipe. Use one of these, or leave overlap_forward_backward"):
        SchedulePlan("gpipe", placement=Placement(2), stage=0, has_pairs=True)
    own = SchedulePlan(schedule_named("gpipe", 1), placement=Placement(2), stage=1, has_pairs=True)
    assert own.paired(4) == {Forward(3)}
