"""A conversation line by line: each line is a prompt, and its answer comes as it is made."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from megatron.generate.writer import Writer
from megatron.mpu.groups import Group

ROUND_S = 60.0
"""Ranks hear from the one that reads the lines so often: a person may take longer than ranks wait for each other."""


def talk(writer: Writer, world: Group) -> None:
    """Answer each line of standard input on standard output, until it ends. Collective; rank 0 reads and writes."""
    for line in _lines(world):
        if not line.strip():
            continue
        shown: list[str] = []

        def show(text: str, shown: list[str] = shown) -> None:
            shown.append(text)
            if world.rank == 0:
                sys.stdout.write(text)
                sys.stdout.flush()

        (answer,) = writer.answer([line], show)
        if world.rank == 0:
            sys.stdout.write(answer.text.removeprefix("".join(shown)) + "\n")  # what was no whole character, too
            sys.stdout.flush()


def _lines(world: Group) -> Iterator[str]:
    """Yield the lines of rank 0's standard input on every rank."""
    asked: queue.Queue[str] = queue.Queue()
    if world.rank == 0:
        threading.Thread(target=_read_lines, args=(asked,), daemon=True).start()
    while True:
        line = _next(asked, world)
        if line == "":
            return
        if line is not None:
            yield line.removesuffix("\n")


def _read_lines(asked: queue.Queue[str]) -> None:
    while True:
        line = sys.stdin.readline()
        asked.put(line)
        if line == "":
            return


def _next(asked: queue.Queue[str], world: Group) -> str | None:
    """Return the next line, "" at the end, None when none came in a round."""
    box: list[Any] = [None]
    if world.rank == 0:
        with suppress(queue.Empty):
            box = [asked.get(timeout=ROUND_S)]
    if world.size > 1:
        dist.broadcast_object_list(box, src=world.ranks[0], group=world.handle)
    return box[0]
