"""A save in the background has the bytes, the commit and the errors of one that is waited for."""

import errno
import threading
from pathlib import Path

import pytest

from megatron.checkpoint import AsyncSaver, CapturedState, RetentionPolicy, open_latest, save
from megatron.errors import CheckpointError, ConfigError
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import FailAt, assert_equals_sample, make_records, save_on_one_rank, world_group
from tests.helpers.harness import run_ranks


def _file_contents(path: Path) -> dict[str, bytes]:
    return {child.name: child.read_bytes() for child in path.iterdir()}


def _save_while_training(rank, root, size):
    """Save in the background and change every tensor before a byte is written; save the same by hand elsewhere."""
    from megatron import files

    world = world_group(rank, size)
    state = {"step": 20, "list": [1]}
    save(root / "waited", 20, make_records(rank, size, 20), state, world)
    is_changed = threading.Event()
    files.before_operation = lambda operation, path: is_changed.wait()
    saver = AsyncSaver(world)
    records = make_records(rank, size, 20)
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
def test_background_save_matches_synchronous_save_bytes(tmp_path, size):
    for copied_bytes, written_bytes, name in run_ranks(size, _save_while_training, tmp_path, size):
        assert copied_bytes == written_bytes > 0 and name == "step-00000020"
    synchronous, background = (tmp_path / subdir / "step-00000020" for subdir in ("waited", "behind"))
    assert _file_contents(synchronous) == _file_contents(background)
    assert_equals_sample(open_latest(tmp_path / "behind", SINGLE), 20)


def _disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _out_of_memory(*_: object) -> None:
    raise MemoryError("no host memory")


def _result_or_error(finish):
    try:
        return finish()
    except CheckpointError as error:
        return str(error)


def _save_after_failures(rank, root):
    saver = AsyncSaver(world_group(rank, 2))
    results = []
    with FailAt(1 if rank else 10**6, _disk_full, only_operation="write"):
        saver.save(root, CapturedState(20, make_records(rank, 2, 20), {}))
        results.append(_result_or_error(saver.finish))
    results.append(saver.poll())
    staging = saver._staging.copy
    if rank:
        saver._staging.copy = _out_of_memory
    saver.save(root, CapturedState(30, make_records(rank, 2, 30), {}))
    results.append(_result_or_error(saver.finish))
    saver._staging.copy = staging
    saver.save(root, CapturedState(40, make_records(rank, 2, 40), {}), RetentionPolicy(2))
    saver.close()
    results.append(saver.finish().path.name)
    return results


def test_rank_failure_is_reported_once_and_next_save_succeeds(tmp_path):
    save_on_one_rank(tmp_path, 10)
    first, second = run_ranks(2, _save_after_failures, tmp_path)
    assert first == second
    disk_full_error, poll_result, memory_error, saved_name = first
    assert None not in (disk_full_error, memory_error)
    assert (
        f"the checkpoint of step 20 was not saved to {tmp_path}: rank 1: [Errno 28] No space left on device"
        in disk_full_error
    )
    assert "(needed " in disk_full_error and poll_result is None
    assert "step 30 was not saved" in memory_error and "rank 1: MemoryError: no host memory" in memory_error
    assert (
        sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000010", saved_name]
        and saved_name == "step-00000040"
    )


def test_next_save_waits_for_pending_save_and_reuses_buffer(tmp_path):
    is_released = threading.Event()
    saver = AsyncSaver(SINGLE)
    copy = saver._staging.copy
    addresses, was_writing = [], []

    def record_copy(records):
        was_writing.append(any(thread.name.startswith("save-") for thread in threading.enumerate()))
        copied, num_bytes = copy(records)
        addresses.append(min(record.tensor.data_ptr() for record in copied))
        return copied, num_bytes

    saver._staging.copy = record_copy
    with FailAt(0, is_released.wait):
        saver.save(tmp_path, CapturedState(10, make_records(0, 1, 10), {}))
        assert not is_released.is_set()
        timer = threading.Timer(0.05, is_released.set)
        timer.start()
        saver.save(tmp_path, CapturedState(20, make_records(0, 1, 20), {}))
        assert is_released.is_set(), "the second save waits for the first"
        timer.join()
    assert was_writing == [False, False]
    assert saver.poll().step == 10
    assert saver.finish().step == 20 and addresses[0] == addresses[1]
    assert_equals_sample(open_latest(tmp_path, SINGLE), 20)


def test_retention_below_one_is_rejected():
    with pytest.raises(ConfigError, match="--keep-every must be at least 1, got 0"):
        RetentionPolicy(every=0)
