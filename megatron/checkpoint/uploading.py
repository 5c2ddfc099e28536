"""Upload a run folder's checkpoints and exports to an object store, in the background, by all ranks.

Folders to upload are queued in the run folder as hard links to their files. The links survive a kill and the deletion
of old checkpoints.

| name in ``.uploads/<store>/`` | state |
|---|---|
| ``.linking-...`` | links are being created |
| ``.new-checkpoints+step-00000020`` | queued; rank 0 must first delete an older marker of this folder in the store |
| ``checkpoints+step-00000020`` | being uploaded: each rank uploads its files and deletes their links here |

The marker (``manifest.json``, or ``config.json`` of a Hugging Face folder) shows that an upload is complete. Rank 0
uploads it after all other files are in the store. The next start resumes unfinished uploads.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Condition, Lock, Thread

from megatron import files, log, object_store
from megatron.checkpoint.manifest import CHECKPOINTS, MANIFEST_NAME
from megatron.errors import DataError

QUEUE = ".uploads"
HF = "hf"
"""Name of the folder of exported Hugging Face folders in a run folder, next to its checkpoints."""
MARKERS = {CHECKPOINTS: MANIFEST_NAME, HF: "config.json"}
"""Folder in the run folder -> name of its marker, the file whose presence in the store completes an upload."""

_LINKING, _NEW = ".linking-", ".new-"
_POLL_S = 0.2
_POLL_DURATION_S = 600.0
"""Ranks other than 0 poll the queue for this many seconds, because they may see rank 0's entries late."""
_PROGRESS_INTERVAL_S = 10.0


