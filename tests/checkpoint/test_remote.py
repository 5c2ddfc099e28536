"""Checkpoints in an object store: what is half there is never taken as whole, and what is taken has all its bytes."""

from __future__ import annotations

import json
import shutil
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatron.checkpoint import open_checkpoint, remote, save
from megatron.checkpoint.downloading import fetch_newest
from megatron.checkpoint.manifest import CHECKPOINTS, MANIFEST_NAME
from megatron.checkpoint.retention import AUTOMATIC, RetentionPolicy
from megatron.checkpoint.uploading import HF, QUEUE, Uploads
from megatron.errors import CheckpointError, DataError
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import make_records
from tests.helpers.fake_store import intercept, make_empty_store, needs_moto, s3

TARGET = "memory://b/run"
SHARD = "rank-00000.safetensors"


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryFileSystem:
    return make_empty_store(monkeypatch)


def save_steps(folder: Path, *steps: int, **state: Any) -> list[Path]:
    return [save(folder / CHECKPOINTS, step, make_records(0, 1), {"step": step, **state}, SINGLE) for step in steps]


def upload(folder: Path, *paths: Path, subfolder: str = CHECKPOINTS, target: str = TARGET) -> list[str]:
    """Upload them as one rank; return what is not in the store in the end."""
    uploads = Uploads(folder, target, 0, 1, lambda subfolder, name: None)
    for path in paths:
        uploads.add(subfolder, path)
    uploads.publish()
    uploads.finish(print)
    return uploads.close()


def stored_names(store: MemoryFileSystem) -> list[str]:
    return sorted(name.removeprefix("/b/run/") for name in store.store)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_uploaded_checkpoint_downloads_byte_for_byte(tmp_path: Path, store: MemoryFileSystem) -> None:
    first, second = save_steps(tmp_path, 20, 10)  # the second was saved last
    assert upload(tmp_path, first, second) == []
    checkpoints = remote.find_checkpoints(TARGET)
    assert [(checkpoint.name, checkpoint.step, checkpoint.metadata["step"]) for checkpoint in checkpoints] == [
        ("step-00000010", 10, 10), ("step-00000020", 20, 20),
    ]  # fmt: skip
    root = tmp_path / "new" / CHECKPOINTS
    path = fetch_newest(TARGET, root, SINGLE)
    assert path == root / "step-00000010" and read_files(path) == read_files(second)
    assert open_checkpoint(path, SINGLE).step == 10 and [child.name for child in root.iterdir()] == [path.name]
    for source in (f"{TARGET}/checkpoints", f"{TARGET}/checkpoints/step-00000010/"):
        assert remote.find_checkpoints(source)[0].name == "step-00000010"


