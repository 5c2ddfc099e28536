"""Messages between stages: any structure, any number of chunks, shapes that change, and nothing more than is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tds.p2p.communicator
from tds.p2p.boundary import Boundary, BoundaryError, set_list
from tds.p2p.communicator import P2PCommunicator
from tds.p2p.packed_layout import TensorGroup
from tds.p2p.transport import StageLinks, Transport
from tds.schedule import (
    Action,
    Backward,
    Forward,
    Message,
    MessageType,
    Placement,
    V,
    forward_only,
    one_forward_one_backward,
    schedule_named,
)
from tds.schedule.limits import receive_posts, send_window
from tests.helpers.harness import fork_ranks, run_ranks
from tests.helpers.lines import (
    check_equals_one_process,
    make_communicator,
    make_micro_batch,
    order_chunk_by_chunk,
    run_actions,
)

MANUAL_ORDERS: list[list[Action]] = [
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
    communicator = make_communicator(num_chunks)
    communicator.window = window
    return run_actions(communicator, orders[rank], inputs)


@pytest.mark.parametrize(
    ("orders", "num_chunks", "window"),
    [
        ([one_forward_one_backward(3, 5, stage) for stage in range(3)], 1, 4),
        (MANUAL_ORDERS, 2, 2),
        ([order_chunk_by_chunk(3, 2)] * 2, 2, None),
        ([order_chunk_by_chunk(2, 3)] * 2, 3, 2),
        ([order_chunk_by_chunk(3, 2)] * 3, 2, 4),
    ],
    ids=["1f1b", "by hand", "two by two", "two by three", "three by two"],
)
def test_structures_cross_in_both_directions_with_chunks(
    orders: list[list[Action]], num_chunks: int, window: int | None
) -> None:
    inputs = [make_micro_batch(i) for i in range(1 + max(action.micro_batch for action in orders[0]))]
    check_equals_one_process(run_ranks(len(orders), _drive, orders, inputs, num_chunks, window), inputs, num_chunks)


def _drive_v(rank: int, name: str, num_stages: int, inputs: list[torch.Tensor]) -> Any:
    order, num_micro_batches = schedule_named(name, 2, V), len(inputs)
    communicator = make_communicator(2, placement=V)
    communicator.set_limits(
        send_window(order, num_stages, num_micro_batches, 2, True, V),
        receive_posts(order, num_stages, num_micro_batches, 2, V)[rank],
    )
    return run_actions(communicator, order(num_stages, num_micro_batches, rank), inputs)


@pytest.mark.parametrize(("name", "num_stages"), [("dualpipev", 2), ("dualpipev", 3)])
def test_v_stages_send_to_both_neighbours_and_themselves(name: str, num_stages: int) -> None:
    inputs = [make_micro_batch(i) for i in range(7)]
    check_equals_one_process(run_ranks(num_stages, _drive_v, name, num_stages, inputs), inputs, 2, V)


def make_single_v_stage(**options: Any) -> P2PCommunicator:
    """Return the exchange of a stage that is the only one, so that all it sends goes to itself."""
    links = StageLinks(0, [0], {}, TensorGroup(), torch.device("cpu"))
    communicator = P2PCommunicator(links, placement=Placement(1, 2, V), **options)
    communicator.begin([], is_training=True)
    return communicator


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_local_message_is_not_copied(is_dynamic: bool) -> None:
    communicator = make_single_v_stage(is_dynamic=is_dynamic)
    weight = torch.ones(3, requires_grad=True)
    outputs = [{"hidden": weight * n, "ids": torch.tensor([n])} for n in (2.0, 3.0)]
    for micro_batch_idx, output in enumerate(outputs):
        with_grad = communicator.send_forward(Message(MessageType.ACTIVATION, micro_batch_idx, 0, 0), output)
        assert len(with_grad) == 1 and with_grad[0] is output["hidden"]
    for micro_batch_idx, output in enumerate(outputs):
        received, leaves = communicator.recv_forward(Message(MessageType.ACTIVATION, micro_batch_idx, 1, 0))
        assert {name: tensor.data_ptr() for name, tensor in received.items()} == {
            name: tensor.data_ptr() for name, tensor in output.items()
        }
        (received["hidden"] * 5).sum().backward()
        communicator.send_backward(Message(MessageType.GRADIENT, micro_batch_idx, 1, 0), [leaf.grad for leaf in leaves])
        (gradient,) = communicator.recv_backward(Message(MessageType.GRADIENT, micro_batch_idx, 0, 0))
        assert gradient is leaves[0].grad and gradient.tolist() == [5.0] * 3 and weight.grad is None
    communicator.finish()
    assert not communicator._local_tensors and not communicator.history


def test_in_place_change_of_local_message_is_detected() -> None:
    """Its own backward may need it: after an operation in place in the next chunk it must fail, not give other sums."""
    communicator = make_single_v_stage()
    output = torch.tanh(torch.ones(3, requires_grad=True))
    communicator.send_forward(Message(MessageType.ACTIVATION, 0, 0, 0), output)
    received, _ = communicator.recv_forward(Message(MessageType.ACTIVATION, 0, 1, 0))
    received.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_local_message_is_checked_against_declaration() -> None:
    communicator = make_single_v_stage(module=SimpleNamespace(boundary=[Boundary("hidden"), Boundary("mask", "bool")]))
    with pytest.raises(BoundaryError, match="must return the 2 declared tensors"):
        communicator.send_forward(Message(MessageType.ACTIVATION, 0, 0, 0), torch.ones(2))


def _run_calls(rank: int) -> list[Any]:
    """Train, evaluate and train with one exchange on micro-batches of other sizes and numbers."""
    communicator = make_communicator()
    results = []
    for rows, num_micro_batches, is_training in ((2, 3, True), (5, 2, False), (1, 4, True)):
        inputs = [make_micro_batch(i, rows) for i in range(num_micro_batches)]
        order = one_forward_one_backward if is_training else forward_only
        results.append(run_actions(communicator, order(2, num_micro_batches, rank), inputs, is_training))
    return results


def test_shapes_may_change_between_calls_and_modes() -> None:
    first, second = run_ranks(2, _run_calls)
    check_equals_one_process([first[0], second[0]], [make_micro_batch(i, 2) for i in range(3)])
    check_equals_one_process([first[2], second[2]], [make_micro_batch(i, 1) for i in range(4)])
    assert len(second[1][0]) == 2


def _run_dynamic(rank: int, rows: list[int], is_dynamic: bool, num_chunks: int, actions: list[list[Action]]) -> Any:
    communicator = make_communicator(num_chunks, is_dynamic=is_dynamic)
    return run_actions(communicator, actions[rank], [make_micro_batch(i, size) for i, size in enumerate(rows)])


@pytest.mark.parametrize(
    ("actions", "num_chunks"),
    [([one_forward_one_backward(3, 5, stage) for stage in range(3)], 1), ([order_chunk_by_chunk(5, 2)] * 2, 2)],
    ids=["1f1b", "chunks"],
)
def test_dynamic_shape_allows_shapes_per_micro_batch(actions: list[list[Action]], num_chunks: int) -> None:
    rows = [2, 5, 1, 0, 3]
    results = run_ranks(len(actions), _run_dynamic, rows, True, num_chunks, actions)
    check_equals_one_process(results, [make_micro_batch(i, size) for i, size in enumerate(rows)], num_chunks)


def test_shape_change_without_dynamic_shape_raises_before_send() -> None:
    actions = [one_forward_one_backward(2, 3, stage) for stage in range(2)]
    codes, _, reports = fork_ranks(2, _run_dynamic, [2, 2, 3], False, 1, actions)
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


def _exchange_outputs(rank: int) -> Any:
    communicator = make_communicator()
    got, grads = [], []
    for output in OUTPUTS:
        communicator.begin([Forward(0), Backward(0)], is_training=True)
        if rank == 0:
            with_grad = communicator.send_forward(Message(MessageType.ACTIVATION, 0, 0, 1), output)
            grads += communicator.recv_backward(Message(MessageType.GRADIENT, 0, 0, 1))
            assert len(with_grad) == (1 if output is OUTPUTS[0] else 0)
        else:
            value, leaves = communicator.recv_forward(Message(MessageType.ACTIVATION, 0, 0, 0))
            communicator.send_backward(Message(MessageType.GRADIENT, 0, 0, 0), [torch.full_like(x, 7) for x in leaves])
            got.append(value)
        communicator.finish()
    num_sent = sum(
        1
        for direction, message_type, _ in communicator.history
        if direction == "sent" and message_type is MessageType.GRADIENT
    )
    return got, grads, num_sent


def test_received_structure_equals_sent_structure() -> None:
    (_, grads, _), (got, _, num_gradients) = run_ranks(2, _exchange_outputs)
    assert num_gradients == 1 and [g.tolist() for g in grads] == [[[7.0, 7.0], [7.0, 7.0]]]
    for value, output in zip(got, OUTPUTS, strict=True):
        assert type(value) is type(output)
        names = (
            list(output) if isinstance(output, dict) else range(len(output)) if type(output) in (list, tuple) else None
        )
        assert not isinstance(output, dict) or list(value) == names
        pairs = [(value, output)] if names is None else [(value[n], output[n]) for n in names]
        assert names is None or len(value) == len(output)
        for received_tensor, sent_tensor in pairs:
            assert (
                received_tensor.dtype is sent_tensor.dtype
                and received_tensor.shape == sent_tensor.shape
                and torch.equal(received_tensor, sent_tensor)
            )
            assert received_tensor.requires_grad == sent_tensor.requires_grad and received_tensor.is_leaf


def _exchange_mixed_gradients(rank: int) -> list[float]:
    """Two chunks: the boundary of the first has a gradient, that of the second has none."""
    communicator = make_communicator(2)
    first, second = (Message(MessageType.ACTIVATION, 0, chunk, 1 - rank) for chunk in (0, 1))
    gradient_type = MessageType.GRADIENT
    communicator.begin([Forward(0, 0), Forward(0, 1), Backward(0, 1), Backward(0, 0)], is_training=True)
    if rank == 0:
        communicator.send_forward(first, torch.ones(2, requires_grad=True))
        ring, leaves = communicator.recv_forward(second)
        communicator.send_forward(second, ring.detach() * 5)
        assert communicator.recv_backward(Message(gradient_type, 0, 1, 1)) == []
        communicator.send_backward(Message(gradient_type, 0, 1, 1), [torch.full((2,), 3.0) for _ in leaves])
        result = communicator.recv_backward(Message(gradient_type, 0, 0, 1))[0]
    else:
        value, leaves = communicator.recv_forward(first)
        communicator.send_forward(first, value * 2)
        result, no_leaves = communicator.recv_forward(second)
        communicator.send_backward(Message(gradient_type, 0, 1, 0), no_leaves)
        (arrived,) = communicator.recv_backward(Message(gradient_type, 0, 0, 0))
        communicator.send_backward(Message(gradient_type, 0, 0, 0), [arrived * 2 for _ in leaves])
    communicator.finish()
    return result.tolist()


def test_boundary_without_gradients_sends_no_gradient_message() -> None:
    assert run_ranks(2, _exchange_mixed_gradients) == [[6.0, 6.0], [10.0, 10.0]]


class _HeaderCounter(P2PCommunicator):
    """Counts the headers that it sends."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.headers = 0

    def send(self, message_type: MessageType, message: Message, buffer: torch.Tensor) -> None:
        self.headers += message_type is MessageType.HEADER
        super().send(message_type, message, buffer)


