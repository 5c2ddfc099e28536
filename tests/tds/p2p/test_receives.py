"""When a stage posts its receives: never one that depends on what it runs meanwhile.

Each stage of a schedule is driven alone, as the engine drives it, by a ``P2PCommunicator`` whose messages go nowhere.
Who depends on whom is found here from all actions and messages, in another way than ``receive_posts`` finds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tds.engine.schedule_plan import SchedulePlan
from tds.p2p import communicator
from tds.p2p.boundary_layers import output_place
from tds.p2p.communicator import P2PCommunicator
from tds.p2p.message_header import encode_header
from tds.p2p.packed_layout import Slice
from tds.p2p.structure import SINGLE
from tds.p2p.tensor_meta import TensorMeta
from tds.p2p.transport import P2PHandle
from tds.schedule import LOOP, Action, Backward, Forward, Kind, Message, Placement, V, received, sent
from tds.schedule.limits import Posts, receive_posts
from tds.schedule.simulate import IN_A_V
from tds.schedule.validate import run
from tests.helpers.orders import MANY_CHUNKS, ONE_CHUNK

CPU = torch.device("cpu")
OUTPUT = torch.ones(1, requires_grad=True)
HEADER = encode_header(
    (TensorMeta(torch.float32, (1,), needs_grad=True, partitioned=False),),
    SINGLE,
    output_place(None, 0, 0, Placement(1)),
)


class _Alone(P2PCommunicator):
    """A stage whose messages are there at once; it notes which are posted and not taken."""

    def __init__(self, stage: int, placement: Placement) -> None:
        links: Any = SimpleNamespace(stage=stage, num_stages=placement.num_stages, device=CPU, cut=Slice())
        super().__init__(links, placement=placement)
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
    actions: Sequence[Action], posts: Posts, stage: int, placement: Placement, is_training: bool
) -> list[list[Message]]:
    """Return, of each action, which receives are posted while it runs, once its own message is there."""
    place = stage, placement
    exchange = _Alone(*place)
    exchange.set_limits(None, posts)
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


def needed_by(
    stages: Sequence[Sequence[Action]], num_chunks: int, placement: str = LOOP
) -> tuple[dict[Any, int], dict[Any, int]]:
    """Return, in bits, on which actions each (stage, action) depends, itself too, and on which the message does that it
    takes."""
    bit = bits_of(stages)
    done = [0] * len(stages)
    on_the_wire: dict[tuple[Any, Any], int] = {}
    of_action, of_message = {}, {}
    for stage, action, source, takes, target, sends in run(stages, num_chunks, placement=placement):
        if source is not None:
            of_message[stage, action] = on_the_wire[source, takes]
            done[stage] |= of_message[stage, action]
        done[stage] |= bit[stage, action]
        of_action[stage, action] = on_the_wire[target, sends] = done[stage]
    return of_action, of_message


def bits_of(stages: Sequence[Sequence[Action]]) -> dict[tuple[int, Action], int]:
    """Return a bit for each action of each stage."""
    return {key: 1 << i for i, key in enumerate((s, a) for s, actions in enumerate(stages) for a in actions)}


def check(
    schedule: Any,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    is_training: bool = True,
    kind: str = LOOP,
) -> int:
    """Hold each stage to the rule; return how many actions ahead of its own a receive is posted at most."""
    placement = Placement(num_stages, num_chunks, kind)
    plans = [SchedulePlan(schedule, placement=placement, stage=s) for s in range(num_stages)]
    stages = [(p.training if is_training else p.evaluation)(num_micro_batches) for p in plans]
    (of_action, of_message), bit = needed_by(stages, num_chunks, kind), bits_of(stages)
    own = [sum(bit[stage, action] for action in actions) for stage, actions in enumerate(stages)]
    furthest = 0
    for stage, actions in enumerate(stages):
        _, posts = plans[stage].limits(num_micro_batches, is_training=is_training)
        place = stage, placement
        takes = {received(action, *place): number for number, action in enumerate(actions)}
        planned = {number: at for at, numbers in enumerate(posts) for number in numbers}
        assert planned.keys() == {
            number for message, number in takes.items() if message is not None and message.peer != stage
        }
        posted = posted_while(actions, posts, *place, is_training)
        for index, action in enumerate(actions):
            due = [number for number, at in planned.items() if at <= index < number]
            assert sorted(takes[message] for message in posted[index]) == sorted(due), (stage, action)
            for number in due:
                furthest = max(furthest, number - index)
                is_free = not of_message[stage, actions[number]] & bit[stage, action]
                assert is_free, f"stage {stage} waits for what {actions[number]} takes, which depends on {action}"
        for number, at in planned.items():
            before = of_action[stage, actions[at - 1]] if at else 0
            sender = received(actions[number], *place).peer  # type: ignore[union-attr] - those planned have one
            behind_send = own[sender] & ~of_message[stage, actions[number]]  # of the sender, which may be in its send
            assert not before & behind_send, f"stage {sender} sends to {actions[number]} and runs what must come first"
    return furthest


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let receives be posted where those of a device are."""
    monkeypatch.setattr(communicator, "is_host", lambda device: False)


