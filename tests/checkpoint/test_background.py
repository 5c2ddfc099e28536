"""A save in the background has the bytes, the commit and the errors of one that is waited for."""

import threading
from pathlib import Path

import pytest

from megatron.checkpoint import BackgroundSaver, open_latest, save
from megatron.mpu.groups import SINGLE
from tests.checkpoint.samples import assert_holds, records_for, world_of
from tests.harness import run_ranks


def _content(path: Path) -> dict[str, bytes]:
    return {child.name: child.read_bytes() for child in path.iterdir()}


def _save_while_training(rank, root, size):
    """Save in the background and change every tensor before a byte is written; save the same by hand elsewhere."""
    from megatron import files

    world = world_of(rank, size)
    state = {"step": 20, "list": [1]}
    save(root / "waited", 20, records_for(rank, size, 20), state, world)
    is_changed = threading.Event()
    files.before_operation = lambda operation, path: is_changed.wait()
    saver = BackgroundSaver(world)
    records = records_for(rank, size, 20)
    staged = saver.start(root / "behind", 20, records, state)
    assert saver.poll() is None
    for record in records:
        record.tensor.zero_()
    state["list"].append(2)
    is_changed.set()
    durable = saver.finish()
    assert saver.poll() is None and saver.finish() is None
    saver.close()
    return staged.num_bytes, durable.num_bytes, durable.path.name


@pytest.mark.parametrize("size", [1, 2])
def test_its_bytes_are_those_of_a_save_that_is_waited_for_whatever_training_does_meanwhile(tmp_path, size):
    for copied, written, name in run_ranks(size, _save_while_training, tmp_path, size):
        assert copied == written > 0 and name == "step-00000020"
    waited, behind = (tmp_path / place / "step-00000020" for place in ("waited", "behind"))
    assert _content(waited) == _content(behind)
    assert_holds(open_latest(tmp_path / "behind", SINGLE), 20)
