"""Display samples as text with labels, loss mask and documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron.console import print_table

if TYPE_CHECKING:
    from torch import Tensor

# One row of model inputs, with each token's role in training and the document boundaries.

PADDING = -1


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A token sequence with labels, loss mask, positions and documents.

    Args:
        title: sequence name, such as "decoder inputs".
        tokens: int64[n].
        labels, has_loss, positions: [n] each, or None; ``has_loss`` is True if the label contributes to the loss.
        documents: [n], document index within the sample, -1 for padding; None if documents are not separated.
        ends: [n], True for tokens that end a document.
    """

    title: str
    tokens: np.ndarray
    labels: np.ndarray | None = None
    has_loss: np.ndarray | None = None
    positions: np.ndarray | None = None
    documents: np.ndarray | None = None
    ends: np.ndarray | None = None


class Section(NamedTuple):
    """Tokens ``start`` ... ``stop`` - 1 in a stream, which belong to document ``document`` (-1: padding)."""

    start: int
    stop: int
    document: int


def gpt2_streams(fields: Mapping[str, Tensor | None], eod_id: int | None) -> list[Stream]:
    """Convert a GPT-2 sample, the first row of ``gpt2_fields``, to a list with one stream."""
    tokens = _first_row(fields, "tokens")
    assert tokens is not None
    return [
        Stream(
            title="inputs",
            tokens=tokens,
            labels=_first_row(fields, "labels"),
            has_loss=_loss_flags(fields),
            positions=_first_row(fields, "position_ids"),
            documents=_first_row(fields, "segment_ids"),
            ends=None if eod_id is None else tokens == eod_id,
        )
    ]


def t5_streams(fields: Mapping[str, Tensor | None], eod_id: int | None) -> list[Stream]:
    """Convert a T5 sample, the first row of ``t5_fields``, to three streams: inputs, decoder inputs and targets."""
    inputs, decoder_inputs, labels = (_first_row(fields, name) for name in ("enc_tokens", "dec_tokens", "labels"))
    assert inputs is not None and decoder_inputs is not None and labels is not None
    documents, loss = _first_row(fields, "dec_segments"), _loss_flags(fields)
    return [
        Stream(
            title="inputs",
            tokens=inputs,
            documents=_first_row(fields, "enc_segments"),
            ends=None if eod_id is None else inputs == eod_id,
        ),
        Stream(title="decoder inputs", tokens=decoder_inputs, labels=labels, has_loss=loss, documents=documents),
        Stream(title="targets", tokens=labels, has_loss=loss, documents=documents),
    ]


def sections(stream: Stream) -> Iterator[Section]:
    """Yield a section per document. Without document indices, position resets and document ends separate documents."""
    count = len(stream.tokens)
    starts = np.flatnonzero(_is_start(stream))
    for idx, (start, stop) in enumerate(zip(starts, [*starts[1:], count], strict=True)):
        yield Section(int(start), int(stop), idx if stream.documents is None else int(stream.documents[start]))


def _is_start(stream: Stream) -> np.ndarray:
    """Mark each document's first token: bool[n]."""
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


def _first_row(fields: Mapping[str, Tensor | None], name: str) -> np.ndarray | None:
    value = fields[name]
    return None if value is None else value[0].numpy()


def _loss_flags(fields: Mapping[str, Tensor | None]) -> np.ndarray | None:
    mask = _first_row(fields, "loss_mask")
    return None if mask is None else mask > 0


# Token ids as readable text: control tokens by name, other tokens decoded.

PARTIAL_CHARACTER = "(part of a character)"


class Decoder(Protocol):
    """Tokenizer interface that ``TokenFormatter`` needs."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod_id(self) -> int: ...

    @property
    def control_tokens(self) -> Mapping[str, int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class TokenFormatter:
    """Names and texts for token ids.

    Args:
        names: id -> name for further control tokens; overrides the tokenizer's own names.
    """

    def __init__(self, tokenizer: Decoder, names: Mapping[int, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self.names = {token: name for name, token in tokenizer.control_tokens.items()} | dict(names or {})

    def is_control(self, token: int) -> bool:
        """Check if ``token`` is a control token or outside the vocabulary."""
        return token in self.names or token >= self._tokenizer.vocab_size

    def name(self, token: int) -> str:
        """Return a control token's name."""
        return self.names.get(token, f"<id {token}>")

    def text(self, tokens: Iterable[int]) -> str:
        """Decode ordinary tokens."""
        return self._tokenizer.decode([int(token) for token in tokens])

    def format_cell(self, token: int) -> str:
        """Format a token for a table cell, on one line and with escaped line ends."""
        if self.is_control(token):
            return self.name(token)
        text = self.text([token])
        return PARTIAL_CHARACTER if "\ufffd" in text else repr(text)


