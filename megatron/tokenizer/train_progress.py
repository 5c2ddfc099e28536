"""Progress log lines while the text for a vocabulary is read and while the vocabulary is trained."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType

from megatron import log

INTERVAL_S = 10.0
"""Seconds between two log lines."""


class TrainingProgress:
    """A context manager around reading and training that logs a line every ``INTERVAL_S`` seconds.

    A background thread writes the lines, because the libraries train in a single call, which releases the GIL.

    Args:
        description: name of the training, such as "a vocabulary of 8192 tokens (bpe)".
    """

    def __init__(self, description: str) -> None:
        self._description = description
        self._num_documents = self._num_bytes = 0
        self._is_read = False
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="training progress", daemon=True)

    def __enter__(self) -> TrainingProgress:
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def reading(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield ``texts`` and count them."""
        for text in texts:
            self._num_documents += 1
            self._num_bytes += len(text.encode())
            yield text
        self._is_read = True

    def _report(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            elapsed = log.human_time(time.monotonic() - self._started)
            documents = f"{self._num_documents} document{'' if self._num_documents == 1 else 's'}"
            read = f"{documents}, {self._num_bytes / 1e6:.1f} MB"
            log.info(
                f"{elapsed}: training {self._description} on {read}" if self._is_read else f"{elapsed}: read {read}"
            )
