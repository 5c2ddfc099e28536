"""What happens to files between a save and a load: each change is found, and an older checkpoint serves."""

import shutil

import pytest
import torch

from megatron.checkpoint import open_checkpoint, open_latest, save
from megatron.errors import CheckpointError, exit_code
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import assert_equals_sample, make_records, save_on_one_rank, world_group
from tests.helpers.harness import run_ranks


@pytest.fixture
def warnings(monkeypatch):
    messages = []
    monkeypatch.setattr("megatron.log.warning", messages.append)
    return messages


@pytest.fixture
def newest_shard(tmp_path):
    """A folder with the checkpoints of steps 10 and 20; the path of the latter's shard."""
    save_on_one_rank(tmp_path, 10)
    return save_on_one_rank(tmp_path, 20) / "rank-00000.safetensors"


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 0.999])
def test_truncated_shard_is_named_and_older_checkpoint_is_loaded(newest_shard, fraction, warnings):
    content = newest_shard.read_bytes()
    num_bytes = int(len(content) * fraction)
    newest_shard.write_bytes(content[:num_bytes])
    assert_equals_sample(open_latest(newest_shard.parent.parent, SINGLE), 10)
    assert any(
        f"rank-00000.safetensors is truncated: {num_bytes} of {len(content)} bytes" in message for message in warnings
    )
    assert any("falling back to step-00000010" in message for message in warnings)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json"])
def test_missing_file_is_named_and_older_checkpoint_is_loaded(newest_shard, name, warnings):
    (newest_shard.parent / name).unlink()
    assert open_latest(newest_shard.parent.parent, SINGLE).step == 10
    with pytest.raises(CheckpointError, match=f"{name}: No such file"):
        open_checkpoint(newest_shard.parent, SINGLE)
    if name != "manifest.json":
        assert any("No such file" in message for message in warnings)


def test_foreign_files_are_ignored_with_one_warning(newest_shard, warnings):
    root = newest_shard.parent.parent
    for path in (
        root / "step-00000020.bak",
        root / "notes.txt",
        newest_shard.parent / ".manifest.json.swp",
        newest_shard.parent / "x.tmp",
    ):
        path.write_text("foreign")
    (root / "step-x").mkdir()
    assert_equals_sample(open_latest(root, SINGLE), 20)
    assert_equals_sample(open_latest(root, SINGLE), 20)
    assert [message for message in warnings if ".manifest.json.swp, x.tmp" in message] == warnings and len(
        warnings
    ) == 1


@pytest.mark.parametrize("hint", ["", "step-00000010\n", "step-00000999", "\x00\xff garbage", None])
def test_latest_file_is_only_a_hint_and_next_save_repairs_it(newest_shard, hint, warnings):
    root = newest_shard.parent.parent
    (root / "latest").unlink()
    if hint is not None:
        (root / "latest").write_text(hint)
    assert_equals_sample(open_latest(root, SINGLE), 20)
    assert len(warnings) == 1 and "the newest complete checkpoint is step-00000020" in warnings[0]
    save_on_one_rank(root, 30)
    assert (root / "latest").read_text() == "step-00000030\n"


def test_path_without_valid_checkpoint_exits_with_code_3(tmp_path, newest_shard, warnings):
    empty_dir = tmp_path / "empty"
    empty_dir.mkdir()
    deepspeed_dir = tmp_path / "other"
    (deepspeed_dir / "global_step20").mkdir(parents=True)
    for path, message in [
        (tmp_path / "typo", "typo does not exist"),
        (empty_dir, f"no checkpoint found in {empty_dir}"),
        (deepspeed_dir, "global_step20 was written by DeepSpeed: import its weights with tools/import_checkpoint.py"),
        (newest_shard, "is a file"),
    ]:
        with pytest.raises(CheckpointError, match=message) as caught:
            open_latest(path, SINGLE)
        assert exit_code(caught.value) == 3
    newest_shard.unlink()
    shutil.rmtree(tmp_path / "step-00000010")
    with pytest.raises(CheckpointError, match="no checkpoint in .* verifies: .*rank-00000.safetensors: No such file"):
        open_latest(tmp_path, SINGLE)


