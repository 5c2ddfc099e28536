"""Perplexity and bits per byte on texts, by domain: text files, JSON lines, or token files."""

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
    from megatron.evaluation.all_ranks import DistributedModel
    from megatron.tokenizer import Tokenizer

# Documents are scored separately. A document follows the bos_token if the tokenizer adds one, otherwise the
# end-of-document token. Each token is predicted once (``rolling_rows``), except for the end of the document. Bits per
# byte are the sum of -log2 p divided by the UTF-8 bytes of the text; unlike perplexity per token, they are comparable
# between models with different vocabularies.
#
# | path | documents |
# |---|---|
# | FILE.txt, or any other file | the full file |
# | FILE.jsonl | the "text" (--field) of each line |
# | PREFIX of PREFIX.bin and PREFIX.idx | the documents of the token file; bytes are counted in the decoded text |

TOKENS_PER_CALL = 1 << 20
"""Approximate number of tokens that are scored in one call; rows are sorted by length within a call."""


@dataclass(frozen=True)
class Domain:
    """A named text set that receives one score."""

    name: str
    path: Path

    @classmethod
    def from_argument(cls, argument: str) -> Domain:
        """Parse an argument to --texts: NAME=PATH, or PATH, whose stem is the name."""
        name, is_named, path = argument.partition("=")
        return cls(name, Path(path)) if is_named and path else cls(Path(argument).stem, Path(argument))


@dataclass(frozen=True)
class TextScore:
    """A domain's score.

    Args:
        nats: negative log-probability of all tokens.
    """

    name: str
    documents: int
    tokens: int
    bytes: int
    nats: float

    @property
    def perplexity(self) -> float:
        """Perplexity per token; only comparable between models with the same vocabulary."""
        return math.exp(min(self.nats / self.tokens, 700.0)) if self.tokens else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte; comparable between vocabularies."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens if self.tokens else math.nan


@dataclass(frozen=True)
class Document:
    """A text's tokens and its length in UTF-8 bytes."""

    tokens: Sequence[int]
    num_bytes: int


def score_domains(
    model: DistributedModel, domains: Sequence[Domain], *, field: str = "text", limit: int | None = None
) -> list[TextScore]:
    """Score each domain. Called only on rank 0, within ``model.run_from_rank_0``.

    Args:
        field: key for the text in JSON lines.
        limit: documents per domain, taken from the start; None: all.

    Raises:
        DataError: a file cannot be read; the message names file and line.
    """
    return [
        _score_domain(model, domain.name, islice(read_documents(domain.path, model.prompts.tokenizer, field), limit))
        for domain in domains
    ]


def combine_scores(scores: Sequence[TextScore]) -> TextScore:
    """Combine the scores of all domains: sums over all texts, not means over domains."""
    return TextScore(
        "all",
        sum(score.documents for score in scores),
        sum(score.tokens for score in scores),
        sum(score.bytes for score in scores),
        math.fsum(score.nats for score in scores),
    )


def _score_domain(model: DistributedModel, name: str, docs: Iterable[Document]) -> TextScore:
    prompts = model.prompts
    prefix = prompts.opening[-1] if prompts.opening else prompts.tokenizer.eod_id
    num_documents = num_tokens = num_bytes = 0
    nats = list[float]()
    for portion in _portions(docs):
        rows = [row for document in portion for row in rolling_rows(document.tokens, prefix, model.max_length)]
        nats += [-score.logprob for score in model.score(rows)]
        num_documents += len(portion)
        num_tokens += sum(len(document.tokens) for document in portion)
        num_bytes += sum(document.num_bytes for document in portion)
    return TextScore(name, num_documents, num_tokens, num_bytes, math.fsum(nats))


def _portions(docs: Iterable[Document]) -> Iterator[list[Document]]:
    portion, num_tokens = list[Document](), 0
    for document in docs:
        portion.append(document)
        num_tokens += len(document.tokens)
        if num_tokens >= TOKENS_PER_CALL:
            yield portion
            portion, num_tokens = [], 0
    if portion:
        yield portion


def read_documents(path: Path, tokenizer: Tokenizer, field: str = "text") -> Iterator[Document]:
    """Read a file's documents in order, without empty ones.

    Raises:
        DataError: the file, or a line in it, is invalid; the message names both.
    """
    if not path.is_file():
        if path.with_name(f"{path.name}.idx").is_file():
            yield from _read_token_file(path, tokenizer)
            return
        raise DataError(f"--texts {path} must be a file, or the PREFIX of PREFIX.bin and PREFIX.idx, got neither")
    if path.suffix in (".bin", ".idx"):
        raise DataError(f"--texts {path} is one of the two files of a token file. Pass the path without {path.suffix}")
    texts = _read_lines(path, field) if path.suffix == ".jsonl" else [_read_text(path)]
    for text in texts:
        if text:
            yield Document(tokenizer.encode(text), len(text.encode()))


def _read_token_file(path: Path, tokenizer: Tokenizer) -> Iterator[Document]:
    corpus = IndexedDataset(path)
    eod = tokenizer.eod_id if tokenizer.has_eod else None
    if corpus.sidecar is not None and corpus.sidecar.eod_id is not None:
        eod = corpus.sidecar.eod_id
    for idx in range(corpus.num_documents):
        tokens = corpus.read(idx).tolist()
        while tokens and tokens[-1] == eod:
            tokens.pop()
        if tokens:
            invalid = next((token for token in tokens if token >= tokenizer.vocab_size), None)
            if invalid is not None:
                raise DataError(f"{path}: token {invalid} of document {idx} is not in the tokenizer's vocabulary")
            yield Document(tokens, len(tokenizer.decode(tokens).encode()))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--texts {path} must be UTF-8 text: {error}") from None


def _read_lines(path: Path, field: str) -> Iterator[str]:
    with open(path, "rb") as file:
        for line_number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[field]
                problem = None if isinstance(text, str) else f"{field!r} is not a string"
            except (ValueError, KeyError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
            if problem is not None:
                raise DataError(
                    f"{path}:{line_number}: each line must be a JSON object with a string under {field!r} "
                    f"(--field): {problem}"
                )
            yield text