def test_manifest_is_uploaded_last_and_partial_upload_is_ignored(
    tmp_path: Path, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    (path,) = save_steps(tmp_path, 20)
    order: list[tuple[str, int]] = []
    intercept(monkeypatch, "put_file", lambda _, name, **__: order.append((name, len(remote.find_checkpoints(TARGET)))))
    upload(tmp_path, path)
    base = f"/b/run/checkpoints/{path.name}"
    assert (
        order == [(f"{base}/{SHARD}", 0), (f"{base}/{MANIFEST_NAME}", 0)] and len(remote.find_checkpoints(TARGET)) == 1
    )
    objects = {name: store.cat_file(name) for name in (f"{base}/{SHARD}", f"{base}/{MANIFEST_NAME}")}
    for name, content in objects.items():
        for damaged in (None, content[:-1]):
            store.store.pop(name, None)
            if damaged is not None:
                store.pipe_file(name, damaged)
            assert remote.find_checkpoints(TARGET) == []
        with pytest.raises(CheckpointError, match="no complete checkpoint found in memory://b/run"):
            fetch_newest(TARGET, tmp_path / "new", SINGLE)
        store.pipe_file(name, content)
    stderr = capfd.readouterr().err
    assert (
        f"{SHARD} has 0 of" in stderr
        and "checksum of its manifest.json does not match" in stderr
        and len(remote.find_checkpoints(TARGET)) == 1
    )


def test_damaged_download_falls_back_unless_strict(tmp_path: Path, store: MemoryFileSystem, capfd) -> None:
    upload(tmp_path, *save_steps(tmp_path, 10, 20))
    name = f"/b/run/checkpoints/step-00000020/{SHARD}"
    content = store.cat_file(name)
    store.pipe_file(name, content[:-1] + bytes([content[-1] ^ 1]))
    root = tmp_path / "new"
    with pytest.raises(
        CheckpointError, match=rf"newest checkpoint must verify.*step-00000020 is damaged: {SHARD} was alt"
    ):
        fetch_newest(TARGET, root, SINGLE, strict=True)
    assert fetch_newest(TARGET, root, SINGLE).name == "step-00000010" and len(list(root.iterdir())) == 1
    assert "falling back to memory://b/run/checkpoints/step-00000010 (step 10)" in capfd.readouterr().err


def test_existing_checkpoint_is_not_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = save_steps(tmp_path, 10)
    upload(tmp_path, path)
    requests: list[str] = []
    intercept(monkeypatch, "cat_file", lambda name, **_: requests.append(name))
    assert fetch_newest(TARGET, path.parent, SINGLE) == path and not [name for name in requests if SHARD in name]
    (other_path,) = save_steps(tmp_path / "other", 10, run="another")
    assert fetch_newest(TARGET, other_path.parent, SINGLE).name == "step-00000010-1" and read_files(
        other_path
    ) != read_files(path)


def test_failed_upload_is_reported_and_retried_with_next_save(
    tmp_path: Path, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    is_failing = [True]

    def raise_if_failing(*_: Any, **__: Any) -> None:
        if is_failing[0]:
            raise OSError("500 Internal Server Error")

    intercept(monkeypatch, "put_file", raise_if_failing)
    uploads = Uploads(tmp_path, TARGET, 0, 1, lambda subfolder, name: None)
    first, second = save_steps(tmp_path, 10, 20)
    uploads.add(CHECKPOINTS, first)
    uploads.finish(print)
    stderr = capfd.readouterr().err
    assert (
        f"checkpoints/{first.name}: NOT UPLOADED to {TARGET}" in stderr
        and "500 Internal" in stderr
        and stored_names(store) == []
    )
    is_failing[0] = False
    uploads.add(CHECKPOINTS, second)
    uploads.finish(print)
    assert uploads.close() == [] and {checkpoint.step for checkpoint in remote.find_checkpoints(TARGET)} == {10, 20}
    assert list((tmp_path / QUEUE).rglob("step-*")) == []


def test_pending_upload_resumes_after_local_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = save_steps(tmp_path, 10)
    with monkeypatch.context() as patch:
        intercept(patch, "put_file", _deny_access)
        assert upload(tmp_path, path) == ["checkpoints/step-00000010"]
    expected = read_files(path)
    for file in path.iterdir():
        file.unlink()  # as --keep-last does
    assert upload(tmp_path) == []
    assert read_files(fetch_newest(TARGET, tmp_path / "new", SINGLE)) == expected


def test_resaved_step_replaces_checkpoint_being_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """Training went back and saved the step once more, while the first file of the former one was on its way."""
    path = write_two_rank_checkpoint(tmp_path, b"former")
    is_sending, may_continue = threading.Event(), threading.Event()
    original_put_file = MemoryFileSystem.put_file

    def put_file(self: MemoryFileSystem, source: str, name: str) -> None:
        original_put_file(self, source, name)
        if name.endswith("rank-00001.safetensors") and not may_continue.is_set():
            is_sending.set()
            assert may_continue.wait(20)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    ranks = [Uploads(tmp_path, TARGET, rank, 2, lambda subfolder, name: None) for rank in (0, 1)]
    for uploads in ranks:
        uploads.add(CHECKPOINTS, path)
    assert is_sending.wait(20)
    shutil.rmtree(path)
    write_two_rank_checkpoint(tmp_path, b"latter")
    for uploads in ranks:
        uploads.add(CHECKPOINTS, path)
    ranks[0].publish()  # rank 1 is still busy with its file of the former checkpoint
    may_continue.set()
    for uploads in ranks:
        uploads.finish(print)
    ranks[1].close()
    assert ranks[0].close() == []
    assert read_files(fetch_newest(TARGET, tmp_path / "new", SINGLE)) == read_files(path)
    assert "NOT UPLOADED" not in capfd.readouterr().err


def write_two_rank_checkpoint(folder: Path, text: bytes) -> Path:
    """Write a checkpoint of step 10 whose two files hold ``text``."""
    path = folder / CHECKPOINTS / "step-00000010"
    path.mkdir(parents=True)
    written = {}
    for rank in range(2):
        name, data = f"rank-0000{rank}.safetensors", text + bytes([rank])
        (path / name).write_bytes(data)
        written[name] = [len(data), f"{zlib.crc32(data):08x}"]
    fields = json.dumps({"state": {"text": text.decode()}, "files": written, "index": {}})
    body = b'"format_version": 1, "sequence": 1, "step": 10,\n' + fields[1:].encode()
    (path / MANIFEST_NAME).write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(body) + body)
    return path


def test_truncated_upload_is_retried(
    tmp_path: Path, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    original_put_file, sent = MemoryFileSystem.put_file, []

    def put_file(self: MemoryFileSystem, source: str, name: str) -> None:
        original_put_file(self, source, name)
        sent.append(name)
        if len(sent) == 1:
            self.pipe_file(name, self.cat_file(name)[:-1])

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    (path,) = save_steps(tmp_path, 10)
    assert upload(tmp_path, path) == [] and len(sent) == 3 and len(remote.find_checkpoints(TARGET)) == 1
    assert "the store has 1254 of 1255 bytes" in capfd.readouterr().err


def _deny_access(*_: Any, **__: Any) -> None:
    raise PermissionError("Forbidden")


def test_old_manifest_is_deleted_before_files_are_replaced(
    tmp_path: Path, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = save_steps(tmp_path, 10)
    upload(tmp_path, path)
    (other_path,) = save_steps(tmp_path / "other", 10, run="another")
    num_complete: list[int] = []
    intercept(monkeypatch, "put_file", lambda *_, **__: num_complete.append(len(remote.find_checkpoints(TARGET))))
    upload(tmp_path / "other", other_path)
    assert (
        num_complete == [0, 0]
        and remote.find_checkpoints(TARGET)[0].manifest == (other_path / MANIFEST_NAME).read_bytes()
    )


def test_ranks_upload_their_files_and_manifest_waits_for_all(tmp_path: Path, store: MemoryFileSystem) -> None:
    path = tmp_path / CHECKPOINTS / "step-00000010"
    path.mkdir(parents=True)
    for rank in range(3):
        (path / f"rank-0000{rank}.safetensors").write_bytes(bytes([rank]) * 9)
    (path / MANIFEST_NAME).write_bytes(b"manifest")
    completed: list[str] = []
    ranks = [Uploads(tmp_path, TARGET, rank, 3, lambda subfolder, name: completed.append(name)) for rank in (0, 2)]
    for uploads in ranks:
        uploads.add(CHECKPOINTS, path)
    deadline = time.monotonic() + 20
    while len(stored_names(store)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    for uploads in ranks:
        uploads.finish(print)
    assert [Path(name).name for name in stored_names(store)] == [
        "rank-00000.safetensors",
        "rank-00002.safetensors",
    ] and not completed
    late_uploads = Uploads(tmp_path, TARGET, 1, 3, lambda subfolder, name: None)
    late_uploads.finish(print)
    late_uploads.close()
    ranks[1].close()
    assert ranks[0].close() == [] and len(stored_names(store)) == 4 and completed == ["step-00000010"]


def test_huggingface_config_is_uploaded_last(
    tmp_path: Path, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / HF / "step-00000010"
    folder.mkdir(parents=True)
    for name in (
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "tokenizer.json",
    ):
        (folder / name).write_text(json.dumps(name))
    order: list[str] = []
    intercept(monkeypatch, "put_file", lambda _, name, **__: order.append(name.rpartition("/")[2]))
    assert upload(tmp_path, folder, subfolder=HF) == [] and order[-1] == "config.json" and len(order) == 4
    assert len(stored_names(store)) == 4 and remote.find_checkpoints(TARGET) == []


@pytest.mark.parametrize(
    "policy, remaining_steps",
    [
        (RetentionPolicy(2), {40, 50}),
        (RetentionPolicy(1, 20), {20, 40, 50}),
        (RetentionPolicy(automatic=1), {10, 50}),  # that of step 10 was asked for
    ],
)
def test_old_checkpoints_are_deleted_manifest_first(
    tmp_path: Path,
    store: MemoryFileSystem,
    monkeypatch: pytest.MonkeyPatch,
    policy: RetentionPolicy,
    remaining_steps: set[int],
) -> None:
    upload(tmp_path, *save_steps(tmp_path, 10), *save_steps(tmp_path, 20, 30, 40, 50, **{AUTOMATIC: True}))
    store.pipe("/b/run/notes.txt", b"of somebody else")
    deleted: list[str] = []
    intercept(monkeypatch, "rm_file", lambda name: deleted.append(name.rpartition("/")[2]))
    num_retained = policy.automatic if policy.last is None else policy.last
    assert num_retained is not None
    names = remote.remove_old(TARGET, policy.counts, num_retained, policy.every)
    assert {checkpoint.step for checkpoint in remote.find_checkpoints(TARGET)} == remaining_steps and len(
        names
    ) == 5 - len(remaining_steps)
    assert deleted == [MANIFEST_NAME, SHARD] * len(names) and "notes.txt" in stored_names(store)


def test_denied_store_access_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    intercept(monkeypatch, "find", _deny_access)
    with pytest.raises(CheckpointError, match="memory://b/run: the store denies access .*Check the credentials"):
        fetch_newest(TARGET, tmp_path, SINGLE)
    with pytest.raises(DataError, match="denies access"):
        remote.find_checkpoints(TARGET)


def test_slow_store_does_not_block_queueing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_released = threading.Event()
    intercept(monkeypatch, "put_file", lambda *_, **__: is_released.wait(20))
    uploads = Uploads(tmp_path, TARGET, 0, 1, lambda subfolder, name: None)
    messages: list[str] = []
    monkeypatch.setattr("megatron.checkpoint.uploading._PROGRESS_INTERVAL_S", 0.05)
    for path in save_steps(tmp_path, 10, 20):
        uploads.add(CHECKPOINTS, path)
    assert remote.find_checkpoints(TARGET) == []

    def report_progress(text: str) -> None:
        messages.append(text)
        is_released.set()

    uploads.finish(report_progress)
    assert "files," in messages[0] and "MB remain on this rank" in messages[0]
    assert uploads.close() == [] and len(remote.find_checkpoints(TARGET)) == 2


@needs_moto
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_s3_returns_uploaded_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto's server stands in for S3."""
    first, second = save_steps(tmp_path, 10, 20)
    with s3(monkeypatch) as files:
        target = "s3://bucket/run"
        assert remote.find_checkpoints(target) == []
        assert upload(tmp_path, first, second, target=target) == []
        assert [checkpoint.step for checkpoint in remote.find_checkpoints(target)] == [20, 10]
        assert read_files(fetch_newest(target, tmp_path / "new", SINGLE)) == read_files(second)
        files.rm_file(f"bucket/run/checkpoints/{second.name}/{SHARD}")
        assert [checkpoint.step for checkpoint in remote.find_checkpoints(target)] == [10]
        assert (
            remote.remove_old(target, lambda checkpoint: True, 0, None) == [first.name]
            and remote.find_checkpoints(target) == []
        )
        with pytest.raises(CheckpointError, match="no complete checkpoint found in s3://none/run"):
            fetch_newest("s3://none/run", tmp_path, SINGLE)
        assert upload(tmp_path, first, target="s3://none/run") == [f"checkpoints/{first.name}"]
