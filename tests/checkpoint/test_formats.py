"""Checkpoints that earlier versions wrote go on loading. ``format_1`` is of commit 858821c, saved by two ranks."""

from dataclasses import replace
from pathlib import Path

import torch

from megatron.checkpoint import open_checkpoint, save
from megatron.checkpoint.one_process import read_whole
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import records_for, whole_tensors, world_of
from tests.helpers.harness import run_ranks

FORMAT_1 = Path(__file__).parent / "format_1" / "step-00000020"


def test_a_checkpoint_of_format_1_loads():
    found = open_checkpoint(FORMAT_1, SINGLE)
    assert (found.step, found.metadata) == (20, {"step": 20, "seed": 20})
    expected = whole_tensors(20)
    assert sorted(found.names()) == sorted(expected)
    for name, whole in expected.items():  # another processor may draw the last bit otherwise; the checksum has fitted
        torch.testing.assert_close(read_whole(found, name), whole)


def _save_what_it_holds(rank, root):
    found = open_checkpoint(FORMAT_1, SINGLE)
    records = [replace(record, tensor=found.read(record.name, record.shard)) for record in records_for(rank, 2, 20)]
    save(root, 20, records, found.metadata, world_of(rank, 2))


def test_the_same_tensors_are_the_same_bytes_today(tmp_path):
    run_ranks(2, _save_what_it_holds, tmp_path)
    written = {path.name: path.read_bytes() for path in (tmp_path / "step-00000020").iterdir()}
    assert written == {path.name: path.read_bytes() for path in FORMAT_1.iterdir()}
