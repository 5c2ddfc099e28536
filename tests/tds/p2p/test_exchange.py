"""Messages between stages: any structure, any number of chunks, shapes that change, and nothing more than is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tds.p2p.communicator
from tds.p2p.boundary import Boundary, BoundaryError, set_list
from tds.p2p.communicator import P2PCommunicator
from tds.p2p.packed_layout import Slice
from tds.p2p.transport import StageLinks, Transport
from tds.schedule import (
    Action,
    Backward,
    Forward,
    Kind,
    Message,
    Placement,
    V,
    forward_only,
    one_forward_one_backward,
    schedule_named,
)
from tds.schedule.limits import receive_posts, send_window
from tests.helpers.harness import fork_ranks, run_ranks
from tests.helpers.lines import check, chunk_by_chunk, drive, make_exchange, micro_batch

BY_HAND: list[list[Action]] = [
    [
        *(Forward(0, 0), Forward(1, 0), Forward(0, 1), Forward(1, 1)),
        *(Backward(0, 1), Backward(1, 1), Backward(0, 0), Backward(1, 0)),
    ],
    [
        *(Forward(0, 0), Forward(1, 0), Forward(0, 1), Backward(0, 1), Forward(1, 1)),
        *(Backward(1, 1), Backward(0, 0), Backward(1, 0)),
    ],
]
"""Two stages, two chunks, two micro-batches: the second stage turns round early."""


def _drive(rank: int, orders: list[list[Action]], inputs: list[torch.Tensor], num_chunks: int, window: Any) -> Any:
    exchange = make_exchange(num_chunks)
    exchange.window = window
    return drive(exchange, orders[rank], inputs)


@pytest.mark.parametrize(
    ("orders", "num_chunks", "window"),
    [
        ([one_forward_one_backward(3, 5, stage) for stage in range(3)], 1, 4),
        (BY_HAND, 2, 2),
        ([chunk_by_chunk(3, 2)] * 2, 2, None),
        ([chunk_by_chunk(2, 3)] * 2, 3, 2),
        ([chunk_by_chunk(3, 2)] * 3, 2, 4),
    ],
    ids=["1f1b", "by hand", "two by two", "two by three", "three by two"],
)
def test_every_structure_crosses_in_both_directions_with_any_number_of_chunks(
    orders: list[list[Action]], num_chunks: int, window: int | None
) -> None:
    inputs = [micro_batch(i) for i in range(1 + max(action.micro_batch for action in orders[0]))]
    check(run_ranks(len(orders), _drive, orders, inputs, num_chunks, window), inputs, num_chunks)


def _drive_in_a_v(rank: int, name: str, num_stages: int, inputs: list[torch.Tensor]) -> Any:
    order, number = schedule_named(name, 2, V), len(inputs)
    exchange = make_exchange(2, placement=V)
    exchange.set_limits(
        send_window(order, num_stages, number, 2, True, V), receive_posts(order, num_stages, number, 2, V)[rank]
    )
    return drive(exchange, order(num_stages, number, rank), inputs)


@pytest.mark.parametrize(("name", "num_stages"), [("dualpipev", 2), ("dualpipev", 3)])
def test_in_a_v_each_stage_sends_to_both_sides_and_the_ends_to_themselves(name: str, num_stages: int) -> None:
    inputs = [micro_batch(i) for i in range(7)]
    check(run_ranks(num_stages, _drive_in_a_v, name, num_stages, inputs), inputs, 2, V)


def alone_in_a_v(**options: Any) -> P2PCommunicator:
    """Return the exchange of a stage that is the only one, so that all it sends goes to itself."""
    links = StageLinks(0, [0], {}, Slice(), torch.device("cpu"))
    exchange = P2PCommunicator(links, placement=Placement(1, 2, V), **options)
    exchange.begin([], is_training=True)
    return exchange


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_message_to_oneself_costs_no_copy(is_dynamic: bool) -> None:
    exchange = alone_in_a_v(is_dynamic=is_dynamic)
    weight = torch.ones(3, requires_grad=True)
    outputs = [{"hidden": weight * n, "ids": torch.tensor([n])} for n in (2.0, 3.0)]
    for number, output in enumerate(outputs):
        with_grad = exchange.send_forward(Message(Kind.ACTIVATION, number, 0, 0), output)
        assert len(with_grad) == 1 and with_grad[0] is output["hidden"]
    for number, output in enumerate(outputs):
        given, leaves = exchange.recv_forward(Message(Kind.ACTIVATION, number, 1, 0))
        assert {name: tensor.data_ptr() for name, tensor in given.items()} == {
            name: tensor.data_ptr() for name, tensor in output.items()
        }
        (given["hidden"] * 5).sum().backward()
        exchange.send_backward(Message(Kind.GRADIENT, number, 1, 0), [leaf.grad for leaf in leaves])
        (gradient,) = exchange.recv_backward(Message(Kind.GRADIENT, number, 0, 0))
        assert gradient is leaves[0].grad and gradient.tolist() == [5.0] * 3 and weight.grad is None
    exchange.finish()
    assert not exchange._own and not exchange.history


def test_what_a_stage_hands_to_itself_is_not_changed_unnoticed() -> None:
    """Its own backward may need it: after an operation in place in the next chunk it must fail, not give other sums."""
    exchange = alone_in_a_v()
    output = torch.tanh(torch.ones(3, requires_grad=True))
    exchange.send_forward(Message(Kind.ACTIVATION, 0, 0, 0), output)
    given, _ = exchange.recv_forward(Message(Kind.ACTIVATION, 0, 1, 0))
    given.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_an_output_to_oneself_is_held_to_the_declaration() -> None:
    exchange = alone_in_a_v(module=SimpleNamespace(boundary=[Boundary("hidden"), Boundary("mask", "bool")]))
    with pytest.raises(BoundaryError, match="must return the 2 declared tensors"):
        exchange.send_forward(Message(Kind.ACTIVATION, 0, 0, 0), torch.ones(2))


def _calls(rank: int) -> list[Any]:
    """Train, evaluate and train with one exchange on micro-batches of other sizes and numbers."""
    exchange = make_exchange()
    results = []
    for rows, number, is_training in ((2, 3, True), (5, 2, False), (1, 4, True)):
        inputs = [micro_batch(i, rows) for i in range(number)]
        order = one_forward_one_backward if is_training else forward_only
        results.append(drive(exchange, order(2, number, rank), inputs, is_training))
    return results


def test_shapes_change_from_call_to_call_and_between_training_and_evaluation() -> None:
    first, second = run_ranks(2, _calls)
    check([first[0], second[0]], [micro_batch(i, 2) for i in range(3)])
    check([first[2], second[2]], [micro_batch(i, 1) for i in range(4)])
    assert len(second[1][0]) == 2


def _dynamic(rank: int, rows: list[int], is_dynamic: bool, num_chunks: int, actions: list[list[Action]]) -> Any:
    exchange = make_exchange(num_chunks, is_dynamic=is_dynamic)
    return drive(exchange, actions[rank], [micro_batch(i, size) for i, size in enumerate(rows)])


@pytest.mark.parametrize(
    ("actions", "num_chunks"),
    [([one_forward_one_backward(3, 5, stage) for stage in range(3)], 1), ([chunk_by_chunk(5, 2)] * 2, 2)],
    ids=["1f1b", "chunks"],
)
def test_with_dynamic_shape_every_micro_batch_may_have_its_own(actions: list[list[Action]], num_chunks: int) -> None:
    rows = [2, 5, 1, 0, 3]
    results = run_ranks(len(actions), _dynamic, rows, True, num_chunks, actions)
    check(results, [micro_batch(i, size) for i, size in enumerate(rows)], num_chunks)


def test_without_it_a_change_within_a_call_is_refused_before_the_wire() -> None:
    actions = [one_forward_one_backward(2, 3, stage) for stage in range(2)]
    codes, _, reports = fork_ranks(2, _dynamic, [2, 2, 3], False, 1, actions)
    assert codes == [1, 1]
    assert "stage 0 output 0 was float64[2, 3], got float64[3, 3] at micro-batch 2" in reports[0]
    assert "dynamic_shape=True" in reports[0] and "lost stage 0" in reports[1]


OUTPUTS = [
    {"h": torch.ones(2, 2, requires_grad=True), "0-dim": torch.tensor(3), "": torch.zeros(0, 4), "ä": torch.eye(3).t()},
    (torch.arange(6).view(2, 3).t(), torch.tensor([True, False]), torch.ones(1, dtype=torch.bfloat16)),
    [],
    (),
    {},
    torch.ones(3, 0, 2),
    [torch.tensor(2.0, dtype=torch.float16)],
    torch.ones(4, 4, dtype=torch.uint8)[:, 1:3],
]  # fmt: skip


def _outputs(rank: int) -> Any:
    exchange = make_exchange()
    got, grads = [], []
    for output in OUTPUTS:
        exchange.begin([Forward(0), Backward(0)], is_training=True)
        if rank == 0:
            with_grad = exchange.send_forward(Message(Kind.ACTIVATION, 0, 0, 1), output)
            grads += exchange.recv_backward(Message(Kind.GRADIENT, 0, 0, 1))
            assert len(with_grad) == (1 if output is OUTPUTS[0] else 0)
        else:
            value, leaves = exchange.recv_forward(Message(Kind.ACTIVATION, 0, 0, 0))
            exchange.send_backward(Message(Kind.GRADIENT, 0, 0, 0), [torch.full_like(x, 7) for x in leaves])
            got.append(value)
        exchange.finish()
    sent = sum(1 for doing, kind, _ in exchange.history if doing == "sent" and kind is Kind.GRADIENT)
    return got, grads, sent


def test_a_layer_gets_the_very_structure_that_was_returned() -> None:
    (_, grads, _), (got, _, num_gradients) = run_ranks(2, _outputs)
    assert num_gradients == 1 and [g.tolist() for g in grads] == [[[7.0, 7.0], [7.0, 7.0]]]
    for value, output in zip(got, OUTPUTS, strict=True):
        assert type(value) is type(output)
        names = (
            list(output) if isinstance(output, dict) else range(len(output)) if type(output) in (list, tuple) else None
        )
        assert not isinstance(output, dict) or list(value) == names
        pairs = [(value, output)] if names is None else [(value[n], output[n]) for n in names]
        assert names is None or len(value) == len(output)
        for ours, theirs in pairs:
            assert ours.dtype is theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)
            assert ours.requires_grad == theirs.requires_grad and ours.is_leaf


def _partly(rank: int) -> list[float]:
    """Two chunks: the boundary of the first has a gradient, that of the second has none."""
    exchange = make_exchange(2)
    first, second = (Message(Kind.ACTIVATION, 0, chunk, 1 - rank) for chunk in (0, 1))
    back = Kind.GRADIENT
    exchange.begin([Forward(0, 0), Forward(0, 1), Backward(0, 1), Backward(0, 0)], is_training=True)
    if rank == 0:
        exchange.send_forward(first, torch.ones(2, requires_grad=True))
        ring, leaves = exchange.recv_forward(second)
        exchange.send_forward(second, ring.detach() * 5)
        assert exchange.recv_backward(Message(back, 0, 1, 1)) == []
        exchange.send_backward(Message(back, 0, 1, 1), [torch.full((2,), 3.0) for _ in leaves])
        result = exchange.recv_backward(Message(back, 0, 0, 1))[0]
    else:
        value, leaves = exchange.recv_forward(first)
        exchange.send_forward(first, value * 2)
        result, none = exchange.recv_forward(second)
        exchange.send_backward(Message(back, 0, 1, 0), none)
        (arrived,) = exchange.recv_backward(Message(back, 0, 0, 0))
        exchange.send_backward(Message(back, 0, 0, 0), [arrived * 2 for _ in leaves])
    exchange.finish()
    return result.tolist()


def test_a_boundary_without_gradients_sends_none_back_beside_one_that_does() -> None:
    assert run_ranks(2, _partly) == [[6.0, 6.0], [10.0, 10.0]]


class _Counting(P2PCommunicator):
    """Counts the headers that it sends."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.headers = 0

    def send(self, kind: Kind, message: Message, buffer: torch.Tensor) -> None:
        self.headers += kind is Kind.HEADER
        super().send(kind, message, buffer)


