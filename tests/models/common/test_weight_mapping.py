"""Packed parts of different heights and adjacent rotary pairs: both directions, and every slice of the weight."""

from __future__ import annotations

import pytest
import torch

from megatron.errors import CheckpointError
from megatron.models.common.gated_query_rows import GatedQueryRows
from megatron.models.common.huggingface import WeightMapping, join_rows, read_into, weight_from_hf, weight_to_hf
from megatron.models.common.rotary_rows import RotaryRows
from megatron.mpu.shard import Shard

GROUPS, HEADS_PER_GROUP, HEAD_SIZE, WIDTH = 3, 2, 6, 5
QUERY_ROWS, KEY_ROWS = GROUPS * HEADS_PER_GROUP * HEAD_SIZE, GROUPS * HEAD_SIZE
NUM_ROWS = QUERY_ROWS + 2 * KEY_ROWS
HEAD_ROWS = RotaryRows(HEAD_SIZE, 0, 4)
ROTARY_ROWS = (HEAD_ROWS, HEAD_ROWS, None)
MAPPINGS = {
    "packed": WeightMapping(
        ("qkv",), num_blocks=GROUPS, num_packed=3, packed_rows=(QUERY_ROWS, KEY_ROWS, KEY_ROWS)
    ),
    "adjacent pairs": WeightMapping(("q", "k", "v"), num_blocks=GROUPS, row_orders=ROTARY_ROWS),
    "both": WeightMapping(
        ("qkv",), num_blocks=GROUPS, num_packed=3, packed_rows=(QUERY_ROWS, KEY_ROWS, KEY_ROWS), row_orders=ROTARY_ROWS
    ),
}  # fmt: skip


def make_tensors(mapping: WeightMapping, *columns: int) -> dict[str, torch.Tensor]:
    """Return Hugging Face tensors whose elements are all different."""
    packed = torch.arange(NUM_ROWS * (columns[0] if columns else 1)).view(NUM_ROWS, *columns)
    if len(mapping.hf_names) == 1:
        return {"qkv": packed}
    return dict(zip("qkv", packed.split([QUERY_ROWS, KEY_ROWS, KEY_ROWS]), strict=True))


def expected_rows(mapping: WeightMapping) -> list[int]:
    """Return, for each of our rows, its index among all rows of queries, then keys, then values."""
    in_head = [0, 2, 1, 3, 4, 5] if mapping.row_orders else list(range(HEAD_SIZE))
    rows: list[int] = []
    for group in range(GROUPS):
        for head in range(HEADS_PER_GROUP):
            rows += [(group * HEADS_PER_GROUP + head) * HEAD_SIZE + row for row in in_head]
        rows += [QUERY_ROWS + group * HEAD_SIZE + row for row in in_head]
        rows += range(QUERY_ROWS + KEY_ROWS + group * HEAD_SIZE, QUERY_ROWS + KEY_ROWS + (group + 1) * HEAD_SIZE)
    return rows


@pytest.mark.parametrize("columns", [(WIDTH,), ()], ids=["weight", "bias"])
@pytest.mark.parametrize("name", MAPPINGS)
def test_conversion_orders_rows_by_group_and_is_reversible(name: str, columns: tuple[int, ...]) -> None:
    mapping = MAPPINGS[name]
    tensors = make_tensors(mapping, *columns)
    weight = weight_from_hf(mapping, tensors)
    assert weight.equal(torch.cat(list(tensors.values()))[expected_rows(mapping)])
    heights = {"q": QUERY_ROWS, "k": KEY_ROWS, "v": KEY_ROWS}
    restored = weight_to_hf(mapping, weight, None if name != "adjacent pairs" else heights)
    assert restored.keys() == tensors.keys()
    assert all(restored[key].equal(tensors[key]) for key in tensors)


