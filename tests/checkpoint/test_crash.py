"""A rank is killed ahead of every file operation of a save, in turn: the newest checkpoint is always whole."""

import os
import signal

import pytest

from megatron.checkpoint import AsyncSaver, CapturedState, RetentionPolicy, open_latest, save
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import FailAt, assert_equals_sample, make_records, save_on_one_rank, world_group
from tests.helpers.harness import fork_ranks


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _save_and_die(rank, root, size, culprit, kill_idx):
    with FailAt(kill_idx if rank == culprit else 10**6, _die) as operations:
        save(
            root,
            20,
            make_records(rank, size, 20),
            {"step": 20, "seed": 20},
            world_group(rank, size),
            RetentionPolicy(1),
        )
    return operations.operations


def kill_points(names, config):
    """Return before which of the operations ``names`` a rank is killed: all of them with --all.

    Otherwise the first and the last of each kind, and the one behind the rename.
    """
    if config.getoption("--all"):
        return range(len(names))
    idxs = [
        operation_idx
        for name in {*names}
        for operation_idx in (names.index(name), len(names) - 1 - names[::-1].index(name))
    ]
    return sorted({*idxs, *(operation_idx + 1 for operation_idx, name in enumerate(names[:-1]) if name == "rename")})


def _kill_at_each_point(tmp_path, config, size, save_function, culprit):
    """Kill rank ``culprit`` of saves of step 20 beside step 10; return its operations, and the folders."""
    save_on_one_rank(tmp_path / "whole", 10)
    codes, results, reports = fork_ranks(size, save_function, tmp_path / "whole", size, culprit, 10**6, deadline_s=30)
    assert not any(codes) and open_latest(tmp_path / "whole", SINGLE).step == 20, reports
    operations, roots = results[culprit], []
    for kill_idx in kill_points(operations, config):
        root = tmp_path / str(kill_idx)
        save_on_one_rank(root, 10)
        codes, _, reports = fork_ranks(size, save_function, root, size, culprit, kill_idx, deadline_s=30)
        assert codes[culprit] == -signal.SIGKILL, reports
        checkpoint = open_latest(root, SINGLE)
        assert_equals_sample(checkpoint, seed=checkpoint.step)
        is_new = culprit == 0 and kill_idx > operations.index("rename")
        assert checkpoint.step == checkpoint.metadata["seed"] == (20 if is_new else 10)
        roots.append(root)
    return operations, roots


@pytest.mark.parametrize("culprit", [0, 1])
def test_kill_before_any_operation_leaves_old_or_new_checkpoint(tmp_path, culprit, monkeypatch, pytestconfig):
    monkeypatch.setattr("megatron.log.warning", lambda message: None)
    operations, roots = _kill_at_each_point(tmp_path, pytestconfig, 2, _save_and_die, culprit)
    for root in roots:
        save_on_one_rank(root, 30, last=1)
        assert sorted(path.name for path in root.iterdir()) == ["latest", "step-00000030"]
    operations_of_all, operations_of_rank_0 = (
        {"create", "write", "fsync"},
        {"make_folder", "sync_folder", "rename", "remove", "remove_folder"},
    )
    assert (
        operations_of_all | operations_of_rank_0 <= {*operations}
        if culprit == 0
        else {*operations} == operations_of_all
    )


def _save_in_background_and_die(rank, root, size, culprit, kill_idx):
    with FailAt(kill_idx if rank == culprit else 10**6, _die) as operations:
        saver = AsyncSaver(world_group(rank, size))
        saver.save(root, CapturedState(20, make_records(rank, size, 20), {"step": 20, "seed": 20}), RetentionPolicy(1))
        saver.finish()
    return operations.operations


@pytest.mark.parametrize(("size", "culprit"), [(1, 0), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_kill_during_background_save_leaves_old_or_new_checkpoint(tmp_path, size, culprit, monkeypatch, pytestconfig):
    monkeypatch.setattr("megatron.log.warning", lambda message: None)
    operations, _ = _kill_at_each_point(tmp_path, pytestconfig, size, _save_in_background_and_die, culprit)
    assert "fsync" in operations and ("rename" in operations) == (culprit == 0)


def test_next_save_removes_leftovers_of_killed_save(tmp_path):
    (tmp_path / ".tmp-step-00000099-1").mkdir()
    save_on_one_rank(tmp_path, 10)
    for name in (".tmp-step-00000098-1", ".deleted-step-00000097-1"):
        (tmp_path / "step-00000010").rename(tmp_path / name)
        save_on_one_rank(tmp_path, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000010"]
    assert open_latest(tmp_path, SINGLE).step == 10


def test_load_writes_nothing(tmp_path):
    path = save_on_one_rank(tmp_path, 10)

    def snapshot():
        return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")}

    before = snapshot()
    with FailAt(0, lambda: pytest.fail("a load called a file operation that writes")):
        assert_equals_sample(open_latest(tmp_path, SINGLE), 10)
        assert_equals_sample(open_latest(path, SINGLE), 10)
    assert snapshot() == before
