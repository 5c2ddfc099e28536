"""A whole preprocessing job: text files in, a pair of token files out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from megatron.data.preprocess import sources
from megatron.data.preprocess.encode import Encoded, Encoder
from megatron.data.preprocess.parse import BadRecord
from megatron.data.preprocess.pool import encode_all
from megatron.data.preprocess.progress import progress
from megatron.data.token_writer import TokenFileWriter
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer

CHUNK_BYTES = 1 << 18
_BAD_RECORDS_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to turn into what. ``format`` is one of ``sources.FORMATS``; results do not depend on ``num_workers``."""

    inputs: list[Path]
    output_prefix: str
    make_tokenizer: Callable[[], Tokenizer]
    format: str
    json_key: str = "text"
    append_eod: bool = True
    num_workers: int = 1
    max_bad_lines: int = 0


@dataclass
class Summary:
    """What came of a job."""

    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    num_bytes: int = 0
    num_bad: int = 0
    seconds: float = 0.0
    bad: list[BadRecord] = field(default_factory=list)


def run(job: Job) -> Summary:
    """Do the job; the three output files appear at the end, all or none.

    Raises:
        DataError: an input is no text, more than ``max_bad_lines`` records are bad, or there is no document at all.
        RuntimeError: an encoding process died.
    """
    started = time.monotonic()
    for path in job.inputs:
        sources.check_is_text(path)
    tokenizer = job.make_tokenizer()
    summary = Summary()
    writer = TokenFileWriter(
        job.output_prefix,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.identity,
        eod_id=tokenizer.eod_id if job.append_eod else None,
    )
    with writer:
        _encode_into(writer, job, summary, started)
        _check_any(job, summary)
    return summary


def _encode_into(writer: TokenFileWriter, job: Job, summary: Summary, started: float) -> None:
    encoder = Encoder(job.make_tokenizer, job.json_key if job.format == "jsonl" else None, job.append_eod)
    records = sources.read(job.inputs, job.format)
    total = sum(path.stat().st_size for path in job.inputs)
    with (
        closing(encode_all(in_chunks(records), encoder, job.num_workers)) as results,
        progress("encoding", total) as advance,
    ):
        for encoded in results:
            writer.add(encoded.tokens, encoded.sizes)
            _count(encoded, summary, job.max_bad_lines)
            summary.num_documents, summary.num_tokens = writer.num_documents, writer.num_tokens
            summary.seconds = time.monotonic() - started
            speed = summary.num_bytes / 1e6 / max(summary.seconds, 1e-9)
            advance(
                encoded.num_bytes, f"{summary.num_documents} documents, {summary.num_tokens} tokens, {speed:.1f} MB/s"
            )


def in_chunks(records: Iterable[sources.Record]) -> Iterator[list[sources.Record]]:
    """Group records until each group holds CHUNK_BYTES; groups depend on the input alone."""
    chunk: list[sources.Record] = []
    size = 0
    for record in records:
        chunk.append(record)
        size += len(record.data)
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _count(encoded: Encoded, summary: Summary, max_bad_lines: int) -> None:
    summary.num_empty += encoded.num_empty
    summary.num_bytes += encoded.num_bytes
    summary.num_bad += len(encoded.bad)
    summary.bad += encoded.bad[: _BAD_RECORDS_SHOWN - len(summary.bad)]
    if summary.num_bad > max_bad_lines:
        shown = "\n".join(f"  {bad}" for bad in summary.bad)
        raise DataError(
            f"at most {max_bad_lines} bad lines are allowed (--max-bad-lines), got {summary.num_bad} so far:\n{shown}\n"
            "Correct them, or allow more; bad lines are left out. Nothing was written."
        )


def _check_any(job: Job, summary: Summary) -> None:
    if not summary.num_documents:
        names = ", ".join(map(str, job.inputs))
        raise DataError(
            f"no documents in {names} ({summary.num_empty} empty, {summary.num_bad} bad). Nothing was written."
        )
