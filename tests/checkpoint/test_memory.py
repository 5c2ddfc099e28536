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

_ROWS, _TENSORS = 1 << 22, 12  # of fp32: 16 MiB each
_SPARE = (16 + 40) << 20  # one tensor, and 8 MiB for the stack of each thread


def _limit_memory(mapped=0):
    """Let this process have ``_SPARE`` bytes more than now, and a file of ``mapped`` bytes mapped into its memory."""
    [used] = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    resource.setrlimit(resource.RLIMIT_DATA, (int(used) * 1024 + _SPARE + mapped, resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError, match="alloc"):  # all at once would not do
        torch.empty(mapped // 4 + _TENSORS * _ROWS)


def _save_and_load(rank, root):
    from megatron.checkpoint import dcp  # noqa: F401  its import is no part of the measure

    records = [TensorRecord(str(i), torch.full((_ROWS,), float(i)), Shard((_ROWS,))) for i in range(_TENSORS)]
    _limit_memory()
    path = save(root, 1, records, {}, SINGLE)
    for record in records:
        record.tensor.zero_()
    _limit_memory(mapped=(path / "rank-00000.safetensors").stat().st_size)
    open_latest(root, SINGLE).load(records)
    return [record.tensor[-1].item() for record in records]


def test_a_save_and_a_load_need_one_tensor_of_memory(tmp_path):
    assert run_ranks(1, _save_and_load, tmp_path) == [[float(i) for i in range(_TENSORS)]]
