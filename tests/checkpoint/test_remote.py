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
from tests.helpers.checkpoint_samples import records_for
from tests.helpers.fake_store import empty_store, intercept, needs_moto, s3

TARGET = "memory://b/run"
SHARD = "rank-00000.safetensors"


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryFileSystem:
    return empty_store(monkeypatch)


def saved(folder: Path, *steps: int, **state: Any) -> list[Path]:
    return [save(folder / CHECKPOINTS, step, records_for(0, 1), {"step": step, **state}, SINGLE) for step in steps]


def upload(folder: Path, *paths: Path, kind: str = CHECKPOINTS, target: str = TARGET) -> list[str]:
    """Upload them as one rank; return what is not in the store in the end."""
    uploads = Uploads(folder, target, 0, 1, lambda kind, name: None)
    for path in paths:
        uploads.add(kind, path)
    uploads.begin()
    uploads.finish(print)
    return uploads.close()


def held(store: MemoryFileSystem) -> list[str]:
    return sorted(name.removeprefix("/b/run/") for name in store.store)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_was_uploaded_is_downloaded_to_the_byte(tmp_path: Path, store: MemoryFileSystem) -> None:
    first, second = saved(tmp_path, 20, 10)  # the second was saved last
    assert upload(tmp_path, first, second) == []
    assert [(one.name, one.step, one.metadata["step"]) for one in remote.find(TARGET)] == [
        ("step-00000010", 10, 10), ("step-00000020", 20, 20),
    ]  # fmt: skip
    root = tmp_path / "new" / CHECKPOINTS
    path = fetch_newest(TARGET, root, SINGLE)
    assert path == root / "step-00000010" and contents(path) == contents(second)
    assert open_checkpoint(path, SINGLE).step == 10 and [each.name for each in root.iterdir()] == [path.name]
    for source in (f"{TARGET}/checkpoints", f"{TARGET}/checkpoints/step-00000010/"):
        assert remote.find(source)[0].name == "step-00000010"


