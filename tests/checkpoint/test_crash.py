"""A rank is killed ahead of every file operation of a save, in turn: the newest checkpoint is always whole."""

import os
import signal

import pytest

from megatron.checkpoint import AsyncSaver, open_latest, save
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import FailAt, assert_holds, records_for, save_alone, world_of
from tests.helpers.harness import fork_ranks


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _save_and_die(rank, root, culprit, k):
    with FailAt(k if rank == culprit else 10**6, _die) as operations:
        save(root, 20, records_for(rank, 2, 20), {"step": 20, "seed": 20}, world_of(rank, 2), keep_last=1)
    return operations.names


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_kill_ahead_of_any_file_operation_leaves_the_old_or_the_new_checkpoint(tmp_path, culprit, monkeypatch):
    monkeypatch.setattr("megatron.log.warning", lambda message: None)
    steps_found = []
    for k in range(200):
        root = tmp_path / str(k)
        save_alone(root, 10)
        codes, results, reports = fork_ranks(2, _save_and_die, root, culprit, k, deadline_s=30)
        found = open_latest(root, SINGLE)
        assert_holds(found, seed=found.step)
        assert found.step == found.state["seed"] and found.step in (10, 20)
        steps_found.append(found.step)
        if not any(codes):
            break
        assert codes[culprit] == -signal.SIGKILL, reports
        save_alone(root, 30, keep_last=1)
        assert sorted(path.name for path in root.iterdir()) == ["latest", "step-00000030"]
    assert steps_found == sorted(steps_found) and steps_found[-1] == 20
    done = results[culprit]
    if culprit == 0:
        assert steps_found.index(20) == done.index("rename") + 1
        assert {"make_folder", "create", "write", "fsync", "sync_folder", "rename", "remove", "remove_folder"} <= {
            *done
        }
    else:
        assert steps_found[:-1] == [10] * len(done) and {*done} == {"create", "write", "fsync"}


def _save_behind_and_die(rank, root, size, culprit, k):
    with FailAt(k if rank == culprit else 10**6, _die) as operations:
        saver = AsyncSaver(world_of(rank, size))
        saver.start(root, 20, records_for(rank, size, 20), {"step": 20, "seed": 20}, keep_last=1)
        saver.finish()
    return operations.names


@pytest.mark.parametrize(("size", "culprit"), [(1, 0), (2, 1)])
def test_a_kill_at_any_moment_of_a_save_in_the_background_leaves_the_old_or_the_new(
    tmp_path, size, culprit, monkeypatch
):
    monkeypatch.setattr("megatron.log.warning", lambda message: None)
    steps_found = []
    for k in range(200):
        root = tmp_path / str(k)
        save_alone(root, 10)
        codes, results, reports = fork_ranks(size, _save_behind_and_die, root, size, culprit, k, deadline_s=30)
        found = open_latest(root, SINGLE)
        assert_holds(found, seed=found.step)
        steps_found.append(found.step)
        if not any(codes):
            break
        assert codes[culprit] == -signal.SIGKILL, reports
    done = results[culprit]
    assert len(steps_found) == len(done) + 1 and steps_found == sorted(steps_found) and steps_found[-1] == 20
    assert steps_found.index(20) == (done.index("rename") + 1 if culprit == 0 else len(done))


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
