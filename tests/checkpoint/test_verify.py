"""The checksum of a file is put together from those of its segments, read by any number of ranks."""

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron import files
from megatron.checkpoint import open_checkpoint, verify
from megatron.errors import CheckpointError
from tests.helpers.checkpoint_samples import assert_equals_sample, save_on_one_rank, world_group
from tests.helpers.harness import run_ranks


@given(size=st.integers(0, 40), chunk=st.integers(1, 9), split_offset=st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_segment_crc_reads_only_segment(tmp_path_factory, size, chunk, split_offset):
    path = tmp_path_factory.mktemp("segment") / "file"
    content = bytes(range(size))
    path.write_bytes(content)
    assert files.segment_crc(path, min(split_offset, size), size, chunk) == zlib.crc32(
        content[min(split_offset, size) :]
    )
    assert files.segment_crc(path, 0, min(split_offset, size), chunk) == zlib.crc32(content[:split_offset])


def _verify_in_segments(rank, root, size):
    """Return which bytes of the shard this rank read, and what it said of the checkpoint."""
    verify.SEGMENT_BYTES = 100
    read_ranges, segment_crc = [], files.segment_crc

    def record_segment(path, start, stop):
        read_ranges.append((start, stop))
        return segment_crc(path, start, stop)

    files.segment_crc = record_segment
    try:
        assert_equals_sample(open_checkpoint(root, world_group(rank, size)), 20)
    except CheckpointError as error:
        return read_ranges, str(error)
    return read_ranges, None


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_share_one_file_and_any_detects_damage(tmp_path, size):
    path = save_on_one_rank(tmp_path, 20)
    shard = path / "rank-00000.safetensors"
    content = shard.read_bytes()
    results = run_ranks(size, _verify_in_segments, path, size)
    all_ranges = sorted(byte_range for rank_ranges, _ in results for byte_range in rank_ranges)
    assert [start for start, _ in all_ranges] == [0, *(stop for _, stop in all_ranges[:-1])] and all_ranges[-1][
        1
    ] == len(content)
    assert all(damage is None and rank_ranges for rank_ranges, damage in results)
    shard.write_bytes(content[:150] + bytes([content[150] ^ 4]) + content[151:])
    damage = {damage for _, damage in run_ranks(size, _verify_in_segments, path, size)}
    assert damage == {f"{path} is damaged: rank-00000.safetensors was altered: its checksum does not match"}
