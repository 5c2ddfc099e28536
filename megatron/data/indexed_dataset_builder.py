"""Write a pair of token files; memory use is independent of token and document counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from megatron import files, object_store
from megatron.data import file_io, index_format
from megatron.data.dataset_metadata import DatasetMetadata
from megatron.data.file_io import StreamedFile, read_lengths
from megatron.data.index_writer import index_chunks
from megatron.errors import DataError


def check_prefix(prefix: str) -> None:
    """Check that an output prefix is a local path that ends with a name.

    A prefix such as "data/" would create the hidden file "data/.bin".

    Raises:
        DataError: the prefix has no name, or it names an object store.
    """
    if os.path.basename(prefix) in ("", ".", ".."):
        raise DataError(f"--output-prefix must end with a name for the files, such as data/corpus, got {prefix!r}")
    if object_store.is_remote(prefix):
        raise DataError(
            f"token files must be built on a local disk and then uploaded (--output-prefix of the tools), got {prefix}"
        )


class IndexedDatasetBuilder:
    """Stream documents into ``PREFIX.bin``, ``.idx`` and ``.meta.json``.

    A context manager. The files appear together when the ``with`` block ends without an exception.

    Args:
        vocab_size: exclusive upper bound for token ids; also determines the token type. If None (unknown),
            ``dtype`` is required, no ``.meta.json`` is written, and an existing one is deleted.
        tokenizer: tokenizer identity, stored in the sidecar.
        eod_id: token id that ends every added document; None if documents do not end with such a token.
        dtype: token type in the file; by default it follows from ``vocab_size``.
        source: digest of the text that was encoded, stored in the sidecar.
        probe: the tokenizer's ids of the probe texts, stored in the sidecar.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        vocab_size: int | None,
        tokenizer: str = "",
        eod_id: int | None = None,
        dtype: np.dtype | None = None,
        source: str | None = None,
        probe: Mapping[str, Any] | None = None,
    ) -> None:
        if dtype is None and vocab_size is None:
            raise ValueError("dtype is required if vocab_size is None")
        self.prefix = str(prefix)
        check_prefix(self.prefix)
        self.dtype = np.dtype(dtype) if dtype is not None else index_format.token_type(vocab_size or 0)
        self.num_tokens = self.num_documents = 0
        self._vocab_size, self._tokenizer, self._eod_id = vocab_size, tokenizer, eod_id
        self._source, self._probe = source, probe
        self._max_token_id = -1
        self._paths = [Path(self.prefix + suffix) for suffix in (".bin", ".idx", ".meta.json")]
        self._temporary_paths = [file_io.temporary_path(path) for path in self._paths]
        self._lengths_path = file_io.temporary_path(Path(self.prefix + ".len"))
        self._open_files = ExitStack()

    def __enter__(self) -> IndexedDatasetBuilder:
        self._paths[0].parent.mkdir(parents=True, exist_ok=True)
        file_io.roll_forward(self.prefix)
        file_io.remove_stale(self.prefix)
        try:
            self._tokens_file = self._open_files.enter_context(StreamedFile(self._temporary_paths[0]))
            self._lengths_file = self._open_files.enter_context(StreamedFile(self._lengths_path))
        except BaseException:
            self._close_and_remove()
            raise
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error_type is None:
                self._finish_files()
        finally:
            self._close_and_remove()

    def _close_and_remove(self) -> None:
        with suppress(OSError):  # on a full disk, flushing the buffers on close fails a second time
            self._open_files.close()
        for path in [self._lengths_path, *([] if file_io.is_pending(self.prefix) else self._temporary_paths)]:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def add(self, tokens: np.ndarray, lengths: np.ndarray | None = None) -> None:
        """Append the concatenated documents ``tokens`` with lengths ``lengths`` (None: a single document)."""
        lengths = np.array([len(tokens)], np.int64) if lengths is None else lengths
        if int(lengths.sum(dtype=np.int64)) != len(tokens):
            raise ValueError(f"lengths sum to {lengths.sum()}, but there are {len(tokens)} tokens")
        if not len(tokens):
            return
        self._check_ids(int(tokens.min()), int(tokens.max()))
        self._tokens_file.write(np.ascontiguousarray(tokens, self.dtype).data.cast("B"))
        self.num_tokens += len(tokens)
        self._add_lengths(lengths)

    def append(
        self, path: Path, lengths: Iterable[np.ndarray], *, num_tokens: int, max_token_id: int, crc32: int | None = None
    ) -> None:
        """Append a file with tokens in this builder's token type without inspecting the tokens.

        Args:
            lengths: tokens per document in ``path``, in arrays with any length; empty documents are dropped.
            max_token_id: the largest id in ``path``, for the sidecar.
            crc32: checksum of ``path``. If None, it is computed while copying, at half the speed.

        Raises:
            DataError: the file size or the sum of ``lengths`` does not match ``num_tokens``.
        """
        if num_tokens:
            self._check_ids(0, max_token_id)
        self._tokens_file.append_file(path, num_tokens * self.dtype.itemsize, crc32)
        total = sum(self._add_lengths(block) for block in lengths)
        if total != num_tokens:
            raise DataError(f"{path}: lengths sum to {total}, but it has {num_tokens} tokens. Build it again.")
        self.num_tokens += num_tokens

    def _add_lengths(self, lengths: np.ndarray) -> int:
        nonempty = lengths[lengths > 0].astype("<i4")
        if len(nonempty):
            self._lengths_file.write(nonempty.data.cast("B"))
        self.num_documents += len(nonempty)
        return int(nonempty.sum(dtype=np.int64))

    def _check_ids(self, lowest: int, highest: int) -> None:
        limit = np.iinfo(self.dtype).max + 1 if self._vocab_size is None else self._vocab_size
        if lowest < 0 or highest >= limit:
            raise DataError(f"token ids must be in 0 ... {limit - 1}, got {lowest} ... {highest}")
        self._max_token_id = max(self._max_token_id, highest)

    def _finish_files(self) -> None:
        self._tokens_file.sync()
        self._lengths_file.flush()
        blocks: Callable[[], Iterator[np.ndarray]] = lambda: read_lengths(self._lengths_path)  # noqa: E731
        _, index_crc32 = files.write_chunks(
            self._temporary_paths[1], index_chunks(blocks, self.num_documents, self.dtype)
        )
        written_paths, obsolete_paths = self._paths, self._paths[2:]
        if self._vocab_size is None:
            written_paths = self._paths[:2]
        else:
            obsolete_paths = []
            files.write_bytes(self._temporary_paths[2], self._make_metadata(self._vocab_size, index_crc32).to_json())
        file_io.replace_together(self.prefix, written_paths, obsolete_paths)

    def _make_metadata(self, vocab_size: int, index_crc32: int) -> DatasetMetadata:
        return DatasetMetadata(
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            max_token_id=self._max_token_id,
            vocab_size=vocab_size,
            tokenizer=self._tokenizer,
            eod_id=self._eod_id,
            has_eod=self._eod_id is not None,
            bin_bytes=self._tokens_file.size,
            bin_crc32=self._tokens_file.crc32,
            idx_crc32=index_crc32,
            source=self._source,
            probe=self._probe,
        )