def _open(rank, root):
    from megatron import log

    messages = []
    log.warning = messages.append
    return open_latest(root, world_group(rank, 2)).step, len(messages)


def _save(rank, root, step):
    save(root, step, make_records(rank, 2, step), {}, world_group(rank, 2))


def test_ranks_share_verification_and_agree_on_fallback(tmp_path):
    for step in (10, 20):
        run_ranks(2, _save, tmp_path, step)
    shard = tmp_path / "step-00000020" / "rank-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    assert run_ranks(2, _open, tmp_path) == [(10, 2), (10, 0)]


def test_newer_format_is_rejected_instead_of_skipped(newest_shard):
    import zlib

    path = newest_shard.parent / "manifest.json"
    body = path.read_bytes().split(b"\n", 1)[1].replace(b'"format_version": 1', b'"format_version": 2')
    path.write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(body) + body)
    with pytest.raises(CheckpointError, match="format version 2; this program supports versions up to 1"):
        open_latest(newest_shard.parent.parent, SINGLE)
    for step in (30, 40):
        save_on_one_rank(newest_shard.parent.parent, step, last=1)
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
def test_inconsistent_manifest_is_rejected(tmp_path, old, new):
    import zlib

    path = save(tmp_path, 1, make_records(0, 1) + _half_records(), {}, SINGLE) / "manifest.json"
    body = path.read_bytes().split(b"\n", 1)[1]
    assert old in body
    body = body.replace(old, new)
    path.write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(body) + body)
    with pytest.raises(CheckpointError, match="does not describe a checkpoint"):
        open_checkpoint(path.parent, SINGLE)


def _half_records():
    from megatron.checkpoint import TensorRecord
    from megatron.mpu.shard import Shard

    return [TensorRecord("halves", torch.zeros(4), Shard((8,), 0, start, 4)) for start in (0, 4)]


def test_pickle_instead_of_shard_is_never_executed(newest_shard, tmp_path):
    import pickle
    import zlib

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    content = pickle.dumps(Bomb())
    newest_shard.write_bytes(content)
    path = newest_shard.parent / "manifest.json"
    body = path.read_bytes().split(b"\n", 1)[1]
    line = body[body.index(b'"files"') : body.index(b'"index"')]
    body = body.replace(
        line, b'"files": {"rank-00000.safetensors": [%d, "%08x"]},\n' % (len(content), zlib.crc32(content))
    )
    path.write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(body) + body)
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        assert_equals_sample(open_checkpoint(newest_shard.parent, SINGLE), 20)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("steps", [(10, 20), (20, 10)])
def test_altered_sequence_number_is_reported_and_checkpoint_skipped(steps, tmp_path, warnings):
    for step in steps:
        path = save_on_one_rank(tmp_path, step) / "manifest.json"
    content = path.read_bytes()
    assert b'"sequence": 2,' in content
    path.write_bytes(content.replace(b'"sequence": 2,', b'"sequence": 0,'))
    with pytest.raises(CheckpointError, match=f"--strict-load.*{path.parent.name}.*damaged"):
        open_latest(tmp_path, SINGLE, strict=True)
    assert open_latest(tmp_path, SINGLE).step == steps[0]
    assert "falling back to" in warnings[0] and f"{path} is damaged" in warnings[0]
    assert save_on_one_rank(tmp_path, 30, last=1).exists() and path.exists(), "what cannot be read is left alone"
    assert open_latest(tmp_path, SINGLE, strict=True).step == 30


@pytest.mark.parametrize("lost_file", ["rank-00000.safetensors", "manifest.json"])
def test_strict_load_rejects_older_checkpoint(newest_shard, lost_file, warnings):
    root = newest_shard.parent.parent
    assert open_latest(root, SINGLE, strict=True).step == 20
    (newest_shard.parent / lost_file).unlink()
    with pytest.raises(CheckpointError, match="--strict-load: .*20"):
        open_latest(root, SINGLE, strict=True)
    assert not warnings
    assert open_latest(root, SINGLE).step == 10
    assert "falling back to step-00000010" in warnings[0]
