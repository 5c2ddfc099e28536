"""Disks that are full, read-only or not there: nothing is committed, older checkpoints stay, all ranks say why."""

import errno
import os
import resource
import signal

import pytest

from megatron import files
from megatron.checkpoint import check_writable, open_latest, save
from megatron.errors import CheckpointError, ConfigError, exit_code
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import FailAt, assert_holds, records_for, save_alone, world_of
from tests.helpers.harness import run_ranks


def _disk_full():
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_fills_at_any_operation_before_the_commit_leaves_the_old_checkpoint_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.log.warning", lambda message: None)
    outcomes = []
    for k in range(100):
        root = tmp_path / str(k)
        save_alone(root, 10)
        with FailAt(k, _disk_full) as operations:
            try:
                save_alone(root, 20, last=1)
                outcomes.append(20)
            except CheckpointError as error:
                assert "step 20 was not saved" in str(error) and "No space left" in str(error)
                outcomes.append(10)
        committed = operations.names.index("rename") + 1 if "rename" in operations.names else None
        if committed is None or k < committed:
            assert sorted(path.name for path in root.iterdir()) == ["latest", "step-00000010"]
        assert outcomes[-1] == (10 if committed is None or k < committed else 20), "a rename is a commit"
        found = open_latest(root, SINGLE)
        assert_holds(found, found.step)
        if len(operations.names) <= k:
            break
    assert outcomes[0] == 10 and outcomes[-1] == 20 and outcomes == sorted(outcomes)


def _save_when_one_is_full(rank, root, culprit):
    with FailAt(1 if rank == culprit else 10**6, _disk_full, only="write"):
        try:
            save(root, 20, records_for(rank, 2, 20), {}, world_of(rank, 2))
        except CheckpointError as error:
            return str(error)
    return None


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_save_that_fails_on_one_rank_is_reported_by_all_with_that_rank_and_training_goes_on(tmp_path, culprit):
    save_alone(tmp_path, 10)
    messages = run_ranks(2, _save_when_one_is_full, tmp_path, culprit)
    assert messages[0] == messages[1] and f"rank {culprit}: [Errno 28] No space left on device" in messages[0]
    assert f"rank {1 - culprit}:" not in messages[0]
    assert "needed" in messages[0] and "free" in messages[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000010"]


def test_only_where_room_was_missing_the_room_is_told(tmp_path):
    with FailAt(1, _refused, only="write"), pytest.raises(CheckpointError, match="Permission denied") as caught:
        save_alone(tmp_path, 20)
    assert "needed" not in str(caught.value)


def _save_with_file_limit(rank, root):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        save_alone(root, 20)
    except CheckpointError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
        return str(error)
    return None


def test_a_file_that_the_system_cuts_short_is_an_error_and_no_stump_stays(tmp_path):
    save_alone(tmp_path, 10)
    [message] = run_ranks(1, _save_with_file_limit, tmp_path)
    assert "File too large" in message and "free" not in message
    assert "larger than the limit of `ulimit -f`, 300 bytes. Raise the limit" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000010"]


def test_a_disk_that_is_too_full_is_refused_before_writing(tmp_path, monkeypatch):
    save_alone(tmp_path, 10)
    monkeypatch.setattr(files, "free_bytes", lambda folder: 1000)
    with pytest.raises(CheckpointError, match=r"needs \d\.\d kB, but only 1.0 kB are free"):
        save_alone(tmp_path, 20)
    assert_holds(open_latest(tmp_path, SINGLE), 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000010"]


def _refused():
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize("operation", ["make_folder", "write"])
def test_a_target_that_cannot_be_written_is_found_at_the_start_with_code_2(tmp_path, operation):
    with FailAt(0, _refused, only=operation), pytest.raises(ConfigError, match="--save .*Permission denied") as caught:
        check_writable(tmp_path / "run")
    assert exit_code(caught.value) == 2
    assert not any(tmp_path.glob("run/*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_found_at_the_start(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        check_writable(tmp_path)


def test_a_file_in_place_of_the_target_is_found_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match="--save must be a writable folder"):
            check_writable(path)


def test_a_good_target_is_created_and_left_empty(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
