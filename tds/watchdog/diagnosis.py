"""Who did not come: reports, verdict, stacks, torch's flight recorder."""

from __future__ import annotations

import itertools
import json
import linecache
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any

import torch

from tds.schedule import Action, Kind, Message
from tds.torch_api import flight_record

# Who did not come: found from what each rank says of itself when one has waited too long.

VERBS = {"Forward": "forward", "Backward": "backward", "BackwardInput": "backward", "BackwardWeight": "backward"}


@dataclass(frozen=True)
class Report:
    """What one rank is doing, in words, and whom it waits for.

    ``is_waiting`` tells one that waits for others from one that works or sleeps; ``waits_for`` is a rank, or None where
    it waits for a whole group.
    """

    is_waiting: bool
    waits_for: int | None
    since_s: float
    words: str

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Report:
        return cls(**json.loads(text))


@dataclass(frozen=True, eq=False)
class State:
    """What a rank is at. ``count`` grows with each wait, so that many short ones do not look like a long one."""

    phase: str
    action: Action | None
    waiting: tuple[str, Kind, Message] | None
    together: str | None
    count: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        """True for the same wait: the exchange makes a new tuple for each."""
        if not isinstance(other, State) or self.waiting is not other.waiting:
            return False
        own = self.phase, self.action, self.together, self.count
        return own == (other.phase, other.action, other.together, other.count)


def report(
    phase: str,
    action: Action | None,
    waiting: tuple[str, Kind, Message] | None,
    together: str | None,
    since_s: float,
    ranks: Sequence[int],
) -> Report:
    """Return what a rank says of itself.

    Args:
        phase: "train_batch", "eval_batch", or what it does outside of them.
        waiting: the message that it waits for; ``together``: the collective that it is in.
        ranks: the global ranks of its pipeline, by stage.
    """
    since = f"for {since_s:.1f} s"
    ahead = f" ahead of its {_name(action)}" if action is not None else ""
    if together is not None:
        return Report(True, None, since_s, f"has been {together}{ahead} {since}")
    if waiting is not None:
        doing, kind, message = waiting
        peer = f"stage {message.peer} (rank {ranks[message.peer]})"
        verb, to = ("waited", "from") if doing == "receiving" else ("tried to send", "to")
        what = f"the {_what(kind, message)} {to} {peer}"
        words = f"has {verb} {'for ' if doing == 'receiving' else ''}{what}{ahead} {since}"
        return Report(True, ranks[message.peer], since_s, words)
    if action is not None:
        return Report(False, None, since_s, f"has been in its {_name(action)} {since}")
    return Report(False, None, since_s, f"has been {phase} {since}")


def on_device(own: Report, action: Action | None) -> Report:
    """Return ``own`` with the action that the rank's device is at, where the host only queues its work."""
    return own if action is None else replace(own, words=f"{own.words}, its device is at its {_name(action)}")


def format_history(history: Iterable[tuple[str, Kind, Message] | str]) -> str:
    """Return the last messages, and the collectives between them, in words, the newest last."""
    return f"last messages: {', '.join(map(_format_message, list(history))) or 'none'}"


def _format_message(past: tuple[str, Kind, Message] | str) -> str:
    if isinstance(past, str):
        return past
    done, kind, message = past
    return f"{done} {_what(kind, message)} {'to' if done == 'sent' else 'from'} stage {message.peer}"


def verdict(
    reports: Mapping[int, Report], names: Sequence[str], asking: int, last_places: Mapping[int, str] | None = None
) -> str:
    """Return in words who did not come.

    Those who do not answer are stopped or gone. If all answer, it is the one at the end of the chain of waits that
    starts at ``asking``; where that ends in a collective or a circle, the one that has been at work for longest.

    Args:
        names: of every rank.
        last_places: where those who do not answer were last heard of, if they have left word.
    """
    silent = [rank for rank in range(len(names)) if rank not in reports]
    if silent:
        listed = ", ".join(names[rank] for rank in silent[:8]) + (f" and {len(silent) - 8} more" if silent[8:] else "")
        text = f"{listed} did not come and does not answer: stopped, dead or cut off"
        return text + "".join(
            f"; the last word of rank {rank} was: {place}" for rank, place in (last_places or {}).items()
        )
    rank, seen = asking, {asking}
    while (following := reports[rank].waits_for) is not None and following not in seen:
        rank = following
        seen.add(rank)
    if reports[rank].is_waiting:
        at_work = [each for each in reports if not reports[each].is_waiting]
        if not at_work:
            return f"no rank is at work, they wait for each other; {names[rank]} {reports[rank].words}"
        rank = max(at_work, key=lambda each: reports[each].since_s)
    return f"{names[rank]} did not come: it {reports[rank].words}"


def _what(kind: Kind, message: Message) -> str:
    chunk = f" chunk {message.chunk}" if message.chunk else ""
    return f"{kind.name.lower()} of micro-batch {message.micro_batch}{chunk}"


def _name(action: Action) -> str:
    chunk = f" chunk {action.chunk}" if action.chunk else ""
    return f"{VERBS[type(action).__name__]} of micro-batch {action.micro_batch}{chunk}"


# The last operations between ranks that this process has started, from torch's own flight recorder.
#
# The recorder runs in any case, over gloo and NCCL alike; it is read only once a rank is late.

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


# Where a thread is, as another thread of its process sees it: for ranks that are stuck.

DEEPEST = 12
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_INSTALLED = {"site-packages", "dist-packages"}
_OWN_FOLDERS = tuple(os.path.join(folder, "") for folder in (sysconfig.get_paths()["stdlib"], *torch.__path__))
"""Of what may lie elsewhere: Python's own modules, and torch, which is often built in a checkout."""


def main_frame() -> FrameType | None:
    """Return the innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def format_stack(frame: FrameType | None) -> str:
    """Return the innermost ``DEEPEST`` calls in the form of a traceback, the last call last."""
    if frame is None:
        return ""
    return "".join(traceback.format_list(traceback.extract_stack(frame, DEEPEST)))


def format_place(frame: FrameType | None) -> str:
    """Return the innermost call that is neither Python's nor an installed library's, such as "read (loader.py:12)"."""
    each = frame
    while each is not None and _is_library(each.f_code.co_filename):
        each = each.f_back
    each = each or frame
    return f"{each.f_code.co_name} ({os.path.basename(each.f_code.co_filename)}:{each.f_lineno})" if each else "?"


def communication(frame: FrameType | None) -> str | None:
    """Return the operation between ranks that a thread waits in, such as "all_reduce"; None if it is in none.

    An operation that was started earlier is waited for by ``work.wait()``, which leaves no frame of its own.
    """
    name, each = None, frame
    while each is not None:
        if each.f_code.co_filename.endswith(_COLLECTIVES):
            name = each.f_code.co_name
        each = each.f_back
    if name is None and frame is not None and ".wait(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        name = "an operation that it has started"
    return name


def _is_library(path: str) -> bool:
    return path.startswith(("<", *_OWN_FOLDERS)) or not _INSTALLED.isdisjoint(path.split(os.sep))
