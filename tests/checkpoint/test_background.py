"""A save in the background has the bytes, the commit and the errors of one that is waited for."""

import errno
import threading
from pathlib import Path

import pytest

from megatron.checkpoint import AsyncSaver, CapturedState, RetentionPolicy, open_latest, save
from megatron.errors import CheckpointError, ConfigError
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import FailAt, assert_holds, records_for, save_alone, world_of
from tests.helpers.harness import run_ranks


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
    saver = AsyncSaver(world)
    records = records_for(rank, size, 20)
    staged = saver.save(root / "behind", CapturedState(20, records, state))
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


def _disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _out_of_memory(*_: object) -> None:
    raise MemoryError("no host memory")


def _caught(finish):
    try:
        return finish()
    except CheckpointError as error:
        return str(error)


def _fail_and_go_on(rank, root):
    saver = AsyncSaver(world_of(rank, 2))
    results = []
    with FailAt(1 if rank else 10**6, _disk_full, only="write"):
        saver.save(root, CapturedState(20, records_for(rank, 2, 20), {}))
        results.append(_caught(saver.finish))
    results.append(saver.poll())
    staging = saver._staging.copy
    if rank:
        saver._staging.copy = _out_of_memory
    saver.save(root, CapturedState(30, records_for(rank, 2, 30), {}))
    results.append(_caught(saver.finish))
    saver._staging.copy = staging
    saver.save(root, CapturedState(40, records_for(rank, 2, 40), {}), RetentionPolicy(2))
    saver.close()
    results.append(saver.finish().path.name)
    return results


def test_a_failure_on_one_rank_is_told_once_on_all_and_the_next_save_succeeds(tmp_path):
    save_alone(tmp_path, 10)
    first, second = run_ranks(2, _fail_and_go_on, tmp_path)
    assert first == second
    full, nothing, memory, name = first
    assert None not in (full, memory)
    assert f"the checkpoint of step 20 was not saved to {tmp_path}: rank 1: [Errno 28] No space left on device" in full
    assert "(needed " in full and nothing is None
    assert "step 30 was not saved" in memory and "rank 1: MemoryError: no host memory" in memory
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000010", name] and name == "step-00000040"


def test_the_next_save_waits_for_the_one_under_way_and_uses_its_memory_again(tmp_path):
    is_released = threading.Event()
    saver = AsyncSaver(SINGLE)
    copy = saver._staging.copy
    places, is_writing = [], []

    def copy_alone(records):
        is_writing.append(any(thread.name.startswith("save-") for thread in threading.enumerate()))
        copied, num_bytes = copy(records)
        places.append(min(record.tensor.data_ptr() for record in copied))
        return copied, num_bytes

    saver._staging.copy = copy_alone
    with FailAt(0, is_released.wait):
        saver.save(tmp_path, CapturedState(10, records_for(0, 1, 10), {}))
        assert not is_released.is_set()
        timer = threading.Timer(0.05, is_released.set)
        timer.start()
        saver.save(tmp_path, CapturedState(20, records_for(0, 1, 20), {}))
        assert is_released.is_set(), "the second save waits for the first"
        timer.join()
    assert is_writing == [False, False]
    assert saver.poll().step == 10
    assert saver.finish().step == 20 and places[0] == places[1]
    assert_holds(open_latest(tmp_path, SINGLE), 20)


def test_a_retention_below_one_checkpoint_is_rejected():
    with pytest.raises(ConfigError, match="--keep-every must be at least 1, got 0"):
        RetentionPolicy(every=0)
