"""What one rank failed at, all ranks say, in words a person can act on."""

import errno

import pytest
import torch

from megatron.checkpoint import TensorRecord, open_checkpoint, open_latest, save
from megatron.checkpoint.rank_errors import as_checkpoint_error, gather_verdict, summarize_failures
from megatron.errors import CheckpointError
from megatron.mpu.shard import Shard
from tests.helpers.checkpoint_samples import FailAt, make_records, save_on_one_rank, world_group
from tests.helpers.harness import run_ranks

_DISK_FULL = OSError(errno.ENOSPC, "No space left on device")


class _UnpicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def _make_failure(error, **attributes):
    with pytest.raises(CheckpointError) as caught, as_checkpoint_error(**attributes):
        raise error
    return caught.value, None


def test_identical_failures_are_grouped_by_rank():
    disk_full, other_error = _make_failure(_DISK_FULL), _make_failure(ValueError("odd"))
    assert summarize_failures({1: disk_full, 0: disk_full, 2: other_error}, 4) == (
        "ranks 0, 1: [Errno 28] No space left on device; rank 2: ValueError: odd"
    )
    assert summarize_failures({0: disk_full, 1: disk_full}, 2) == "[Errno 28] No space left on device"
    assert summarize_failures({0: _make_failure(CheckpointError("need 2 GB"), is_of_this_rank=False)}, 2) == "need 2 GB"


def _save_with_failing_rank(rank, root, error):
    def fail():
        raise error

    try:
        with FailAt(0 if rank else 10**6, fail, only_operation="create"):
            save(root, 20, make_records(rank, 2, 20), {}, world_group(rank, 2))
    except BaseException as caught:
        return type(caught).__name__, str(caught)
    return None


def test_unpicklable_error_is_reported_on_all_ranks(tmp_path):
    messages = run_ranks(2, _save_with_failing_rank, tmp_path, _UnpicklableError("two", "words"))
    assert messages[0] == messages[1] and "rank 1: _UnpicklableError: two words" in messages[0][1]


def test_interrupt_ends_its_rank_and_other_ranks_report_it(tmp_path):
    interrupt = KeyboardInterrupt()
    (error_type, message), interrupted_result = run_ranks(2, _save_with_failing_rank_alive, tmp_path, interrupt)
    assert (
        error_type == "CheckpointError"
        and "rank 1: KeyboardInterrupt" in message
        and interrupted_result == ("KeyboardInterrupt", "")
    )


def _save_with_failing_rank_alive(rank, root, error):
    """As ``_save_with_failing_rank``; rank 1 takes rank 0's last word, as its exit would end rank 0's telling."""
    result = _save_with_failing_rank(rank, root, error)
    if rank:
        world_group(rank, 2).broadcast_object(None)
    return result


def _load_with_tensor_missing_on_one_rank(rank, root):
    checkpoint = open_latest(root, world_group(rank, 2))
    records = [TensorRecord("mask", torch.zeros(3, dtype=torch.bool), Shard((3,)))]
    if rank:
        records.append(TensorRecord("layers.9.up", torch.zeros(2), Shard((2,))))
    message = None
    try:
        checkpoint.load(records)
    except CheckpointError as error:
        message = str(error)
    return message, bool(records[0].tensor.any())


def test_tensor_missing_on_one_rank_stops_load_on_all_ranks(tmp_path):
    path = save_on_one_rank(tmp_path, 20)
    message = f"rank 1: {path} does not fit this model (1 tensors): layers.9.up: not in the checkpoint"
    assert run_ranks(2, _load_with_tensor_missing_on_one_rank, tmp_path) == [(message, False)] * 2


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-9])


def _collect_errors(rank, root):
    """Return what this rank raises of each kind of damage and failure: the words, and whether it is to say them."""
    world = world_group(rank, 2)

    def fail():
        raise OSError(errno.EIO, "Input/output error")

    def save_where_rank_1_fails():
        with FailAt(0 if rank else 10**6, fail, only_operation="create"):
            save(root / "good", 30, make_records(rank, 2, 30), {}, world)

    extra_records = [TensorRecord("layers.9.up", torch.zeros(2), Shard((2,)))]
    attempts = {
        "no folder": lambda: open_latest(root / "none", world),
        "a damaged file": lambda: open_checkpoint(root / "shard/step-00000020", world),
        "a damaged manifest": lambda: open_checkpoint(root / "manifest/step-00000020", world),
        "the only one is damaged": lambda: open_latest(root / "shard", world),
        "the newest must verify": lambda: open_latest(root / "shard", world, strict=True),
        "another model": lambda: open_latest(root / "good", world).load(extra_records),
        "a save": save_where_rank_1_fails,
        "a share": lambda: gather_verdict(world, fail if rank else str, str),
    }
    errors = {}
    for name, attempt in attempts.items():
        with pytest.raises(CheckpointError) as caught:
            attempt()
        errors[name] = (str(caught.value), caught.value.is_of_this_rank)
    return errors


def test_shared_errors_are_not_marked_as_rank_local(tmp_path):
    for name in ("good", "shard", "manifest"):
        save_on_one_rank(tmp_path / name, 20)
    _truncate(tmp_path / "shard/step-00000020/rank-00000.safetensors")
    _truncate(tmp_path / "manifest/step-00000020/manifest.json")
    first, second = run_ranks(2, _collect_errors, tmp_path)
    assert first == second and [name for name, (_, is_local) in first.items() if is_local] == []
    assert "rank 1: [Errno 5]" in first["a save"][0] and first["a share"][0].startswith("rank 1: [Errno 5]")
