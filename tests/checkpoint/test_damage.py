"""What happens to files between a save and a load: each change is found, and an older checkpoint serves."""

import shutil

import pytest
import torch

from megatron.checkpoint import open_checkpoint, open_latest, save
from megatron.errors import CheckpointError, exit_code
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import assert_holds, records_for, save_alone, world_of
from tests.helpers.harness import run_ranks


@pytest.fixture
def warnings(monkeypatch):
    messages = []
    monkeypatch.setattr("megatron.log.warning", messages.append)
    return messages


@pytest.fixture
def two(tmp_path):
    """A folder with the checkpoints of steps 10 and 20; the path of the latter's shard."""
    save_alone(tmp_path, 10)
    return save_alone(tmp_path, 20) / "rank-00000.safetensors"


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_shard_is_named_with_both_sizes_and_the_older_checkpoint_serves(two, part, warnings):
    whole = two.read_bytes()
    kept = int(len(whole) * part)
    two.write_bytes(whole[:kept])
    assert_holds(open_latest(two.parent.parent, SINGLE), 10)
    assert any(f"rank-00000.safetensors is truncated: {kept} of {len(whole)} bytes" in message for message in warnings)
    assert any("falling back to step-00000010" in message for message in warnings)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json"])
def test_a_missing_file_is_named_and_the_older_checkpoint_serves(two, name, warnings):
    (two.parent / name).unlink()
    assert open_latest(two.parent.parent, SINGLE).step == 10
    with pytest.raises(CheckpointError, match=f"{name}: No such file"):
        open_checkpoint(two.parent, SINGLE)
    if name != "manifest.json":
        assert any("No such file" in message for message in warnings)


def test_foreign_files_are_ignored_and_told_once(two, warnings):
    root = two.parent.parent
    for path in (
        root / "step-00000020.bak",
        root / "notes.txt",
        two.parent / ".manifest.json.swp",
        two.parent / "x.tmp",
    ):
        path.write_text("foreign")
    (root / "step-x").mkdir()
    assert_holds(open_latest(root, SINGLE), 20)
    assert_holds(open_latest(root, SINGLE), 20)
    assert [message for message in warnings if ".manifest.json.swp, x.tmp" in message] == warnings and len(
        warnings
    ) == 1


@pytest.mark.parametrize("hint", ["", "step-00000010\n", "step-00000999", "\x00\xff garbage", None])
def test_latest_is_a_hint_only_and_the_next_save_mends_it(two, hint, warnings):
    root = two.parent.parent
    (root / "latest").unlink()
    if hint is not None:
        (root / "latest").write_text(hint)
    assert_holds(open_latest(root, SINGLE), 20)
    assert len(warnings) == 1 and "the newest complete checkpoint is step-00000020" in warnings[0]
    save_alone(root, 30)
    assert (root / "latest").read_text() == "step-00000030\n"


def test_no_folder_an_empty_one_a_file_or_only_broken_ones_end_the_job_with_code_3(tmp_path, two, warnings):
    empty = tmp_path / "empty"
    empty.mkdir()
    other = tmp_path / "other"
    (other / "global_step20").mkdir(parents=True)
    for path, message in [
        (tmp_path / "typo", "typo does not exist"),
        (empty, f"no checkpoint found in {empty}"),
        (other, "global_step20 was written by DeepSpeed: import its weights with tools/import_checkpoint.py"),
        (two, "is a file"),
    ]:
        with pytest.raises(CheckpointError, match=message) as caught:
            open_latest(path, SINGLE)
        assert exit_code(caught.value) == 3
    two.unlink()
    shutil.rmtree(tmp_path / "step-00000010")
    with pytest.raises(CheckpointError, match="no checkpoint in .* verifies: .*rank-00000.safetensors: No such file"):
        open_latest(tmp_path, SINGLE)


def _open(rank, root):
    from megatron import log

    messages = []
    log.warning = messages.append
    return open_latest(root, world_of(rank, 2)).step, len(messages)


def _save(rank, root, step):
    save(root, step, records_for(rank, 2, step), {}, world_of(rank, 2))