def _count_headers(rank: int, is_dynamic: bool) -> tuple[int, int]:
    communicator = make_communicator(is_dynamic=is_dynamic)
    communicator.__class__ = _HeaderCounter
    communicator.headers = 0
    run_actions(communicator, one_forward_one_backward(2, 6, rank), [make_micro_batch(i) for i in range(6)])
    return communicator.headers, len(communicator.waits)


def test_header_is_sent_once_per_call_or_per_message_if_dynamic() -> None:
    (headers, _), (back, waits) = run_ranks(2, _count_headers, False)
    assert (headers, back, waits) == (1, 0, 7), "six activations and a header"
    assert run_ranks(2, _count_headers, True)[0][0] == 6


def _count_retained_sends(rank: int) -> list[int]:
    """Return how many sent activations are kept as each gradient is taken."""
    communicator = make_communicator()
    num_retained = []
    receive_backward = communicator.recv_backward

    def counted_receive(message: Message) -> list[torch.Tensor]:
        gradients = receive_backward(message)
        num_retained.append(len(communicator._pending_sends[MessageType.ACTIVATION, 1]))
        return gradients

    communicator.recv_backward = counted_receive  # type: ignore[method-assign]
    run_actions(communicator, one_forward_one_backward(2, 5, rank), [make_micro_batch(i) for i in range(5)])
    return num_retained


