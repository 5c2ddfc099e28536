"""One process that encodes: it asks for units one after another, and tells how far it is."""

from __future__ import annotations

import errno
import gc
import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from megatron.child_process import die_with_parent
from megatron.data.preprocess.compressed import check_is_whole
from megatron.data.preprocess.counts import Counts, total
from megatron.data.preprocess.encode import Encoder, in_chunks
from megatron.data.preprocess.parts import Part, Parts, PartWriter
from megatron.data.preprocess.records import Unit, compression_of
from megatron.data.preprocess.units import read_unit
from megatron.errors import DataError

_SECONDS_BETWEEN_REPORTS = 0.2


@dataclass(frozen=True)
class Running:
    """A unit is being encoded: what was counted in it so far."""

    counts: Counts


@dataclass(frozen=True)
class Finished:
    """A unit is finished; ``is_new`` unless its part was there already."""

    part: Part
    is_new: bool


@dataclass(frozen=True)
class Failed:
    """A unit cannot be encoded, and why; ``error_number`` is that of the operating system, 0 if it is none."""

    reason: str
    is_data_error: bool = False
    error_number: int = 0
    where: str = ""


Report = Running | Finished | Failed


@dataclass(frozen=True)
class Work:
    """All that a worker needs; it is inherited by the fork, never pickled."""

    units: Sequence[Unit]
    encoder: Encoder
    parts: Parts


def run(connection: Connection, work: Work, parent: int) -> None:
    """Encode each unit whose number comes from ``connection``, until None does; reports go back the same way."""
    _become_worker(parent)
    try:
        while (number := connection.recv()) is not None:
            connection.send(_do(work, work.units[number], connection))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the job is gone


def _become_worker(parent: int) -> None:
    die_with_parent()
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the job ends its workers, also on Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # what is inherited stays shared: the collector would write to each page of it


def _do(work: Work, unit: Unit, connection: Connection) -> Report:
    try:
        if part := work.parts.finished(unit.number):
            return Finished(part, is_new=False)
        return Finished(_encode(work, unit, connection), is_new=True)
    except DataError as error:
        return Failed(str(error), is_data_error=True)
    except OSError as error:
        return Failed(str(error), error_number=error.errno or errno.EIO, where=traceback.format_exc())
    except Exception as error:
        return Failed(f"{type(error).__name__}: {error}", where=traceback.format_exc())


def _encode(work: Work, unit: Unit, connection: Connection) -> Part:
    encoder, counts, told = work.encoder, Counts(), time.monotonic()
    is_checked = compression_of(unit.path) is None
    with PartWriter(work.parts, unit.number) as writer:
        for chunk in in_chunks(read_unit(unit, encoder.json_keys)):
            encoded = encoder.encode(chunk, unit.format)
            if encoded.bad and not is_checked:  # behind a flipped bit comes rubbish, and the checksum only at the end
                check_is_whole(unit.path)
                is_checked = True
            counts = total((counts, encoded.counts))
            writer.add(encoded, counts)
            if encoded.bad or time.monotonic() - told >= _SECONDS_BETWEEN_REPORTS:
                connection.send(Running(counts))
                told = time.monotonic()
        return writer.finish()
