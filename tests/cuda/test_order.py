"""Streams and events: what runs happens in the order that it needs, and the check sees where it does not."""

from __future__ import annotations

import pytest

from tests.cuda.cases import flags
from tests.cuda.device import HOST, Operator
from tests.cuda.fake_cuda import EventType
from tests.cuda.order import StreamOrder
from tests.cuda.test_matrix import MASKED_FAMILIES, check_outcomes
from tests.cuda.worker import Case, Worker

WRITES = Operator("writes", "here", (), (7,))
READS = Operator("reads", "there", (7,), ())
ALLOCATED = (EventType.MADE, 7, 1)
WRITTEN = (EventType.OPERATOR, 0, 1)
READ_ON_OTHER_STREAM = (EventType.OPERATOR, 1, 2)
EVENT = [(EventType.RECORD, 5, 1), (EventType.WAIT, 5, 2)]
RETURN_EVENT = [(EventType.RECORD, 6, 2), (EventType.WAIT, 6, 1)]
FREED = (EventType.FREE, 7, 0)


def find_faults(*log: tuple[int, int, int]) -> list[str]:
    order = StreamOrder()
    order.replay(log, [WRITES, READS])
    return [fault.partition(",")[0] for fault in order.faults]


def test_read_requires_event_after_write() -> None:
    assert find_faults(ALLOCATED, WRITTEN, *EVENT, READ_ON_OTHER_STREAM, *RETURN_EVENT, FREED) == []
    assert find_faults(ALLOCATED, WRITTEN, READ_ON_OTHER_STREAM) == ["read too early: reads in there"]
    assert find_faults(ALLOCATED, WRITTEN, EVENT[1], EVENT[0], READ_ON_OTHER_STREAM) == [
        "read too early: reads in there"
    ]
    assert (
        find_faults(ALLOCATED, WRITTEN, (EventType.HOST_STREAM, 1, 0), READ_ON_OTHER_STREAM, *RETURN_EVENT, FREED) == []
    )


def test_memory_is_freed_after_last_use_or_record_stream() -> None:
    assert find_faults(ALLOCATED, WRITTEN, *EVENT, READ_ON_OTHER_STREAM, FREED) == ["freed too early"]
    assert find_faults(ALLOCATED, WRITTEN, *EVENT, READ_ON_OTHER_STREAM, (EventType.KEEP, 7, 2), FREED) == []
    assert find_faults(ALLOCATED, WRITTEN, *EVENT, READ_ON_OTHER_STREAM, (EventType.HOST_DEVICE, 0, 0), FREED) == []


def test_write_waits_for_reads_on_other_streams() -> None:
    assert find_faults(ALLOCATED, WRITTEN, *EVENT, READ_ON_OTHER_STREAM, WRITTEN) == [
        "written too early: writes in here"
    ]
    assert find_faults(ALLOCATED, WRITTEN, *EVENT, READ_ON_OTHER_STREAM, *RETURN_EVENT, WRITTEN) == []


def test_host_read_requires_synchronization() -> None:
    assert find_faults(ALLOCATED, WRITTEN, (EventType.OPERATOR, 1, HOST)) == ["read too early: reads in there"]
    assert (
        find_faults(
            ALLOCATED, WRITTEN, (EventType.RECORD, 5, 1), (EventType.HOST_EVENT, 5, 0), (EventType.OPERATOR, 1, HOST)
        )
        == []
    )


STREAMS = {
    "uploads": ("gpt2", "--bf16", 1, (0,)),
    "activations on the host": ("gpt2", "--bf16 --checkpoint-activations --checkpoint-in-cpu --num-layers 2", 1, (0,)),
    "sums beside the backward": ("gpt2", "--bf16", 2, (0,)),
    "weights a layer ahead": ("gpt2", "--bf16 --zero-stage 3 --num-layers 2", 2, (0,)),
    "sequence parallel": ("llama", "--bf16 --model-parallel-size 2 --sequence-parallel", 2, (0,)),
    "stages": ("gpt2", "--bf16 --pipe-parallel-size 2 --num-layers 2", 2, (0, 1)),
}
"""What copies, sums and comes beside the computation: family, flags, ranks, those that run."""
FAST_CASES = ("weights a layer ahead", "sums beside the backward", "stages")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST_CASES else pytest.mark.slow) for name in STREAMS]
)
def test_side_streams_are_waited_for(worker: Worker, name: str) -> None:
    family, extra, world_size, ranks = STREAMS[name]
    case = Case(family, flags(family, extra), world_size, ranks)
    check_outcomes(case, worker.run(case), has_mask=family in MASKED_FAMILIES)


def test_offloaded_optimizer_waits_for_gradients(worker: Worker) -> None:
    case = Case("gpt2", flags("gpt2", "--bf16 --offload-optimizer"), 1, (0,))
    (outcome,) = worker.run(case)
    assert not outcome.faults and not outcome.wrong
