"""Whether the disk has room, before and after it turns out that it has none."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron import files
from megatron.data.preprocess.counts import Counts
from megatron.data.preprocess.records import Unit
from megatron.errors import DataError
from megatron.log import human_bytes

_BYTES_PER_TOKEN_AT_MOST = 8
"""Bytes of text that a token stands for; few tokenizers reach it, so less room than that is never enough."""

_IDX_BYTES_PER_DOCUMENT, _LEN_BYTES_PER_DOCUMENT = 20, 4

_megabytes = partial(human_bytes, units=("MB", "GB"), digits=1)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, a used up quota, a limit on the size of files."""


def check_for_units(folder: Path, units: Sequence[Unit], itemsize: int) -> None:
    """Check that there may be room for the tokens of ``units``, twice: as parts and in the ``.bin`` made of them.

    Raises:
        DataError: there is not, whatever the tokenizer.
    """
    text = sum(unit.size for unit in units)
    _check(folder, 2 * itemsize * text // _BYTES_PER_TOKEN_AT_MOST, f"{text / 1e9:.2f} GB of input need at least")


def check_for_output(folder: Path, counts: Counts, itemsize: int) -> None:
    """Check that there is room for the output that is made of all parts.

    Raises:
        DataError: there is not.
    """
    _check(folder, output_bytes(counts, itemsize), "the output made of the finished parts needs")


def output_bytes(counts: Counts, itemsize: int) -> int:
    """Return the size of ``.bin`` and ``.idx``, and of what is written on the way to them."""
    per_document = _IDX_BYTES_PER_DOCUMENT + _LEN_BYTES_PER_DOCUMENT
    return itemsize * counts.num_tokens + per_document * counts.num_documents


def in_words(error: OSError, folder: Path, counts: Counts, total_bytes: int, itemsize: int) -> str:
    """Return what a full disk means for the job: what is free, about how much more is needed, and what to do.

    Args:
        counts: what was encoded before the disk was full.
        total_bytes: of the whole input.
    """
    if error.errno == errno.EFBIG:
        return f"a file of the output in {folder} is {files.told_too_large()} ({error})"
    text = f"there is no room for the output in {folder} ({error}): {_megabytes(files.free_bytes(folder))} are free"
    if counts.num_tokens and total_bytes >= counts.num_bytes:
        whole = output_bytes(counts, itemsize) * total_bytes / counts.num_bytes
        done = (itemsize * counts.num_tokens) + _LEN_BYTES_PER_DOCUMENT * counts.num_documents
        text += f", about {_megabytes(2 * whole - done)} are needed beyond the finished parts"
    return f"{text}. Make room"


def _check(folder: Path, needed: int, what: str) -> None:
    free = files.free_bytes(folder)
    if free < needed:
        raise DataError(
            f"{what} {_megabytes(needed)} in {folder}, {_megabytes(free)} are free. Make room, or give another "
            "--output-prefix."
        )
