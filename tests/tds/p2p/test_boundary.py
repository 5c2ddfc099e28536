"""Declarations are read and checked, and what does not match them is refused before the wire."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tds.p2p.boundary import Boundary, BoundaryError, declared_boundary, records_of, set_list
from tds.p2p.boundary_layers import BoundarySide, input_side, layer_name, output_side
from tds.p2p.structure import LIST, SINGLE, TUPLE, Structure, flatten
from tds.p2p.tensor_meta import TensorMeta, check_received, check_same, describe
from tds.schedule import Placement

ISSUE_DTYPES = (
    torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
LOCATION = BoundarySide(3, "output", "layer 7 (Dense)")
HIDDEN = torch.zeros(4, 1, 8, requires_grad=True)
MASK = torch.zeros(4, dtype=torch.bool)
DECLARED = (Boundary("hidden"), Boundary("mask", "bool"))


def _describe(tensors: Any, records: Any, structure: Structure = TUPLE, **kwargs: Any) -> tuple[TensorMeta, ...]:
    return describe(tensors, structure, records, LOCATION, **{"is_training": True, **kwargs})


def test_deepspeed_lists_become_boundary_records() -> None:
    module = SimpleNamespace(
        _input_grad=[True, False], _input_type=["float", torch.int32], _input_pipe_partitioned=[True, False]
    )
    assert declared_boundary(module) == (
        Boundary("", "float", True, True),
        Boundary("", torch.int32, False, False),
    )
    assert declared_boundary(SimpleNamespace()) is None
    assert declared_boundary(SimpleNamespace(_input_grad=[True, False]))[1].dtype is None
    assert [r.needs_grad for r in declared_boundary(SimpleNamespace(_input_type=["float", "bool", torch.half]))] == [
        True,
        False,
        True,
    ]


def test_boundary_records_may_differ_per_boundary() -> None:
    module = SimpleNamespace(boundary={0: [Boundary("hidden")], 2: list(DECLARED)})
    declared = declared_boundary(module)
    assert [records_of(declared, virtual_stage) for virtual_stage in range(3)] == [
        (Boundary("hidden"),),
        None,
        DECLARED,
    ]
    assert records_of(declared_boundary(SimpleNamespace(boundary=DECLARED)), 5) == DECLARED


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"_input_grad": [True], "_input_type": ["float", "bool"]}, "equal lengths"),
        ({"_input_grad": [True], "_input_type": ["bool"]}, r"only float tensors have gradients.*_input_grad\[0\]"),
        ({"_input_grad": [True], "_input_type": [torch.int64]}, "only float tensors have gradients.*'int64'"),
        ({"_input_grad": [True], "_input_type": ["half"]}, "_input_type.0. must be one of"),
        ({"_input_grad": ["yes"]}, r"_input_grad\[0\] must be True or False, got 'yes'"),
        ({"_input_grad": [True], "boundary": [Boundary()]}, "declared only once, got boundary and _input_grad"),
        ({"boundary": ["float"]}, r"boundary\[0\] must be a Boundary, got 'float'"),
    ],
)
def test_inconsistent_declarations_are_rejected(lists: dict, message: str) -> None:
    with pytest.raises(BoundaryError, match=message):
        declared_boundary(SimpleNamespace(**lists))


def test_set_list_allows_temporary_disagreement() -> None:
    module = SimpleNamespace(_input_grad=[True])
    set_list(module, "_input_grad", (True, False))
    set_list(module, "_input_type", ["float", torch.bool])
    assert declared_boundary(module) == (Boundary("", "float"), Boundary("", torch.bool))
    set_list(module, "_input_grad", None)
    set_list(module, "_input_type", None)
    assert declared_boundary(module) is None


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("_input_gard", [True], "are _input_grad, _input_type, _input_pipe_partitioned, got '_input_gard'"),
        ("_input_grad", ["float"], "_input_grad.0. must be True or False, got 'float'"),
        ("_input_type", ["float", "floaty"], "_input_type.1. must be one of"),
        ("_input_pipe_partitioned", True, "must be a list with one entry for each tensor, got True"),
    ],
)
def test_invalid_list_entries_are_rejected(name: str, values: Any, message: str) -> None:
    with pytest.raises(BoundaryError, match=message):
        set_list(SimpleNamespace(), name, values)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((HIDDEN,), r"stage 3 \(layer 7 \(Dense\)\) must return the 2 declared tensors.*got 1"),
        ((HIDDEN, MASK.float()), r"stage 3 output 1 \('mask', of layer 7 \(Dense\)\): declared bool, got float32\[4\]"),
        (
            (HIDDEN.detach(), MASK),
            "output 0 .'hidden'.*: declared with a gradient, got float32.4, 1, 8. that requires none",
        ),
        ((HIDDEN, MASK, MASK), "got 3"),
    ],
)
def test_output_not_matching_declaration_is_rejected(tensors: tuple, message: str) -> None:
    with pytest.raises(BoundaryError, match=message):
        _describe(tensors, DECLARED)


@pytest.mark.parametrize(("declared", "got"), itertools.permutations(ISSUE_DTYPES, 2))
def test_all_dtype_mismatches_are_detected(declared: torch.dtype, got: torch.dtype) -> None:
    """Against the declaration, against the first micro-batch, and against the receiver's own declaration."""
    record = Boundary("x", declared, needs_grad=False)
    names = f"{str(declared)[6:]}.*got {str(got)[6:]}"
    with pytest.raises(BoundaryError, match=rf"stage 3 output 0 \('x', of layer 7 \(Dense\)\): declared {names}"):
        _describe((torch.zeros(2, 3, dtype=got),), (record,))
    first, current = (TensorMeta(dtype, (2, 3), False, False) for dtype in (declared, got))
    with pytest.raises(BoundaryError, match=rf"stage 3 output 0 \(of layer 7.*was {names}\[2, 3\] at micro-batch 5"):
        check_same((current,), (first,), (SINGLE, SINGLE), LOCATION, micro_batch=5)
    with pytest.raises(
        BoundaryError, match=f"declared on this rank as x {str(declared)[6:]} .*announces {str(got)[6:]}"
    ):
        check_received((current,), (record,), BoundarySide(1, "input"), is_training=True)


