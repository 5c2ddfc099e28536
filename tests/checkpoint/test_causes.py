"""What one rank failed at, all ranks say, in words a person can act on."""

import errno

import pytest
import torch

from megatron.checkpoint import TensorRecord, open_checkpoint, open_latest, save
from megatron.checkpoint.rank_errors import gather_verdict, in_words, summary
from megatron.errors import CheckpointError
from megatron.mpu.shard import Shard
from tests.helpers.checkpoint_samples import FailAt, records_for, save_alone, world_of
from tests.helpers.harness import run_ranks

_FULL = OSError(errno.ENOSPC, "No space left on device")


class _CannotTravel(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def _failed(error, **marks):
    with pytest.raises(CheckpointError) as caught, in_words(**marks):
        raise error
    return caught.value, None


def test_ranks_that_failed_alike_are_named_together_and_what_all_say_needs_no_name():
    full, other = _failed(_FULL), _failed(ValueError("odd"))
    assert summary({1: full, 0: full, 2: other}, 4) == (
        "ranks 0, 1: [Errno 28] No space left on device; rank 2: ValueError: odd"
    )
    assert summary({0: full, 1: full}, 2) == "[Errno 28] No space left on device"
    assert summary({0: _failed(CheckpointError("need 2 GB"), is_of_this_rank=False)}, 2) == "need 2 GB"


def _save_where_one_raises(rank, root, error):
    def fail():
        raise error

    try:
        with FailAt(0 if rank else 10**6, fail, only="create"):
            save(root, 20, records_for(rank, 2, 20), {}, world_of(rank, 2))
    except BaseException as caught:
        return type(caught).__name__, str(caught)
    return None


def test_an_error_that_cannot_travel_is_told_all_the_same(tmp_path):
    messages = run_ranks(2, _save_where_one_raises, tmp_path, _CannotTravel("two", "words"))
    assert messages[0] == messages[1] and "rank 1: _CannotTravel: two words" in messages[0][1]


def test_an_interrupt_ends_its_own_rank_as_it_would_anywhere_and_the_others_say_so(tmp_path):
    interrupted = KeyboardInterrupt()
    (kind, message), own = run_ranks(2, _save_where_one_raises_and_stays, tmp_path, interrupted)
    assert kind == "CheckpointError" and "rank 1: KeyboardInterrupt" in message and own == ("KeyboardInterrupt", "")


def _save_where_one_raises_and_stays(rank, root, error):
    """As ``_save_where_one_raises``; rank 1 takes rank 0's last word, as its exit would end rank 0's telling."""
    found = _save_where_one_raises(rank, root, error)
    if rank:
        world_of(rank, 2).broadcast_object(None)
    return found


def _load_what_one_rank_lacks(rank, root):
    checkpoint = open_latest(root, world_of(rank, 2))
    records = [TensorRecord("mask", torch.zeros(3, dtype=torch.bool), Shard((3,)))]
    if rank:
        records.append(TensorRecord("layers.9.up", torch.zeros(2), Shard((2,))))
    message = None
    try:
        checkpoint.load(records)
    except CheckpointError as error:
        message = str(error)
    return message, bool(records[0].tensor.any())


def test_a_tensor_that_one_rank_misses_stops_all_before_anything_is_read(tmp_path):
    path = save_alone(tmp_path, 20)
    message = f"rank 1: {path} does not fit this model (1 tensors): layers.9.up: not in the checkpoint"
    assert run_ranks(2, _load_what_one_rank_lacks, tmp_path) == [(message, False)] * 2


def _spoil(path):
    path.write_bytes(path.read_bytes()[:-9])


def _errors_of_a_rank(rank, root):
    """Return what this rank raises of each kind of damage and failure: the words, and whether it is to say them."""
    world = world_of(rank, 2)

    def fail():
        raise OSError(errno.EIO, "Input/output error")

    def save_where_rank_1_fails():
        with FailAt(0 if rank else 10**6, fail, only="create"):
            save(root / "good", 30, records_for(rank, 2, 30), {}, world)

    more = [TensorRecord("layers.9.up", torch.zeros(2), Shard((2,)))]
    attempts = {
        "no folder": lambda: open_latest(root / "none", world),
        "a damaged file": lambda: open_checkpoint(root / "shard/step-00000020", world),
        "a damaged manifest": lambda: open_checkpoint(root / "manifest/step-00000020", world),
        "the only one is damaged": lambda: open_latest(root / "shard", world),
        "the newest must verify": lambda: open_latest(root / "shard", world, strict=True),
        "another model": lambda: open_latest(root / "good", world).load(more),
        "a save": save_where_rank_1_fails,
        "a share": lambda: gather_verdict(world, fail if rank else str, str),
    }
    found = {}
    for name, attempt in attempts.items():
        with pytest.raises(CheckpointError) as caught:
            attempt()
        found[name] = (str(caught.value), caught.value.is_of_this_rank)
    return found


def test_what_all_ranks_find_alike_is_marked_as_such_wherever_it_was_found(tmp_path):
    for name in ("good", "shard", "manifest"):
        save_alone(tmp_path / name, 20)
    _spoil(tmp_path / "shard/step-00000020/rank-00000.safetensors")
    _spoil(tmp_path / "manifest/step-00000020/manifest.json")
    first, second = run_ranks(2, _errors_of_a_rank, tmp_path)
    assert first == second and [name for name, (_, is_own) in first.items() if is_own] == []
    assert "rank 1: [Errno 5]" in first["a save"][0] and first["a share"][0].startswith("rank 1: [Errno 5]")
