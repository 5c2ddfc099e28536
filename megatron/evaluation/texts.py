"""Perplexity and bits per byte of texts, by domain: files of text, JSON lines, or token files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import DataError
from megatron.evaluation.scoring import rolling_rows

if TYPE_CHECKING:
    from megatron.evaluation.all_ranks import ModelOfAllRanks
    from megatron.tokenizer import Tokenizer

# Each document is read alone, after the bos_token where the tokenizer adds one, otherwise after the end-of-document
# token, and each of its tokens is predicted once (``rolling_rows``). The end of a document is not predicted. Bits per
# byte are the sum of -log2 p over the UTF-8 bytes of the text: unlike a perplexity by tokens they compare models with
# different vocabularies.
#
# | name | a document is |
# |---|---|
# | FILE.txt, or any other file | the whole file |
# | FILE.jsonl | the text under "text" (--field) of each line |
# | PREFIX of PREFIX.bin and PREFIX.idx | one of the token file; its bytes are those of its tokens' text |

TOKENS_AT_ONCE = 1 << 20
"""Of documents that are scored together, about: rows are sorted by length among these."""


@dataclass(frozen=True)
class Domain:
    """Texts that are counted together."""

    name: str
    path: Path

    @classmethod
    def of(cls, word: str) -> Domain:
        """Return the domain that a word of --texts means: NAME=PATH, or PATH, which is named after itself."""
        name, is_named, path = word.partition("=")
        return cls(name, Path(path)) if is_named and path else cls(Path(word).stem, Path(word))


@dataclass(frozen=True)
class TextScore:
    """What a model says to a domain.

    Args:
        nats: minus the log-probability of all tokens.
    """

    name: str
    documents: int
    tokens: int
    bytes: int
    nats: float

    @property
    def perplexity(self) -> float:
        """By tokens: of models with one vocabulary alone."""
        return math.exp(min(self.nats / self.tokens, 700.0)) if self.tokens else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Comparable over vocabularies."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens if self.tokens else math.nan


@dataclass(frozen=True)
class Document:
    """A text's tokens and its number of UTF-8 bytes."""

    tokens: Sequence[int]
    num_bytes: int


def score_domains(
    model: ModelOfAllRanks, domains: Sequence[Domain], *, field: str = "text", limit: int | None = None
) -> list[TextScore]:
    """Return the score of each domain; called by rank 0, within ``model.lead``.

    Args:
        field: of JSON lines, where the text is.
        limit: of each domain the first so many documents.

    Raises:
        DataError: a file that cannot be read, naming file and line.
    """
    return [
        _score(model, domain.name, islice(documents(domain.path, model.prompts.tokenizer, field), limit))
        for domain in domains
    ]


def together(scores: Sequence[TextScore]) -> TextScore:
    """Return the score of all domains as one, in which each byte counts alike."""
    return TextScore(
        "all",
        sum(one.documents for one in scores),
        sum(one.tokens for one in scores),
        sum(one.bytes for one in scores),
        math.fsum(one.nats for one in scores),
    )


def _score(model: ModelOfAllRanks, name: str, found: Iterable[Document]) -> TextScore:
    prompts = model.prompts
    prefix = prompts.opening[-1] if prompts.opening else prompts.tokenizer.eod_id
    count = tokens = num_bytes = 0
    nats = list[float]()
    for some in _portions(found):
        rows = [row for one in some for row in rolling_rows(one.tokens, prefix, model.max_length)]
        nats += [-score.logprob for score in model.score(rows)]
        count += len(some)
        tokens += sum(len(one.tokens) for one in some)
        num_bytes += sum(one.num_bytes for one in some)
    return TextScore(name, count, tokens, num_bytes, math.fsum(nats))


def _portions(found: Iterable[Document]) -> Iterator[list[Document]]:
    portion, size = list[Document](), 0
    for one in found:
        portion.append(one)
        size += len(one.tokens)
        if size >= TOKENS_AT_ONCE:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def documents(path: Path, tokenizer: Tokenizer, field: str = "text") -> Iterator[Document]:
    """Yield the documents of a file, in its order; empty ones are left out.

    Raises:
        DataError: naming the file, and the line where there is one.
    """
    if not path.is_file():
        if path.with_name(f"{path.name}.idx").is_file():
            yield from _of_token_file(path, tokenizer)
            return
        raise DataError(f"--texts {path} must be a file, or the PREFIX of PREFIX.bin and PREFIX.idx, got neither")
    if path.suffix in (".bin", ".idx"):
        raise DataError(f"--texts {path} is a half of a token file. Name it without {path.suffix}")
    texts = _lines(path, field) if path.suffix == ".jsonl" else [_whole(path)]
    for text in texts:
        if text:
            yield Document(tokenizer.encode(text), len(text.encode()))


def _of_token_file(path: Path, tokenizer: Tokenizer) -> Iterator[Document]:
    corpus = IndexedDataset(path)
    eod = tokenizer.eod_id if tokenizer.has_eod else None
    if corpus.sidecar is not None and corpus.sidecar.eod_id is not None:
        eod = corpus.sidecar.eod_id
    for number in range(corpus.num_documents):
        tokens = corpus.read(number).tolist()
        while tokens and tokens[-1] == eod:
            tokens.pop()
        if tokens:
            wrong = next((token for token in tokens if token >= tokenizer.vocab_size), None)
            if wrong is not None:
                raise DataError(f"{path}: token {wrong} of document {number} is not in the tokenizer's vocabulary")
            yield Document(tokens, len(tokenizer.decode(tokens).encode()))


def _whole(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--texts {path} must be a text in UTF-8: {error}") from None


def _lines(path: Path, field: str) -> Iterator[str]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[field]
                problem = None if isinstance(text, str) else f"{field!r} is not a text"
            except (ValueError, KeyError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
            if problem is not None:
                raise DataError(
                    f"{path}:{number}: each line must be a JSON object with a text under {field!r} (--field): {problem}"
                )
            yield text