def _headers(rank: int, is_dynamic: bool) -> tuple[int, int]:
    exchange = make_exchange(is_dynamic=is_dynamic)
    exchange.__class__ = _Counting
    exchange.headers = 0
    drive(exchange, one_forward_one_backward(2, 6, rank), [micro_batch(i) for i in range(6)])
    return exchange.headers, len(exchange.waits)


def test_one_header_goes_ahead_of_a_call_and_with_dynamic_shape_one_ahead_of_each_message() -> None:
    (headers, _), (back, waits) = run_ranks(2, _headers, False)
    assert (headers, back, waits) == (1, 0, 7), "six activations and a header"
    assert run_ranks(2, _headers, True)[0][0] == 6


def _frees(rank: int) -> list[int]:
    """Return how many sent activations are kept as each gradient is taken."""
    exchange = make_exchange()
    kept = []
    take = exchange.recv_backward

    def taken(message: Message) -> list[torch.Tensor]:
        gradients = take(message)
        kept.append(len(exchange._sending[Kind.ACTIVATION, 1]))
        return gradients

    exchange.recv_backward = taken  # type: ignore[method-assign]
    drive(exchange, one_forward_one_backward(2, 5, rank), [micro_batch(i) for i in range(5)])
    return kept


def test_what_was_sent_is_let_go_when_its_gradient_is_back() -> None:
    assert run_ranks(2, _frees)[0] == [1, 1, 1, 1, 0]


