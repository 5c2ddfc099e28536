"""What a rank reads of its part is that part of the whole, for every recipe and every cut."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from megatron.checkpoint.tensor_record import part_shape
from megatron.errors import CheckpointError
from megatron.models.common.huggingface import WeightMapping, from_our_weight, read_into, to_our_weight
from megatron.mpu.shard import Shard

COLUMNS = 5
RECIPES = {
    "plain": (WeightMapping(("a",)), {"a": 12}),
    "transposed": (WeightMapping(("a",), is_transposed=True), {"a": 12}),
    "three tensors by head": (WeightMapping(("q", "k", "v"), blocks=4), {"q": 8, "k": 8, "v": 8}),
    "one tensor by head": (WeightMapping(("qkv",), blocks=4, parts_in_one=3), {"qkv": 24}),
    "one transposed tensor by head": (
        WeightMapping(("qkv",), blocks=4, parts_in_one=3, is_transposed=True),
        {"qkv": 24},
    ),
    "grouped queries": (WeightMapping(("q", "k", "v"), blocks=2), {"q": 16, "k": 4, "v": 4}),
    "gate and value": (WeightMapping(("gate", "up"), blocks=6), {"gate": 6, "up": 6}),
}


@dataclass
class Counting:
    """A tensor that counts the numbers that are read of it."""

    tensor: torch.Tensor
    read: int = 0

    def __getitem__(self, index):
        found = self.tensor[index]
        self.read += found.numel()
        return found


def read_part(recipe, theirs, shapes, shard):
    part = torch.full(part_shape(shard), torch.nan, dtype=torch.float64)
    read_into(part, recipe, theirs, shapes, shard)
    return part


def theirs_of(recipe: WeightMapping, heights: dict[str, int]) -> dict[str, torch.Tensor]:
    made = {}
    for i, (name, rows) in enumerate(heights.items()):
        tensor = 1000.0 * i + torch.arange(rows * COLUMNS, dtype=torch.float64).view(rows, COLUMNS)
        made[name] = tensor.t().contiguous() if recipe.is_transposed else tensor
    return made


@pytest.mark.parametrize("name", RECIPES)
def test_there_and_back_is_every_bit(name):
    recipe, heights = RECIPES[name]
    theirs = theirs_of(recipe, heights)
    back = from_our_weight(recipe, to_our_weight(recipe, theirs), heights)
    assert back.keys() == theirs.keys() and all(torch.equal(back[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", RECIPES)
def test_any_part_that_is_read_is_that_part_of_the_whole(name):
    recipe, heights = RECIPES[name]
    theirs = theirs_of(recipe, heights)
    shapes = {key: list(tensor.shape) for key, tensor in theirs.items()}
    whole = to_our_weight(recipe, theirs)
    rows = whole.shape[0]
    cuts = [(0, start, stop) for start in range(rows) for stop in range(start + 1, rows + 1)]
    cuts += [(1, start, stop) for start in range(COLUMNS) for stop in range(start + 1, COLUMNS + 1)]
    for dim, start, stop in cuts:
        shard = Shard(tuple(whole.shape), dim, start, stop - start)
        assert torch.equal(read_part(recipe, theirs, shapes, shard), shard.cut(whole)), shard
    assert torch.equal(read_part(recipe, theirs, shapes, Shard(tuple(whole.shape))), whole)


@pytest.mark.parametrize("name", RECIPES)
def test_a_rank_of_two_reads_half(name):
    recipe, heights = RECIPES[name]
    theirs = {key: Counting(tensor) for key, tensor in theirs_of(recipe, heights).items()}
    shapes = {key: list(counting.tensor.shape) for key, counting in theirs.items()}
    rows = sum(heights.values())
    read_part(recipe, theirs, shapes, Shard((rows, COLUMNS), 0, rows // 2, rows // 2))
    assert sum(counting.read for counting in theirs.values()) == rows * COLUMNS // 2


def test_queries_keys_and_values_of_a_group_lie_together():
    recipe, heights = RECIPES["grouped queries"]
    first = to_our_weight(recipe, theirs_of(recipe, heights))[:, 0]
    theirs = theirs_of(recipe, heights)
    group = [theirs["q"][:8, 0], theirs["k"][:2, 0], theirs["v"][:2, 0]]
    assert torch.equal(first[:12], torch.cat(group))


def test_rows_that_make_no_blocks_are_named():
    with pytest.raises(CheckpointError, match="q, k: the rows of each part must .* 4 blocks .* got 6 rows"):
        to_our_weight(WeightMapping(("q", "k"), blocks=4), {"q": torch.zeros(6, 2), "k": torch.zeros(6, 2)})
    with pytest.raises(CheckpointError, match="q, k: the rows of each part must .* 4 blocks .* got 12 rows"):
        read_part(WeightMapping(("q", "k"), blocks=4), {}, {"q": [6, 2], "k": [6, 2]}, Shard((12, 2), 0, 0, 3))
