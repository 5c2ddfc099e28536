"""Streams and events: what runs happens in the order that it needs, and the check sees where it does not."""

from __future__ import annotations

import pytest

from tests.cuda.cases import flags
from tests.cuda.device import HOST, Operator
from tests.cuda.fake_cuda import Kind
from tests.cuda.order import Order
from tests.cuda.test_matrix import check
from tests.cuda.worker import Case, Worker

WRITES = Operator("writes", "here", (), (7,))
READS = Operator("reads", "there", (7,), ())
MADE = (Kind.MADE, 7, 1)
WRITTEN = (Kind.OPERATOR, 0, 1)
ON_ANOTHER = (Kind.OPERATOR, 1, 2)
EVENT = [(Kind.RECORD, 5, 1), (Kind.WAIT, 5, 2)]
BACK = [(Kind.RECORD, 6, 2), (Kind.WAIT, 6, 1)]
FREED = (Kind.FREE, 7, 0)


def faults(*log: tuple[int, int, int]) -> list[str]:
    order = Order()
    order.follow(log, [WRITES, READS])
    return [fault.partition(",")[0] for fault in order.faults]


def test_a_read_behind_an_event_is_in_order_and_one_without_is_not() -> None:
    assert faults(MADE, WRITTEN, *EVENT, ON_ANOTHER, *BACK, FREED) == []
    assert faults(MADE, WRITTEN, ON_ANOTHER) == ["read too early: reads in there"]
    assert faults(MADE, WRITTEN, EVENT[1], EVENT[0], ON_ANOTHER) == ["read too early: reads in there"]
    assert faults(MADE, WRITTEN, (Kind.HOST_STREAM, 1, 0), ON_ANOTHER, *BACK, FREED) == []


def test_memory_is_freed_behind_its_last_use_or_kept_for_the_stream() -> None:
    assert faults(MADE, WRITTEN, *EVENT, ON_ANOTHER, FREED) == ["freed too early"]
    assert faults(MADE, WRITTEN, *EVENT, ON_ANOTHER, (Kind.KEEP, 7, 2), FREED) == []
    assert faults(MADE, WRITTEN, *EVENT, ON_ANOTHER, (Kind.HOST_DEVICE, 0, 0), FREED) == []


def test_a_write_waits_for_reads_on_other_streams() -> None:
    assert faults(MADE, WRITTEN, *EVENT, ON_ANOTHER, WRITTEN) == ["written too early: writes in here"]
    assert faults(MADE, WRITTEN, *EVENT, ON_ANOTHER, *BACK, WRITTEN) == []


def test_the_host_reads_what_has_come() -> None:
    assert faults(MADE, WRITTEN, (Kind.OPERATOR, 1, HOST)) == ["read too early: reads in there"]
    assert faults(MADE, WRITTEN, (Kind.RECORD, 5, 1), (Kind.HOST_EVENT, 5, 0), (Kind.OPERATOR, 1, HOST)) == []


STREAMS = {
    "uploads": ("gpt2", "--bf16", 1, (0,)),
    "activations on the host": ("gpt2", "--bf16 --checkpoint-activations --checkpoint-in-cpu --num-layers 2", 1, (0,)),
    "sums beside the backward": ("gpt2", "--bf16", 2, (0,)),
    "weights a layer ahead": ("gpt2", "--bf16 --zero-stage 3 --num-layers 2", 2, (0,)),
    "sequence parallel": ("llama", "--bf16 --model-parallel-size 2 --sequence-parallel", 2, (0,)),
    "stages": ("gpt2", "--bf16 --pipe-parallel-size 2 --num-layers 2", 2, (0, 1)),
}
"""What copies, sums and comes beside the computation: family, flags, ranks, those that run."""
QUICK = ("weights a layer ahead", "sums beside the backward", "stages")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in STREAMS]
)
def test_what_runs_beside_the_computation_is_waited_for(worker: Worker, name: str) -> None:
    family, extra, size, ranks = STREAMS[name]
    case = Case(family, flags(family, extra), size, ranks)
    check(case, worker.run(case))


def test_an_offloaded_optimizer_waits_for_its_gradients(worker: Worker) -> None:
    case = Case("gpt2", flags("gpt2", "--bf16 --offload-optimizer"), 1, (0,))
    (seen,) = worker.run(case)
    assert not seen.faults and not seen.wrong
