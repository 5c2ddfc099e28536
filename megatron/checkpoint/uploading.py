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
_LOOKS_S = 600.0
"""Ranks other than 0 poll the queue for this many seconds, because they may see rank 0's entries late."""
_SAID_EVERY_S = 10.0


class Uploads:
    """Uploads of one rank, run in a background thread. An error in the thread never ends the run.

    A failed upload is logged and retried: with the next upload, at the end of the run, and at the next start.

    Args:
        folder: the run folder, which all ranks can access.
        target: address of the run in the store.
        rank, num_ranks: determine which files this rank uploads; rank 0 also uploads the markers.
        on_whole: called on rank 0, in the background thread, with (kind, name) of each folder whose upload is complete.
    """

    def __init__(
        self, folder: Path, target: str, rank: int, num_ranks: int, on_whole: Callable[[str, str], None]
    ) -> None:
        self._folder, self._target, self._rank, self._num_ranks = folder, target, rank, num_ranks
        self._queue = folder / QUEUE / hashlib.sha256(target.encode()).hexdigest()[:16]
        self._on_whole = on_whole
        self._failed: dict[str, str] = {}
        self._lock, self._turn = Lock(), Condition()
        self._asked, self._done = 1, 0  # start with a pass, because an earlier start may have left uploads
        self._looks_until = time.monotonic() + _LOOKS_S
        self._is_ending = False
        if rank == 0 and self._queue.is_dir():
            for leftover in self._queue.glob(f"{_LINKING}*"):
                files.remove_tree(leftover)
        self._thread = Thread(target=self._run, name="uploads", daemon=True)  # a failing job must not wait for it
        self._thread.start()

    def add(self, kind: str, path: Path) -> None:
        """Queue the upload of ``path`` to the folder ``kind`` of the run in the store.

        All ranks call this; rank 0 adds the folder to the queue.
        """
        if self._rank == 0:
            try:
                self._link(kind, path)
            except OSError as error:
                log.error(f"{path}: NOT UPLOADED to {self._target}: {error}. The run continues")
        self._call()

    def begin(self) -> None:
        """Publish the queued uploads to all ranks. Rank 0 calls this before the ranks call ``finish``."""
        with self._lock:
            self._begin_new()

    def finish(self, show: Callable[[str], None]) -> None:
        """Retry failed uploads and wait until they have finished or failed; ``show`` receives progress messages."""
        asked = self._call()
        while not self._is_done(asked, _SAID_EVERY_S):
            sizes = [file.stat().st_size for folder in self._waiting() for file in self._own(folder)]
            show(f"uploading to {self._target}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB remain on this rank")

    def _call(self) -> int:
        with self._turn:
            self._failed.clear()
            self._looks_until = time.monotonic() + _LOOKS_S
            self._asked += 1
            self._turn.notify_all()
            return self._asked

    def _is_done(self, asked: int, timeout_s: float) -> bool:
        with self._turn:
            return self._turn.wait_for(lambda: self._done >= asked, timeout_s)

    def close(self) -> list[str]:
        """Upload the markers of the completed folders and end the thread; return the folders that are not in the store.

        Rank 0 calls this after all ranks have finished.
        """
        with self._turn:
            self._is_ending = True
            self._turn.notify_all()
        self._thread.join()
        self._pass()
        return [folder.name.replace("+", "/") for folder in self._waiting()]

    def _link(self, kind: str, path: Path) -> None:
        name = f"{kind}+{path.name}"
        linking = self._queue / f"{_LINKING}{name}"
        for entry in (linking, self._queue / f"{_NEW}{name}", self._queue / name):
            if entry.exists():  # left from steps that were rolled back
                files.remove_tree(entry)
        files.make_folder(linking)
        for file in sorted(_files_in(path)):  # an export may have a folder of chat templates
            link = linking / file.relative_to(path)
            if link.parent != linking:
                files.make_folder(link.parent)
            try:
                os.link(file, link)
            except OSError:  # the file system does not support links
                shutil.copyfile(file, link)
        os.replace(linking, self._queue / f"{_NEW}{name}")

    def _run(self) -> None:
        while not self._is_ending:
            with self._turn:
                asked = self._asked
            self._pass()
            with self._turn:
                self._done = asked
                self._turn.notify_all()
                if self._asked == asked and not self._is_ending:
                    self._turn.wait(_POLL_S if self._has_more() else None)

    def _has_more(self) -> bool:
        """Return True if the queue should be polled again soon.

        Other ranks may still be uploading, or rank 0 may just have queued a folder.
        """
        is_waiting = any(folder.name not in self._failed for folder in self._waiting())
        return is_waiting or (self._rank > 0 and time.monotonic() < self._looks_until)

    def _pass(self) -> None:
        with self._lock:
            if self._rank == 0:
                self._begin_new()
            for folder in self._waiting():
                self._try(folder.name, self._send, folder)

    def _begin_new(self) -> None:
        for new in self._listed(_NEW):
            self._try(new.name, self._begin, new)

    def _try(self, name: str, do: Callable[[Path], None], folder: Path) -> None:
        if name in self._failed:
            return
        try:
            do(folder)
        except FileNotFoundError:  # rank 0 removed the folder to queue a checkpoint of the same name
            return
        except (DataError, OSError) as error:
            self._failed[name] = str(error)
            shown = name.removeprefix(_NEW).replace("+", "/")
            log.error(
                f"{shown}: NOT UPLOADED to {self._target}: {error} The run continues; the next save retries the upload"
            )

    def _begin(self, new: Path) -> None:
        """Delete an older marker of this folder from the store, then rename the folder so that all ranks upload it."""
        kind, name = new.name.removeprefix(_NEW).split("+")
        object_store.remove(object_store.join(self._target, kind, name, MARKERS[kind]))
        os.replace(new, new.with_name(f"{kind}+{name}"))

    def _send(self, folder: Path) -> None:
        """Upload this rank's files; rank 0 uploads the marker after all other files.

        Rank 0 may replace the folder by a checkpoint of the same name at any time. Therefore a link is only removed if
        it still refers to the uploaded file, and the folder is listed again until no files are left.
        """
        kind, name = folder.name.split("+")
        target = object_store.join(self._target, kind, name)
        while local_files := self._own(folder):
            for file in local_files:
                with suppress(FileNotFoundError):
                    uploaded = _identity(file)
                    object_store.upload(file, object_store.join(target, *file.relative_to(folder).parts))
                    if _identity(file) == uploaded:
                        files.remove_file(file)
        marker = folder / MARKERS[kind]
        if self._rank or _files_in(folder) not in ([marker], []):
            return
        if marker.exists():
            object_store.upload(marker, object_store.join(target, marker.name))
        files.remove_tree(folder)
        self._on_whole(kind, name)

    def _own(self, folder: Path) -> list[Path]:
        """Return the files that this rank uploads.

        Each rank uploads the file that it wrote, provided that the number of ranks has not changed.
        """
        kind = folder.name.partition("+")[0]
        if kind == HF and self._rank:  # rank 0 wrote all files of an export
            return []
        with suppress(FileNotFoundError):
            return sorted(
                file
                for file in _files_in(folder)
                if file != folder / MARKERS[kind]
                and (kind == HF or _writer_of(file.name) % self._num_ranks == self._rank)
            )
        return []

    def _waiting(self) -> list[Path]:
        """Return the folders that are being uploaded, newest first."""
        return self._listed("")

    def _listed(self, opening: str) -> list[Path]:
        paths: Iterator[Path] = self._queue.glob(f"{opening}*+*") if self._queue.is_dir() else iter(())
        return sorted((path for path in paths if path.name.startswith(opening or tuple(MARKERS))), reverse=True)


def _files_in(folder: Path) -> list[Path]:
    """Return all files below ``folder``.

    Raises:
        FileNotFoundError: the folder has been removed.
    """
    return [file for path in folder.iterdir() for file in (_files_in(path) if path.is_dir() else [path])]


def _identity(file: Path) -> tuple[int, int]:
    """Return inode and modification time, which distinguish a file from one that has replaced it."""
    status = file.stat()
    return status.st_ino, status.st_mtime_ns


def _writer_of(name: str) -> int:
    match = re.search(r"\d+", name)
    return int(match[0]) if match else 0
