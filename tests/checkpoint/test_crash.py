"""A rank is killed ahead of every file operation of a save, in turn: the newest checkpoint is always whole."""

import os
import signal

import pytest

from megatron.checkpoint import AsyncSaver, CapturedState, RetentionPolicy, open_latest, save
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import FailAt, assert_holds, records_for, save_alone, world_of
from tests.helpers.harness import fork_ranks


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _save_and_die(rank, root, size, culprit, k):
    with FailAt(k if rank == culprit else 10**6, _die) as operations:
        save(root, 20, records_for(rank, size, 20), {"step": 20, "seed": 20}, world_of(rank, size), RetentionPolicy(1))
    return operations.names


def moments_of(names, config):
    """Return before which of the operations ``names`` a rank is killed: all of them with --all.

    Otherwise the first and the last of each kind, and the one behind the rename.
    """
    if config.getoption("--all"):
        return range(len(names))
    ends = [place for name in {*names} for place in (names.index(name), len(names) - 1 - names[::-1].index(name))]
    return sorted({*ends, *(place + 1 for place, name in enumerate(names[:-1]) if name == "rename")})


def _kill_at_each(tmp_path, config, size, function, culprit):
    """Kill rank ``culprit`` of saves of step 20 beside step 10; return its operations, and the folders."""
    save_alone(tmp_path / "whole", 10)
    codes, results, reports = fork_ranks(size, function, tmp_path / "whole", size, culprit, 10**6, deadline_s=30)
    assert not any(codes) and open_latest(tmp_path / "whole", SINGLE).step == 20, reports
    done, roots = results[culprit], []
    for k in moments_of(done, config):
        root = tmp_path / str(k)
        save_alone(root, 10)
        codes, _, reports = fork_ranks(size, function, root, size, culprit, k, deadline_s=30)
        assert codes[culprit] == -signal.SIGKILL, reports
        found = open_latest(root, SINGLE)
        assert_holds(found, seed=found.step)
        is_new = culprit == 0 and k > done.index("rename")
        assert found.step == found.metadata["seed"] == (20 if is_new else 10)
        roots.append(root)
    return done, roots


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_kill_ahead_of_any_file_operation_leaves_the_old_or_the_new_checkpoint(
    tmp_path, culprit, monkeypatch, pytestconfig
):
    monkeypatch.setattr("megatron.log.warning", lambda message: None)
    done, roots = _kill_at_each(tmp_path, pytestconfig, 2, _save_and_die, culprit)
    for root in roots:
        save_alone(root, 30, last=1)
        assert sorted(path.name for path in root.iterdir()) == ["latest", "step-00000030"]
    of_all, of_0 = {"create", "write", "fsync"}, {"make_folder", "sync_folder", "rename", "remove", "remove_folder"}
    assert of_all | of_0 <= {*done} if culprit == 0 else {*done} == of_all


def _save_behind_and_die(rank, root, size, culprit, k):
    with FailAt(k if rank == culprit else 10**6, _die) as operations:
        saver = AsyncSaver(world_of(rank, size))
        saver.save(root, CapturedState(20, records_for(rank, size, 20), {"step": 20, "seed": 20}), RetentionPolicy(1))
        saver.finish()
    return operations.names


@pytest.mark.parametrize(("size", "culprit"), [(1, 0), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_of_a_save_in_the_background_leaves_the_old_or_the_new(
    tmp_path, size, culprit, monkeypatch, pytestconfig
):
    monkeypatch.setattr("megatron.log.warning", lambda message: None)
    done, _ = _kill_at_each(tmp_path, pytestconfig, size, _save_behind_and_die, culprit)
    assert "fsync" in done and ("rename" in done) == (culprit == 0)


def test_leftovers_of_a_killed_save_are_not_checkpoints_and_the_next_save_removes_them(tmp_path):
    (tmp_path / ".tmp-step-00000099-1").mkdir()
    save_alone(tmp_path, 10)
    for name in (".tmp-step-00000098-1", ".deleted-step-00000097-1"):
        (tmp_path / "step-00000010").rename(tmp_path / name)
        save_alone(tmp_path, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000010"]
    assert open_latest(tmp_path, SINGLE).step == 10


def test_a_load_writes_nothing(tmp_path):
    path = save_alone(tmp_path, 10)

    def snapshot():
        return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")}

    before = snapshot()
    with FailAt(0, lambda: pytest.fail("a load called a file operation that writes")):
        assert_holds(open_latest(tmp_path, SINGLE), 10)
        assert_holds(open_latest(path, SINGLE), 10)
    assert snapshot() == before
