"""Declarations are read and checked; what crosses keeps its dtype, shape and bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tds.boundary import Boundary, BoundaryError, TensorSpec, check_same, declared_boundary, describe
from tds.header import DTYPES, decode_header, encode_header
from tds.structure import LIST, SINGLE, TUPLE, Structure
from tds.wire import Layout, Slice


def test_three_lists_become_records() -> None:
    module = SimpleNamespace(
        _input_grad=[True, False], _input_type=["float", "bool"], _input_pipe_partitioned=[True, False]
    )
    assert declared_boundary(module) == (
        Boundary("tensor 0", "float", True, True),
        Boundary("tensor 1", "bool", False, False),
    )
    assert declared_boundary(SimpleNamespace()) is None
    assert declared_boundary(SimpleNamespace(_input_grad=[True, False]))[1].kind is None


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ({"_input_grad": [True], "_input_type": ["float", "bool"]}, "one length"),
        ({"_input_grad": [True], "_input_type": ["bool"]}, r"only floats have gradients.*_input_grad\[0\]"),
        ({"_input_grad": [True], "_input_type": ["half"]}, "_input_type.0. must be one of"),
    ],
)
def test_lists_that_disagree_are_refused(lists: dict, words: str) -> None:
    with pytest.raises(BoundaryError, match=words):
        declared_boundary(SimpleNamespace(**lists))


HIDDEN = torch.zeros(4, 1, 8, requires_grad=True)
MASK = torch.zeros(4, dtype=torch.bool)
DECLARED = (Boundary("hidden"), Boundary("mask", "bool", False))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ((HIDDEN,), "2 tensors that are declared.*got 1"),
        ((HIDDEN, MASK.float()), r"stage 3 output 1: declared bool, got float32\[4\]"),
        ((HIDDEN.detach(), MASK), "output 0: declared with a gradient, got float32.* requires none"),
        ((HIDDEN, MASK, MASK), "got 3"),
    ],
)
def test_an_output_that_is_not_as_declared_is_refused(tensors: tuple, words: str) -> None:
    with pytest.raises(BoundaryError, match=words):
        describe(tensors, DECLARED, stage=3, is_training=True)


def test_a_gradient_that_would_be_lost_is_refused_unless_recompute_marks_all() -> None:
    declared = (Boundary("factor", "float", needs_grad=False),)
    with pytest.raises(BoundaryError, match="would be lost"):
        describe((HIDDEN,), declared, stage=0, is_training=True)
    (spec,) = describe((HIDDEN,), declared, stage=0, is_training=True, marks_all=True)
    assert not spec.needs_grad


def test_a_float_declared_int_without_gradient_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    declared = (Boundary("mask", "int", needs_grad=False),)
    for _ in range(2):
        (spec,) = describe((torch.zeros(2, 3),), declared, stage=0, is_training=True)
    assert spec == TensorSpec(torch.float32, (2, 3), False, False)
    assert len(caplog.records) == 1


def test_a_change_within_a_call_names_both_forms() -> None:
    first = (TensorSpec(torch.float32, (2, 8), True, False),)
    now = (TensorSpec(torch.float32, (8, 2), True, False),)
    with pytest.raises(BoundaryError, match=r"stage 1 output 0.*float32\[2, 8\], got float32\[8, 2\].*micro-batch 2"):
        check_same(now, first, stage=1, micro_batch=2, names=["hidden"])


SPECS = st.lists(
    st.builds(
        TensorSpec, st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4).map(tuple), st.booleans(),
        st.booleans(),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(SPECS, st.sampled_from([SINGLE, TUPLE, LIST, Structure(dict, ("hidden", "Maske ä"))]))
def test_header_and_message_come_back_as_they_were(specs: list[TensorSpec], structure: Structure) -> None:
    assert decode_header(encode_header(specs, structure, stage=0)) == (tuple(specs), structure)
    tensors = [torch.randint(0, 2, spec.shape).to(spec.dtype) for spec in specs]
    layout = Layout(specs, Slice())
    for sent, got in zip(tensors, layout.unpack(layout.pack(tensors)), strict=True):
        assert got.dtype is sent.dtype and torch.equal(got, sent)


def test_a_single_tensor_is_not_copied_and_views_do_not_share_versions() -> None:
    tensor = torch.arange(32, dtype=torch.float32)
    layout = Layout([TensorSpec(torch.float32, (32,), True, False)], Slice())
    assert layout.pack([tensor]).data_ptr() == tensor.data_ptr()
    specs = [TensorSpec(torch.float32, (4,), True, False), TensorSpec(torch.bool, (4,), False, False)]
    layout = Layout(specs, Slice())
    hidden, mask = layout.unpack(layout.pack([torch.ones(4), torch.ones(4, dtype=torch.bool)]))
    loss = (hidden.requires_grad_() ** 2).sum()
    mask.logical_not_()
    loss.backward()
    assert torch.equal(hidden.grad, torch.full((4,), 2.0))