def cases(stages: Iterable[int], micro_batches: Iterable[int]) -> list[tuple[str, int, int, int]]:
    """Return (schedule, stages, micro-batches, chunks)."""
    sizes = list(itertools.product(stages, micro_batches))
    plain = [(name, p, m, 1) for name in ONE_CHUNK for p, m in sizes]
    return plain + [(name, p, m, c) for name in MANY_CHUNKS for p, m in sizes for c in (2, 3, 4)]


MOST_AHEAD = {"1f1b": 1, "gpipe": 1, "zb-h1": 1, "interleaved": 4, "zb-h1 in chunks": 6}
"""How many actions ahead of its own a receive is posted at most, up to 8 stages and 32 micro-batches."""


def hold(case: tuple[str, int, int, int]) -> None:
    """``check`` a schedule of the project, and how far ahead it posts."""
    name, *_, chunks = case
    most = MOST_AHEAD[f"{name} in chunks" if name == "zb-h1" and chunks > 1 else name]
    assert check(*case) <= most, case


def test_no_receive_is_posted_that_depends_on_what_the_stage_runs() -> None:
    for case in cases((2, 3, 5), (1, 2, 5, 9)):
        hold(case)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", range(2, 9))
def test_no_receive_of_any_schedule_is_posted_that_depends_on_what_the_stage_runs(num_stages: int) -> None:
    for case in cases([num_stages], (*range(1, 18), 24, 31, 32)):
        hold(case)


@pytest.mark.parametrize("name", IN_A_V)
def test_nor_in_a_v(name: str) -> None:
    for p, m in itertools.product((2, 3, 5), (1, 4, 11)):
        assert check(name, p, m, 2, kind=V) <= 11


def test_nor_in_an_evaluation() -> None:
    for p, m in itertools.product((2, 3, 5), (1, 4, 9)):
        assert check("1f1b", p, m, is_training=False) <= 1
        assert check("interleaved", p, m, 2, is_training=False) <= 1


def test_a_receive_is_posted_for_the_next_action_and_further_ahead_only_in_a_ring() -> None:
    assert [check(name, p, 8) for name in ("gpipe", "1f1b", "zb-h1") for p in (2, 4, 7)] == [1] * 9
    assert [check(name, 4, 8, c) for name in MANY_CHUNKS for c in (2, 3)] == [1] * 4
    assert [check(name, 5, 8, c) for name in ("interleaved", "zb-h1") for c in (2, 3)] == [2, 2, 3, 3]


def test_on_a_host_it_is_posted_one_action_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo sends nothing before, and nothing waits for a whole device."""
    monkeypatch.setattr(communicator, "is_host", lambda device: True)
    plan = SchedulePlan("1f1b", placement=Placement(2), stage=1)
    posts = ((0,), (2,), (), (), (4,), ())
    posted = posted_while(plan.training(3), posts, 1, Placement(2), True)
    assert [[message.micro_batch for message in each] for each in posted] == [[], [1], [], [2], [], []]
    assert receive_posts(plan.order, 2, 3)[1] == posts


def _pairs(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    """Two forwards and two backwards in turn."""
    starts = range(0, num_micro_batches, 2)
    return [action for i in starts for action in (Forward(i), Forward(i + 1), Backward(i), Backward(i + 1))]


def test_a_schedule_of_a_user_is_held_to_it_too() -> None:
    assert check(_pairs, 3, 6) == 1
