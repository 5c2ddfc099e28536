"""Checkpoints that earlier versions wrote go on loading. ``format_1`` is of commit 858821c, saved by two ranks."""

from pathlib import Path

from megatron.checkpoint import open_checkpoint, save
from megatron.mpu.groups import SINGLE
from tests.checkpoint.samples import assert_holds, records_for, world_of
from tests.harness import run_ranks

FORMAT_1 = Path(__file__).parent / "format_1" / "step-00000020"


def test_a_checkpoint_of_format_1_loads():
    found = open_checkpoint(FORMAT_1, SINGLE)
    assert_holds(found, 20)
    assert (found.step, found.state) == (20, {"step": 20, "seed": 20})


def _save(rank, root):
    save(root, 20, records_for(rank, 2, 20), {"step": 20, "seed": 20}, world_of(rank, 2))


def test_the_same_tensors_are_the_same_bytes_today(tmp_path):
    run_ranks(2, _save, tmp_path)
    written = {path.name: path.read_bytes() for path in (tmp_path / "step-00000020").iterdir()}
    assert written == {path.name: path.read_bytes() for path in FORMAT_1.iterdir()}
