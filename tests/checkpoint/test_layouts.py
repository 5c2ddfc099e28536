"""Whatever cut a tensor, any other cut of it can be read."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint import TensorRecord, open_latest, save
from megatron.errors import CheckpointError
from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard
from tests.helpers.checkpoint_samples import (
    assert_equals_sample,
    make_global_tensors,
    make_records,
    make_shard,
    save_on_one_rank,
    world_group,
)
from tests.helpers.harness import run_ranks


def _save(rank, root, size):
    return save(root, 20, make_records(rank, size), {"saved_by": size}, world_group(rank, size)).name


def _load(rank, root, size):
    checkpoint = open_latest(root, world_group(rank, size))
    for name, full_tensor in make_global_tensors().items():
        shard, _ = make_shard(name, full_tensor, rank, size)
        assert torch.equal(checkpoint.read(name, shard), shard.narrow(full_tensor)), name
    records = [TensorRecord(r.name, torch.zeros_like(r.tensor), r.shard) for r in make_records(rank, size)]
    checkpoint.load(records)
    for record, expected in zip(records, make_records(rank, size), strict=True):
        assert torch.equal(record.tensor, expected.tensor), record.name
    return checkpoint.step, checkpoint.metadata


@pytest.mark.parametrize("saved_by", [1, 2, 4])
def test_any_tensor_parallel_size_loads_any_other(tmp_path, saved_by):
    assert set(run_ranks(saved_by, _save, tmp_path, saved_by)) == {"step-00000020"}
    for size in (1, 2, 4):
        assert run_ranks(size, _load, tmp_path, size) == [(20, {"saved_by": saved_by})] * size


def test_files_store_each_value_once_without_padding(tmp_path):
    from safetensors.torch import load_file

    run_ranks(4, _save, tmp_path, 4)
    written = [tensor for path in tmp_path.rglob("*.safetensors") for tensor in load_file(path).values()]
    assert sum(t.numel() for t in written) == sum(full_tensor.numel() for full_tensor in make_global_tensors().values())


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    requested=st.tuples(st.sampled_from([None, 0, 1]), st.integers(0, 5), st.integers(0, 5)),
    saved_split=st.sampled_from([(None, 1), (0, 2), (1, 2), (0, 3)]),
)
@settings(max_examples=60, deadline=None)
def test_any_slice_along_any_dimension_is_loaded(tmp_path_factory, shape, requested, saved_split):
    full_tensor = torch.arange(shape[0] * shape[1], dtype=torch.float64).view(shape)
    records = []
    dim, num_shards = saved_split
    edges = (
        [0] + sorted(shape[dim] * i // num_shards for i in range(1, num_shards)) + [shape[dim]]
        if dim is not None
        else []
    )
    for start, stop in itertools.pairwise(edges):
        shard = Shard(shape, dim, start, stop - start)
        records.append(TensorRecord("w", shard.narrow(full_tensor), shard))
    root = tmp_path_factory.mktemp("slices")
    save(root, 1, records or [TensorRecord("w", full_tensor, Shard(shape))], {}, SINGLE)
    dim, start, length = requested
    if dim is not None:
        start = min(start, shape[dim])
        length = min(length, shape[dim] - start)
    expected = Shard(shape, dim, start if dim is not None else 0, length if dim is not None else 0)
    assert torch.equal(open_latest(root, SINGLE).read("w", expected), expected.narrow(full_tensor))


def test_load_converts_dtype_on_request(tmp_path):
    save_on_one_rank(tmp_path, 1)
    loaded = open_latest(tmp_path, SINGLE).read("layers.0.mlp.up.weight", Shard((8, 4), 0, 2, 3), torch.float32)
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, make_global_tensors(1)["layers.0.mlp.up.weight"][2:5].float())


def test_all_mismatches_are_listed_and_nothing_is_copied(tmp_path):
    save_on_one_rank(tmp_path, 1)
    records = [
        TensorRecord("mask", torch.zeros(3, dtype=torch.bool), Shard((3,))),
        TensorRecord("embedding.word.weight", torch.zeros(12, 4), Shard((12, 4))),
        TensorRecord("layers.0.mlp.up.weight", torch.zeros(8, 2), Shard((8, 2))),
        TensorRecord("layers.9.mlp.up.weight", torch.zeros(8, 2), Shard((8, 2))),
        TensorRecord("optimizer.exp_avg", torch.zeros(4), Shard((8,), 0, 6, 4)),
    ]
    with pytest.raises(CheckpointError) as caught:
        open_latest(tmp_path, SINGLE).load(records)
    message = str(caught.value)
    assert "embedding.word.weight: saved [13, 4], now [12, 4]" in message
    assert "layers.0.mlp.up.weight: saved [8, 4], now [8, 2]" in message
    assert "layers.9.mlp.up.weight: not in the checkpoint" in message and "4 tensors" in message
    assert "optimizer.exp_avg: Shard(" in message and "exceeds the bounds of the tensor" in message
    assert not records[0].tensor.any()


def test_files_are_plain_safetensors(tmp_path):
    from safetensors.torch import load_file

    path = save_on_one_rank(tmp_path, 3)
    tensors = load_file(path / "rank-00000.safetensors")
    assert all(torch.equal(tensors[name], full_tensor) for name, full_tensor in make_global_tensors(3).items())
    assert_equals_sample(open_latest(tmp_path, SINGLE), 3)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([("a", (4,), 0, 0, 2), ("a", (4,), 0, 1, 3)], "a .*indices 1 to 2 of dimension 0 are written twice"),
        ([("a", (4,), 0, 0, 1), ("a", (4,), 0, 2, 2)], "a .*indices 1 to 2 of dimension 0 are written by no rank"),
        ([("a", (4,), 0, 0, 3)], "a .*dimension 0 has 4 indices, but 3 are written"),
        ([("a", (4,), None, 0, 0), ("a", (4,), None, 0, 0)], "a .*2 ranks write it"),
        ([("a", (2, 2), 0, 0, 1), ("a", (2, 2), 1, 1, 1)], "a .*different dimensions"),
        ([("a", (4,), 0, 0, 2), ("a", (5,), 0, 2, 3)], "a .*ranks disagree"),
    ],
)
def test_tensor_not_written_exactly_once_is_rejected(tmp_path, records, message):
    tensor_records = []
    for name, shape, dim, start, length in records:
        shard = Shard(shape, dim, start, length)
        tensor_records.append(TensorRecord(name, shard.narrow(torch.zeros(shape)), shard))
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, 1, tensor_records, {}, SINGLE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tensor", "shard", "message"),
    [
        (torch.zeros(3), Shard((4,), 0, 0, 4), r"a: its shard .* has the shape \[4\], the tensor \[3\]"),
        (torch.zeros(3), Shard((4,)), r"the shape \[4\], the tensor \[3\]"),
        (torch.zeros(2, dtype=torch.complex64), Shard((2,)), "complex64"),
    ],
)
def test_tensor_with_mismatched_shard_or_dtype_is_rejected(tmp_path, tensor, shard, message):
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, 1, [TensorRecord("a", tensor, shard)], {}, SINGLE)


def test_state_not_serializable_as_json_is_rejected(tmp_path):
    with pytest.raises(CheckpointError, match="set is not JSON serializable"):
        save(tmp_path, 1, make_records(0, 1), {"a": {1}}, SINGLE)
    assert not list(tmp_path.iterdir())
