"""Datasets for CPM's three-file sets, and the T5 dataset builder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron import log
from megatron.config.data import CPM_SUFFIXES, is_cpm_set
from megatron.data import dataset_checks
from megatron.data.blend_paths import BlendPaths
from megatron.data.cache import IndexCache
from megatron.data.dataset_builder import OpenCorpus, SplitDatasets, build_datasets
from megatron.data.documents import Documents, documents_key
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sample_index import DocumentSlice, SampleIndex
from megatron.errors import DataError, SampleError
from megatron.models.t5 import data
from megatron.models.t5.data import InputsAndTargets, T5Dataset, T5Tokens
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

_NUM_CHECKED_DOCUMENTS = 1000


class SpanFiles:
    """The three token file pairs in a set.

    Args:
        vocab_size: V, the vocabulary size used to build the set.
        reader, cache: as in ``IndexedDataset``.

    Raises:
        DataError: a file is missing or damaged, the pairs do not belong together, or V does not match.
    """

    def __init__(self, prefix: str, vocab_size: int, *, reader: str = "mmap", cache: IndexCache | None = None) -> None:
        self.prefix, self.vocab_size = prefix, vocab_size
        self._check_files_exist()
        self.context, self.target, self.offsets = (
            IndexedDataset(prefix + suffix, reader=reader, cache=cache) for suffix in CPM_SUFFIXES
        )
        self._check_documents()
        self._check_markers()
        self._check_ids()

    @property
    def fingerprint(self) -> str:
        """Short hash that changes with any of the three files."""
        fingerprints = [file.fingerprint for file in (self.context, self.target, self.offsets)]
        return hashlib.sha256(":".join(fingerprints).encode()).hexdigest()[:16]

    def read(self, document: int, first_span: int, num_spans: int) -> np.ndarray:
        """Read spans ``first_span ... first_span + num_spans - 1`` in a document, each after its marker.

        Raises:
            DataError: the spans are not at the stored offsets.
        """
        stored_starts, lengths = self.offsets.read(document).astype(np.int64).reshape(-1, 2).T
        starts = np.cumsum(lengths) - lengths
        num_bits = 8 * self.offsets.dtype.itemsize
        if not first_span + num_spans <= len(lengths) or ((starts - stored_starts) % (1 << num_bits)).any():
            raise self._damaged_error(document, f"its {len(lengths)} spans are not contiguous")
        start, stop = (
            int(starts[first_span]),
            int(starts[first_span + num_spans - 1] + lengths[first_span + num_spans - 1]),
        )
        if stop > self.target.document_lengths[document]:
            raise self._damaged_error(
                document, f"its target has {self.target.document_lengths[document]} tokens, but its spans need {stop}"
            )
        tokens = self.target.read(document, start, stop - start).astype(np.int64)
        markers = np.flatnonzero(tokens >= self.vocab_size)
        expected = starts[first_span : first_span + num_spans] - start
        if (
            not np.array_equal(markers, expected)
            or (tokens[markers] - self.vocab_size != first_span + np.arange(num_spans)).any()
        ):
            raise self._damaged_error(
                document, f"spans {first_span} ... {first_span + num_spans - 1} do not all start with their markers"
            )
        return tokens

    def _damaged_error(self, document: int, problem: str) -> DataError:
        return DataError(
            f"{self.prefix}: document {document} of the three-file set is invalid: {problem}. The files are "
            "damaged or belong to different sets. Build all three again."
        )

    def _check_files_exist(self) -> None:
        missing = [
            path
            for suffix in CPM_SUFFIXES
            for path in (Path(self.prefix + suffix + ".idx"), Path(self.prefix + suffix + ".bin"))
            if not path.is_file()
        ]
        if missing:
            raise DataError(
                f"{missing[0]} does not exist; a three-file set is {', '.join(CPM_SUFFIXES)}, each .bin and .idx. "
                f"Copy the missing files, or use ordinary token files {self.prefix}.bin and .idx."
            )

    def _check_documents(self) -> None:
        counts = [file.num_documents for file in (self.context, self.target, self.offsets)]
        if len(set(counts)) > 1:
            raise DataError(
                f"{self.prefix}: the three files of a set must have the same number of documents, got "
                f"{', '.join(f'{count} in {suffix}' for count, suffix in zip(counts, CPM_SUFFIXES, strict=True))}. "
                "They belong to different sets, or one of them is truncated. Build all three again."
            )
        odd_documents = np.flatnonzero(self.offsets.document_lengths % 2)
        if len(odd_documents):
            raise self._damaged_error(
                int(odd_documents[0]),
                f"its {self.offsets.document_lengths[odd_documents[0]]} offsets do not form pairs",
            )

    def _check_markers(self) -> None:
        """Raise DataError unless the first marker is V; with another vocabulary, markers would be read as text."""
        for document in np.flatnonzero(self.offsets.document_lengths)[:_NUM_CHECKED_DOCUMENTS]:
            markers = self.target.read(int(document))[:1].tolist()
            if markers != [self.vocab_size]:
                raise DataError(
                    f"{self.prefix}: targets must start with the marker {self.vocab_size}, the size of the vocabulary, "
                    f"got {markers} in document {document}. Use the tokenizer that the set was built with."
                )

    def _check_ids(self) -> None:
        max_spans = int(self.offsets.document_lengths.max(initial=0)) // 2
        limit = self.vocab_size + max_spans
        for file in (self.context, self.target):
            if limit - 1 > np.iinfo(file.dtype).max:
                document = int(np.argmax(self.offsets.document_lengths))
                raise self._damaged_error(document, f"{file.dtype} cannot represent the markers of {max_spans} spans")
            first_invalid = file.find_invalid_id(limit)
            if first_invalid is not None:
                document, offset, token = first_invalid
                name = Path(file.token_path).name
                raise self._damaged_error(document, f"token {offset} of {name} is {token}, which is above all markers")


# T5 samples from a set of three files. Spans are fixed; sentinels restart in each sample.

_NUM_CHECKED_SAMPLES = 256


class SpanFilesDataset:
    """T5 samples from a three-file set; sample i is the dictionary that ``data.build_sample`` returns.

    Any i >= 0 is valid; its epoch is i // samples_per_epoch. Inputs are ``enc_seq_length`` - 1 context tokens and the
    end token. Targets are padded or truncated to ``dec_seq_length``. Truncations in the first samples are logged.

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
            length_flag=f"--enc-seq-length {enc_seq_length}",
            cache=cache,
        )
        self.num_tokens, self.samples_per_epoch = self._windows.num_tokens, self._windows.per_epoch
        self._sentinels = np.array(tokens.sentinels, np.int64)
        self._log_truncated_targets()

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
        return data.build_sample(self._inputs_and_targets(index), self.tokens, self.enc_seq_length, self.dec_seq_length)

    def _inputs_and_targets(self, index: int) -> InputsAndTargets:
        slices = self._windows.slices(index)
        text = self._windows.read(index, slices)
        is_marker = text >= self.files.vocab_size
        targets = self._targets(index, text, slices)
        is_target_marker = targets >= self.files.vocab_size
        document_indices = np.arange(len(slices)) if self.reset_attention_mask else np.zeros(len(slices), np.int64)
        documents = np.repeat(document_indices, [doc_slice.length for doc_slice in slices])
        span_documents = documents[is_marker]
        idx_in_document = np.arange(len(span_documents)) - np.searchsorted(span_documents, span_documents)
        self.tokens.require_sentinels(
            int(idx_in_document.max(initial=-1)) + 1, f"sample {index} of {self.files.prefix}"
        )
        text[is_marker] = targets[is_target_marker] = self._sentinels[idx_in_document]
        return InputsAndTargets(text, targets, documents, span_documents[np.cumsum(is_target_marker) - 1])

    def _targets(self, index: int, text: np.ndarray, slices: Sequence[DocumentSlice]) -> np.ndarray:
        """Collect the spans whose markers are in ``text``, each after its marker."""
        targets, start = [np.zeros(0, np.int64)], 0
        for doc_slice in slices:
            slice_tokens = text[start : start + doc_slice.length]
            spans = slice_tokens[slice_tokens >= self.files.vocab_size] - self.files.vocab_size
            start += doc_slice.length
            if not len(spans):
                continue
            if not np.array_equal(spans, spans[0] + np.arange(len(spans))):
                raise SampleError(
                    f"sample {index} cannot be read: markers of document {doc_slice.document} are not consecutive"
                )
            targets.append(self._read(index, doc_slice.document, int(spans[0]), len(spans)))
        return np.concatenate(targets)

    def _read(self, index: int, document: int, first_span: int, num_spans: int) -> np.ndarray:
        try:
            return self.files.read(document, first_span, num_spans)
        except Exception as error:
            raise SampleError(f"sample {index} cannot be read: {error}") from error

    def _log_truncated_targets(self) -> None:
        """Count and log truncated targets among the first samples."""
        num_checked = min(self.samples_per_epoch, _NUM_CHECKED_SAMPLES)
        lengths = [len(self._inputs_and_targets(index).targets) + 1 for index in range(num_checked)]
        num_truncated = sum(length > self.dec_seq_length for length in lengths)
        if num_truncated:
            log.info(
                f"{num_truncated} of {num_checked} checked samples have more than --dec-seq-length "
                f"{self.dec_seq_length} target tokens, up to {max(lengths)}; their targets are truncated"
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
    tokenizer_probe: Mapping[str, Any] | None = None,
) -> SplitDatasets:
    """Build training, validation and test samples; None for a split that is not needed.

    Each corpus is a pair of token files PREFIX.bin and .idx, or, if these do not exist, CPM's three-file set, whose
    spans are fixed.

    Args:
        enc_seq_length, dec_seq_length, denoisers, seed, reset_attention_mask: as in ``T5Dataset``.
        tokens: all token ids in a text must be below its ``text_vocab_size``.
        tokenizer_identity, tokenizer_probe: the tokenizer's identity and probe, compared with those in the corpus's
            sidecar file, if any.

    Raises:
        DataError: the data fail a check (D02, D09-D14 in docs/reliability.md), paths or weights are invalid, there are
            too few sentinels, ``dec_seq_length`` is too small, or there are several denoisers for a three-file set.
    """
    length_flag = f"--enc-seq-length {enc_seq_length}"
    settings: dict[str, Any] = {
        "enc_seq_length": enc_seq_length,
        "dec_seq_length": dec_seq_length,
        "tokens": tokens,
        "seed": seed,
        "reset_attention_mask": reset_attention_mask,
    }

    def open_corpus(prefix: str, cache: IndexCache) -> OpenCorpus:
        dataset_kwargs = {**settings, "cache": cache}
        if is_cpm_set(prefix):
            _check_single_denoiser(prefix, denoisers)
            files = SpanFiles(prefix, tokens.text_vocab_size, reader=paths.data_impl, cache=cache)
            make_from_set = partial(_span_file_samples, files, dataset_kwargs)
            return OpenCorpus(
                files.context, files.fingerprint, make_from_set, enc_seq_length - 1, length_flag, has_random_draws=False
            )
        token_file = paths.open_token_file(prefix, cache)
        dataset_checks.check_tokenizer(token_file, tokenizer_identity, tokenizer_probe)
        dataset_checks.check_token_ids(token_file, tokens.text_vocab_size or tokens.vocab_size, cache)
        make_from_tokens = partial(_t5_samples, token_file, {**dataset_kwargs, "denoisers": denoisers})
        sample_tokens = raw_length(enc_seq_length, denoisers)
        return OpenCorpus(
            token_file, token_file.fingerprint, make_from_tokens, sample_tokens, length_flag, has_random_draws=True
        )

    return build_datasets(paths, needed, open_corpus, tokenizer_identity, _tokens_per_sample)


