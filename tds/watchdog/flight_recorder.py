"""This process's last collectives, from torch's flight recorder.

The recorder is always on, with gloo and with NCCL. It is only read when a rank is late.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tds.torch_api import flight_record

NUM_OPERATIONS = 20
_CLOCK_S = time.time() - time.monotonic()
"""Offset from the monotonic clock to the wall clock at import; torch records wall-clock times."""


@dataclass(frozen=True)
class Operation:
    """One send, receive or collective; ``start_s`` is a wall-clock time."""

    words: str
    start_s: float


def operations(groups: Mapping[str, str] | None = None) -> list[Operation]:
    """List the operations that this process has started, the newest last. Background threads are excluded.

    Args:
        groups: maps process group names to descriptions.
    """
    record = flight_record()
    main = threading.main_thread().ident
    background = {str(item.ident) for item in threading.enumerate() if item.ident != main}
    entries = [item for item in record.get("entries", []) if item.get("thread_id") not in background]
    entries.sort(key=lambda item: int(item["record_id"]))
    return [Operation(_describe(item, groups or {}), int(item["time_created_ns"]) * 1e-9) for item in entries]


def idle_s() -> float:
    """Return the seconds since this process started its last operation; infinite if it has started none.

    torch records wall-clock times. If the wall clock has been changed since this module's import, the operation may
    have been recorded by the old or by the new clock, so the shorter duration is returned.
    """
    recorded = operations()
    if not recorded:
        return float("inf")
    now = time.monotonic()
    since = [now + clock_s - recorded[-1].start_s for clock_s in (_CLOCK_S, time.time() - now)]
    return min((seconds for seconds in since if seconds >= 0), default=0.0)


def format_operations(groups: Mapping[str, str]) -> str:
    """Format the last ``NUM_OPERATIONS`` operations as one line, the newest last."""
    last = [operation.words for operation in operations(groups)[-NUM_OPERATIONS:]]
    runs = [(words, len(list(run))) for words, run in itertools.groupby(last)]
    listed = [words if count == 1 else f"{count} x {words}" for words, count in runs]
    return f"last {NUM_OPERATIONS} operations: {', '.join(listed) or 'none'}"


def _describe(entry: Mapping[str, Any], groups: Mapping[str, str]) -> str:
    """Describe an operation, such as "all_reduce float[2, 3] (tensor)"."""
    name = str(entry["profiling_name"]).partition(":")[2]
    group_name, description = entry["process_group"]
    dtypes, shapes = entry["input_dtypes"], entry["input_sizes"]
    tensor = f" {str(dtypes[0]).lower()}{shapes[0]}" if dtypes and shapes else ""
    fallback = description if description not in ("", "undefined") else f"group {group_name}"
    return f"{name}{tensor} ({groups.get(str(group_name), fallback)})"
