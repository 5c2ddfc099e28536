"""The checksum of a file is put together from those of its segments, read by any number of ranks."""

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron import files
from megatron.checkpoint import open_checkpoint, verify
from megatron.errors import CheckpointError
from tests.helpers.checkpoint_samples import assert_holds, save_alone, world_of
from tests.helpers.harness import run_ranks


@given(size=st.integers(0, 40), chunk=st.integers(1, 9), cut=st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_a_segment_is_read_and_no_more(tmp_path_factory, size, chunk, cut):
    path = tmp_path_factory.mktemp("segment") / "file"
    content = bytes(range(size))
    path.write_bytes(content)
    assert files.segment_crc(path, min(cut, size), size, chunk) == zlib.crc32(content[min(cut, size) :])
    assert files.segment_crc(path, 0, min(cut, size), chunk) == zlib.crc32(content[:cut])


def _verify_in_segments(rank, root, size):
    """Return which bytes of the shard this rank read, and what it said of the checkpoint."""
    verify.SEGMENT_BYTES = 100
    read, segment_crc = [], files.segment_crc

    def noted(path, start, stop):
        read.append((start, stop))
        return segment_crc(path, start, stop)

    files.segment_crc = noted
    try:
        assert_holds(open_checkpoint(root, world_of(rank, size)), 20)
    except CheckpointError as error:
        return read, str(error)
    return read, None


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_share_one_file_and_any_of_them_finds_the_byte(tmp_path, size):
    path = save_alone(tmp_path, 20)
    shard = path / "rank-00000.safetensors"
    whole = shard.read_bytes()
    found = run_ranks(size, _verify_in_segments, path, size)
    pieces = sorted(piece for read, _ in found for piece in read)
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])] and pieces[-1][1] == len(whole)
    assert all(damage is None and read for read, damage in found)
    shard.write_bytes(whole[:150] + bytes([whole[150] ^ 4]) + whole[151:])
    damage = {damage for _, damage in run_ranks(size, _verify_in_segments, path, size)}
    assert damage == {f"{path} is damaged: rank-00000.safetensors was altered: its checksum does not match"}
