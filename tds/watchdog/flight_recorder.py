"""The last collectives of this process, from torch's flight recorder.

The recorder runs in any case, over gloo and NCCL alike; it is read only once a rank is late.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tds.torch_api import flight_record

NUMBER = 20
_CLOCK_S = time.time() - time.monotonic()
"""The wall clock, in which torch's times are, against the one that nobody sets; as it was at first."""


@dataclass(frozen=True)
class Operation:
    """One send, receive or collective; ``began_s`` is on the wall clock."""

    words: str
    began_s: float


def operations(groups: Mapping[str, str] | None = None) -> list[Operation]:
    """Return what this process has started, the newest last, but for what threads of its own did in the background.

    Args:
        groups: the name of a process group -> what to call it.
    """
    traced = flight_record()
    main = threading.main_thread().ident
    background = {str(each.ident) for each in threading.enumerate() if each.ident != main}
    entries = [each for each in traced.get("entries", []) if each.get("thread_id") not in background]
    entries.sort(key=lambda each: int(each["record_id"]))
    return [Operation(_words(each, groups or {}), int(each["time_created_ns"]) * 1e-9) for each in entries]


def idle_s() -> float:
    """Return the seconds since this process has started an operation; infinite if it has started none.

    Where the wall clock was set meanwhile, the operation may be of before or after that: the shorter time counts.
    """
    found = operations()
    if not found:
        return float("inf")
    now = time.monotonic()
    since = [now + clock_s - found[-1].began_s for clock_s in (_CLOCK_S, time.time() - now)]
    return min((each for each in since if each >= 0), default=0.0)


def format_operations(groups: Mapping[str, str]) -> str:
    """Return the last ``NUMBER`` operations in words, the newest last."""
    last = [each.words for each in operations(groups)[-NUMBER:]]
    runs = [(words, len(list(run))) for words, run in itertools.groupby(last)]
    listed = [words if number == 1 else f"{number} x {words}" for words, number in runs]
    return f"last {NUMBER} operations: {', '.join(listed) or 'none'}"


def _words(entry: Mapping[str, Any], groups: Mapping[str, str]) -> str:
    """Return an operation such as "all_reduce float[2, 3] (tensor)"."""
    name = str(entry["profiling_name"]).partition(":")[2]
    number, described = entry["process_group"]
    dtypes, sizes = entry["input_dtypes"], entry["input_sizes"]
    tensor = f" {str(dtypes[0]).lower()}{sizes[0]}" if dtypes and sizes else ""
    fallback = described if described not in ("", "undefined") else f"group {number}"
    return f"{name}{tensor} ({groups.get(str(number), fallback)})"
