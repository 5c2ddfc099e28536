"""Token file statistics (counts, lengths, token ids) as tables and as a plot."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table
from rich.text import Text

from megatron import files
from megatron.data.dataset_metadata import DatasetMetadata
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.inspect.view import TokenFormatter
from megatron.errors import DataError
from megatron.tokenizer.identity import is_same

if TYPE_CHECKING:
    from megatron.data.indexed_dataset import IndexedDataset
    from megatron.tokenizer import Tokenizer

# Document length distribution: each occurring length with its document count.
#
# Documents are counted in blocks, so that memory use depends on the distinct lengths, not on the document count.

_BLOCK = 1 << 22


@dataclass(frozen=True)
class Lengths:
    """Ascending document lengths ``values`` and document counts per length, both int64."""

    values: np.ndarray
    counts: np.ndarray

    @classmethod
    def from_lengths(cls, lengths: np.ndarray) -> Lengths:
        """Count the lengths in ``lengths``, any sliceable array, such as an unaligned view of a mapped file."""
        values, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for start in range(0, len(lengths), _BLOCK):
            unique = np.unique(np.array(lengths[start : start + _BLOCK]), return_counts=True)
            values, counts = _merge_counts(values, counts, unique[0].astype(np.int64), unique[1].astype(np.int64))
        return cls(values, counts)

    @property
    def num_documents(self) -> int:
        return int(self.counts.sum())

    @property
    def num_empty(self) -> int:
        """Number of documents without tokens."""
        return int(self.counts[self.values == 0].sum())

    @property
    def mean(self) -> float:
        """Mean tokens per document; NaN without documents."""
        return float(self.values @ self.counts) / self.num_documents if self.num_documents else math.nan

    def quantile(self, share: float) -> int:
        """Find the smallest length n such that at least ``share`` of the documents have at most n tokens.

        A share of 0 gives the shortest length.

        Raises:
            ValueError: there are no documents.
        """
        if not self.num_documents:
            raise ValueError("quantiles need at least one document, got none")
        cumulative = np.cumsum(self.counts)
        needed = max(math.ceil(share * self.num_documents), 1)
        return int(self.values[np.searchsorted(cumulative, needed, "left")])

    def histogram(self, bounds: np.ndarray) -> np.ndarray:
        """Count, for each i, the documents with bounds[i] <= length < bounds[i + 1]."""
        cumulative = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])
        return np.diff(cumulative[np.searchsorted(self.values, bounds, "left")])


def _merge_counts(
    values: np.ndarray, counts: np.ndarray, more_values: np.ndarray, more_counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    merged_values, positions = np.unique(np.concatenate([values, more_values]), return_inverse=True)
    totals = np.zeros(len(merged_values), np.int64)
    np.add.at(totals, positions, np.concatenate([counts, more_counts]))
    return merged_values, totals


# Document length plot for one or several corpora.

_BINS_PER_DECADE = 10


def bin_bounds(longest: int) -> np.ndarray:
    """Compute ascending integer bounds for logarithmically spaced bins from 1 to a value above ``longest``."""
    decades = np.log10(max(longest, 1) + 1)
    exponents = np.linspace(0, decades, max(int(np.ceil(decades * _BINS_PER_DECADE)), 1) + 1)
    return np.unique(np.ceil(10**exponents).astype(np.int64))


def plot_lengths(corpora: Mapping[str, Lengths], path: Path) -> None:
    """Write a PNG with one histogram per corpus; empty documents are only counted in the legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    edges = bin_bounds(max((int(lengths.values.max(initial=1)) for lengths in corpora.values()), default=1))
    for name, lengths in corpora.items():
        axes.stairs(lengths.histogram(edges), edges, label=_legend(name, lengths), fill=len(corpora) == 1, alpha=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("tokens per document")
    axes.set_ylabel("documents")
    axes.legend(loc="upper right", fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace_bytes(path, buffer.getvalue())


def _legend(name: str, lengths: Lengths) -> str:
    if not lengths.num_documents:
        return f"{name}: no documents"
    empty = f", {lengths.num_empty} empty" if lengths.num_empty else ""
    return f"{name}: {lengths.num_documents} documents, median {lengths.quantile(0.5)}{empty}"


# Token ids, in one pass over the file.

_MAX_IDS = 1 << 24


def find_largest_id(token_file: IndexedDataset) -> int:
    """Find the largest token id in the file; -1 without tokens."""
    return max((int(block.max()) for block in _read_blocks(token_file)), default=-1)


def count_ids(token_file: IndexedDataset) -> np.ndarray:
    """Count the occurrences of each id, int64[largest id + 1].

    Raises:
        DataError: an id is below 0 or too large for any vocabulary (2^24 or more).
    """
    totals = np.zeros(0, np.int64)
    for block in _read_blocks(token_file):
        lowest, highest = int(block.min()), int(block.max())
        if lowest < 0 or highest >= _MAX_IDS:
            raise DataError(
                f"{token_file.token_path}: token ids must be in 0 ... {_MAX_IDS - 1} to be counted, got {lowest} ... "
                f"{highest}. The file is damaged, or its token type differs from its .idx. Build it again."
            )
        block_counts = np.bincount(block.astype(np.int64))
        totals = np.pad(totals, (0, max(len(block_counts) - len(totals), 0)))
        totals[: len(block_counts)] += block_counts
    return totals


def _read_blocks(token_file: IndexedDataset) -> Iterator[np.ndarray]:
    with open(token_file.token_path, "rb") as file:
        while len(block := np.fromfile(file, token_file.dtype, _BLOCK)):
            yield block


# Statistics for a pair of token files: counts, lengths, document ends, ids, vocabulary.

MAX_EXAMINED_ENDS = 10_000


@dataclass(frozen=True, kw_only=True)
class TokenFileStats:
    """Statistics for a pair of token files.

    Args:
        eod_id: the end-of-document token; None if unknown.
        eod_share: share of the examined nonempty documents that end with ``eod_id``; None without an id or documents.
        num_examined_ends: evenly spaced documents examined for ``eod_share``.
        max_token_id: largest token id; -1 without tokens.
        sidecar: content of ``PREFIX.meta.json``; None if the file does not exist.
    """

    prefix: str
    dtype: str
    num_documents: int
    num_tokens: int
    bin_bytes: int
    lengths: Lengths
    eod_id: int | None
    eod_share: float | None
    num_examined_ends: int
    max_token_id: int
    sidecar: DatasetMetadata | None


def collect_stats(token_file: IndexedDataset, eod_id: int | None = None) -> TokenFileStats:
    """Collect the statistics for a pair; without a sidecar, all tokens are read to find the largest id.

    Args:
        eod_id: the tokenizer's end-of-document token, used if the sidecar does not name one.
    """
    sidecar = token_file.sidecar
    if sidecar is not None and sidecar.eod_id is not None:
        eod_id = sidecar.eod_id
    eod_share, num_examined = (None, 0) if eod_id is None else _measure_eod_share(token_file, eod_id)
    max_token_id = token_file.max_token_id
    return TokenFileStats(
        prefix=token_file.prefix,
        dtype=token_file.dtype.name,
        num_documents=token_file.num_documents,
        num_tokens=token_file.num_tokens,
        bin_bytes=token_file.num_tokens * token_file.dtype.itemsize,
        lengths=Lengths.from_lengths(token_file.document_lengths),
        eod_id=eod_id,
        eod_share=eod_share,
        num_examined_ends=num_examined,
        max_token_id=find_largest_id(token_file) if max_token_id is None else max_token_id,
        sidecar=sidecar,
    )


def _measure_eod_share(token_file: IndexedDataset, eod_id: int) -> tuple[float | None, int]:
    """Measure (share of documents that end with ``eod_id``, documents examined).

    The documents are evenly spaced over the file; empty documents are skipped.
    """
    count = min(token_file.num_documents, MAX_EXAMINED_ENDS)
    documents = np.linspace(0, token_file.num_documents - 1, count).astype(np.int64)
    lengths = [int(token_file.document_lengths[document]) for document in documents]
    has_eod = [
        int(token_file.read(int(document), length - 1, 1)[0]) == eod_id
        for document, length in zip(documents, lengths, strict=True)
        if length
    ]
    return (sum(has_eod) / len(has_eod) if has_eod else None), len(has_eod)


# Statistics tables.

_IDENTITY_CHARS = 16


def stats_table(stats: TokenFileStats, tokenizer: Tokenizer | None) -> Table:
    """Build a table with a pair's statistics."""
    rows = Table(title=Text(stats.prefix), title_justify="left", show_header=False)
    rows.add_column("name", no_wrap=True)
    rows.add_column("value", overflow="fold")
    for name, value in statistics_rows(stats, tokenizer):
        rows.add_row(name, Text(value))
    return rows


def statistics_rows(stats: TokenFileStats, tokenizer: Tokenizer | None) -> Iterator[tuple[str, str]]:
    """Yield (name, value) for each table row."""
    lengths = stats.lengths
    yield "documents", f"{stats.num_documents:,}"
    yield "tokens", f"{stats.num_tokens:,} as {stats.dtype}, {stats.bin_bytes:,} bytes"
    if lengths.num_documents:
        quantiles = [lengths.quantile(share) for share in (0.0, 0.5, 0.99, 1.0)]
        names = ("shortest", "median", "99 % up to", "longest")
        cells = [f"{name} {value:,}" for name, value in zip(names, quantiles, strict=True)]
        yield "tokens per document", ", ".join([*cells[:2], f"mean {lengths.mean:,.1f}", *cells[2:]])
        yield "empty documents", f"{lengths.num_empty:,}"
    yield "end of document", _describe_ends(stats)
    yield "largest id", str(stats.max_token_id) if stats.num_tokens else "none, there are no tokens"
    yield "vocabulary", _describe_vocabulary(stats, tokenizer)


def _describe_ends(stats: TokenFileStats) -> str:
    if stats.eod_id is None:
        return "unknown: neither a .meta.json nor a tokenizer names the token"
    if stats.eod_share is None:
        return f"id {stats.eod_id}; there is no document to examine"
    return f"{stats.eod_share:.1%} of {stats.num_examined_ends:,} examined documents end with id {stats.eod_id}"


def _describe_vocabulary(stats: TokenFileStats, tokenizer: Tokenizer | None) -> str:
    sidecar = stats.sidecar
    if sidecar is None:
        text = "unknown, there is no .meta.json"
    elif not sidecar.tokenizer:
        text = f"{sidecar.vocab_size:,} ids, of an unnamed tokenizer"
    else:
        text = f"{sidecar.vocab_size:,} ids, identity {sidecar.tokenizer[:_IDENTITY_CHARS]}"
    if tokenizer is None:
        return text
    if sidecar is None or not sidecar.tokenizer:
        verdict = "covers all ids" if stats.max_token_id < tokenizer.vocab_size else "is too small for these ids"
        return f"{text}; the given tokenizer has {tokenizer.vocab_size:,} and {verdict}"
    is_same_tokenizer = is_same(sidecar.tokenizer, tokenizer.identity)
    return f"{text}; {'the given tokenizer is the same' if is_same_tokenizer else 'the given tokenizer is DIFFERENT'}"


def most_frequent_table(token_file: IndexedDataset, count: int, tokenizer: Tokenizer | None) -> Table:
    """Build a table with the ``count`` most frequent ids and their shares; reads all tokens."""
    totals = count_ids(token_file)
    formatter = None if tokenizer is None else TokenFormatter(tokenizer)
    rows = Table(title="most frequent tokens", title_justify="left")
    for name in ("id", "tokens", "share", "text"):
        rows.add_column(name, justify="left" if name == "text" else "right", overflow="fold")
    for token in np.argsort(-totals, kind="stable")[:count]:
        if totals[token]:
            share = f"{totals[token] / token_file.num_tokens:.2%}"
            rows.add_row(
                str(token), f"{totals[token]:,}", share, Text(formatter.format_cell(int(token)) if formatter else "")
            )
    return rows
