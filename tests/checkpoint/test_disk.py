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
from tests.helpers.checkpoint_samples import FailAt, assert_equals_sample, make_records, save_on_one_rank, world_group
from tests.helpers.harness import run_ranks


def _disk_full():
    raise OSError(errno.ENOSPC, "No space left on device")


def test_disk_full_before_commit_leaves_old_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.log.warning", lambda message: None)
    outcomes = []
    for failing_idx in range(100):
        root = tmp_path / str(failing_idx)
        save_on_one_rank(root, 10)
        with FailAt(failing_idx, _disk_full) as operations:
            try:
                save_on_one_rank(root, 20, last=1)
                outcomes.append(20)
            except CheckpointError as error:
                assert "step 20 was not saved" in str(error) and "No space left" in str(error)
                outcomes.append(10)
        num_until_commit = operations.operations.index("rename") + 1 if "rename" in operations.operations else None
        if num_until_commit is None or failing_idx < num_until_commit:
            assert sorted(path.name for path in root.iterdir()) == ["latest", "step-00000010"]
        assert outcomes[-1] == (10 if num_until_commit is None or failing_idx < num_until_commit else 20), (
            "a rename is a commit"
        )
        checkpoint = open_latest(root, SINGLE)
        assert_equals_sample(checkpoint, checkpoint.step)
        if len(operations.operations) <= failing_idx:
            break
    assert outcomes[0] == 10 and outcomes[-1] == 20 and outcomes == sorted(outcomes)


def _save_with_full_disk_on_one_rank(rank, root, culprit):
    with FailAt(1 if rank == culprit else 10**6, _disk_full, only_operation="write"):
        try:
            save(root, 20, make_records(rank, 2, 20), {}, world_group(rank, 2))
        except CheckpointError as error:
            return str(error)
    return None


@pytest.mark.parametrize("culprit", [0, 1])
def test_failed_rank_is_named_on_all_ranks_and_nothing_is_saved(tmp_path, culprit):
    save_on_one_rank(tmp_path, 10)
    messages = run_ranks(2, _save_with_full_disk_on_one_rank, tmp_path, culprit)
    assert messages[0] == messages[1] and f"rank {culprit}: [Errno 28] No space left on device" in messages[0]
    assert f"rank {1 - culprit}:" not in messages[0]
    assert "needed" in messages[0] and "free" in messages[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000010"]


def test_free_space_is_reported_only_when_disk_is_full(tmp_path):
    with (
        FailAt(1, _permission_denied, only_operation="write"),
        pytest.raises(CheckpointError, match="Permission denied") as caught,
    ):
        save_on_one_rank(tmp_path, 20)
    assert "needed" not in str(caught.value)


def _save_with_file_limit(rank, root):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        save_on_one_rank(root, 20)
    except CheckpointError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
        return str(error)
    return None


def test_file_size_limit_error_leaves_no_partial_file(tmp_path):
    save_on_one_rank(tmp_path, 10)
    [message] = run_ranks(1, _save_with_file_limit, tmp_path)
    assert "File too large" in message and "free" not in message
    assert "larger than the limit of `ulimit -f`, 300 bytes. Raise the limit" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000010"]


def test_insufficient_space_is_rejected_before_writing(tmp_path, monkeypatch):
    save_on_one_rank(tmp_path, 10)
    monkeypatch.setattr(files, "free_bytes", lambda folder: 1000)
    with pytest.raises(CheckpointError, match=r"needs \d\.\d kB, but only 1.0 kB are free"):
        save_on_one_rank(tmp_path, 20)
    assert_equals_sample(open_latest(tmp_path, SINGLE), 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000010"]


def _permission_denied():
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize("operation", ["make_folder", "write"])
def test_unwritable_target_is_rejected_at_start_with_code_2(tmp_path, operation):
    with (
        FailAt(0, _permission_denied, only_operation=operation),
        pytest.raises(ConfigError, match="--save .*Permission denied") as caught,
    ):
        check_writable(tmp_path / "run")
    assert exit_code(caught.value) == 2
    assert not any(tmp_path.glob("run/*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_rejected_at_start(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        check_writable(tmp_path)


def test_file_as_target_is_rejected_at_start(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match="--save must be a writable folder"):
            check_writable(path)


def test_writable_target_is_created_and_left_empty(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