class Uploads:
    """One rank's uploads, run in a background thread. An error in the thread never ends the run.

    A failed upload is logged and retried: with the next upload, at the end of the run, and at the next start.

    Args:
        folder: the run folder, which all ranks can access.
        target: the run's address in the store.
        rank, num_ranks: determine which files this rank uploads; rank 0 also uploads the markers.
        on_uploaded: called on rank 0, in the background thread, with (subfolder, name) of each folder whose
            upload is complete.
    """

    def __init__(
        self, folder: Path, target: str, rank: int, num_ranks: int, on_uploaded: Callable[[str, str], None]
    ) -> None:
        self._folder, self._target, self._rank, self._num_ranks = folder, target, rank, num_ranks
        self._queue = folder / QUEUE / hashlib.sha256(target.encode()).hexdigest()[:16]
        self._on_uploaded = on_uploaded
        self._failed: dict[str, str] = {}
        self._lock, self._condition = Lock(), Condition()
        self._num_requested, self._num_completed = (
            1,
            0,
        )  # start with a pass, because an earlier start may have left uploads
        self._poll_deadline = time.monotonic() + _POLL_DURATION_S
        self._is_ending = False
        if rank == 0 and self._queue.is_dir():
            for leftover in self._queue.glob(f"{_LINKING}*"):
                files.remove_tree(leftover)
        self._thread = Thread(target=self._run, name="uploads", daemon=True)  # a failing job must not wait for uploads
        self._thread.start()

    def add(self, subfolder: str, path: Path) -> None:
        """Queue the upload of ``path`` to the run's folder ``subfolder`` in the store.

        All ranks call this; rank 0 adds the folder to the queue.
        """
        if self._rank == 0:
            try:
                self._link(subfolder, path)
            except OSError as error:
                log.error(f"{path}: NOT UPLOADED to {self._target}: {error}. The run continues")
        self._request_pass()

    def publish(self) -> None:
        """Publish the queued uploads to all ranks. Rank 0 calls this before the ranks call ``finish``."""
        with self._lock:
            self._publish_new()

    def finish(self, show: Callable[[str], None]) -> None:
        """Retry failed uploads and wait until they have finished or failed; ``show`` receives progress messages."""
        num_requested = self._request_pass()
        while not self._is_done(num_requested, _PROGRESS_INTERVAL_S):
            file_sizes = [
                file.stat().st_size for folder in self._pending_folders() for file in self._local_files(folder)
            ]
            show(
                f"uploading to {self._target}: {len(file_sizes)} files, {sum(file_sizes) / 1e6:.1f} MB remain on this "
                "rank"
            )

    def _request_pass(self) -> int:
        with self._condition:
            self._failed.clear()
            self._poll_deadline = time.monotonic() + _POLL_DURATION_S
            self._num_requested += 1
            self._condition.notify_all()
            return self._num_requested

    def _is_done(self, num_requested: int, timeout_s: float) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._num_completed >= num_requested, timeout_s)

    def close(self) -> list[str]:
        """Upload the completed folders' markers and end the thread; return the folders that are not in the store.

        Rank 0 calls this after all ranks have finished.
        """
        with self._condition:
            self._is_ending = True
            self._condition.notify_all()
        self._thread.join()
        self._run_pass()
        return [folder.name.replace("+", "/") for folder in self._pending_folders()]

    def _link(self, subfolder: str, path: Path) -> None:
        name = f"{subfolder}+{path.name}"
        temporary = self._queue / f"{_LINKING}{name}"
        for entry in (temporary, self._queue / f"{_NEW}{name}", self._queue / name):
            if entry.exists():  # left from steps that were rolled back
                files.remove_tree(entry)
        files.make_folder(temporary)
        for file in sorted(_files_in(path)):  # an export may have a folder of chat templates
            link = temporary / file.relative_to(path)
            if link.parent != temporary:
                files.make_folder(link.parent)
            try:
                os.link(file, link)
            except OSError:  # the file system does not support links
                shutil.copyfile(file, link)
        os.replace(temporary, self._queue / f"{_NEW}{name}")

    def _run(self) -> None:
        while not self._is_ending:
            with self._condition:
                num_requested = self._num_requested
            self._run_pass()
            with self._condition:
                self._num_completed = num_requested
                self._condition.notify_all()
                if self._num_requested == num_requested and not self._is_ending:
                    self._condition.wait(_POLL_S if self._has_more() else None)

    def _has_more(self) -> bool:
        """Check if the queue should be polled again soon.

        Other ranks may still be uploading, or rank 0 may just have queued a folder.
        """
        is_waiting = any(folder.name not in self._failed for folder in self._pending_folders())
        return is_waiting or (self._rank > 0 and time.monotonic() < self._poll_deadline)

    def _run_pass(self) -> None:
        with self._lock:
            if self._rank == 0:
                self._publish_new()
            for folder in self._pending_folders():
                self._try(folder.name, self._upload_folder, folder)

    def _publish_new(self) -> None:
        for new_folder in self._list_queue(_NEW):
            self._try(new_folder.name, self._publish, new_folder)

    def _try(self, name: str, action: Callable[[Path], None], folder: Path) -> None:
        if name in self._failed:
            return
        try:
            action(folder)
        except FileNotFoundError:  # rank 0 removed the folder to queue a checkpoint of the same name
            return
        except (DataError, OSError) as error:
            self._failed[name] = str(error)
            display_name = name.removeprefix(_NEW).replace("+", "/")
            log.error(
                f"{display_name}: NOT UPLOADED to {self._target}: {error} The run continues; the next save retries the "
                "upload"
            )

    def _publish(self, new_folder: Path) -> None:
        """Delete an older marker of this folder from the store, then rename the folder so that all ranks upload it."""
        subfolder, name = new_folder.name.removeprefix(_NEW).split("+")
        object_store.remove(object_store.join(self._target, subfolder, name, MARKERS[subfolder]))
        os.replace(new_folder, new_folder.with_name(f"{subfolder}+{name}"))

    def _upload_folder(self, folder: Path) -> None:
        """Upload this rank's files; rank 0 uploads the marker after all other files.

        Rank 0 may replace the folder by a checkpoint of the same name at any time. Therefore a link is only removed if
        it still refers to the uploaded file, and the folder is listed again until no files are left.
        """
        subfolder, name = folder.name.split("+")
        target = object_store.join(self._target, subfolder, name)
        while local_files := self._local_files(folder):
            for file in local_files:
                with suppress(FileNotFoundError):
                    identity = _file_identity(file)
                    object_store.upload(file, object_store.join(target, *file.relative_to(folder).parts))
                    if _file_identity(file) == identity:
                        files.remove_file(file)
        marker = folder / MARKERS[subfolder]
        if self._rank or _files_in(folder) not in ([marker], []):
            return
        if marker.exists():
            object_store.upload(marker, object_store.join(target, marker.name))
        files.remove_tree(folder)
        self._on_uploaded(subfolder, name)

    def _local_files(self, folder: Path) -> list[Path]:
        """List the files that this rank uploads.

        Each rank uploads the file that it wrote, provided that the world size has not changed.
        """
        subfolder = folder.name.partition("+")[0]
        if subfolder == HF and self._rank:  # rank 0 wrote all files of an export
            return []
        with suppress(FileNotFoundError):
            return sorted(
                file
                for file in _files_in(folder)
                if file != folder / MARKERS[subfolder]
                and (subfolder == HF or _writer_rank(file.name) % self._num_ranks == self._rank)
            )
        return []

    def _pending_folders(self) -> list[Path]:
        """List the folders that are being uploaded, newest first."""
        return self._list_queue("")

    def _list_queue(self, prefix: str) -> list[Path]:
        paths: Iterator[Path] = self._queue.glob(f"{prefix}*+*") if self._queue.is_dir() else iter(())
        return sorted((path for path in paths if path.name.startswith(prefix or tuple(MARKERS))), reverse=True)


def _files_in(folder: Path) -> list[Path]:
    """List all files below ``folder``.

    Raises:
        FileNotFoundError: the folder has been removed.
    """
    return [file for path in folder.iterdir() for file in (_files_in(path) if path.is_dir() else [path])]


def _file_identity(file: Path) -> tuple[int, int]:
    """Identify a file by inode and modification time, which change if another file replaces it."""
    status = file.stat()
    return status.st_ino, status.st_mtime_ns


def _writer_rank(name: str) -> int:
    match = re.search(r"\d+", name)
    return int(match[0]) if match else 0
