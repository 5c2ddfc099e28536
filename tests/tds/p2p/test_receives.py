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
from tds.p2p.boundary_layers import output_side
from tds.p2p.communicator import P2PCommunicator
from tds.p2p.message_header import encode_header
from tds.p2p.packed_layout import TensorGroup
from tds.p2p.structure import SINGLE
from tds.p2p.tensor_meta import TensorMeta
from tds.p2p.transport import P2PHandle
from tds.schedule import (
    LOOP,
    Action,
    Backward,
    Forward,
    Message,
    MessageType,
    Placement,
    V,
    received_message,
    sent_message,
)
from tds.schedule.limits import Posts, receive_posts
from tds.schedule.simulate import V_SCHEDULES
from tds.schedule.validate import run
from tests.helpers.orders import MANY_CHUNKS, ONE_CHUNK

CPU = torch.device("cpu")
OUTPUT = torch.ones(1, requires_grad=True)
HEADER = encode_header(
    (TensorMeta(torch.float32, (1,), needs_grad=True, partitioned=False),),
    SINGLE,
    output_side(None, 0, 0, Placement(1)),
)


class _FakeCommunicator(P2PCommunicator):
    """A stage whose messages are there at once; it notes which are posted and not taken."""

    def __init__(self, stage: int, placement: Placement) -> None:
        links: Any = SimpleNamespace(
            stage=stage, num_stages=placement.num_stages, device=CPU, tensor_group=TensorGroup()
        )
        super().__init__(links, placement=placement)
        self.outstanding: list[Message] = []

    def send(self, message_type: MessageType, message: Message, buffer: torch.Tensor) -> None:
        pass

    def receive(self, message_type: MessageType, message: Message, buffer: torch.Tensor) -> P2PHandle:
        if message_type is not MessageType.HEADER:
            self.outstanding.append(message)
        return P2PHandle(message_type, message, HEADER if message_type is MessageType.HEADER else buffer.zero_(), None)

    def wait_for(self, transfer: P2PHandle) -> torch.Tensor:
        if transfer.message_type is not MessageType.HEADER:
            self.outstanding.remove(transfer.message)
        return transfer.buffer


def record_posted_receives(
    actions: Sequence[Action], posts: Posts, stage: int, placement: Placement, is_training: bool
) -> list[list[Message]]:
    """Return, of each action, which receives are posted while it runs, once its own message is there."""
    args = stage, placement
    stage_communicator = _FakeCommunicator(*args)
    stage_communicator.set_limits(None, posts)
    stage_communicator.begin(actions, is_training=is_training)
    posted = []
    for action in actions:
        stage_communicator.begin_action(action)
        incoming, outgoing = received_message(action, *args), sent_message(action, *args)
        if incoming is not None:
            stage_communicator.recv_forward(incoming) if isinstance(
                action, Forward
            ) else stage_communicator.recv_backward(incoming)
        posted.append(list(stage_communicator.outstanding))
        if outgoing is not None and isinstance(action, Forward):
            stage_communicator.send_forward(outgoing, OUTPUT)
        elif outgoing is not None:
            stage_communicator.send_backward(outgoing, [OUTPUT.detach()])
    stage_communicator.finish()
    assert not stage_communicator.outstanding
    return posted


def compute_dependencies(
    stages: Sequence[Sequence[Action]], num_chunks: int, placement: str = LOOP
) -> tuple[dict[Any, int], dict[Any, int]]:
    """Return, in bits, on which actions each (stage, action) depends, itself too, and on which the message does that it
    takes."""
    bit_of = action_bits(stages)
    done = [0] * len(stages)
    in_transit: dict[tuple[Any, Any], int] = {}
    action_deps, message_deps = {}, {}
    for stage, action, source, received_content, target, sent_content in run(stages, num_chunks, placement=placement):
        if source is not None:
            message_deps[stage, action] = in_transit[source, received_content]
            done[stage] |= message_deps[stage, action]
        done[stage] |= bit_of[stage, action]
        action_deps[stage, action] = in_transit[target, sent_content] = done[stage]
    return action_deps, message_deps


def action_bits(stages: Sequence[Sequence[Action]]) -> dict[tuple[int, Action], int]:
    """Return a bit for each action of each stage."""
    return {key: 1 << i for i, key in enumerate((s, a) for s, actions in enumerate(stages) for a in actions)}


