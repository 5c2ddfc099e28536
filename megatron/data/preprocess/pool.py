"""Encoding chunks in several processes; results come in the order of the chunks, whatever the number of processes."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from megatron.data.preprocess.encode import Encoded, Encoder
from megatron.data.preprocess.sources import Record
from megatron.tokenizer import Tokenizer

_CHUNKS_AHEAD_PER_WORKER = 4

_of_this_process: tuple[Encoder, Tokenizer] | None = None


def encode_all(chunks: Iterable[list[Record]], encoder: Encoder, num_workers: int) -> Generator[Encoded]:
    """Yield the tokens of each chunk in order.

    Raises:
        RuntimeError: a process died; the others are ended.
    """
    if num_workers <= 1:
        tokenizer = encoder.make_tokenizer()
        yield from (encoder.encode(chunk, tokenizer) for chunk in chunks)
        return
    context = multiprocessing.get_context("fork")  # cheap; the pool starts all of them before it starts a thread
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start, initargs=(encoder,))
    try:
        yield from _in_order(pool, chunks, num_workers * _CHUNKS_AHEAD_PER_WORKER)
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"one of the {num_workers} encoding processes died (killed, or out of memory); nothing was written. "
            "Run again with a smaller --workers."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, chunks: Iterable[list[Record]], num_ahead: int) -> Iterator[Encoded]:
    waiting: deque[Future[Encoded]] = deque()
    for chunk in chunks:
        waiting.append(pool.submit(_encode, chunk))
        if len(waiting) >= num_ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _start(encoder: Encoder) -> None:
    global _of_this_process
    # The library's threads do not live on in a forked process: a child that used them would wait for ever.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _of_this_process = encoder, encoder.make_tokenizer()


def _encode(chunk: list[Record]) -> Encoded:
    if _of_this_process is None:
        raise RuntimeError("a process of the pool must be started by _start")
    encoder, tokenizer = _of_this_process
    return encoder.encode(chunk, tokenizer)