def test_sent_activation_is_freed_when_gradient_arrives() -> None:
    assert run_ranks(2, _count_retained_sends)[0] == [1, 1, 1, 1, 0]


def _change_declaration(rank: int) -> list[str]:
    """Change the declaration between calls of one exchange; return what the sender was told in each."""
    module = SimpleNamespace(_input_grad=[True], _layer_specs=[torch.tanh, torch.nn.ReLU()], parts=[0, 1, 2])
    communicator = make_communicator(module=module)
    messages = []
    for dtype, grad in ((None, True), ("bool", False), (torch.float64, True)):
        set_list(module, "_input_type", [dtype])
        set_list(module, "_input_grad", [grad])
        if rank == 1 and dtype == "bool":
            continue
        communicator.begin([Forward(0), Backward(0)], is_training=True)
        try:
            if rank == 0:
                communicator.send_forward(
                    Message(MessageType.ACTIVATION, 0, 0, 1), make_micro_batch(0).requires_grad_()
                )
                communicator.recv_backward(Message(MessageType.GRADIENT, 0, 0, 1))
            else:
                _, leaves = communicator.recv_forward(Message(MessageType.ACTIVATION, 0, 0, 0))
                communicator.send_backward(Message(MessageType.GRADIENT, 0, 0, 0), leaves)
            messages.append("")
        except BoundaryError as error:
            messages.append(str(error))
        communicator.finish()
    return messages


