"""A network file system may show a file late: it is waited for there, and nowhere else."""

import threading
import time
from pathlib import Path

import pytest

from megatron.checkpoint import file_visibility, open_checkpoint
from megatron.errors import CheckpointError
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import assert_equals_sample, save_on_one_rank

_MOUNTS = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:35 / /home rw - nfs4 server:/home rw,vers=4.2
41 40 0:36 / /home/me/fast\\040disk rw - xfs /dev/vdb rw
42 22 0:37 / /mnt/bucket rw - fuse.s3fs s3fs rw
43 22 0:38 / /mnt/stick rw - fuseblk /dev/sdb rw
"""


@pytest.fixture
def mount_nfs(tmp_path_factory, monkeypatch):
    """Let the path that is given lie on NFS."""
    mount_table = tmp_path_factory.mktemp("mounts") / "mountinfo"
    monkeypatch.setattr(file_visibility, "MOUNTINFO", mount_table)

    def mount(path):
        mount_table.write_text(f"{_MOUNTS}44 22 0:39 / {path} rw - nfs server:/x rw\n")

    return mount


def test_longest_mount_point_determines_file_system(mount_nfs):
    mount_nfs("/elsewhere")
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
def test_late_shard_on_nfs_is_awaited(tmp_path, mount_nfs, shown_at_first):
    path = save_on_one_rank(tmp_path, 10)
    mount_nfs(tmp_path)
    shard = path / "rank-00000.safetensors"
    content = shard.read_bytes()
    shard.unlink()
    if shown_at_first:
        shard.write_bytes(content[:shown_at_first])
    timer = threading.Timer(0.2, shard.write_bytes, [content])
    timer.start()
    assert_equals_sample(open_checkpoint(path, SINGLE), 10)
    timer.join()


def test_missing_file_on_nfs_is_reported_after_timeout(tmp_path, mount_nfs, monkeypatch):
    monkeypatch.setattr(file_visibility, "WAIT_S", 0.2)
    path = save_on_one_rank(tmp_path, 10)
    mount_nfs(tmp_path)
    (path / "rank-00000.safetensors").unlink()
    start_time = time.monotonic()
    with pytest.raises(CheckpointError, match="rank-00000.safetensors: No such file"):
        open_checkpoint(path, SINGLE)
    assert time.monotonic() - start_time >= 0.2


def test_missing_files_share_one_timeout(tmp_path, mount_nfs, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    mount_nfs(tmp_path)
    visibility = file_visibility.FileVisibility()
    clock[0] = 1000.0
    for name in ("a", "b", "c"):
        visibility.wait_for(tmp_path / name)
    assert file_visibility.WAIT_S <= clock[0] - 1000.0 < file_visibility.WAIT_S + 3


def test_missing_file_on_local_disk_is_not_awaited(tmp_path, mount_nfs, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("a missing file of a local disk was waited for"))
    mount_nfs("/elsewhere")
    path = save_on_one_rank(tmp_path, 10)
    (path / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="rank-00000.safetensors: No such file"):
        open_checkpoint(path, SINGLE)