def _declare(rank: int) -> list[str]:
    """Change the declaration between calls of one exchange; return what the sender was told in each."""
    module = SimpleNamespace(_input_grad=[True], _layer_specs=[torch.tanh, torch.nn.ReLU()], parts=[0, 1, 2])
    exchange = make_exchange(module=module)
    messages = []
    for dtype, grad in ((None, True), ("bool", False), (torch.float64, True)):
        set_list(module, "_input_type", [dtype])
        set_list(module, "_input_grad", [grad])
        if rank == 1 and dtype == "bool":
            continue
        exchange.begin([Forward(0), Backward(0)], is_training=True)
        try:
            if rank == 0:
                exchange.send_forward(Message(Kind.ACTIVATION, 0, 0, 1), micro_batch(0).requires_grad_())
                exchange.recv_backward(Message(Kind.GRADIENT, 0, 0, 1))
            else:
                _, leaves = exchange.recv_forward(Message(Kind.ACTIVATION, 0, 0, 0))
                exchange.send_backward(Message(Kind.GRADIENT, 0, 0, 0), leaves)
            messages.append("")
        except BoundaryError as error:
            messages.append(str(error))
        exchange.finish()
    return messages


def test_a_new_declaration_holds_from_the_next_call_on() -> None:
    messages, _ = run_ranks(2, _declare)
    assert messages[0] == messages[2] == ""
    assert "stage 0 output 0 (of layer 0 (tanh)): declared bool, got float64[2, 3]" in messages[1]


