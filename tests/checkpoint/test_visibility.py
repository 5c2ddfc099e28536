"""A network file system may show a file late: it is waited for there, and nowhere else."""

import threading
import time
from pathlib import Path

import pytest

from megatron.checkpoint import file_visibility, open_checkpoint
from megatron.errors import CheckpointError
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import assert_holds, save_alone

_MOUNTS = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:35 / /home rw - nfs4 server:/home rw,vers=4.2
41 40 0:36 / /home/me/fast\\040disk rw - xfs /dev/vdb rw
42 22 0:37 / /mnt/bucket rw - fuse.s3fs s3fs rw
43 22 0:38 / /mnt/stick rw - fuseblk /dev/sdb rw
"""


@pytest.fixture
def mounts(tmp_path_factory, monkeypatch):
    """Let the path that is given lie on NFS."""
    table = tmp_path_factory.mktemp("mounts") / "mountinfo"
    monkeypatch.setattr(file_visibility, "MOUNTS", table)

    def mount(path):
        table.write_text(f"{_MOUNTS}44 22 0:39 / {path} rw - nfs server:/x rw\n")

    return mount


def test_the_longest_mount_point_says_what_a_path_lies_on(mounts):
    mounts("/elsewhere")
    for path, expected in {
        "/home/me/runs": True,
        "/home/me/fast disk/runs": False,
        "/mnt/bucket/x": True,
        "/mnt/stick/x": False,
        "/homely": False,
        "/": False,
    }.items():
        assert file_visibility.is_on_network(Path(path)) is expected, path


@pytest.mark.parametrize("shown_at_first", [None, 5])
def test_a_shard_that_is_late_on_nfs_is_waited_for(tmp_path, mounts, shown_at_first):
    path = save_alone(tmp_path, 10)
    mounts(tmp_path)
    shard = path / "rank-00000.safetensors"
    content = shard.read_bytes()
    shard.unlink()
    if shown_at_first:
        shard.write_bytes(content[:shown_at_first])
    timer = threading.Timer(0.2, shard.write_bytes, [content])
    timer.start()
    assert_holds(open_checkpoint(path, SINGLE), 10)
    timer.join()


def test_one_that_never_comes_is_told_after_the_limit(tmp_path, mounts, monkeypatch):
    monkeypatch.setattr(file_visibility, "WAIT_S", 0.2)
    path = save_alone(tmp_path, 10)
    mounts(tmp_path)
    (path / "rank-00000.safetensors").unlink()
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="rank-00000.safetensors: No such file"):
        open_checkpoint(path, SINGLE)
    assert time.monotonic() - began >= 0.2


def test_files_that_never_come_are_waited_for_together(tmp_path, mounts, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    mounts(tmp_path)
    patience = file_visibility.FileVisibility()
    now[0] = 1000.0
    for name in ("a", "b", "c"):
        patience.wait_for(tmp_path / name)
    assert file_visibility.WAIT_S <= now[0] - 1000.0 < file_visibility.WAIT_S + 3


def test_on_a_local_disk_nobody_waits(tmp_path, mounts, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("a missing file of a local disk was waited for"))
    mounts("/elsewhere")
    path = save_alone(tmp_path, 10)
    (path / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="rank-00000.safetensors: No such file"):
        open_checkpoint(path, SINGLE)