def _t5_samples(token_file: IndexedDataset, settings: dict[str, Any], documents: Documents, draws: str) -> T5Dataset:
    return T5Dataset(token_file, documents=documents, draws=draws, **settings)


def _span_file_samples(files: SpanFiles, settings: dict[str, Any], documents: Documents, _: str) -> SpanFilesDataset:
    return SpanFilesDataset(files, documents=documents, **settings)


def _tokens_per_sample(datasets: Sequence[Any]) -> int:
    """Return the tokens per sample that the model reads, which must be the same in all corpora."""
    first = datasets[0]
    for other in datasets:
        if other.dec_seq_length != first.dec_seq_length:
            raise DataError(
                f"targets must have the same length in all corpora, got {first.dec_seq_length} for {_prefix(first)} "
                f"and {other.dec_seq_length} for {_prefix(other)}. Set --dec-seq-length."
            )
    return first.enc_seq_length + first.dec_seq_length


def _prefix(samples: T5Dataset | SpanFilesDataset) -> str:
    return samples.files.prefix if isinstance(samples, SpanFilesDataset) else samples.token_file.prefix


def _check_single_denoiser(prefix: str, denoisers: Sequence[Denoiser]) -> None:
    if has_modes(denoisers):
        raise DataError(
            f"--denoisers must be one denoiser for {prefix}, a three-file set with fixed spans, got "
            f"{','.join(denoiser.kind for denoiser in denoisers)}. Remove it, or use ordinary token files."
        )