def test_tensors_that_lie_elsewhere_are_named() -> None:
    links = SimpleNamespace(stage=0, num_stages=2, ranks=[0, 1], device=torch.device("cpu"))
    exchange = P2PCommunicator(links, SimpleNamespace(boundary=[Boundary("hidden")]))  # type: ignore[arg-type]
    exchange.begin([], is_training=True)
    message = Message(Kind.ACTIVATION, 0, 0, 1)
    with pytest.raises(TypeError, match=r"stage 0 output 0 must be a dense tensor on cpu, got float32\[2\] on meta"):
        exchange.send_forward(message, torch.empty(2, device="meta"))
    with pytest.raises(TypeError, match="layout torch.sparse_coo"):
        exchange.send_forward(message, torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match="stage 0 must return a tensor or a plain tuple, list or dict"):
        exchange.send_forward(message, None)


def test_an_exchange_knows_what_it_waits_for_when_a_neighbour_is_gone() -> None:
    class Gone:
        def wait(self, *_: Any) -> None:
            raise RuntimeError("Connection closed by peer")

    links = SimpleNamespace(stage=1, num_stages=3, ranks=[4, 5, 6], device=torch.device("cpu"), timeout=None)
    transport = Transport(links)  # type: ignore[arg-type]
    transport.action = Backward(3, 1)
    message = Message(Kind.GRADIENT, 3, 1, 2)
    transfer = SimpleNamespace(kind=Kind.GRADIENT, message=message, work=Gone())
    words = r"stage 1 lost stage 2 \(rank 6\) while receiving the gradient of micro-batch 3 chunk 1 during Backward\(m"
    with pytest.raises(RuntimeError, match=words):
        transport.wait_for(transfer)  # type: ignore[arg-type]
    assert transport.waiting == ("receiving", Kind.GRADIENT, message)