def test_dict_requires_declared_names_in_order() -> None:
    records = (Boundary("hidden"), Boundary("mask", "bool"))
    assert len(_describe((HIDDEN, MASK), records, Structure(dict, ("hidden", "mask")))) == 2
    swapped = (Boundary("mask"), Boundary("hidden"))
    with pytest.raises(BoundaryError, match="declared names .'mask', 'hidden'. in order, got dict of 'hidden', 'mask'"):
        _describe((HIDDEN, HIDDEN), swapped, Structure(dict, ("hidden", "mask")))


def test_lost_gradient_is_rejected_unless_recompute_marks_all() -> None:
    declared = (Boundary("factor", "float", needs_grad=False),)
    with pytest.raises(BoundaryError, match="'factor'.*declared without a gradient.*would be lost"):
        _describe((HIDDEN,), declared)
    (spec,) = _describe((HIDDEN,), declared, marks_all=True)
    assert not spec.needs_grad


def test_float_declared_as_int_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    declared = (Boundary("weights", "int", needs_grad=False),)
    for size in (2, 3):
        (spec,) = _describe((torch.zeros(size, 3),), declared)
    assert spec == TensorMeta(torch.float32, (3, 3), False, False)
    assert len(caplog.records) == 1 and "'weights'" in caplog.text


@pytest.mark.parametrize(
    ("current", "structures", "message"),
    [
        (
            [TensorMeta(torch.float32, (8, 2), True, False)],
            (SINGLE, SINGLE),
            r"float32\[2, 8\], got float32\[8, 2\] at micro",
        ),
        ([TensorMeta(torch.float32, (2, 8), False, False)], (SINGLE, SINGLE), "with gradient=False at micro-batch 2"),
        ([], (TUPLE, SINGLE), "returned 1 tensors as tensor before, got 0 as tuple at micro-batch 2"),
        ([TensorMeta(torch.float32, (2, 8), True, False)], (LIST, TUPLE), "as tuple before, got 1 as list"),
    ],
)
def test_structure_change_within_call_names_both_structures(current: list, structures: Any, message: str) -> None:
    first = (TensorMeta(torch.float32, (2, 8), True, False),)
    with pytest.raises(BoundaryError, match=f"stage 3.*layer 7.*{message}"):
        check_same(tuple(current), first, structures, LOCATION, micro_batch=2)


def test_header_not_matching_receiver_declaration_is_rejected() -> None:
    location = BoundarySide(1, "input", "layer 2 (Dense)")
    spec = TensorMeta(torch.float32, (2, 8), True, False)
    for record, message in (
        (
            Boundary("h", partitioned=True),
            "partitioned=True; the sender announces float32.2, 8. with gradient=True, partitioned=False",
        ),
        (Boundary("h", needs_grad=False), "gradient=False"),
    ):
        with pytest.raises(BoundaryError, match=rf"stage 1 input 0 \('h', of layer 2 \(Dense\)\).*{message}"):
            check_received((spec,), (record,), location, is_training=True)
    with pytest.raises(
        BoundaryError, match="stage 1 .layer 2 .Dense.. expects the 2 declared tensors, but the sender announces 1"
    ):
        check_received((spec,), DECLARED, location, is_training=True)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (None, "must return a tensor or a plain tuple, list or dict of tensors, got NoneType"),
        ((MASK, None), r"got NoneType at \[1\] of the tuple"),
        ({"hidden": 1.0}, r"got float at \['hidden'\] of the dict"),
        ({3: MASK}, "keys are strings, got the key 3"),
        (torch.return_types.max((MASK, MASK)), "got max"),
    ],
)
def test_invalid_output_structures_are_rejected(output: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        flatten(output)


@pytest.mark.parametrize("output", [MASK, (), (MASK,), [HIDDEN, MASK], [], {}, {"b": MASK, "a": HIDDEN}])
def test_structure_roundtrip_preserves_output(output: Any) -> None:
    tensors, structure = flatten(output)
    rebuilt = structure.rebuild(list(tensors))
    assert type(rebuilt) is type(output)
    if isinstance(output, torch.Tensor):
        assert rebuilt is output
        return
    assert list(rebuilt) == list(output) or not isinstance(output, dict)
    assert all(a is b for a, b in zip(flatten(rebuilt)[0], tensors, strict=True))


def test_layer_names_contain_class_and_index() -> None:
    layers = [SimpleNamespace(typename=torch.nn.Linear), torch.nn.ReLU(), torch.flatten, torch.nn.Tanh()]
    module = SimpleNamespace(parts=[0, 2, 3, 4], _layer_specs=layers)
    assert [layer_name(module, i) for i in range(4)] == [
        "layer 0 (Linear)",
        "layer 1 (ReLU)",
        "layer 2 (flatten)",
        "layer 3 (Tanh)",
    ]
    assert (
        output_side(module, 0, 0, Placement(3)).layer == "layer 1 (ReLU)"
        and input_side(module, 0, 1, Placement(3)).layer[6:7] == "2"
    )
    assert str(output_side(module, 1, 0, Placement(2, 2))) == "stage 0 chunk 1 (layer 3 (Tanh))"
    assert output_side(None, 0, 1, Placement(2)).describe_tensor(0) == "stage 1 output 0"
