"""Which checkpoint is the newest, and which are deleted."""

import errno

import pytest

from megatron import files
from megatron.checkpoint import open_latest, save
from megatron.checkpoint.retention import AUTOMATIC
from megatron.errors import ConfigError
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import assert_holds, records_for, save_alone


def _names(root):
    return sorted(path.name for path in root.iterdir() if path.name != "latest")


def test_the_last_ones_are_kept(tmp_path):
    for step in (10, 20, 30, 40):
        save_alone(tmp_path, step, keep_last=2)
    assert _names(tmp_path) == ["step-00000030", "step-00000040"]


def test_one_that_is_broken_does_not_count(tmp_path):
    for step in (10, 20):
        save_alone(tmp_path, step)
    (tmp_path / "step-00000020" / "rank-00000.safetensors").write_bytes(b"short")
    save_alone(tmp_path, 30, keep_last=2)
    assert _names(tmp_path) == ["step-00000010", "step-00000020", "step-00000030"]
    save_alone(tmp_path, 40, keep_last=1)
    assert _names(tmp_path) == ["step-00000040"]


def test_the_loaded_one_is_never_deleted(tmp_path):
    loaded = save_alone(tmp_path, 10)
    for step in (20, 30):
        save_alone(tmp_path, step, keep_last=1, loaded=loaded)
    assert _names(tmp_path) == ["step-00000010", "step-00000030"]


def test_foreign_folders_are_never_deleted(tmp_path):
    (tmp_path / "step-20-of-mine").mkdir(parents=True)
    (tmp_path / "global_step10").mkdir()
    for step in (10, 20):
        save_alone(tmp_path, step, keep_last=1)
    assert _names(tmp_path) == ["global_step10", "step-00000020", "step-20-of-mine"]


def test_a_run_that_went_back_continues_from_what_it_saved_last(tmp_path):
    for step in (10, 20, 30, 15):
        save_alone(tmp_path, step)
    assert open_latest(tmp_path, SINGLE).step == 15
    save_alone(tmp_path, 18, keep_last=2)
    assert _names(tmp_path) == ["step-00000015", "step-00000018"]


def test_a_step_saved_again_stands_beside_the_first_and_is_the_newer(tmp_path):
    first, second = save_alone(tmp_path, 10, seed=1), save_alone(tmp_path, 10, seed=2)
    assert [first.name, second.name] == ["step-00000010", "step-00000010-1"]
    assert_holds(open_latest(tmp_path, SINGLE), 2)
    save_alone(tmp_path, 20, keep_last=1)
    assert _names(tmp_path) == ["step-00000020"]


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--keep-last must be at least 1, got 0"):
        save_alone(tmp_path, 10, keep_last=0)


def test_every_so_many_steps_one_stays_whatever_came_after_it(tmp_path):
    for step in (10, 15, 20, 25, 30, 40, 45):
        save_alone(tmp_path, step, keep_last=1, keep_every=20)
    assert _names(tmp_path) == ["step-00000020", "step-00000040", "step-00000045"]


def test_every_so_many_steps_alone_deletes_nothing(tmp_path):
    for step in (10, 20, 30):
        save_alone(tmp_path, step, keep_every=20)
    assert _names(tmp_path) == ["step-00000010", "step-00000020", "step-00000030"]


def _save_unasked(root, step, **settings):
    return save(root, step, records_for(0, 1, step), {AUTOMATIC: True}, SINGLE, **settings)


def test_of_those_that_nobody_asked_for_the_last_few_stay_beside_all_others(tmp_path):
    _save_unasked(tmp_path, 10)
    save_alone(tmp_path, 20)
    for step in (30, 40, 50):
        _save_unasked(tmp_path, step, keep_automatic=2)
    assert _names(tmp_path) == ["step-00000020", "step-00000040", "step-00000050"]


def test_whoever_says_what_to_keep_gets_that(tmp_path):
    for step in (10, 20, 30, 40, 50):
        _save_unasked(tmp_path, step, keep_automatic=2, keep_last=3, keep_every=20)
    assert _names(tmp_path) == ["step-00000020", "step-00000030", "step-00000040", "step-00000050"]


def test_those_of_an_earlier_run_are_neither_counted_nor_deleted(tmp_path):
    for step in (10, 20):
        save_alone(tmp_path, step)
    for step in (1, 2, 3):
        save_alone(tmp_path, step, keep_last=2, earlier=2)
    assert _names(tmp_path) == ["step-00000002", "step-00000003", "step-00000010", "step-00000020"]


def test_a_leftover_that_cannot_be_deleted_costs_a_warning_only(tmp_path, monkeypatch):
    (tmp_path / ".deleted-step-00000009-1").mkdir()
    (tmp_path / ".deleted-step-00000009-1" / ".nfs01").write_text("open elsewhere")
    (tmp_path / ".tmp-step-00000009-1").mkdir()
    messages = []
    monkeypatch.setattr("megatron.log.warn_once", messages.append)

    def busy(operation, path):
        if operation == "remove" and path.name == ".nfs01":
            raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(files, "before_operation", busy)
    assert_holds(open_latest(save_alone(tmp_path, 10), SINGLE), 10)
    assert len(messages) == 1 and "busy" in messages[0] and not (tmp_path / ".tmp-step-00000009-1").exists()
