"""Saving and loading take no more host memory than one tensor beside what the run holds anyway."""

import re
import resource
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import TensorRecord, open_latest, save
from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard
from tests.helpers.harness import run_ranks

_NUM_ROWS, _NUM_TENSORS = 1 << 22, 12  # of fp32: 16 MiB each
_MEMORY_MARGIN = (16 + 40) << 20  # one tensor, and 8 MiB for the stack of each thread


def _limit_memory(mapped_bytes=0):
    """Limit this process to ``_MEMORY_MARGIN`` more bytes than it has now, plus ``mapped_bytes`` for a mapped file."""
    [used_kib] = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    resource.setrlimit(
        resource.RLIMIT_DATA, (int(used_kib) * 1024 + _MEMORY_MARGIN + mapped_bytes, resource.RLIM_INFINITY)
    )
    with pytest.raises(RuntimeError, match="alloc"):  # all at once would not do
        torch.empty(mapped_bytes // 4 + _NUM_TENSORS * _NUM_ROWS)


def _save_and_load(rank, root):
    from megatron.checkpoint import dcp  # noqa: F401  its import is no part of the measure

    records = [
        TensorRecord(str(i), torch.full((_NUM_ROWS,), float(i)), Shard((_NUM_ROWS,))) for i in range(_NUM_TENSORS)
    ]
    _limit_memory()
    path = save(root, 1, records, {}, SINGLE)
    for record in records:
        record.tensor.zero_()
    _limit_memory(mapped_bytes=(path / "rank-00000.safetensors").stat().st_size)
    open_latest(root, SINGLE).load(records)
    return [record.tensor[-1].item() for record in records]


def test_save_and_load_need_memory_of_one_tensor(tmp_path):
    assert run_ranks(1, _save_and_load, tmp_path) == [[float(i) for i in range(_NUM_TENSORS)]]
