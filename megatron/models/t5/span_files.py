"""Datasets for CPM's sets of three files, and the builder of T5 datasets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron import log
from megatron.config.data import SET_SUFFIXES, is_set
from megatron.data import dataset_checks
from megatron.data.blend_paths import BlendPaths
from megatron.data.cache import IndexCache
from megatron.data.dataset_builder import OpenCorpus, Three, build_datasets
from megatron.data.documents import Documents, documents_key
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sample_index import Piece, SampleIndex
from megatron.errors import DataError, SampleError
from megatron.models.t5 import data
from megatron.models.t5.data import Pair, T5Dataset, T5Tokens
from megatron.models.t5.spans import Denoiser, has_modes, raw_length

# CPM's sets of three files: texts whose spans were cut out when the files were built.
#
# A set is three pairs of token files; document d has the same index in all three. V is the vocabulary size.
#
# | pair | contents of a document |
# |---|---|
# | PREFIX_context | the remaining text, with the marker V + k in place of span k = 0, 1, ... |
# | PREFIX_target | for each span its marker V + k and its tokens |
# | PREFIX_target_offset | two numbers per span: its start in the target, and its length including the marker |
#
# The tool that built the sets stored 16-bit numbers, so starts above 65,535 wrapped around. Starts are therefore
# computed from the lengths and compared with the stored ones modulo their number of bits.

_DOCUMENTS_LOOKED_AT = 1000


class SpanFiles:
    """The three pairs of token files of a set.

    Args:
        vocab_size: V, the vocabulary size of the tokenizer that the set was built with.
        reader, cache: as in ``IndexedDataset``.

    Raises:
        DataError: a file is missing or damaged, the pairs do not belong together, or V does not match.
    """

    def __init__(self, prefix: str, vocab_size: int, *, reader: str = "mmap", cache: IndexCache | None = None) -> None:
        self.prefix, self.vocab_size = prefix, vocab_size
        self._check_present()
        self.context, self.target, self.offsets = (
            IndexedDataset(prefix + suffix, reader=reader, cache=cache) for suffix in SET_SUFFIXES
        )
        self._check_documents()
        self._check_markers()
        self._check_ids()

    @property
    def fingerprint(self) -> str:
        """Short hash that changes with any of the three files."""
        prints = [file.fingerprint for file in (self.context, self.target, self.offsets)]
        return hashlib.sha256(":".join(prints).encode()).hexdigest()[:16]

    def read(self, document: int, first: int, count: int) -> np.ndarray:
        """Return spans ``first`` ... ``first + count - 1`` of a document, each after its marker.

        Raises:
            DataError: the spans are not at the stored offsets.
        """
        stored, lengths = self.offsets.read(document).astype(np.int64).reshape(-1, 2).T
        starts = np.cumsum(lengths) - lengths
        bits = 8 * self.offsets.dtype.itemsize
        if not first + count <= len(lengths) or ((starts - stored) % (1 << bits)).any():
            raise self._damaged(document, f"its {len(lengths)} spans are not contiguous")
        start, stop = int(starts[first]), int(starts[first + count - 1] + lengths[first + count - 1])
        if stop > self.target.sizes[document]:
            raise self._damaged(
                document, f"its target has {self.target.sizes[document]} tokens, but its spans need {stop}"
            )
        tokens = self.target.read(document, start, stop - start).astype(np.int64)
        markers = np.flatnonzero(tokens >= self.vocab_size)
        expected = starts[first : first + count] - start
        if (
            not np.array_equal(markers, expected)
            or (tokens[markers] - self.vocab_size != first + np.arange(count)).any()
        ):
            raise self._damaged(document, f"spans {first} ... {first + count - 1} do not all start with their markers")
        return tokens

    def _damaged(self, document: int, what: str) -> DataError:
        return DataError(
            f"{self.prefix}: document {document} of the set in three files is invalid: {what}. The files are damaged "
            "or belong to different sets. Build all three again."
        )

    def _check_present(self) -> None:
        missing = [
            path
            for suffix in SET_SUFFIXES
            for path in (Path(self.prefix + suffix + ".idx"), Path(self.prefix + suffix + ".bin"))
            if not path.is_file()
        ]
        if missing:
            raise DataError(
                f"{missing[0]} does not exist; a set in three files is {', '.join(SET_SUFFIXES)}, each .bin and .idx. "
                f"Copy the missing files, or use ordinary token files {self.prefix}.bin and .idx."
            )

    def _check_documents(self) -> None:
        counts = [file.num_documents for file in (self.context, self.target, self.offsets)]
        if len(set(counts)) > 1:
            raise DataError(
                f"{self.prefix}: the three files of a set must have the same number of documents, got "
                f"{', '.join(f'{count} in {suffix}' for count, suffix in zip(counts, SET_SUFFIXES, strict=True))}. "
                "They belong to different sets, or one of them is truncated. Build all three again."
            )
        odd_documents = np.flatnonzero(self.offsets.sizes % 2)
        if len(odd_documents):
            raise self._damaged(
                int(odd_documents[0]), f"its {self.offsets.sizes[odd_documents[0]]} offsets do not form pairs"
            )

    def _check_markers(self) -> None:
        """Check that the first span's marker is V; with another vocabulary, markers would be read as text."""
        for document in np.flatnonzero(self.offsets.sizes)[:_DOCUMENTS_LOOKED_AT]:
            markers = self.target.read(int(document))[:1].tolist()
            if markers != [self.vocab_size]:
                raise DataError(
                    f"{self.prefix}: targets must start with the marker {self.vocab_size}, the size of the vocabulary, "
                    f"got {markers} in document {document}. Use the tokenizer that the set was built with."
                )

    def _check_ids(self) -> None:
        max_spans = int(self.offsets.sizes.max(initial=0)) // 2
        limit = self.vocab_size + max_spans
        for file in (self.context, self.target):
            if limit - 1 > np.iinfo(file.dtype).max:
                document = int(np.argmax(self.offsets.sizes))
                raise self._damaged(document, f"{file.dtype} cannot represent the markers of {max_spans} spans")
            first_invalid = file.first_outside(limit)
            if first_invalid is not None:
                document, offset, token = first_invalid
                name = Path(file.token_path).name
                raise self._damaged(document, f"token {offset} of {name} is {token}, which is above all markers")


