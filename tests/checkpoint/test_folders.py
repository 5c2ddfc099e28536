"""Which checkpoint is the newest, and which are deleted."""

import pytest

from megatron.checkpoint import open_latest
from megatron.errors import ConfigError
from megatron.mpu.groups import SINGLE
from tests.checkpoint.samples import assert_holds, save_alone


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