# A stream as text: documents with headings, tokens without a loss in brackets, and a table of tokens.
#
# If the console supports colours, they are used in addition; no information depends only on them.

_HEADING, _CONTROL, _NO_LOSS = "bold yellow", "cyan", "red"
_MAX_REPEATED = 2


def print_stream(stream: Stream, formatter: TokenFormatter, console: Console, num_rows: int) -> None:
    """Print ``stream`` as text and, if it has labels, as ``stream_table``."""
    console.print(Text(f"{stream.title}, {len(stream.tokens)} tokens", style="bold"))
    for section in sections(stream):
        console.print(Text(format_heading(stream, section), style=_HEADING), soft_wrap=True)
        console.print(format_section(stream, section, formatter), soft_wrap=True)
    if stream.labels is not None and num_rows:
        print_table(stream_table(stream, formatter, num_rows), console)


def format_heading(stream: Stream, section: Section) -> str:
    """Format a document's heading: its token range, its positions, and whether documents are separated."""
    start, stop, document = section
    name = "padding" if document == PADDING else f"document {document}"
    clauses = [f"---- {name}: tokens {start}-{stop - 1}"]
    if stream.positions is not None and document != PADDING:
        clauses.append(f"positions {stream.positions[start]}-{stream.positions[stop - 1]}")
    if document != PADDING and (document or stop < len(stream.tokens)):
        clauses.append("separated" if stream.documents is not None else "not separated from the other documents")
    return ", ".join(clauses)


def format_section(stream: Stream, section: Section, formatter: TokenFormatter) -> Text:
    """Decode a section, with ``[no loss: ...]`` around tokens without a loss."""
    result = Text()
    for start, stop, has_loss in _runs_by_loss(stream, section):
        decoded = _decode(stream.tokens[start:stop], formatter)
        if has_loss:
            result.append_text(decoded)
        else:
            result.append_text(Text.assemble("[no loss: ", decoded, "]", style=_NO_LOSS))
    return result


def _runs_by_loss(stream: Stream, section: Section) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, stop, has_loss) for runs of consecutive tokens with the same ``has_loss``."""
    has_loss = np.ones(len(stream.tokens), np.bool_) if stream.has_loss is None else stream.has_loss
    flags = has_loss[section.start : section.stop]
    bounds = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        yield section.start + start, section.start + stop, bool(flags[start])


def _decode(tokens: np.ndarray, formatter: TokenFormatter) -> Text:
    result = Text()
    for start, stop in _runs_by_control(tokens, formatter):
        if not formatter.is_control(int(tokens[start])):
            result.append(formatter.text(tokens[start:stop]))
            continue
        name, count = formatter.name(int(tokens[start])), stop - start
        result.append(name * count if count <= _MAX_REPEATED else f"{name} x {count}", style=_CONTROL)
    return result


def _runs_by_control(tokens: np.ndarray, formatter: TokenFormatter) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) for runs of ordinary tokens, or for repetitions of one control token."""
    keys = [int(token) if formatter.is_control(int(token)) else -1 for token in tokens]
    start = 0
    for stop in range(1, len(keys) + 1):
        if stop == len(keys) or keys[stop] != keys[start]:
            yield start, stop
            start = stop


def stream_table(stream: Stream, formatter: TokenFormatter, num_rows: int) -> Table:
    """Build a table: the first ``num_rows`` tokens, the last token, and the tokens where document or loss changes."""
    assert stream.labels is not None
    columns = {"input": stream.tokens, "label": stream.labels}
    optional_columns = {"loss": stream.has_loss, "position": stream.positions, "document": stream.documents}
    extra_columns = {name: values for name, values in optional_columns.items() if values is not None}
    result = Table(title=f"{stream.title}, token by token", title_justify="left")
    for name in ("token", *columns, *extra_columns):
        result.add_column(name, justify="left" if name in columns else "right", overflow="fold")
    previous_idx = -1
    for idx in _shown_indices(stream, num_rows):
        if idx != previous_idx + 1:
            result.add_row(*["..."] * len(result.columns))
        cells = [f"{values[idx]} {formatter.format_cell(int(values[idx]))}" for values in columns.values()]
        extra_cells = [str(int(values[idx])) for values in extra_columns.values()]
        result.add_row(str(idx), *map(Text, cells), *extra_cells)
        previous_idx = idx
    return result


def _shown_indices(stream: Stream, num_rows: int) -> list[int]:
    """Select the ascending token indices that ``stream_table`` shows."""
    count = len(stream.tokens)
    changes = [section.start for section in sections(stream)]
    changes += [start for section in sections(stream) for start, _, _ in _runs_by_loss(stream, section)]
    neighbours = {idx for start in changes for idx in (start - 1, start)}
    return sorted({*range(min(num_rows, count)), *(idx for idx in neighbours if idx >= 0), count - 1})
