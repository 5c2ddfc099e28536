"""A stage posts what its next action receives, nothing further, and nothing that depends on what it runs meanwhile.

Each stage of a schedule is driven alone, as the engine drives it, by a ``P2PCommunicator`` whose messages go nowhere.
Who depends on whom is found here from all actions and messages, in another way than ``late_receives`` finds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tds.engine.stage import SchedulePlan
from tds.p2p.boundary import SINGLE, TensorMeta, encode_header, output_place
from tds.p2p.communicator import P2PCommunicator, P2PHandle
from tds.p2p.packed_layout import Slice
from tds.schedule import Action, Backward, Forward, Kind, Message, gpipe, received, sent
from tds.schedule.simulate import late_receives
from tds.schedule.validate import run
from tests.helpers.orders import MANY_CHUNKS, ONE_CHUNK

CPU = torch.device("cpu")
OUTPUT = torch.ones(1, requires_grad=True)
HEADER = encode_header(
    (TensorMeta(torch.float32, (1,), needs_grad=True, partitioned=False),), SINGLE, output_place(None, 0, 0, 1)
)


class _Alone(P2PCommunicator):
    """A stage whose messages are there at once; it notes which are posted and not taken."""

    def __init__(self, stage: int, num_stages: int, num_chunks: int) -> None:
        links: Any = SimpleNamespace(stage=stage, num_stages=num_stages, device=CPU, cut=Slice())
        super().__init__(links, num_chunks=num_chunks)
        self.outstanding: list[Message] = []

    def send(self, kind: Kind, message: Message, buffer: torch.Tensor) -> None:
        pass

    def receive(self, kind: Kind, message: Message, buffer: torch.Tensor) -> P2PHandle:
        if kind is not Kind.HEADER:
            self.outstanding.append(message)
        return P2PHandle(kind, message, HEADER if kind is Kind.HEADER else buffer.zero_(), None)

    def wait_for(self, transfer: P2PHandle) -> torch.Tensor:
        if transfer.kind is not Kind.HEADER:
            self.outstanding.remove(transfer.message)
        return transfer.buffer


def posted_while(
    actions: Sequence[Action], late: frozenset[Action], stage: int, num_stages: int, num_chunks: int, is_training: bool
) -> list[list[Message]]:
    """Return, of each action, which receives are posted while it runs, once its own message is there."""
    exchange = _Alone(stage, num_stages, num_chunks)
    place = stage, num_stages, num_chunks
    exchange.set_limits(None, late)
    exchange.begin(actions, is_training=is_training)
    found = []
    for action in actions:
        exchange.begin_action(action)
        came, goes = received(action, *place), sent(action, *place)
        if came is not None:
            exchange.recv_forward(came) if isinstance(action, Forward) else exchange.recv_backward(came)
        found.append(list(exchange.outstanding))
        if goes is not None and isinstance(action, Forward):
            exchange.send_forward(goes, OUTPUT)
        elif goes is not None:
            exchange.send_backward(goes, [OUTPUT.detach()])
    exchange.finish()
    assert not exchange.outstanding
    return found


def needed_by(stages: Sequence[Sequence[Action]], num_chunks: int) -> tuple[dict[Any, int], dict[Any, int]]:
    """Return, in bits, on which actions each (stage, action) depends, itself too, and on which the message does that it
    takes."""
    bit = bits_of(stages)
    done = [0] * len(stages)
    on_the_wire: dict[tuple[Any, Any], int] = {}
    of_action, of_message = {}, {}
    for stage, action, source, takes, target, sends in run(stages, num_chunks):
        if source is not None:
            of_message[stage, action] = on_the_wire[source, takes]
            done[stage] |= of_message[stage, action]
        done[stage] |= bit[stage, action]
        of_action[stage, action] = on_the_wire[target, sends] = done[stage]
    return of_action, of_message


def bits_of(stages: Sequence[Sequence[Action]]) -> dict[tuple[int, Action], int]:
    """Return a bit for each action of each stage."""
    return {key: 1 << i for i, key in enumerate((s, a) for s, actions in enumerate(stages) for a in actions)}


def check(schedule: Any, num_stages: int, num_micro_batches: int, num_chunks: int = 1, is_training: bool = True) -> int:
    """Hold each stage to the rule; return how many receives wait for the action ahead of theirs."""
    plans = [SchedulePlan(schedule, num_stages=num_stages, num_chunks=num_chunks, stage=s) for s in range(num_stages)]
    stages = [(p.training if is_training else p.evaluation)(num_micro_batches) for p in plans]
    (of_action, of_message), bit = needed_by(stages, num_chunks), bits_of(stages)
    own = [sum(bit[stage, action] for action in actions) for stage, actions in enumerate(stages)]
    num_late = 0
    for stage, actions in enumerate(stages):
        _, late = plans[stage].limits(num_micro_batches, is_training=is_training)
        num_late += len(late)
        place = stage, num_stages, num_chunks
        posted = posted_while(actions, late, *place, is_training)
        known: set[tuple[Kind, int]] = set()  # of which kind and chunk the size of a message is
        for index, (action, following) in enumerate(itertools.pairwise([*actions, None])):
            message = None if following is None else received(following, *place)
            is_posted = message is not None and following not in late and (message.kind, message.chunk) in known
            assert posted[index] == ([message] if is_posted else []), (stage, action, posted[index])
            if isinstance(action, Forward):
                known |= {(Kind.ACTIVATION, action.chunk), (Kind.GRADIENT, action.chunk)}
            if message is None:
                continue
            if is_posted:
                is_free = not of_message[stage, following] & bit[stage, action]
                assert is_free, f"stage {stage} waits for {message}, which depends on the {action} that it runs"
            before = of_action[stage, actions[index - is_posted]] if index >= is_posted else 0
            behind_send = own[message.peer] & ~of_message[stage, following]  # of the sender, which may be in its send
            assert not before & behind_send, f"stage {message.peer} sends {message} and runs what is needed to post it"
    return num_late


def cases(stages: Iterable[int], micro_batches: Iterable[int]) -> list[tuple[str, int, int, int]]:
    """Return (schedule, stages, micro-batches, chunks)."""
    sizes = list(itertools.product(stages, micro_batches))
    plain = [(name, p, m, 1) for name in ONE_CHUNK for p, m in sizes]
    return plain + [(name, p, m, c) for name in MANY_CHUNKS for p, m in sizes for c in (2, 3, 4)]


def test_no_receive_is_posted_that_depends_on_what_the_stage_runs() -> None:
    for case in cases((2, 3, 5), (1, 2, 5, 9)):
        check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", range(2, 9))
def test_no_receive_of_any_schedule_is_posted_that_depends_on_what_the_stage_runs(num_stages: int) -> None:
    for case in cases([num_stages], range(1, 33)):
        check(*case)


def test_nor_in_an_evaluation() -> None:
    """There each chunk's first forward may follow the last of the chunk before it, on which it depends."""
    for p, m in itertools.product((2, 3, 5), (1, 4, 9)):
        assert check("1f1b", p, m, is_training=False) == 0
        assert check("interleaved", p, m, 2, is_training=False) == (p if m % p == 1 or p == 2 < m and m % 2 else 0), (
            p,
            m,
        )


def test_only_where_a_stage_turns_a_receive_waits_for_the_action_ahead() -> None:
    """In GPipe that is the last forward of each stage but the last, in 1F1B there is none with enough micro-batches."""
    assert [check("gpipe", p, 8) for p in (2, 4, 7)] == [1, 3, 6]
    assert [check(name, p, 8) for name in ("1f1b", "zb-h1") for p in (2, 4, 7)] == [0] * 6
    assert [check(name, 4, 8, c) for name in MANY_CHUNKS for c in (2, 3)] == [0] * 4
    assert check("1f1b", 4, 1) == 3
    assert late_receives(gpipe, 3, 2) == (frozenset({Backward(0)}), frozenset({Backward(0)}), frozenset())


def _pairs(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    """Two forwards and two backwards in turn."""
    starts = range(0, num_micro_batches, 2)
    return [action for i in starts for action in (Forward(i), Forward(i + 1), Backward(i), Backward(i + 1))]


def test_a_schedule_of_a_user_is_held_to_it_too() -> None:
    assert check(_pairs, 3, 6) == 10
