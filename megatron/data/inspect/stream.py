"""One row of tokens as a model gets it, with what training does with each, and where documents begin in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

PADDING = -1


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The tokens and, for each of them, what goes with it.

    Args:
        title: what it is, such as "decoder inputs".
        tokens: int64[n].
        labels, has_loss, positions: [n] where there are any; ``has_loss`` says whether the label counts.
        documents: [n], the number of the document within the sample, -1 for padding; None where they are not told
            apart.
        ends: [n], which tokens end a document.
    """

    title: str
    tokens: np.ndarray
    labels: np.ndarray | None = None
    has_loss: np.ndarray | None = None
    positions: np.ndarray | None = None
    documents: np.ndarray | None = None
    ends: np.ndarray | None = None


class Section(NamedTuple):
    """Tokens ``start`` to ``stop`` of a stream, which belong to one document; ``number`` is -1 for padding."""

    start: int
    stop: int
    number: int


def gpt2_streams(fields: Mapping[str, Tensor | None], eod_id: int | None) -> list[Stream]:
    """Return the one stream of a GPT-2 sample: the first row of what ``gpt2_fields`` returned."""
    tokens = _row(fields, "tokens")
    assert tokens is not None
    return [
        Stream(
            title="inputs",
            tokens=tokens,
            labels=_row(fields, "labels"),
            has_loss=_has_loss(fields),
            positions=_row(fields, "position_ids"),
            documents=_row(fields, "segment_ids"),
            ends=None if eod_id is None else tokens == eod_id,
        )
    ]


def t5_streams(fields: Mapping[str, Tensor | None], eod_id: int | None) -> list[Stream]:
    """Return inputs, decoder inputs and targets of a T5 sample: the first row of what ``t5_fields`` returned."""
    inputs, late, labels = (_row(fields, name) for name in ("enc_tokens", "dec_tokens", "labels"))
    assert inputs is not None and late is not None and labels is not None
    documents, loss = _row(fields, "dec_segments"), _has_loss(fields)
    return [
        Stream(
            title="inputs",
            tokens=inputs,
            documents=_row(fields, "enc_segments"),
            ends=None if eod_id is None else inputs == eod_id,
        ),
        Stream(title="decoder inputs", tokens=late, labels=labels, has_loss=loss, documents=documents),
        Stream(title="targets", tokens=labels, has_loss=loss, documents=documents),
    ]


def sections(stream: Stream) -> Iterator[Section]:
    """Yield the documents of a stream: by their numbers, else by positions that start anew, else by their ends."""
    count = len(stream.tokens)
    starts = np.flatnonzero(_is_start(stream))
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], count], strict=True)):
        yield Section(int(start), int(stop), number if stream.documents is None else int(stream.documents[start]))


def _is_start(stream: Stream) -> np.ndarray:
    is_start = np.zeros(len(stream.tokens), np.bool_)
    is_start[:1] = True
    if stream.documents is not None:
        is_start[1:] |= stream.documents[1:] != stream.documents[:-1]
    else:
        if stream.positions is not None:
            is_start[1:] |= stream.positions[1:] != stream.positions[:-1] + 1
        if stream.ends is not None:
            is_start[1:] |= stream.ends[:-1]
    return is_start


def _row(fields: Mapping[str, Tensor | None], name: str) -> np.ndarray | None:
    value = fields[name]
    return None if value is None else value[0].numpy()


def _has_loss(fields: Mapping[str, Tensor | None]) -> np.ndarray | None:
    mask = _row(fields, "loss_mask")
    return None if mask is None else mask > 0
