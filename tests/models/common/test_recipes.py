"""What a rank reads of its part is that part of the whole, for every recipe and every cut."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from megatron.checkpoint.tensor_record import shard_shape
from megatron.errors import CheckpointError
from megatron.models.common.huggingface import (
    WeightMapping,
    read_into,
    stack_indexed,
    weight_from_hf,
    weight_to_hf,
)
from megatron.mpu.shard import Shard

COLUMNS = 5
RECIPES = {
    "plain": (WeightMapping(("a",)), {"a": 12}),
    "transposed": (WeightMapping(("a",), is_transposed=True), {"a": 12}),
    "three tensors by head": (WeightMapping(("q", "k", "v"), num_blocks=4), {"q": 8, "k": 8, "v": 8}),
    "one tensor by head": (WeightMapping(("qkv",), num_blocks=4, num_packed=3), {"qkv": 24}),
    "one transposed tensor by head": (
        WeightMapping(("qkv",), num_blocks=4, num_packed=3, is_transposed=True),
        {"qkv": 24},
    ),
    "grouped queries": (WeightMapping(("q", "k", "v"), num_blocks=2), {"q": 16, "k": 4, "v": 4}),
    "gate and value": (WeightMapping(("gate", "up"), num_blocks=6), {"gate": 6, "up": 6}),
    "third of a stack": (WeightMapping(("a",), index=2), {"a": 12}),
    "third of a transposed stack": (WeightMapping(("a",), is_transposed=True, index=2), {"a": 12}),
}
STACK_SIZE = 4


@dataclass
class CountingTensor:
    """A tensor that counts the numbers that are read of it."""

    tensor: torch.Tensor
    num_read: int = 0

    def __getitem__(self, index):
        values = self.tensor[index]
        self.num_read += values.numel()
        return values


def read_shard(recipe, tensors, shapes, shard):
    result = torch.full(shard_shape(shard), torch.nan, dtype=torch.float64)
    read_into(result, recipe, tensors, shapes, shard)
    return result


def make_tensors(recipe: WeightMapping, heights: dict[str, int]) -> dict[str, torch.Tensor]:
    tensors = {}
    for i, (name, rows) in enumerate(heights.items()):
        tensor = 1000.0 * i + torch.arange(rows * COLUMNS, dtype=torch.float64).view(rows, COLUMNS)
        tensor = tensor.t().contiguous() if recipe.is_transposed else tensor
        tensors[name] = tensor if recipe.index is None else torch.stack([tensor + 0.25 * i for i in range(STACK_SIZE)])
    return tensors


@pytest.mark.parametrize("name", RECIPES)
def test_round_trip_is_bitwise(name):
    recipe, heights = RECIPES[name]
    tensors = make_tensors(recipe, heights)
    exported = weight_to_hf(recipe, weight_from_hf(recipe, tensors), heights)
    if recipe.index is not None:
        each = (replace(recipe, index=i) for i in range(STACK_SIZE))
        elements = {i: weight_to_hf(x, weight_from_hf(x, tensors))["a"] for i, x in enumerate(each)}
        assert torch.equal(exported["a"], elements[recipe.index])
        exported = stack_indexed({"a": elements})
    assert exported.keys() == tensors.keys() and all(torch.equal(exported[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("name", RECIPES)
def test_reading_any_shard_equals_slice_of_full_weight(name):
    recipe, heights = RECIPES[name]
    tensors = make_tensors(recipe, heights)
    shapes = {key: list(tensor.shape) for key, tensor in tensors.items()}
    full = weight_from_hf(recipe, tensors)
    rows = full.shape[0]
    slices = [(0, start, stop) for start in range(rows) for stop in range(start + 1, rows + 1)]
    slices += [(1, start, stop) for start in range(COLUMNS) for stop in range(start + 1, COLUMNS + 1)]
    for dim, start, stop in slices:
        shard = Shard(tuple(full.shape), dim, start, stop - start)
        assert torch.equal(read_shard(recipe, tensors, shapes, shard), shard.narrow(full)), shard
    assert torch.equal(read_shard(recipe, tensors, shapes, Shard(tuple(full.shape))), full)


@pytest.mark.parametrize("name", RECIPES)
def test_half_shard_reads_half_of_values(name):
    recipe, heights = RECIPES[name]
    tensors = {key: CountingTensor(tensor) for key, tensor in make_tensors(recipe, heights).items()}
    shapes = {key: list(counting.tensor.shape) for key, counting in tensors.items()}
    rows = sum(heights.values())
    read_shard(recipe, tensors, shapes, Shard((rows, COLUMNS), 0, rows // 2, rows // 2))
    assert sum(counting.num_read for counting in tensors.values()) == rows * COLUMNS // 2


def test_query_key_value_rows_are_grouped():
    recipe, heights = RECIPES["grouped queries"]
    first_column = weight_from_hf(recipe, make_tensors(recipe, heights))[:, 0]
    tensors = make_tensors(recipe, heights)
    group = [tensors["q"][:8, 0], tensors["k"][:2, 0], tensors["v"][:2, 0]]
    assert torch.equal(first_column[:12], torch.cat(group))


def test_rejects_rows_not_divisible_into_blocks():
    with pytest.raises(CheckpointError, match="q, k: the rows of each part must .* 4 blocks .* got 6 rows"):
        weight_from_hf(WeightMapping(("q", "k"), num_blocks=4), {"q": torch.zeros(6, 2), "k": torch.zeros(6, 2)})
    with pytest.raises(CheckpointError, match="q, k: the rows of each part must .* 4 blocks .* got 12 rows"):
        read_shard(WeightMapping(("q", "k"), num_blocks=4), {}, {"q": [6, 2], "k": [6, 2]}, Shard((12, 2), 0, 0, 3))


def test_incomplete_stack_is_rejected():
    with pytest.raises(CheckpointError, match=r"experts.down_proj needs a weight for each index, got only \[0, 2\]"):
        stack_indexed({"experts.down_proj": {0: torch.zeros(2), 2: torch.zeros(2)}})


def test_vector_of_a_stack_is_read_by_slices():
    """As the biases of experts."""
    recipe, tensors = WeightMapping(("a",), index=1), {"a": torch.arange(12.0, dtype=torch.float64).view(3, 4)}
    assert torch.equal(weight_from_hf(recipe, tensors), tensors["a"][1])
    assert torch.equal(read_shard(recipe, tensors, {"a": [3, 4]}, Shard((4,), 0, 1, 2)), tensors["a"][1, 1:3])