def test_ranks_share_the_verification_and_agree_on_the_fallback(tmp_path):
    for step in (10, 20):
        run_ranks(2, _save, tmp_path, step)
    shard = tmp_path / "step-00000020" / "rank-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    assert run_ranks(2, _open, tmp_path) == [(10, 2), (10, 0)]


def test_a_newer_format_is_refused_rather_than_passed_over(two):
    import zlib

    path = two.parent / "manifest.json"
    body = path.read_bytes().split(b"\n", 1)[1].replace(b'"format_version": 1', b'"format_version": 2')
    path.write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(body) + body)
    with pytest.raises(CheckpointError, match="format version 2; this program supports versions up to 1"):
        open_latest(two.parent.parent, SINGLE)
    for step in (30, 40):
        save_alone(two.parent.parent, step, last=1)
    assert path.exists(), "it is not deleted either"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"rank-00000.safetensors": [', b'"../x": ['),
        (b'"file": "rank-00000.safetensors"', b'"file": "/etc/passwd"'),
        (b'"length": 4', b'"length": 3'),
        (b'"dtype": "BF16"', b'"dtype": "PICKLE"'),
        (b'"index": {', b'"index": {"a": [], '),
    ],
)
def test_a_manifest_that_describes_what_cannot_be_is_refused(tmp_path, old, new):
    import zlib

    path = save(tmp_path, 1, records_for(0, 1) + _halves(), {}, SINGLE) / "manifest.json"
    body = path.read_bytes().split(b"\n", 1)[1]
    assert old in body
    body = body.replace(old, new)
    path.write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(body) + body)
    with pytest.raises(CheckpointError, match="does not describe a checkpoint"):
        open_checkpoint(path.parent, SINGLE)


def _halves():
    from megatron.checkpoint import TensorRecord
    from megatron.mpu.shard import Shard

    return [TensorRecord("halves", torch.zeros(4), Shard((8,), 0, start, 4)) for start in (0, 4)]


def test_a_pickle_in_place_of_a_shard_is_never_executed(two, tmp_path):
    import pickle
    import zlib

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    content = pickle.dumps(Bomb())
    two.write_bytes(content)
    path = two.parent / "manifest.json"
    body = path.read_bytes().split(b"\n", 1)[1]
    line = body[body.index(b'"files"') : body.index(b'"index"')]
    body = body.replace(
        line, b'"files": {"rank-00000.safetensors": [%d, "%08x"]},\n' % (len(content), zlib.crc32(content))
    )
    path.write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(body) + body)
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        assert_holds(open_checkpoint(two.parent, SINGLE), 20)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("steps", [(10, 20), (20, 10)])
def test_a_digit_of_the_newest_sequence_number_costs_it_its_place_and_is_told(steps, tmp_path, warnings):
    for step in steps:
        path = save_alone(tmp_path, step) / "manifest.json"
    content = path.read_bytes()
    assert b'"sequence": 2,' in content
    path.write_bytes(content.replace(b'"sequence": 2,', b'"sequence": 0,'))
    with pytest.raises(CheckpointError, match=f"--strict-load.*{path.parent.name}.*damaged"):
        open_latest(tmp_path, SINGLE, strict=True)
    assert open_latest(tmp_path, SINGLE).step == steps[0]
    assert "falling back to" in warnings[0] and f"{path} is damaged" in warnings[0]
    assert save_alone(tmp_path, 30, last=1).exists() and path.exists(), "what cannot be read is left alone"
    assert open_latest(tmp_path, SINGLE, strict=True).step == 30


@pytest.mark.parametrize("lost", ["rank-00000.safetensors", "manifest.json"])
def test_strictly_nothing_older_is_taken(two, lost, warnings):
    root = two.parent.parent
    assert open_latest(root, SINGLE, strict=True).step == 20
    (two.parent / lost).unlink()
    with pytest.raises(CheckpointError, match="--strict-load: .*20"):
        open_latest(root, SINGLE, strict=True)
    assert not warnings
    assert open_latest(root, SINGLE).step == 10
    assert "falling back to step-00000010" in warnings[0]