@pytest.mark.parametrize("name", MAPPINGS)
def test_every_slice_equals_slice_of_converted_weight(name: str) -> None:
    mapping = MAPPINGS[name]
    tensors = make_tensors(mapping, WIDTH)
    weight, shapes = weight_from_hf(mapping, tensors), {key: list(tensor.shape) for key, tensor in tensors.items()}
    spans = [
        (0, NUM_ROWS),
        *((start, stop) for start in range(0, NUM_ROWS, 7) for stop in (start + 1, start + 5, NUM_ROWS)),
    ]
    for start, stop in spans:
        shard = Shard((NUM_ROWS, WIDTH), 0, start, min(stop, NUM_ROWS) - start)
        target = torch.full((shard.length, WIDTH), -1)
        read_into(target, mapping, tensors, shapes, shard)
        assert target.equal(weight[start : start + shard.length]), (start, stop)
    target = torch.full((NUM_ROWS, 2), -1)
    read_into(target, mapping, tensors, shapes, Shard((NUM_ROWS, WIDTH), 1, 2, 2))
    assert target.equal(weight[:, 2:4])
    target = torch.full((NUM_ROWS, WIDTH), -1)
    read_into(target, mapping, tensors, shapes, Shard((NUM_ROWS, WIDTH)))
    assert target.equal(weight)


def test_packed_tensor_of_another_height_is_rejected() -> None:
    tensor = torch.zeros(NUM_ROWS + 1, WIDTH)
    with pytest.raises(CheckpointError, match="qkv: the rows of each part must divide into 3 blocks"):
        weight_from_hf(MAPPINGS["packed"], {"qkv": tensor})
    with pytest.raises(CheckpointError, match="qkv: the rows of each part must divide into 3 blocks"):
        read_into(tensor, MAPPINGS["packed"], {"qkv": tensor}, {"qkv": list(tensor.shape)}, Shard(tuple(tensor.shape)))


# Rows of groups, dimensions of size 1, gates.

PARTS = {"query": (0, 2), "key": (2, 2), "value": (4, 3)}
"""Part -> (first row, number of rows) in each of three groups of seven rows."""


@pytest.mark.parametrize("unit_dims", [(), (1,), (0, 1, 3)])
def test_parts_of_grouped_rows_round_trip_and_are_read_in_slices(unit_dims: tuple[int, ...]) -> None:
    packed = torch.arange(21 * WIDTH).view(21, WIDTH)
    groups = packed.view(GROUPS, 7, WIDTH)
    for dim in unit_dims:
        packed = packed.unsqueeze(dim)
    joined: dict[int, torch.Tensor] = {}
    for name, (start, num_rows) in PARTS.items():
        mapping = WeightMapping(("packed",), rows=(start, num_rows), rows_per_group=7, unit_dims=unit_dims)
        weight = weight_from_hf(mapping, {"packed": packed})
        assert weight.equal(groups[:, start : start + num_rows].reshape(-1, WIDTH)), name
        (joined[start],) = weight_to_hf(mapping, weight).values()
        for low in range(len(weight)):
            for high in range(low + 1, len(weight) + 1):
                target = torch.full((high - low, WIDTH), -1)
                shard = Shard(tuple(weight.shape), 0, low, high - low)
                read_into(target, mapping, {"packed": packed}, {"packed": list(packed.shape)}, shard)
                assert target.equal(weight[low:high]), (name, low, high)
        target = torch.full((len(weight), 2), -1)
        read_into(
            target, mapping, {"packed": packed}, {"packed": list(packed.shape)}, Shard(tuple(weight.shape), 1, 1, 2)
        )
        assert target.equal(weight[:, 1:3]), name
    if unit_dims in ((), (1,)):
        assert join_rows({"packed": joined}, {"packed": GROUPS})["packed"].equal(packed)
        del joined[2]
        with pytest.raises(
            CheckpointError, match=r"packed needs the weights of all its rows, got those from rows \[0, 4\]"
        ):
            join_rows({"packed": joined}, {"packed": GROUPS})


def test_gates_follow_the_queries_of_their_group() -> None:
    """Two groups of two heads of three rows; files alternate query and gate of each head."""
    names = [f"{part}{head}.{row}" for head in range(4) for part in "qg" for row in range(3)]
    ours = [f"{part}{head}.{row}" for heads in ((0, 1), (2, 3)) for part in "qg" for head in heads for row in range(3)]
    order = GatedQueryRows(period=12, head_size=3)
    indices = torch.arange(24)
    assert [names[idx] for idx in order.to_ours(indices)] == ours
    assert order.to_hf(order.to_ours(indices)).equal(indices)
    assert order.enclosing(slice(5, 13)) == slice(0, 24)
