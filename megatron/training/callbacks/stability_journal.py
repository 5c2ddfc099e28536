"""``stability.jsonl``: the journal of skipped data and rollbacks.

Each line is a numbered record of a skipped step or a rollback. A record is written to disk before the next step
begins; if the disk is full, a warning is logged and the run continues. A run that resumes from a checkpoint drops later
records, because their steps are repeated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from megatron import files, log

JOURNAL_NAME = "stability.jsonl"


class EventLog:
    """One run folder's journal.

    Args:
        num_known: record count up to the checkpoint that the run resumes from; later records are dropped.
    """

    def __init__(self, folder: Path, num_known: int = 0) -> None:
        self.path = folder / JOURNAL_NAME
        all_records = read_journal(self.path)
        self.records = [record for record in all_records if record["number"] <= num_known]
        if len(self.records) != len(all_records):
            self._write()

    def add(self, record: dict[str, Any]) -> None:
        """Append one record; its number must be the next one."""
        self.records.append(record)
        self._write()

    def _write(self) -> None:
        """Write all records to the file atomically; log a warning if that fails."""
        try:
            files.replace_bytes(self.path, b"".join(orjson.dumps(record) + b"\n" for record in self.records))
        except OSError as error:
            log.warning(f"{self.path} could not be written ({error}); the next record retries with all records")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Read a journal; an empty list if there is no file."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
