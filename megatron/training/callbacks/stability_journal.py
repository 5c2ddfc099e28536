"""``stability.jsonl``: the journal of skipped data and rollbacks.

Each line is a record with its number: a step that was skipped, or a return to a checkpoint. A record is on the disk
before the next step begins; a disk that is full costs a warning, not the run. A run that goes on from a checkpoint
drops the records beyond it, for they come again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from megatron import files, log

NAME = "stability.jsonl"


class EventLog:
    """The records of one run folder.

    Args:
        known: records that belong to what the run goes on from; later ones are dropped.
    """

    def __init__(self, folder: Path, known: int = 0) -> None:
        self.path = folder / NAME
        everything = read_journal(self.path)
        self.records = [record for record in everything if record["number"] <= known]
        if len(self.records) != len(everything):
            self._write()

    def add(self, record: dict[str, Any]) -> None:
        """Add one record; its number must be the next."""
        self.records.append(record)
        self._write()

    def _write(self) -> None:
        try:
            files.replace_bytes(self.path, b"".join(orjson.dumps(record) + b"\n" for record in self.records))
        except OSError as error:
            log.warning(f"{self.path} could not be written ({error}); the next record tries again with all of them")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the records of a journal, none where there is no file."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