def test_new_declaration_takes_effect_at_next_call() -> None:
    messages, _ = run_ranks(2, _change_declaration)
    assert messages[0] == messages[2] == ""
    assert "stage 0 output 0 (of layer 0 (tanh)): declared bool, got float64[2, 3]" in messages[1]


def test_tensors_on_other_device_or_layout_are_rejected() -> None:
    links = SimpleNamespace(stage=0, num_stages=2, ranks=[0, 1], device=torch.device("cpu"))
    communicator = P2PCommunicator(links, SimpleNamespace(boundary=[Boundary("hidden")]))  # type: ignore[arg-type]
    communicator.begin([], is_training=True)
    message = Message(MessageType.ACTIVATION, 0, 0, 1)
    with pytest.raises(TypeError, match=r"stage 0 output 0 must be a dense tensor on cpu, got float32\[2\] on meta"):
        communicator.send_forward(message, torch.empty(2, device="meta"))
    with pytest.raises(TypeError, match="layout torch.sparse_coo"):
        communicator.send_forward(message, torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match="stage 0 must return a tensor or a plain tuple, list or dict"):
        communicator.send_forward(message, None)


def test_lost_peer_error_names_pending_message() -> None:
    class FailedWork:
        def wait(self, *_: Any) -> None:
            raise RuntimeError("Connection closed by peer")

    links = SimpleNamespace(stage=1, num_stages=3, ranks=[4, 5, 6], device=torch.device("cpu"), timeout=None)
    transport = Transport(links)  # type: ignore[arg-type]
    transport.action = Backward(3, 1)
    message = Message(MessageType.GRADIENT, 3, 1, 2)
    transfer = SimpleNamespace(message_type=MessageType.GRADIENT, message=message, work=FailedWork())
    pattern = (
        r"stage 1 lost stage 2 \(rank 6\) while receiving the gradient of micro-batch 3 chunk 1 during Backward\(m"
    )
    with pytest.raises(RuntimeError, match=pattern):
        transport.wait_for(transfer)  # type: ignore[arg-type]
    assert transport.waiting == ("receiving", MessageType.GRADIENT, message)


def _make_first_stage(**module: Any) -> tuple[P2PCommunicator, list[MessageType]]:
    """Return the exchange of a first stage without neighbours, and the kinds of what it would have sent."""
    links = SimpleNamespace(stage=0, num_stages=2, ranks=[0, 1], device=torch.device("cpu"), tensor_group=TensorGroup())
    communicator = P2PCommunicator(
        links, SimpleNamespace(parts=[0, 1, 2], _layer_specs=[torch.nn.Tanh(), len], **module)
    )  # type: ignore[arg-type]
    message_types: list[MessageType] = []
    communicator.send = lambda message_type, *_: message_types.append(message_type)  # type: ignore[method-assign]
    communicator.begin([], is_training=True)
    return communicator, message_types


GRAD = torch.ones(2, 8, requires_grad=True)


def test_known_output_structure_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    communicator, message_types = _make_first_stage(_input_grad=[True])
    described: list[Any] = []
    describe = tds.p2p.communicator.describe
    monkeypatch.setattr(
        tds.p2p.communicator, "describe", lambda *args, **flags: described.append(args) or describe(*args, **flags)
    )
    for _ in range(3):
        communicator.begin([], is_training=True)
        communicator.send_forward(Message(MessageType.ACTIVATION, 0, 0, 1), GRAD)
    assert message_types == [MessageType.HEADER, MessageType.ACTIVATION] * 3 and len(described) == 1


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
def test_mismatched_output_is_not_sent(fault: str) -> None:
    module, output, expected = FAULTS[fault]
    communicator, sent = _make_first_stage(**module)
    with pytest.raises(BoundaryError) as raised:
        communicator.send_forward(Message(MessageType.ACTIVATION, 0, 0, 1), output)
    assert all(fragment in str(raised.value) for fragment in ("stage 0", "layer 0 (Tanh)", expected)), raised.value
    assert sent == []


def test_changed_dtype_shape_or_structure_is_not_sent() -> None:
    """P01: each pair of dtypes; P02: another shape of the same bytes; a gradient, a name, a structure that changes."""
    message = Message(MessageType.ACTIVATION, 0, 0, 1)
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
    for first, second, pattern in changes:
        communicator, sent = _make_first_stage()
        communicator.send_forward(message, first)
        with pytest.raises(BoundaryError, match=rf"stage 0.*layer 0 \(Tanh\).*{pattern}"):
            communicator.send_forward(message, second)
        assert sent == [MessageType.HEADER, MessageType.ACTIVATION]
