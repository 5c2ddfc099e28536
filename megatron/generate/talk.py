"""A conversation line by line: each line is a prompt, and its answer comes as it is made."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

from megatron import log
from megatron.errors import DataError
from megatron.generate.writer import Writer
from megatron.mpu.groups import Group

ROUND_S = 60.0
"""Ranks hear from the one that reads the lines so often: a person may take longer than ranks wait for each other."""


def talk(writer: Writer, world: Group) -> None:
    """Answer each line of standard input on standard output, until it ends. Collective; rank 0 reads and writes.

    A line that cannot be answered is told, and the next one is read.
    """
    for line in _lines(world):
        if not line.strip():
            continue
        try:
            _answer(writer, _text(line), is_teller=world.rank == 0)
        except DataError as error:  # on every rank, ahead of anything that they do together
            log.info(str(error))


def _text(line: bytes) -> str:
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        raise DataError(f"a line must be a text in UTF-8: {error}") from None


def _answer(writer: Writer, text: str, *, is_teller: bool) -> None:
    shown: list[str] = []

    def show(piece: str) -> None:
        shown.append(piece)
        if is_teller:
            sys.stdout.write(piece)
            sys.stdout.flush()

    (answer,) = writer.answer([text], show)
    if is_teller:
        sys.stdout.write(answer.text.removeprefix("".join(shown)) + "\n")  # what was no whole character, too
        sys.stdout.flush()


def _lines(world: Group) -> Iterator[bytes]:
    """Yield the lines of rank 0's standard input on every rank."""
    asked: queue.Queue[bytes] = queue.Queue()
    if world.rank == 0:
        threading.Thread(target=_read_lines, args=(asked,), daemon=True).start()
    while True:
        line = _next(asked, world)
        if line == b"":
            return
        if line is not None:
            yield line


def _read_lines(asked: queue.Queue[bytes]) -> None:
    while True:
        line = sys.stdin.buffer.readline()
        asked.put(line)
        if line == b"":
            return


def _next(asked: queue.Queue[bytes], world: Group) -> bytes | None:
    """Return the next line, nothing at the end, None when none came in a round."""
    line = None
    if world.rank == 0:
        with suppress(queue.Empty):
            line = asked.get(timeout=ROUND_S)
    return world.broadcast_object(line)
