"""Text corpora in --data-path: one background process encodes a corpus into token files, which all ranks share.

The token files are in a cache folder whose name depends on the input files, the tokenizer and the encoding options:

| path in the cache folder | content |
|---|---|
| ``tokens.bin``, ``.idx``, ``.meta.json`` | the finished token files |
| ``tokens.parts`` | finished units of an unfinished job; see ``preprocess/shards.py`` |
| ``encoder.lock`` | locked by the encoding process |
| ``error.json`` | the last failure: its message, and an id that differs for every failure |

If error.json cannot be written, because the disk is full, the encoder sends the message to the process that started it.

Any rank on any host may start the encoder; the lock ensures that one of them runs. If the encoder is killed, another
process starts a new one, which continues with the finished units.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron import log, object_store
from megatron.data import file_io
from megatron.data.cache import IndexCache
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.preprocess.corpus import find_inputs
from megatron.data.preprocess.plan import read_plan
from megatron.data.preprocess.shards import shard_folder_path
from megatron.errors import DataError
from megatron.file_lock import FileLock

SUFFIXES = (".bin", ".idx", ".meta.json")
_FORMAT = 1
_POLL_S = 0.1
_REPORT_INTERVAL_S = 30.0
_MAX_KILLED = 3
"""Number of killed encoders after which this process raises an error."""
_LARGE_BYTES = 4 << 30
_MAX_NAME_CHARS = 48
"""Characters of the corpus's name in the cache folder's name, which has at most 255 bytes."""
_MAX_SAMPLED_FILES, _SAMPLES_PER_FILE, _SAMPLE_BYTES = 64, 16, 1 << 16


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """How text corpora of a run are encoded.

    Args:
        cache_folder: folder of the token files; hosts with a shared folder encode a corpus once.
        tokenizer: arguments of ``megatron.tokenizer.build``; None if the run has no tokenizer.
        identity: the tokenizer's identity.
        json_keys: keys of the text in JSON lines and tables.
        max_bad_lines: bad records that are skipped before the corpus is rejected.
        num_workers: encoding processes.
    """

    cache_folder: Path
    tokenizer: Mapping[str, Any] | None
    identity: str = ""
    json_keys: tuple[str, ...] = ("text",)
    max_bad_lines: int = 0
    num_workers: int = 1


@dataclass(frozen=True, kw_only=True)
class EncoderArguments:
    """Arguments of the encoding process, passed as JSON.

    Args:
        failure_descriptor: pipe for the message of a failure that cannot be written to error.json, as on a full disk.
    """

    path: str
    prefix: str
    tokenizer: Mapping[str, Any]
    source: str
    json_keys: Sequence[str]
    max_bad_lines: int
    num_workers: int
    failure_descriptor: int
    parent_pid: int = field(default_factory=os.getpid)


def source_digest(root: str, paths: Sequence[Path | str], json_keys: Sequence[str]) -> str:
    """Digest the text of a corpus: names, sizes and evenly spaced samples of the files, and the keys.

    The digest is part of fingerprints in checkpoints, so its format must never change. It does not depend on the
    location of the corpus or on modification times.
    """
    digest = hashlib.sha256(json.dumps([_FORMAT, *json_keys]).encode())
    step = -(-len(paths) // _MAX_SAMPLED_FILES)
    for idx, path in enumerate(paths):
        name, size = os.path.relpath(str(path), root), object_store.status(path).size
        digest.update(json.dumps([name if len(paths) > 1 else "", size]).encode())
        if idx % step:
            continue
        with object_store.open_file(path) as file:
            last = max(size - _SAMPLE_BYTES, 0)
            for start in sorted({last * sample // (_SAMPLES_PER_FILE - 1) for sample in range(_SAMPLES_PER_FILE)}):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


class TextCorpus:
    """A text corpus and its token files in the cache.

    Attributes:
        source: digest of the text; see ``source_digest``.
        prefix: path of the token files without a suffix; they may not exist yet.

    Args:
        path: file or folder with text, in a format of tools/preprocess_data.py.

    Raises:
        DataError: the run has no tokenizer, or the corpus cannot be read.
    """

    def __init__(self, path: str, settings: TextSettings) -> None:
        if settings.tokenizer is None:
            raise DataError(
                f"--data-path {path} is text, which needs a tokenizer, got none. Set --tokenizer-path (TOKENIZER in "
                "the run scripts); tools/train_tokenizer.py trains one."
            )
        self.path, self.settings = path, settings
        try:
            inputs = find_inputs([path])
            self.source = source_digest(path, inputs, settings.json_keys)
            files = [(os.path.abspath(str(name)), *object_store.status(name)) for name in inputs]
        except OSError as error:
            raise DataError(
                f"--data-path {path} cannot be read: {error}. Correct the path or its permissions."
            ) from error
        except DataError as error:
            raise DataError(str(error).replace("--input", "--data-path")) from error
        self.num_bytes = sum(size for _, size, _ in files)
        values = [_FORMAT, self.source, files, settings.identity.split(".")[0], settings.tokenizer["eod_token"]]
        key = hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
        name = Path(path).name.split(".")[0][:_MAX_NAME_CHARS]
        self.folder = settings.cache_folder / f"{name}-{key}"
        self.prefix = str(self.folder / "tokens")
        self._process: subprocess.Popen[bytes] | None = None
        self._failure_pipe = -1
        self._num_killed = 0
        self._error_before = self._read_error()

    @cached_property
    def shard_folder(self) -> Path:
        """Folder with the finished units of an unfinished job."""
        return shard_folder_path(self.prefix)

    def is_finished(self) -> bool:
        """Return True if the token files are complete."""
        return not file_io.is_pending(self.prefix) and all(os.path.exists(self.prefix + suffix) for suffix in SUFFIXES)

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Wait for ``is_ready``, and make sure that a process encodes the corpus meanwhile.

        Raises:
            DataError: the encoding failed; the same message on every rank that waits.
        """
        reported_s = time.monotonic() - _REPORT_INTERVAL_S + 1.0
        while not is_ready():
            self._check_failure()
            self._start_if_unlocked()
            if self._process is None and time.monotonic() - reported_s >= _REPORT_INTERVAL_S:
                log.info(f"{self.path}: waiting for the process that encodes it{self._describe_progress()}")
                reported_s = time.monotonic()
            time.sleep(_POLL_S)

    def open(self, reader: str, cache: IndexCache) -> IndexedDataset:
        """Wait until the corpus is encoded, and open its token files."""
        self.wait_until(self.is_finished)
        return IndexedDataset(self.prefix, reader=reader, cache=cache)

    def _start_if_unlocked(self) -> None:
        """Start the encoder unless it runs, here or in another process."""
        if self._process is not None and self._process.poll() is None:
            return
        try:
            lock = FileLock(
                self.folder / "encoder.lock",
                "flock",
                wait_s=lambda _: 0.0,
                describe=lambda _: "",
                error=BlockingIOError,
                without_lock=lambda *_: os.environ.get("RANK", "0") == "0",
            )
        except BlockingIOError:
            return
        except OSError as error:
            raise DataError(
                f"{self.folder}, the folder for the token files of {self.path}, cannot be written: {error}. Set "
                "--data-cache-path to a folder with enough space."
            ) from error
        try:
            if not self.is_finished():
                self._process = self._start(lock.descriptor)
        finally:
            lock.release(removes_file=False)  # the encoder has inherited the lock

    def _start(self, lock_descriptor: int) -> subprocess.Popen[bytes]:
        settings = self.settings
        assert settings.tokenizer is not None, "checked in __init__"
        log.info(f"{self.path}: encoding {self.num_bytes / 1e6:,.1f} MB of text into {self.folder}")
        if self.num_bytes >= _LARGE_BYTES:
            log.info(
                "hint: to encode a large corpus before training, on one or several machines, run python "
                f"tools/preprocess_data.py --input {self.path} --tokenizer-path TOKENIZER --output-prefix data/corpus, "
                "and train with --data-path data/corpus (docs/large_corpora.md)"
            )
        self._failure_pipe, failure_descriptor = os.pipe()
        arguments = EncoderArguments(
            path=self.path,
            prefix=self.prefix,
            tokenizer=settings.tokenizer,
            source=self.source,
            json_keys=settings.json_keys,
            max_bad_lines=settings.max_bad_lines,
            num_workers=settings.num_workers,
            failure_descriptor=failure_descriptor,
        )
        root = str(Path(__file__).resolve().parents[2])
        python_path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        try:
            return subprocess.Popen(
                [sys.executable, "-m", "megatron.data.text_encoder", json.dumps(asdict(arguments))],
                env={**os.environ, "PYTHONPATH": python_path},
                stdin=subprocess.DEVNULL,
                pass_fds=(lock_descriptor, failure_descriptor),
            )
        finally:
            os.close(failure_descriptor)

    def _check_failure(self) -> None:
        """Raise DataError if an encoder has failed since this object was created."""
        code = None if self._process is None else self._process.poll()
        error = self._read_error()
        if error is not None and error != self._error_before:
            raise DataError(str(error.get("message")))
        if code is None:
            return
        self._process, message = None, self._read_failure_pipe()
        if message:
            raise DataError(message)
        self._num_killed += code != 0
        if self._num_killed >= _MAX_KILLED:
            reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            raise DataError(
                f"the process that encodes {self.path} {reason}, for the {self._num_killed}rd time (out of "
                "memory? Check dmesg). Encode it before training with tools/preprocess_data.py and fewer --workers."
            )

    def _read_error(self) -> dict[str, Any] | None:
        with suppress(OSError, ValueError):
            return dict(json.loads((self.folder / "error.json").read_bytes()))
        return None

    def _read_failure_pipe(self) -> str:
        """Read the failure of the process that has ended, if it could not write error.json; "" otherwise."""
        if self._failure_pipe < 0:
            return ""
        os.set_blocking(self._failure_pipe, False)  # a worker of a killed process may still hold the other end
        with open(self._failure_pipe, "rb") as pipe:
            self._failure_pipe = -1
            return (pipe.read() or b"").decode("utf-8", "replace")

    def _describe_progress(self) -> str:
        """Describe the number of finished units, if known."""
        plan = read_plan(self.shard_folder)
        if plan is None or not plan.num_units:
            return ""
        with suppress(OSError):
            num_finished = sum(name.endswith(".json") for name in os.listdir(self.shard_folder)) - 1
            return f": {num_finished} of {plan.num_units} units are finished"
        return ""
