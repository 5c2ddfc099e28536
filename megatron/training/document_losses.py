"""Losses of documents: sums over the tokens of a step, and the files in the run folder that record them.

| file in the run folder | content |
|---|---|
| ``document_losses.jsonl`` | the newest steps, one line per step |
| ``document_losses.previous.jsonl`` | the steps before them |

A line is ``{"step": 12, "corpora": {NAME: {"documents": [...], "tokens": [...], "losses": [...]}}}``. The three lists
have one entry per document of which the step predicted a token: its index, the number of tokens, and their mean loss,
null if it is not finite. When the newest file exceeds half of the limit, it replaces the previous file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from megatron import files, log
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.sample_order import Ordered

FILE_NAME = "document_losses.jsonl"
PREVIOUS_NAME = "document_losses.previous.jsonl"
MIB = 1 << 20
_CORPUS_SHIFT = 40
_STEP = re.compile(rb'\{"step":(\d+),')


class DocumentSums(NamedTuple):
    """Sums over tokens by document; each document occurs once.

    Shapes:
        keys   int64[n], ascending: corpus index and document, see ``corpora`` and ``documents``
        losses float64[n], sums of the token losses
        tokens float64[n], sums of the token weights, not 0
    """

    keys: np.ndarray
    losses: np.ndarray
    tokens: np.ndarray

    @property
    def corpora(self) -> np.ndarray:
        """Corpus index of each document."""
        return self.keys >> _CORPUS_SHIFT

    @property
    def documents(self) -> np.ndarray:
        """Index of each document in its corpus."""
        return self.keys & ((1 << _CORPUS_SHIFT) - 1)


def sum_by_document(
    ordered: Ordered, samples: Sequence[int], losses: np.ndarray, weights: np.ndarray, positions: np.ndarray
) -> DocumentSums:
    """Sum token losses by the document that contains the predicted token.

    Args:
        samples: index of each sample in the run.
        losses: weighted token losses.
        weights: weights of the tokens; 0 for tokens without a loss.
        positions: position of each column's input token in the sample; the predicted token is the next one.

    Shapes:
        losses, weights [samples, n]; positions [n]
    """
    parts = list(ordered.parts.values())
    sums = []
    for sample, sample_losses, sample_weights in zip(samples, losses, weights, strict=True):
        corpus_idx, sample_idx = ordered.order.locate(sample)
        dataset = parts[corpus_idx]
        assert isinstance(dataset, GPTDataset)
        slices = dataset.slices(sample_idx)
        ends = np.cumsum([doc_slice.length for doc_slice in slices])
        slice_idx = np.searchsorted(ends, positions + 1, side="right")  # len(slices) for padding
        size = len(slices) + 1
        sums.append(
            DocumentSums(
                np.array([corpus_idx << _CORPUS_SHIFT | doc_slice.document for doc_slice in slices], np.int64),
                np.bincount(slice_idx, sample_losses, size)[:-1],
                np.bincount(slice_idx, sample_weights, size)[:-1],
            )
        )
    return merge(sums)


def merge(sums: Iterable[DocumentSums]) -> DocumentSums:
    """Add sums of the same documents; documents without a counted token are left out."""
    keys, losses, tokens = (np.concatenate(arrays) for arrays in zip(*sums, strict=True))
    unique_keys, idx = np.unique(keys, return_inverse=True)
    losses, tokens = (np.bincount(idx, values, len(unique_keys)) for values in (losses, tokens))
    has_tokens = tokens != 0
    return DocumentSums(unique_keys[has_tokens], losses[has_tokens], tokens[has_tokens])


class DocumentLossWriter:
    """Appends steps to the files in ``folder``, which have at most ``max_bytes`` together.

    Args:
        corpora: names of the corpora, in the order of their indices.
        dtype: dtype of the losses in the file: float32 has fewer digits than float64.
    """

    def __init__(self, folder: Path, corpora: Sequence[str], max_bytes: int, dtype: np.dtype[Any]) -> None:
        self.path, self.previous = folder / FILE_NAME, folder / PREVIOUS_NAME
        self._corpora, self._max_file_bytes, self._dtype = list(corpora), max_bytes // 2, dtype
        for path in (self.previous, self.path):  # an earlier start may have had a larger limit
            _drop_oldest(path, self._max_file_bytes)

    def write(self, steps: Mapping[int, DocumentSums]) -> None:
        """Append the documents of ``steps``, in ascending steps."""
        for step in sorted(steps):
            line = self._line(step, steps[step])
            if len(line) > self._max_file_bytes:
                log.warn_once(
                    f"--log-document-losses: the documents of a step take {len(line) / MIB:.2f} MiB, more than half of "
                    f"the limit of {2 * self._max_file_bytes / MIB:g} MiB. Such steps are not recorded. Raise the "
                    f"limit to at least {-(-2 * len(line) // MIB)}"
                )
                continue
            if self.path.exists() and self.path.stat().st_size + len(line) > self._max_file_bytes:
                os.replace(self.path, self.previous)
            with open(self.path, "ab") as file:
                file.write(line)

    def _line(self, step: int, sums: DocumentSums) -> bytes:
        means = (sums.losses / sums.tokens).astype(self._dtype)
        corpora = {}
        for corpus_idx in np.unique(sums.corpora).tolist():
            rows = sums.corpora == corpus_idx
            corpora[self._corpora[corpus_idx]] = {
                "documents": sums.documents[rows],
                "tokens": sums.tokens[rows].astype(np.int64),
                "losses": means[rows],
            }
        return orjson.dumps({"step": step, "corpora": corpora}, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"


def drop_later_steps(folder: Path, step: int) -> None:
    """Drop the lines after ``step``, because a start or a rollback repeats those steps, and lines truncated by a kill.

    The files may have been written by an earlier start that had the flag.
    """
    for path in (folder / PREVIOUS_NAME, folder / FILE_NAME):
        if not path.exists():
            continue
        num_bytes = 0
        with open(path, "rb") as file:
            for line in file:
                match = _STEP.match(line)
                if match is None or int(match[1]) > step or not line.endswith(b"\n"):
                    break
                num_bytes += len(line)
        os.truncate(path, num_bytes)


def _drop_oldest(path: Path, max_bytes: int) -> None:
    """Retain the newest lines that fit into ``max_bytes``."""
    if not path.exists() or path.stat().st_size <= max_bytes:
        return
    with open(path, "rb") as file:
        file.seek(-max_bytes - 1, os.SEEK_END)
        file.readline()  # the remainder of a line, or of the line before
        files.replace_bytes(path, file.read())


class DocumentLoss(NamedTuple):
    """Mean loss of a document in a step, and the number of its predicted tokens."""

    loss: float
    tokens: int


def read_step(folder: Path, step: int) -> dict[tuple[str, int], DocumentLoss]:
    """Read a step's losses by (corpus, document); empty if the step is not recorded."""
    for recorded_step, corpora in _read_lines(folder):
        if recorded_step == step:
            return {
                (corpus, document): DocumentLoss(_as_float(loss), tokens)
                for corpus, lists in corpora.items()
                for document, tokens, loss in zip(lists["documents"], lists["tokens"], lists["losses"], strict=True)
            }
    return {}


def read_document(folder: Path, corpus: str, document: int) -> dict[int, DocumentLoss]:
    """Read the losses of a document by step, in ascending steps."""
    losses = {}
    for step, corpora in _read_lines(folder):
        lists = corpora.get(corpus)
        if lists is not None and document in lists["documents"]:
            idx = lists["documents"].index(document)
            losses[step] = DocumentLoss(_as_float(lists["losses"][idx]), lists["tokens"][idx])
    return losses


def _as_float(loss: float | None) -> float:
    return float("nan") if loss is None else loss


def _read_lines(folder: Path) -> Iterator[tuple[int, dict[str, dict[str, list[Any]]]]]:
    """Yield (step, lists by corpus) of each recorded step, without lines truncated by a kill."""
    for name in (PREVIOUS_NAME, FILE_NAME):
        if not (folder / name).exists():
            continue
        with open(folder / name, "rb") as file:
            for line in file:
                with suppress(orjson.JSONDecodeError):
                    record = orjson.loads(line)
                    yield record["step"], record["corpora"]