def test_the_manifest_comes_last_and_what_is_half_there_is_not_found(
    tmp_path: Path, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    (path,) = saved(tmp_path, 20)
    order: list[tuple[str, int]] = []
    intercept(monkeypatch, "put_file", lambda _, name, **__: order.append((name, len(remote.find(TARGET)))))
    upload(tmp_path, path)
    base = f"/b/run/checkpoints/{path.name}"
    assert order == [(f"{base}/{SHARD}", 0), (f"{base}/{MANIFEST_NAME}", 0)] and len(remote.find(TARGET)) == 1
    whole = {name: store.cat_file(name) for name in (f"{base}/{SHARD}", f"{base}/{MANIFEST_NAME}")}
    for name, content in whole.items():
        for damaged in (None, content[:-1]):
            store.store.pop(name, None)
            if damaged is not None:
                store.pipe_file(name, damaged)
            assert remote.find(TARGET) == []
        with pytest.raises(CheckpointError, match="no complete checkpoint found in memory://b/run"):
            fetch_newest(TARGET, tmp_path / "new", SINGLE)
        store.pipe_file(name, content)
    said = capfd.readouterr().err
    assert (
        f"{SHARD} has 0 of" in said
        and "checksum of its manifest.json does not match" in said
        and len(remote.find(TARGET)) == 1
    )


def test_damaged_bytes_are_found_and_an_older_one_is_taken_unless_strict(
    tmp_path: Path, store: MemoryFileSystem, capfd
) -> None:
    upload(tmp_path, *saved(tmp_path, 10, 20))
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


def test_one_that_is_there_already_is_not_downloaded_and_another_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = saved(tmp_path, 10)
    upload(tmp_path, path)
    asked: list[str] = []
    intercept(monkeypatch, "cat_file", lambda name, **_: asked.append(name))
    assert fetch_newest(TARGET, path.parent, SINGLE) == path and not [name for name in asked if SHARD in name]
    (other,) = saved(tmp_path / "other", 10, run="another")
    assert fetch_newest(TARGET, other.parent, SINGLE).name == "step-00000010-1" and contents(other) != contents(path)


def test_an_upload_that_fails_is_said_and_goes_with_the_next_save(
    tmp_path: Path, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    fails = [True]

    def refuse(*_: Any, **__: Any) -> None:
        if fails[0]:
            raise OSError("500 Internal Server Error")

    intercept(monkeypatch, "put_file", refuse)
    uploads = Uploads(tmp_path, TARGET, 0, 1, lambda kind, name: None)
    first, second = saved(tmp_path, 10, 20)
    uploads.add(CHECKPOINTS, first)
    uploads.finish(print)
    said = capfd.readouterr().err
    assert (
        f"checkpoints/{first.name}: NOT UPLOADED to {TARGET}" in said and "500 Internal" in said and held(store) == []
    )
    fails[0] = False
    uploads.add(CHECKPOINTS, second)
    uploads.finish(print)
    assert uploads.close() == [] and {one.step for one in remote.find(TARGET)} == {10, 20}
    assert list((tmp_path / QUEUE).rglob("step-*")) == []


def test_what_a_start_has_left_is_uploaded_by_the_next_one_also_when_it_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = saved(tmp_path, 10)
    with monkeypatch.context() as patch:
        intercept(patch, "put_file", _refuse)
        assert upload(tmp_path, path) == ["checkpoints/step-00000010"]
    expected = contents(path)
    for file in path.iterdir():
        file.unlink()  # as --keep-last does
    assert upload(tmp_path) == []
    assert contents(fetch_newest(TARGET, tmp_path / "new", SINGLE)) == expected


def test_a_checkpoint_of_the_same_step_takes_the_place_of_one_that_is_being_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """Training went back and saved the step once more, while the first file of the former one was on its way."""
    path = two_ranks(tmp_path, b"former")
    is_sending, may_go_on = threading.Event(), threading.Event()
    answer = MemoryFileSystem.put_file

    def put_file(self: MemoryFileSystem, source: str, name: str) -> None:
        answer(self, source, name)
        if name.endswith("rank-00001.safetensors") and not may_go_on.is_set():
            is_sending.set()
            assert may_go_on.wait(20)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    ranks = [Uploads(tmp_path, TARGET, rank, 2, lambda kind, name: None) for rank in (0, 1)]
    for uploads in ranks:
        uploads.add(CHECKPOINTS, path)
    assert is_sending.wait(20)
    shutil.rmtree(path)
    two_ranks(tmp_path, b"latter")
    for uploads in ranks:
        uploads.add(CHECKPOINTS, path)
    ranks[0].begin()  # rank 1 is still busy with its file of the former checkpoint
    may_go_on.set()
    for uploads in ranks:
        uploads.finish(print)
    ranks[1].close()
    assert ranks[0].close() == []
    assert contents(fetch_newest(TARGET, tmp_path / "new", SINGLE)) == contents(path)
    assert "NOT UPLOADED" not in capfd.readouterr().err


def two_ranks(folder: Path, text: bytes) -> Path:
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


def test_an_object_that_came_short_is_sent_again(
    tmp_path: Path, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    answer, sent = MemoryFileSystem.put_file, []

    def put_file(self: MemoryFileSystem, source: str, name: str) -> None:
        answer(self, source, name)
        sent.append(name)
        if len(sent) == 1:
            self.pipe_file(name, self.cat_file(name)[:-1])

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    (path,) = saved(tmp_path, 10)
    assert upload(tmp_path, path) == [] and len(sent) == 3 and len(remote.find(TARGET)) == 1
    assert "the store has 1254 of 1255 bytes" in capfd.readouterr().err


def _refuse(*_: Any, **__: Any) -> None:
    raise PermissionError("Forbidden")


def test_a_marker_of_the_same_name_goes_ahead_of_the_files(
    tmp_path: Path, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = saved(tmp_path, 10)
    upload(tmp_path, path)
    (other,) = saved(tmp_path / "other", 10, run="another")
    found: list[int] = []
    intercept(monkeypatch, "put_file", lambda *_, **__: found.append(len(remote.find(TARGET))))
    upload(tmp_path / "other", other)
    assert found == [0, 0] and remote.find(TARGET)[0].manifest == (other / MANIFEST_NAME).read_bytes()


def test_each_rank_sends_its_files_and_the_marker_waits_for_all(tmp_path: Path, store: MemoryFileSystem) -> None:
    path = tmp_path / CHECKPOINTS / "step-00000010"
    path.mkdir(parents=True)
    for rank in range(3):
        (path / f"rank-0000{rank}.safetensors").write_bytes(bytes([rank]) * 9)
    (path / MANIFEST_NAME).write_bytes(b"manifest")
    whole: list[str] = []
    ranks = [Uploads(tmp_path, TARGET, rank, 3, lambda kind, name: whole.append(name)) for rank in (0, 2)]
    for uploads in ranks:
        uploads.add(CHECKPOINTS, path)
    deadline = time.monotonic() + 20
    while len(held(store)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    for uploads in ranks:
        uploads.finish(print)
    assert [Path(name).name for name in held(store)] == [
        "rank-00000.safetensors",
        "rank-00002.safetensors",
    ] and not whole
    late = Uploads(tmp_path, TARGET, 1, 3, lambda kind, name: None)
    late.finish(print)
    late.close()
    ranks[1].close()
    assert ranks[0].close() == [] and len(held(store)) == 4 and whole == ["step-00000010"]


def test_a_hugging_face_folder_gets_its_config_last(
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
    assert upload(tmp_path, folder, kind=HF) == [] and order[-1] == "config.json" and len(order) == 4
    assert len(held(store)) == 4 and remote.find(TARGET) == []


@pytest.mark.parametrize(
    "keep, left",
    [
        (RetentionPolicy(2), {40, 50}),
        (RetentionPolicy(1, 20), {20, 40, 50}),
        (RetentionPolicy(automatic=1), {10, 50}),  # that of step 10 was asked for
    ],
)
def test_old_ones_are_deleted_manifest_first(
    tmp_path: Path, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, keep: RetentionPolicy, left: set[int]
) -> None:
    upload(tmp_path, *saved(tmp_path, 10), *saved(tmp_path, 20, 30, 40, 50, **{AUTOMATIC: True}))
    store.pipe("/b/run/notes.txt", b"of somebody else")
    gone: list[str] = []
    intercept(monkeypatch, "rm_file", lambda name: gone.append(name.rpartition("/")[2]))
    number = keep.automatic if keep.last is None else keep.last
    assert number is not None
    names = remote.remove_old(TARGET, keep.counts, number, keep.every)
    assert {one.step for one in remote.find(TARGET)} == left and len(names) == 5 - len(left)
    assert gone == [MANIFEST_NAME, SHARD] * len(names) and "notes.txt" in held(store)


def test_a_store_that_cannot_be_asked_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    intercept(monkeypatch, "find", _refuse)
    with pytest.raises(CheckpointError, match="memory://b/run: the store denies access .*Check the credentials"):
        fetch_newest(TARGET, tmp_path, SINGLE)
    with pytest.raises(DataError, match="refuses access"):
        remote.find(TARGET)


def test_a_slow_store_does_not_hold_up_what_queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()
    intercept(monkeypatch, "put_file", lambda *_, **__: waits.wait(20))
    uploads = Uploads(tmp_path, TARGET, 0, 1, lambda kind, name: None)
    said: list[str] = []
    monkeypatch.setattr("megatron.checkpoint.uploading._SAID_EVERY_S", 0.05)
    for path in saved(tmp_path, 10, 20):
        uploads.add(CHECKPOINTS, path)
    assert remote.find(TARGET) == []

    def say(text: str) -> None:
        said.append(text)
        waits.set()

    uploads.finish(say)
    assert "files," in said[0] and "MB remain on this rank" in said[0]
    assert uploads.close() == [] and len(remote.find(TARGET)) == 2


@needs_moto
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_s3_gives_back_what_it_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto's server stands in for S3."""
    first, second = saved(tmp_path, 10, 20)
    with s3(monkeypatch) as files:
        target = "s3://bucket/run"
        assert remote.find(target) == []
        assert upload(tmp_path, first, second, target=target) == []
        assert [one.step for one in remote.find(target)] == [20, 10]
        assert contents(fetch_newest(target, tmp_path / "new", SINGLE)) == contents(second)
        files.rm_file(f"bucket/run/checkpoints/{second.name}/{SHARD}")
        assert [one.step for one in remote.find(target)] == [10]
        assert remote.remove_old(target, lambda one: True, 0, None) == [first.name] and remote.find(target) == []
        with pytest.raises(CheckpointError, match="no complete checkpoint found in s3://none/run"):
            fetch_newest("s3://none/run", tmp_path, SINGLE)
        assert upload(tmp_path, first, target="s3://none/run") == [f"checkpoints/{first.name}"]