def check(
    schedule: Any,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    is_training: bool = True,
    style: str = LOOP,
) -> int:
    """Hold each stage to the rule; return how many actions ahead of its own a receive is posted at most."""
    placement = Placement(num_stages, num_chunks, style)
    plans = [SchedulePlan(schedule, placement=placement, stage=s) for s in range(num_stages)]
    stages = [(p.training_actions if is_training else p.evaluation_actions)(num_micro_batches) for p in plans]
    (action_deps, message_deps), bit_of = compute_dependencies(stages, num_chunks, style), action_bits(stages)
    stage_bits = [sum(bit_of[stage, action] for action in actions) for stage, actions in enumerate(stages)]
    max_ahead = 0
    for stage, actions in enumerate(stages):
        _, posts = plans[stage].message_limits(num_micro_batches, is_training=is_training)
        args = stage, placement
        receive_idx_of = {received_message(action, *args): action_idx for action_idx, action in enumerate(actions)}
        planned = {
            action_idx: post_idx for post_idx, action_indices in enumerate(posts) for action_idx in action_indices
        }
        assert planned.keys() == {
            action_idx
            for message, action_idx in receive_idx_of.items()
            if message is not None and message.peer != stage
        }
        posted = record_posted_receives(actions, posts, *args, is_training)
        for index, action in enumerate(actions):
            due = [action_idx for action_idx, post_idx in planned.items() if post_idx <= index < action_idx]
            assert sorted(receive_idx_of[message] for message in posted[index]) == sorted(due), (stage, action)
            for action_idx in due:
                max_ahead = max(max_ahead, action_idx - index)
                is_free = not message_deps[stage, actions[action_idx]] & bit_of[stage, action]
                assert is_free, f"stage {stage} waits for what {actions[action_idx]} takes, which depends on {action}"
        for action_idx, post_idx in planned.items():
            before = action_deps[stage, actions[post_idx - 1]] if post_idx else 0
            sender = received_message(actions[action_idx], *args).peer  # type: ignore[union-attr] - those planned have one
            later_actions = (
                stage_bits[sender] & ~message_deps[stage, actions[action_idx]]
            )  # of the sender, which may be in its send
            assert not before & later_actions, (
                f"stage {sender} sends to {actions[action_idx]} and runs what must come first"
            )
    return max_ahead


@pytest.fixture(autouse=True)
def _receive_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let receives be posted where those of a device are."""
    monkeypatch.setattr(communicator, "is_host", lambda device: False)


def make_cases(stages: Iterable[int], micro_batches: Iterable[int]) -> list[tuple[str, int, int, int]]:
    """Return (schedule, stages, micro-batches, chunks)."""
    layouts = list(itertools.product(stages, micro_batches))
    plain = [(name, p, m, 1) for name in ONE_CHUNK for p, m in layouts]
    return plain + [(name, p, m, c) for name in MANY_CHUNKS for p, m in layouts for c in (2, 3, 4)]


MOST_AHEAD = {"1f1b": 1, "gpipe": 1, "zb-h1": 1, "interleaved": 4, "zb-h1 in chunks": 6}
"""How many actions ahead of its own a receive is posted at most, up to 8 stages and 32 micro-batches."""


def check_case(case: tuple[str, int, int, int]) -> None:
    """``check`` a schedule of the project, and how far ahead it posts."""
    name, *_, chunks = case
    limit = MOST_AHEAD[f"{name} in chunks" if name == "zb-h1" and chunks > 1 else name]
    assert check(*case) <= limit, case


def test_posted_receives_do_not_depend_on_running_action() -> None:
    for case in make_cases((2, 3, 5), (1, 2, 5, 9)):
        check_case(case)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", range(2, 9))
def test_posted_receives_of_all_schedules_are_independent(num_stages: int) -> None:
    for case in make_cases([num_stages], (*range(1, 18), 24, 31, 32)):
        check_case(case)


@pytest.mark.parametrize("name", V_SCHEDULES)
def test_v_receives_do_not_depend_on_running_action(name: str) -> None:
    for p, m in itertools.product((2, 3, 5), (1, 4, 11)):
        assert check(name, p, m, 2, style=V) <= 11


def test_evaluation_receives_do_not_depend_on_running_action() -> None:
    for p, m in itertools.product((2, 3, 5), (1, 4, 9)):
        assert check("1f1b", p, m, is_training=False) <= 1
        assert check("interleaved", p, m, 2, is_training=False) <= 1


def test_receives_are_posted_one_action_ahead_except_in_rings() -> None:
    assert [check(name, p, 8) for name in ("gpipe", "1f1b", "zb-h1") for p in (2, 4, 7)] == [1] * 9
    assert [check(name, 4, 8, c) for name in MANY_CHUNKS for c in (2, 3)] == [1] * 4
    assert [check(name, 5, 8, c) for name in ("interleaved", "zb-h1") for c in (2, 3)] == [2, 2, 3, 3]


def test_host_receives_are_posted_one_action_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo sends nothing before, and nothing waits for a whole device."""
    monkeypatch.setattr(communicator, "is_host", lambda device: True)
    plan = SchedulePlan("1f1b", placement=Placement(2), stage=1)
    posts = ((0,), (2,), (), (), (4,), ())
    posted = record_posted_receives(plan.training_actions(3), posts, 1, Placement(2), True)
    assert [[message.micro_batch for message in messages] for messages in posted] == [[], [1], [], [2], [], []]
    assert receive_posts(plan.order, 2, 3)[1] == posts


def _pairs(num_stages: int, num_micro_batches: int, stage: int) -> list[Action]:
    """Two forwards and two backwards in turn."""
    starts = range(0, num_micro_batches, 2)
    return [action for i in starts for action in (Forward(i), Forward(i + 1), Backward(i), Backward(i + 1))]


def test_user_schedule_receives_do_not_depend_on_running_action() -> None:
    assert check(_pairs, 3, 6) == 1
