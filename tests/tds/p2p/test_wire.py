"""What crosses keeps its dtype, shape, structure and bits, in a header and in a message."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tds.p2p.boundary import BoundaryError
from tds.p2p.boundary_layers import BoundarySide
from tds.p2p.message_header import DTYPES, MAX_KEY_BYTES, decode_header, encode_header
from tds.p2p.packed_layout import PackedLayout, TensorGroup
from tds.p2p.structure import LIST, SINGLE, TUPLE, Structure
from tds.p2p.tensor_meta import TensorMeta

LOCATION = BoundarySide(0, "output", "layer 2 (Dense)")
SPEC = st.builds(
    TensorMeta, st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4).map(tuple), st.booleans(),
    st.booleans(),
)  # fmt: skip
KEYS = st.lists(st.text(max_size=12), max_size=6, unique=True)


@st.composite
def _messages(draw: st.DrawFn) -> tuple[list[TensorMeta], Structure]:
    form = draw(st.sampled_from(["single", "tuple", "list", "dict"]))
    if form == "single":
        return [draw(SPEC)], SINGLE
    if form == "dict":
        keys = draw(KEYS)
        return [draw(SPEC) for _ in keys], Structure(dict, tuple(keys))
    return draw(st.lists(SPEC, max_size=6)), TUPLE if form == "tuple" else LIST


def _values(spec: TensorMeta, seed: int, is_contiguous: bool = True) -> torch.Tensor:
    """Return a tensor of random bytes' worth of values; not contiguous where it has two dimensions."""
    generator = torch.Generator().manual_seed(seed)
    shape = spec.shape if is_contiguous else spec.shape[::-1]
    values = torch.randint(0, 120, shape, generator=generator).to(spec.dtype)
    return values if is_contiguous else values.permute(tuple(range(len(shape)))[::-1])


class _LocalTensorGroup(PackedLayout):
    """One rank's layout of a tensor group that lives in this process: gathers from the messages of all."""

    messages: list[torch.Tensor]

    def _gather(self, shard: torch.Tensor, num_bytes: int) -> torch.Tensor:
        start = shard.storage_offset() - self.messages[self.tensor_group.rank].storage_offset()
        return torch.cat([message[start : start + shard.numel()] for message in self.messages])[:num_bytes]


@settings(max_examples=40, deadline=None)
@given(_messages(), st.integers(1, 5), st.integers(0, 9), st.booleans())
def test_header_and_message_roundtrip(
    message: tuple[list[TensorMeta], Structure], group_size: int, seed: int, is_contiguous: bool
) -> None:
    """Whatever the structure, dtypes and shapes, cut over the tensor group or not."""
    specs, structure = message
    assert decode_header(encode_header(specs, structure, LOCATION)) == (tuple(specs), structure)
    tensors = [_values(spec, seed + i, is_contiguous) for i, spec in enumerate(specs)]
    layouts = [_LocalTensorGroup(specs, TensorGroup(rank, group_size)) for rank in range(group_size)]
    messages = [layout.pack(tensors) for layout in layouts]
    for layout in layouts:
        layout.messages = messages
        assert messages[layout.tensor_group.rank].numel() == layout.num_bytes
        for sent, spec, got in zip(tensors, specs, layout.unpack(messages[layout.tensor_group.rank]), strict=True):
            assert got.dtype is sent.dtype is spec.dtype and got.shape == sent.shape and torch.equal(got, sent)


def test_invalid_header_bytes_are_rejected() -> None:
    header = encode_header([TensorMeta(torch.float32, (2, 3), True, False)], SINGLE, LOCATION)
    header[0] += 1
    with pytest.raises(
        RuntimeError, match="expected a header of tds, got 0x746474: the stages run different schedules"
    ):
        decode_header(header)


@pytest.mark.parametrize("shape", [(32,), (3, 5), (), (7,)])
def test_single_tensor_is_packed_without_copy(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        tensor = torch.ones(shape, dtype=dtype)
        message = PackedLayout([TensorMeta(dtype, shape, False, False)], TensorGroup()).pack([tensor])
        assert message.data_ptr() == tensor.data_ptr() and message.numel() == tensor.numel() * tensor.element_size()


def test_received_views_have_separate_version_counters() -> None:
    specs = [TensorMeta(torch.float32, (4,), True, False), TensorMeta(torch.bool, (4,), False, False)]
    layout = PackedLayout(specs, TensorGroup())
    message = layout.pack([torch.ones(4), torch.ones(4, dtype=torch.bool)])
    hidden, mask = layout.unpack(message)
    assert hidden.data_ptr() == message.data_ptr()
    loss = (hidden.requires_grad_() ** 2).sum()
    mask.logical_not_()
    loss.backward()
    assert torch.equal(hidden.grad, torch.full((4,), 2.0))


def test_lazily_conjugated_tensors_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    layout = PackedLayout([TensorMeta(tensor.dtype, (2,), False, False)], TensorGroup())
    assert torch.equal(layout.unpack(layout.pack([tensor]))[0], tensor)
    layout = PackedLayout([TensorMeta(torch.float32, (2,), False, False)], TensorGroup())
    assert torch.equal(layout.unpack(layout.pack([tensor.imag]))[0], torch.tensor([-2.0, 4.0]))


@pytest.mark.parametrize(
    ("specs", "structure", "message"),
    [
        ([TensorMeta(torch.bool, (), False, False)] * 33, TUPLE, "at most 32 tensors.*got 33 from stage 0 .layer 2"),
        (
            [TensorMeta(torch.bool, (1,) * 9, False, False)],
            SINGLE,
            "at most 8 dimensions.*stage 0 output 0 .of layer 2",
        ),
        ([TensorMeta(torch.float8_e5m2, (1,), False, False)], SINGLE, "a supported dtype, got float8_e5m2"),
        (
            [TensorMeta(torch.bool, (), False, False)],
            Structure(dict, ("k" * MAX_KEY_BYTES,)),
            "keys of a dict.*fit into 1024 bytes, got 1028 bytes for 1 keys from stage 0.*Use shorter keys",
        ),
    ],
)
def test_oversized_headers_are_rejected(specs: list[TensorMeta], structure: Structure, message: str) -> None:
    with pytest.raises(BoundaryError, match=message):
        encode_header(specs, structure, LOCATION)
