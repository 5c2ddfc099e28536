"""Uploads of a run folder's checkpoints and exports to an object store, in the background, by all ranks.

What is to be uploaded waits in the run folder, as further links to its files, so that neither a removal of old
checkpoints nor a kill takes it away:

| name in ``.uploads/<store>/`` | is |
|---|---|
| ``.linking-...`` | being put together |
| ``.new-checkpoints+step-00000020`` | whole; rank 0 first deletes a marker of the same name in the store |
| ``checkpoints+step-00000020`` | being uploaded: each rank sends its files and deletes their links here |

Only the marker (``manifest.json``, ``config.json`` of a Hugging Face folder) is left when all else is in the store;
rank 0 uploads it then, and with it the checkpoint is whole there. The next start goes on with what is left.
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
"""Folder of Hugging Face folders in a run folder, beside its checkpoints."""
MARKERS = {CHECKPOINTS: MANIFEST_NAME, HF: "config.json"}
"""By the folder in the run folder: the file without which nothing counts as whole."""

_LINKING, _NEW = ".linking-", ".new-"
_POLL_S = 0.2
_LOOKS_S = 600.0
"""For so long another rank than 0 looks for what rank 0 queues, which it may see late."""
_SAID_EVERY_S = 10.0


class Uploads:
    """The uploads of one rank, by a thread of its own; nothing that goes wrong there ends the run.

    A failure is logged, and the upload is tried again with the next one, at the end, and at the next start.

    Args:
        folder: the run folder, which all ranks see.
        target: where it goes in the store.
        rank, num_ranks: who sends what; rank 0 sends the markers too.
        on_whole: called in the thread of rank 0 with (kind, name) of what has become whole in the store.
    """

    def __init__(
        self, folder: Path, target: str, rank: int, num_ranks: int, on_whole: Callable[[str, str], None]
    ) -> None:
        self._folder, self._target, self._rank, self._num_ranks = folder, target, rank, num_ranks
        self._queue = folder / QUEUE / hashlib.sha256(target.encode()).hexdigest()[:16]
        self._on_whole = on_whole
        self._failed: dict[str, str] = {}
        self._lock, self._turn = Lock(), Condition()
        self._asked, self._done = 1, 0  # an earlier start may have left something
        self._looks_until = time.monotonic() + _LOOKS_S
        self._is_ending = False
        if rank == 0 and self._queue.is_dir():
            for left in self._queue.glob(f"{_LINKING}*"):
                files.remove_tree(left)
        self._thread = Thread(target=self._run, name="uploads", daemon=True)  # a job that fails does not wait for it
        self._thread.start()

    def add(self, kind: str, path: Path) -> None:
        """Have the folder ``path`` uploaded as ``kind``/its name. Each rank calls it; rank 0 puts it in the queue."""
        if self._rank == 0:
            try:
                self._link(kind, path)
            except OSError as error:
                log.error(f"{path}: NOT UPLOADED to {self._target}: {error}. The run goes on")
        self._call()

    def begin(self) -> None:
        """On rank 0: let all ranks see what was queued, ahead of their ``finish``."""
        with self._lock:
            self._begin_new()

    def finish(self, show: Callable[[str], None]) -> None:
        """Wait until this rank has sent what it is to send, or has failed at it once more; ``show`` gets how far."""
        asked = self._call()
        while not self._is_done(asked, _SAID_EVERY_S):
            left = [file.stat().st_size for folder in self._waiting() for file in self._own(folder)]
            show(f"uploading to {self._target}: {len(left)} files, {sum(left) / 1e6:.1f} MB are left of this rank")

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
        """Send the markers of what is there in whole, and end the thread; return what is not in the store.

        Rank 0 calls it when all ranks have finished.
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
        for there in (linking, self._queue / f"{_NEW}{name}", self._queue / name):
            if there.exists():  # of steps that were taken back
                files.remove_tree(there)
        files.make_folder(linking)
        for file in sorted(_files_in(path)):  # an export may have a folder of chat templates
            link = linking / file.relative_to(path)
            if link.parent != linking:
                files.make_folder(link.parent)
            try:
                os.link(file, link)
            except OSError:  # a file system without links
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
        """Whether to look again soon: at what others send still, or at what rank 0 may just have queued."""
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
        except FileNotFoundError:  # rank 0 has removed the folder to queue a checkpoint of the same name
            return
        except (DataError, OSError) as error:
            self._failed[name] = str(error)
            shown = name.removeprefix(_NEW).replace("+", "/")
            log.error(f"{shown}: NOT UPLOADED to {self._target}: {error} The run goes on; the next save tries it again")

    def _begin(self, new: Path) -> None:
        """Delete a marker of the same name in the store, and let all ranks send."""
        kind, name = new.name.removeprefix(_NEW).split("+")
        object_store.remove(object_store.join(self._target, kind, name, MARKERS[kind]))
        os.replace(new, new.with_name(f"{kind}+{name}"))

    def _send(self, folder: Path) -> None:
        """Send the files of this rank; on rank 0 the marker, when all else has gone.

        Rank 0 may replace the folder by a checkpoint of the same name at any time. A file is removed only if it is the
        one that was sent, and the files are listed again until none is left.
        """
        kind, name = folder.name.split("+")
        target = object_store.join(self._target, kind, name)
        while own := self._own(folder):
            for file in own:
                with suppress(FileNotFoundError):
                    sent = _identity(file)
                    object_store.upload(file, object_store.join(target, *file.relative_to(folder).parts))
                    if _identity(file) == sent:
                        files.remove_file(file)
        marker = folder / MARKERS[kind]
        if self._rank or _files_in(folder) not in ([marker], []):
            return
        if marker.exists():
            object_store.upload(marker, object_store.join(target, marker.name))
        files.remove_tree(folder)
        self._on_whole(kind, name)

    def _own(self, folder: Path) -> list[Path]:
        """Return what this rank sends: files that one rank wrote go from it, as long as there are as many ranks."""
        kind = folder.name.partition("+")[0]
        if kind == HF and self._rank:  # rank 0 has written all of it
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
        """Return what is being uploaded, the newest first."""
        return self._listed("")

    def _listed(self, opening: str) -> list[Path]:
        found: Iterator[Path] = self._queue.glob(f"{opening}*+*") if self._queue.is_dir() else iter(())
        return sorted((path for path in found if path.name.startswith(opening or tuple(MARKERS))), reverse=True)


def _files_in(folder: Path) -> list[Path]:
    """Return all files below ``folder``.

    Raises:
        FileNotFoundError: the folder has been removed.
    """
    return [file for path in folder.iterdir() for file in (_files_in(path) if path.is_dir() else [path])]


def _identity(file: Path) -> tuple[int, int]:
    """Return inode and modification time, which tell a file from one that has replaced it."""
    status = file.stat()
    return status.st_ino, status.st_mtime_ns


def _writer_of(name: str) -> int:
    number = re.search(r"\d+", name)
    return int(number[0]) if number else 0