# T5 samples from a set of three files. Spans are fixed; sentinels restart in each sample.

_SAMPLES_LOOKED_AT = 256


class SpanFilesDataset:
    """T5 samples from a set of three files; sample i is the dictionary that ``data.sample`` returns.

    Any i >= 0 is valid; its epoch is i // samples_per_epoch. Inputs are ``enc_seq_length`` - 1 tokens of the contexts
    and the end token. Targets are padded or truncated to ``dec_seq_length``. Truncations in the first samples are
    logged.

    Args:
        documents, seed, reset_attention_mask, cache: as in ``T5Dataset``.

    Raises:
        DataError: there are fewer tokens than in one sample, or one of the first samples has more spans than there are
            sentinels.
    """

    def __init__(
        self,
        files: SpanFiles,
        *,
        documents: Documents,
        enc_seq_length: int,
        dec_seq_length: int,
        tokens: T5Tokens,
        seed: int,
        reset_attention_mask: bool = False,
        cache: IndexCache | None = None,
    ) -> None:
        self.files, self.documents, self.seed, self.tokens = files, documents, seed, tokens
        self.enc_seq_length, self.dec_seq_length = enc_seq_length, dec_seq_length
        self.reset_attention_mask = reset_attention_mask
        self._windows = SampleIndex(
            files.context,
            documents=documents,
            length=enc_seq_length - 1,
            overlap=0,
            seed=seed,
            asked_by=f"--enc-seq-length {enc_seq_length}",
            cache=cache,
        )
        self.num_tokens, self.samples_per_epoch = self._windows.num_tokens, self._windows.per_epoch
        self._sentinels = np.array(tokens.sentinels, np.int64)
        self._look_ahead()

    @cached_property
    def fingerprint(self) -> str:
        """Short hash that changes with anything that affects samples or their order."""
        lengths = (self.enc_seq_length, self.dec_seq_length)
        documents = self.documents if isinstance(self.documents, tuple) else documents_key(self.documents)
        identity = ("span files", self.files.fingerprint, documents, *lengths, self.tokens, self.seed)
        return hashlib.sha256(repr((*identity, self.reset_attention_mask)).encode()).hexdigest()[:16]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample ``index``.

        Raises:
            SampleError: the sample cannot be read.
            DataError: the sample has more spans than there are sentinels.
        """
        return data.sample(self._pair(index), self.tokens, self.enc_seq_length, self.dec_seq_length)

    def _pair(self, index: int) -> Pair:
        pieces = self._windows.pieces(index)
        text = self._windows.read(index, pieces)
        is_marker = text >= self.files.vocab_size
        targets = self._targets(index, text, pieces)
        is_target_marker = targets >= self.files.vocab_size
        document_indices = np.arange(len(pieces)) if self.reset_attention_mask else np.zeros(len(pieces), np.int64)
        documents = np.repeat(document_indices, [piece.length for piece in pieces])
        span_documents = documents[is_marker]
        idx_in_document = np.arange(len(span_documents)) - np.searchsorted(span_documents, span_documents)
        self.tokens.require_sentinels(
            int(idx_in_document.max(initial=-1)) + 1, f"sample {index} of {self.files.prefix}"
        )
        text[is_marker] = targets[is_target_marker] = self._sentinels[idx_in_document]
        return Pair(text, targets, documents, span_documents[np.cumsum(is_target_marker) - 1])

    def _targets(self, index: int, text: np.ndarray, pieces: Sequence[Piece]) -> np.ndarray:
        """Return the spans whose markers are in ``text``, each after its marker."""
        targets, start = [np.zeros(0, np.int64)], 0
        for piece in pieces:
            piece_tokens = text[start : start + piece.length]
            spans = piece_tokens[piece_tokens >= self.files.vocab_size] - self.files.vocab_size
            start += piece.length
            if not len(spans):
                continue
            if not np.array_equal(spans, spans[0] + np.arange(len(spans))):
                raise SampleError(
                    f"sample {index} cannot be read: markers of document {piece.document} are not consecutive"
                )
            targets.append(self._read(index, piece.document, int(spans[0]), len(spans)))
        return np.concatenate(targets)

    def _read(self, index: int, document: int, first: int, count: int) -> np.ndarray:
        try:
            return self.files.read(document, first, count)
        except Exception as error:
            raise SampleError(f"sample {index} cannot be read: {error}") from error

    def _look_ahead(self) -> None:
        """Log the number of truncated targets among the first samples."""
        num_checked = min(self.samples_per_epoch, _SAMPLES_LOOKED_AT)
        lengths = [len(self._pair(index).targets) + 1 for index in range(num_checked)]
        too_long = sum(length > self.dec_seq_length for length in lengths)
        if too_long:
            log.info(
                f"{too_long} of {num_checked} checked samples have more than --dec-seq-length {self.dec_seq_length} "
                f"target tokens, up to {max(lengths)}; their targets are truncated"
            )


# The datasets of a T5 run, with all checks that are possible before training starts.


def build_t5_train_valid_test(
    paths: BlendPaths,
    *,
    enc_seq_length: int,
    dec_seq_length: int,
    denoisers: Sequence[Denoiser],
    tokens: T5Tokens,
    seed: int,
    reset_attention_mask: bool = False,
    needed: Sequence[bool] = (True, True, True),
    tokenizer_identity: str | None = None,
) -> Three:
    """Return the training, validation and test samples; None for a split that is not needed.

    Each corpus is a pair of token files PREFIX.bin and .idx, or, if these do not exist, a set of CPM's three files,
    whose spans are fixed.

    Args:
        enc_seq_length, dec_seq_length, denoisers, seed, reset_attention_mask: as in ``T5Dataset``.
        tokens: all token ids of a text must be below its ``text_vocab_size``.
        tokenizer_identity: identity of the tokenizer, compared with the identity in the corpus's sidecar file, if any.

    Raises:
        DataError: the data fail a check (D02, D09-D14 in docs/reliability.md), paths or weights are invalid, there are
            too few sentinels, ``dec_seq_length`` is too small, or there are several denoisers for a three-file set.
    """
    asked_by = f"--enc-seq-length {enc_seq_length}"
    settings: dict[str, Any] = {
        "enc_seq_length": enc_seq_length,
        "dec_seq_length": dec_seq_length,
        "tokens": tokens,
        "seed": seed,
        "reset_attention_mask": reset_attention_mask,
    }

    def open_corpus(prefix: str, cache: IndexCache) -> OpenCorpus:
        shared = {**settings, "cache": cache}
        if is_set(prefix):
            _check_one_kind(prefix, denoisers)
            files = SpanFiles(prefix, tokens.text_vocab_size, reader=paths.data_impl, cache=cache)
            make_from_set = partial(_span_file_samples, files, shared)
            return OpenCorpus(
                files.context, files.fingerprint, make_from_set, enc_seq_length - 1, asked_by, is_drawn=False
            )
        token_file = IndexedDataset(prefix, reader=paths.data_impl, cache=cache)
        dataset_checks.check_tokenizer(token_file, tokenizer_identity)
        dataset_checks.check_token_ids(token_file, tokens.text_vocab_size or tokens.vocab_size, cache)
        make_from_tokens = partial(_t5_samples, token_file, {**shared, "denoisers": denoisers})
        sample_tokens = raw_length(enc_seq_length, denoisers)
        return OpenCorpus(token_file, token_file.fingerprint, make_from_tokens, sample_tokens, asked_by, is_drawn=True)

    return build_datasets(paths, needed, open_corpus, tokenizer_identity, _tokens_per_sample)


def _t5_samples(token_file: IndexedDataset, settings: dict[str, Any], documents: Documents, draws: str) -> T5Dataset:
    return T5Dataset(token_file, documents=documents, draws=draws, **settings)


def _span_file_samples(files: SpanFiles, settings: dict[str, Any], documents: Documents, _: str) -> SpanFilesDataset:
    return SpanFilesDataset(files, documents=documents, **settings)


def _tokens_per_sample(parts: Sequence[Any]) -> int:
    """Return the tokens per sample that the model reads, which must be the same in all corpora."""
    first = parts[0]
    for other in parts:
        if other.dec_seq_length != first.dec_seq_length:
            raise DataError(
                f"targets must have the same length in all corpora, got {first.dec_seq_length} for {_prefix(first)} "
                f"and {other.dec_seq_length} for {_prefix(other)}. Set --dec-seq-length."
            )
    return first.enc_seq_length + first.dec_seq_length


def _prefix(samples: T5Dataset | SpanFilesDataset) -> str:
    return samples.files.prefix if isinstance(samples, SpanFilesDataset) else samples.token_file.prefix


def _check_one_kind(prefix: str, denoisers: Sequence[Denoiser]) -> None:
    if has_modes(denoisers):
        raise DataError(
            f"--denoisers must be one denoiser for {prefix}, a set in three files whose spans are fixed, got "
            f"{','.join(denoiser.kind for denoiser in denoisers)}. Remove it, or use ordinary token files."
        )
