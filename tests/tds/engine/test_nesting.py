"""The contract of a collate function, ((inputs...), labels), and what is said where it is not held."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tds.engine.batch_structure import describe_structure
from tds.engine.micro_batches import BatchSource, stage_inputs
from tests.helpers.harness import fork_ranks
from tests.helpers.toys import Toy, make_engine

X, Y = torch.zeros(4, 128), torch.zeros(4)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (X, "tensor [4, 128]"),
        ((X, Y), "(tensor [4, 128], tensor [4])"),
        ([X, (Y,)], "[tensor [4, 128], (tensor [4],)]"),
        ({"ids": X, "more": None}, "{'ids': tensor [4, 128], 'more': None}"),
        (np.zeros((2, 3)), "numpy array [2, 3]"),
        (("text", 3), "(str, int)"),
        ((Y,) * 8, "(" + "tensor [4], " * 6 + "2 more)"),
        ([[[[[[[Y]]]]]]], "[[[[[[...]]]]]]"),
    ],
    ids=range(8),
)
def test_describe_structure_formats_nesting(value: Any, message: str) -> None:
    assert describe_structure(value) == message


@pytest.mark.parametrize("batch", [(X, Y), [X, Y], ((X, X), None), ({"ids": X}, (Y, Y)), [[X], [Y]]], ids=range(5))
def test_batch_source_accepts_pairs_with_or_without_labels(batch: Any) -> None:
    inputs, labels = BatchSource(iter([batch]), None, 0).next()
    assert inputs is batch[0] and labels is batch[1]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            None,
            "got None from here. Return the pair from the batch function (without a return statement it returns None)",
        ),
        (X, "got tensor [4, 128] from here. Return (tensor, labels), or (tensor, None) if there are no labels"),
        (
            {"ids": X, "mask": X, "labels": Y},
            "got {'ids': tensor [4, 128], 'mask': tensor [4, 128], 'labels': tensor [4]} from here. Return the "
            'pair from collate_fn, or call engine.set_batch_fn(lambda batch: ((batch["ids"], batch["mask"]), '
            'batch["labels"]))',
        ),
        ({"ids": X, "target": Y}, 'lambda batch: ((batch["ids"],), batch["target"]))'),
        ({"ids": X}, 'lambda batch: ((batch["ids"],), batch["labels"]))'),
        (
            (X,),
            "got (tensor [4, 128],) from here. The labels are missing. Return (tensor [4, 128], labels)",
        ),
        (((X, Y),), "It is nested one level too deep. Return (tensor [4, 128], tensor [4])"),
        ([[X, Y]], "nested one level too deep. Return [tensor [4, 128], tensor [4]]"),
        (
            (X, X, Y),
            "got (tensor [4, 128], tensor [4, 128], tensor [4]) from here. Put the inputs of the first layer into "
            "one tuple: ((tensor [4, 128], tensor [4, 128]), tensor [4]), if the last element is the labels",
        ),
        ((), "got () from here. The batch is empty"),
        ("text", "got str from here. Return a pair of tensors"),
        (np.zeros((2, 3)), "got numpy array [2, 3] from here. Return a pair of tensors"),
    ],
    ids=range(12),
)
def test_invalid_nesting_error_suggests_fix(batch: Any, message: str) -> None:
    with pytest.raises(TypeError) as raised:
        BatchSource(iter([batch]), None, 0).next()
    text = str(raised.value).replace(" from the iterator on stage 0", " from here")
    assert text.startswith("a micro-batch must be ((inputs...), labels): the inputs of the first layer, and")
    assert message in text


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            (X, np.zeros(3)),
            "ndarray at inputs[1] of the inputs (tensor [4, 128], numpy array [3]). Convert it",
        ),
        (
            {"ids": X, "more": [Y, None]},
            "NoneType at inputs['more'][1] of the inputs {'ids': tensor [4, 128], '",
        ),
        (
            ("one text", "another"),
            "str at inputs[0] of the inputs (str, str). Remove it, or convert the text to numbers",
        ),
        ((X, 3), "int at inputs[1] of the inputs (tensor [4, 128], int). Convert it to a tensor"),
    ],
    ids=range(4),
)
def test_non_tensor_input_error_names_its_path(inputs: Any, message: str) -> None:
    with pytest.raises(TypeError) as raised:
        stage_inputs(inputs, torch.device("cpu"), needs_grad=False)
    assert message in str(raised.value)


def test_batch_source_rejects_non_iterator() -> None:
    with pytest.raises(TypeError, match=r"need an iterator, got list\. Create one with iter\(\.\.\.\), once"):
        BatchSource([(X, Y)], None, 0)  # type: ignore[arg-type]


def _train_with_triples(rank: int) -> None:
    def without_pairs(batch: Any) -> Any:
        x, (target, mask) = batch
        return x, target, mask

    toy = Toy("chain")
    engine = make_engine(toy, 3)
    engine.set_batch_fn(without_pairs)
    engine.train_batch(iter(toy.make_batches()))


def _train_with_two_inputs(rank: int) -> None:
    toy = Toy("chain")
    engine = make_engine(toy, 1)
    engine.train_batch(iter([((x, x), labels) for x, labels in toy.make_batches()]))


def _train_with_wrong_labels(rank: int) -> None:
    toy = Toy("chain")
    make_engine(toy, 1).train_batch(iter([(x, target) for x, (target, _) in toy.make_batches()]))


def test_engine_error_names_nesting_and_source() -> None:
    codes, _, reports = fork_ranks(3, _train_with_triples)
    assert codes == [1, 1, 1]
    for rank in (0, 2):
        message = f"from the batch function without_pairs on stage {rank}"
        assert "got (tensor [3, 4, 6], tensor [3, 4, 6], tensor [3, 4])" in reports[rank] and message in reports[rank]
    assert (
        "the first layer received (tensor [3, 4, 6], tensor [3, 4, 6])" in fork_ranks(1, _train_with_two_inputs)[2][0]
    )
    message = "the loss function received (tensor [3, 4, 6], tensor [3, 4, 6])"
    assert message in fork_ranks(1, _train_with_wrong_labels)[2][0]
