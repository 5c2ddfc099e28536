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
from tests.helpers.checkpoint_samples import assert_holds, records_for, save_alone, shard_for, whole_tensors, world_of
from tests.helpers.harness import run_ranks


def _save(rank, root, size):
    return save(root, 20, records_for(rank, size), {"saved_by": size}, world_of(rank, size)).name


def _load(rank, root, size):
    checkpoint = open_latest(root, world_of(rank, size))
    for name, whole in whole_tensors().items():
        shard, _ = shard_for(name, whole, rank, size)
        assert torch.equal(checkpoint.read(name, shard), shard.cut(whole)), name
    records = [TensorRecord(r.name, torch.zeros_like(r.tensor), r.shard) for r in records_for(rank, size)]
    checkpoint.load(records)
    for record, expected in zip(records, records_for(rank, size), strict=True):
        assert torch.equal(record.tensor, expected.tensor), record.name
    return checkpoint.step, checkpoint.metadata


@pytest.mark.parametrize("saved_by", [1, 2, 4])
def test_any_tensor_size_reads_what_any_other_saved(tmp_path, saved_by):
    assert set(run_ranks(saved_by, _save, tmp_path, saved_by)) == {"step-00000020"}
    for size in (1, 2, 4):
        assert run_ranks(size, _load, tmp_path, size) == [(20, {"saved_by": saved_by})] * size


def test_the_files_hold_each_value_once_and_no_padding(tmp_path):
    from safetensors.torch import load_file

    run_ranks(4, _save, tmp_path, 4)
    written = [tensor for path in tmp_path.rglob("*.safetensors") for tensor in load_file(path).values()]
    assert sum(t.numel() for t in written) == sum(whole.numel() for whole in whole_tensors().values())


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    cut=st.tuples(st.sampled_from([None, 0, 1]), st.integers(0, 5), st.integers(0, 5)),
    saved_cut=st.sampled_from([(None, 1), (0, 2), (1, 2), (0, 3)]),
)
@settings(max_examples=60, deadline=None)
def test_any_slice_along_any_dimension_is_read_back(tmp_path_factory, shape, cut, saved_cut):
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float64).view(shape)
    records = []
    dim, parts = saved_cut
    edges = [0] + sorted(shape[dim] * i // parts for i in range(1, parts)) + [shape[dim]] if dim is not None else []
    for start, stop in itertools.pairwise(edges):
        shard = Shard(shape, dim, start, stop - start)
        records.append(TensorRecord("w", shard.cut(whole), shard))
    root = tmp_path_factory.mktemp("slices")
    save(root, 1, records or [TensorRecord("w", whole, Shard(shape))], {}, SINGLE)
    dim, start, length = cut
    if dim is not None:
        start = min(start, shape[dim])
        length = min(length, shape[dim] - start)
    wanted = Shard(shape, dim, start if dim is not None else 0, length if dim is not None else 0)
    assert torch.equal(open_latest(root, SINGLE).read("w", wanted), wanted.cut(whole))


def test_a_type_is_converted_on_request(tmp_path):
    save_alone(tmp_path, 1)
    found = open_latest(tmp_path, SINGLE).read("layers.0.mlp.up.weight", Shard((8, 4), 0, 2, 3), torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, whole_tensors(1)["layers.0.mlp.up.weight"][2:5].float())


def test_every_missing_name_and_differing_shape_is_listed_and_nothing_is_copied(tmp_path):
    save_alone(tmp_path, 1)
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


def test_the_files_are_plain_safetensors(tmp_path):
    from safetensors.torch import load_file

    path = save_alone(tmp_path, 3)
    found = load_file(path / "rank-00000.safetensors")
    assert all(torch.equal(found[name], whole) for name, whole in whole_tensors(3).items())
    assert_holds(open_latest(tmp_path, SINGLE), 3)


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
def test_a_tensor_that_is_not_written_exactly_once_is_refused_before_writing(tmp_path, records, message):
    made = []
    for name, shape, dim, start, length in records:
        shard = Shard(shape, dim, start, length)
        made.append(TensorRecord(name, shard.cut(torch.zeros(shape)), shard))
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, 1, made, {}, SINGLE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tensor", "shard", "message"),
    [
        (torch.zeros(3), Shard((4,), 0, 0, 4), r"a: its shard .* has the shape \[4\], the tensor \[3\]"),
        (torch.zeros(3), Shard((4,)), r"the shape \[4\], the tensor \[3\]"),
        (torch.zeros(2, dtype=torch.complex64), Shard((2,)), "complex64"),
    ],
)
def test_a_tensor_that_contradicts_its_shard_or_fits_no_file_is_refused(tmp_path, tensor, shard, message):
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, 1, [TensorRecord("a", tensor, shard)], {}, SINGLE)


def test_a_state_that_json_cannot_hold_is_refused_before_writing(tmp_path):
    with pytest.raises(CheckpointError, match="set is not JSON serializable"):
        save(tmp_path, 1, records_for(0, 1), {"a": {1}}, SINGLE)
    assert not list(tmp_path.iterdir())
