"""Which checkpoint is the newest, and which are deleted."""

import errno

import pytest

from megatron import files
from megatron.checkpoint import RetentionPolicy, open_latest, save
from megatron.checkpoint.retention import AUTOMATIC
from megatron.errors import ConfigError
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import assert_equals_sample, make_records, save_on_one_rank


def _names(root):
    return sorted(path.name for path in root.iterdir() if path.name != "latest")


def test_last_checkpoints_are_retained(tmp_path):
    for step in (10, 20, 30, 40):
        save_on_one_rank(tmp_path, step, last=2)
    assert _names(tmp_path) == ["step-00000030", "step-00000040"]


def test_broken_checkpoint_does_not_count_as_retained(tmp_path):
    for step in (10, 20):
        save_on_one_rank(tmp_path, step)
    (tmp_path / "step-00000020" / "rank-00000.safetensors").write_bytes(b"short")
    save_on_one_rank(tmp_path, 30, last=2)
    assert _names(tmp_path) == ["step-00000010", "step-00000020", "step-00000030"]
    save_on_one_rank(tmp_path, 40, last=1)
    assert _names(tmp_path) == ["step-00000040"]


def test_loaded_checkpoint_is_never_deleted(tmp_path):
    loaded = save_on_one_rank(tmp_path, 10)
    for step in (20, 30):
        save_on_one_rank(tmp_path, step, last=1, loaded=loaded)
    assert _names(tmp_path) == ["step-00000010", "step-00000030"]


def test_foreign_folders_are_never_deleted(tmp_path):
    (tmp_path / "step-20-of-mine").mkdir(parents=True)
    (tmp_path / "global_step10").mkdir()
    for step in (10, 20):
        save_on_one_rank(tmp_path, step, last=1)
    assert _names(tmp_path) == ["global_step10", "step-00000020", "step-20-of-mine"]


def test_rolled_back_run_continues_from_last_save(tmp_path):
    for step in (10, 20, 30, 15):
        save_on_one_rank(tmp_path, step)
    assert open_latest(tmp_path, SINGLE).step == 15
    save_on_one_rank(tmp_path, 18, last=2)
    assert _names(tmp_path) == ["step-00000015", "step-00000018"]


def test_repeated_step_is_saved_as_newer_checkpoint(tmp_path):
    first, second = save_on_one_rank(tmp_path, 10, seed=1), save_on_one_rank(tmp_path, 10, seed=2)
    assert [first.name, second.name] == ["step-00000010", "step-00000010-1"]
    assert_equals_sample(open_latest(tmp_path, SINGLE), 2)
    save_on_one_rank(tmp_path, 20, last=1)
    assert _names(tmp_path) == ["step-00000020"]


def test_keep_last_0_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="--keep-last must be at least 1, got 0"):
        save_on_one_rank(tmp_path, 10, last=0)


def test_keep_every_retains_checkpoints_at_interval(tmp_path):
    for step in (10, 15, 20, 25, 30, 40, 45):
        save_on_one_rank(tmp_path, step, last=1, every=20)
    assert _names(tmp_path) == ["step-00000020", "step-00000040", "step-00000045"]


def test_keep_every_without_keep_last_deletes_nothing(tmp_path):
    for step in (10, 20, 30):
        save_on_one_rank(tmp_path, step, every=20)
    assert _names(tmp_path) == ["step-00000010", "step-00000020", "step-00000030"]


def _save_automatic(root, step, **retention):
    return save(root, step, make_records(0, 1, step), {AUTOMATIC: True}, SINGLE, RetentionPolicy(**retention))


def test_last_automatic_checkpoints_are_retained_with_all_requested(tmp_path):
    _save_automatic(tmp_path, 10)
    save_on_one_rank(tmp_path, 20)
    for step in (30, 40, 50):
        _save_automatic(tmp_path, step, automatic=2)
    assert _names(tmp_path) == ["step-00000020", "step-00000040", "step-00000050"]


def test_explicit_policy_overrides_automatic_limit(tmp_path):
    for step in (10, 20, 30, 40, 50):
        _save_automatic(tmp_path, step, automatic=2, last=3, every=20)
    assert _names(tmp_path) == ["step-00000020", "step-00000030", "step-00000040", "step-00000050"]


def test_checkpoints_of_earlier_run_are_not_counted_or_deleted(tmp_path):
    for step in (10, 20):
        save_on_one_rank(tmp_path, step)
    for step in (1, 2, 3):
        save_on_one_rank(tmp_path, step, last=2, earlier_sequence=2)
    assert _names(tmp_path) == ["step-00000002", "step-00000003", "step-00000010", "step-00000020"]


def test_undeletable_leftover_only_warns(tmp_path, monkeypatch):
    (tmp_path / ".deleted-step-00000009-1").mkdir()
    (tmp_path / ".deleted-step-00000009-1" / ".nfs01").write_text("open elsewhere")
    (tmp_path / ".tmp-step-00000009-1").mkdir()
    messages = []
    monkeypatch.setattr("megatron.log.warn_once", messages.append)

    def busy(operation, path):
        if operation == "remove" and path.name == ".nfs01":
            raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(files, "before_operation", busy)
    assert_equals_sample(open_latest(save_on_one_rank(tmp_path, 10), SINGLE), 10)
    assert len(messages) == 1 and "busy" in messages[0] and not (tmp_path / ".tmp-step-00000009-1").exists()
