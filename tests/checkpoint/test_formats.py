"""Checkpoints that earlier versions wrote go on loading. ``format_1`` is of commit 858821c, saved by two ranks."""

from dataclasses import replace
from pathlib import Path

import torch

from megatron.checkpoint import open_checkpoint, save
from megatron.checkpoint.one_process import read_full
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import make_global_tensors, make_records, world_group
from tests.helpers.harness import run_ranks

FORMAT_1 = Path(__file__).parent / "format_1" / "step-00000020"


def test_format_1_checkpoint_loads():
    checkpoint = open_checkpoint(FORMAT_1, SINGLE)
    assert (checkpoint.step, checkpoint.metadata) == (20, {"step": 20, "seed": 20})
    expected = make_global_tensors(20)
    assert sorted(checkpoint.names()) == sorted(expected)
    for (
        name,
        full_tensor,
    ) in expected.items():  # another processor may draw the last bit otherwise; the checksum has fitted
        torch.testing.assert_close(read_full(checkpoint, name), full_tensor)


def _save_loaded_checkpoint(rank, root):
    checkpoint = open_checkpoint(FORMAT_1, SINGLE)
    records = [
        replace(record, tensor=checkpoint.read(record.name, record.shard)) for record in make_records(rank, 2, 20)
    ]
    save(root, 20, records, checkpoint.metadata, world_group(rank, 2))


def test_current_writer_reproduces_format_1_bytes(tmp_path):
    run_ranks(2, _save_loaded_checkpoint, tmp_path)
    written = {path.name: path.read_bytes() for path in (tmp_path / "step-00000020").iterdir()}
    assert written == {path.name: path.read_bytes() for path in FORMAT_1.iterdir()}