def _alone(**module: Any) -> tuple[P2PCommunicator, list[Kind]]:
    """Return the exchange of a first stage without neighbours, and the kinds of what it would have sent."""
    links = SimpleNamespace(stage=0, num_stages=2, ranks=[0, 1], device=torch.device("cpu"), cut=Slice())
    exchange = P2PCommunicator(links, SimpleNamespace(parts=[0, 1, 2], _layer_specs=[torch.nn.Tanh(), len], **module))  # type: ignore[arg-type]
    kinds: list[Kind] = []
    exchange.send = lambda kind, *_: kinds.append(kind)  # type: ignore[method-assign]
    exchange.begin([], is_training=True)
    return exchange, kinds


GRAD = torch.ones(2, 8, requires_grad=True)


def test_an_output_of_a_known_form_is_not_described_again(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, kinds = _alone(_input_grad=[True])
    described: list[Any] = []
    describe = tds.p2p.communicator.describe
    monkeypatch.setattr(
        tds.p2p.communicator, "describe", lambda *args, **flags: described.append(args) or describe(*args, **flags)
    )
    for _ in range(3):
        exchange.begin([], is_training=True)
        exchange.send_forward(Message(Kind.ACTIVATION, 0, 0, 1), GRAD)
    assert kinds == [Kind.HEADER, Kind.ACTIVATION] * 3 and len(described) == 1


ISSUE_DTYPES = (
    torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


FAULTS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "P03-number": ({"_input_grad": [True]}, (GRAD, GRAD), "the 1 declared tensors (any), got 2"),
    "P03-type": ({"_input_type": ["float", "bool"]}, (GRAD, GRAD.detach()), "declared bool, got float32[2, 8]"),
    "P07-detached": ({"_input_grad": [True]}, GRAD.detach(), "declared with a gradient, got float32[2, 8] that"),
    "P07-needed": ({"_input_grad": [False]}, GRAD, "declared without a gradient, got float32[2, 8] that requires"),
    "P13-swapped": ({"boundary": [Boundary("a"), Boundary("b")]}, {"b": GRAD, "a": GRAD}, "names ('a', 'b') in order"),
    "long-name": ({}, {"k" * 2000: GRAD}, "keys of a dict at a stage boundary must fit into 1024 bytes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_output_that_does_not_match_sends_nothing(fault: str) -> None:
    module, output, words = FAULTS[fault]
    exchange, sent = _alone(**module)
    with pytest.raises(BoundaryError) as raised:
        exchange.send_forward(Message(Kind.ACTIVATION, 0, 0, 1), output)
    assert all(part in str(raised.value) for part in ("stage 0", "layer 0 (Tanh)", words)), raised.value
    assert sent == []


def test_a_change_of_dtype_shape_or_form_sends_nothing_more() -> None:
    """P01: each pair of dtypes; P02: another shape of the same bytes; a gradient, a name, a structure that changes."""
    message = Message(Kind.ACTIVATION, 0, 0, 1)
    changes: list[tuple[Any, Any, str]] = [
        (torch.ones(2).to(a), torch.ones(2).to(b), f"was {str(a)[6:]}.2., got {str(b)[6:]}.2. at micro-batch 0")
        for a in ISSUE_DTYPES
        for b in ISSUE_DTYPES
        if a is not b
    ]
    changes += [
        (GRAD, torch.ones(8, 2, requires_grad=True), r"was float32\[2, 8\], got float32\[8, 2\]"),
        (GRAD, GRAD.detach(), "with gradient=False"),
        ({"a": GRAD}, {"b": GRAD}, "1 tensors as dict of 'a' before, got 1 as dict of 'b'"),
        ((GRAD,), [GRAD], "as tuple before, got 1 as list"),
    ]
    for first, then, words in changes:
        exchange, sent = _alone()
        exchange.send_forward(message, first)
        with pytest.raises(BoundaryError, match=rf"stage 0.*layer 0 \(Tanh\).*{words}"):
            exchange.send_forward(message, then)
        assert sent == [Kind.HEADER, Kind.ACTIVATION]
