"""Reports of ranks, and the verdict that names the missing rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from tds.schedule import Action, Kind, Message

VERBS = {"Forward": "forward", "Backward": "backward", "BackwardInput": "backward", "BackwardWeight": "backward"}


@dataclass(frozen=True)
class Report:
    """Report of one rank's current operation.

    Attributes:
        is_waiting: the rank waits for other ranks, instead of working or sleeping.
        waits_for: the rank that this rank waits for; None if it waits for a group, or does not wait.
        since_s: duration of the current operation in seconds.
        words: description of the operation, which follows the rank's name in messages.
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
    """State of a rank. ``count`` changes with each wait, so that many short waits do not look like a long one."""

    phase: str
    action: Action | None
    waiting: tuple[str, Kind, Message] | None
    together: str | None
    count: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        """Return True for equal states with the identical wait; the communicator creates a new tuple for each wait."""
        if not isinstance(other, State) or self.waiting is not other.waiting:
            return False
        fields = self.phase, self.action, self.together, self.count
        return fields == (other.phase, other.action, other.together, other.count)


def report(
    phase: str,
    action: Action | None,
    waiting: tuple[str, Kind, Message] | None,
    together: str | None,
    since_s: float,
    ranks: Sequence[int],
) -> Report:
    """Return the report of a rank.

    Args:
        phase: "in train_batch", "in eval_batch", or the activity of the rank outside of these calls.
        action: the current action of the schedule.
        waiting: the message that the rank waits for.
        together: the collective that the rank is in.
        since_s: duration of this state in seconds.
        ranks: the global ranks of the rank's pipeline, by stage.
    """
    since = f"for {since_s:.1f} s"
    ahead = f" before its {_name(action)}" if action is not None else ""
    if together is not None:
        return Report(True, None, since_s, f"has been {together}{ahead} {since}")
    if waiting is not None:
        doing, message_type, message = waiting
        peer = f"stage {message.peer} (rank {ranks[message.peer]})"
        verb, to = ("waited", "from") if doing == "receiving" else ("tried to send", "to")
        described = f"the {_what(message_type, message)} {to} {peer}"
        words = f"has {verb} {'for ' if doing == 'receiving' else ''}{described}{ahead} {since}"
        return Report(True, ranks[message.peer], since_s, words)
    if action is not None:
        return Report(False, None, since_s, f"has been in its {_name(action)} {since}")
    return Report(False, None, since_s, f"has been {phase} {since}")


def on_device(own: Report, action: Action | None) -> Report:
    """Return the report ``own`` with the device's current action added.

    Args:
        action: the action that the device runs; None: unknown, or the host does not queue work on a device.
    """
    return own if action is None else replace(own, words=f"{own.words}; its device runs its {_name(action)}")


def format_history(history: Iterable[tuple[str, Kind, Message] | str]) -> str:
    """Return a line with the last messages and collectives, the newest last."""
    return f"last messages: {', '.join(map(_format_message, list(history))) or 'none'}"


def _format_message(past: tuple[str, Kind, Message] | str) -> str:
    if isinstance(past, str):
        return past
    done, message_type, message = past
    return f"{done} {_what(message_type, message)} {'to' if done == 'sent' else 'from'} stage {message.peer}"


def verdict(
    reports: Mapping[int, Report], names: Sequence[str], asking: int, last_places: Mapping[int, str] | None = None
) -> str:
    """Return a sentence that names the missing rank.

    Ranks without a report are stopped or gone. If all ranks have reported, the missing rank is the last rank in the
    chain of waits that starts at ``asking``. If the chain ends in a collective or a cycle, the missing rank is the rank
    that has been working for the longest time.

    Args:
        reports: the reports, by rank.
        names: the name of every rank.
        asking: the rank that raised the alarm.
        last_places: last known locations of ranks without a report.
    """
    silent = [rank for rank in range(len(names)) if rank not in reports]
    if silent:
        listed = ", ".join(names[rank] for rank in silent[:8]) + (f" and {len(silent) - 8} more" if silent[8:] else "")
        text = f"{listed} is missing and does not answer: stopped, dead or disconnected"
        return text + "".join(
            f"; last known location of rank {rank}: {location}" for rank, location in (last_places or {}).items()
        )
    rank, seen = asking, {asking}
    while (next_rank := reports[rank].waits_for) is not None and next_rank not in seen:
        rank = next_rank
        seen.add(rank)
    if reports[rank].is_waiting:
        working = [each for each in reports if not reports[each].is_waiting]
        if not working:
            return f"no rank is working, all ranks wait for each other; {names[rank]} {reports[rank].words}"
        rank = max(working, key=lambda each: reports[each].since_s)
    return f"{names[rank]} is missing: it {reports[rank].words}"


def _what(kind: Kind, message: Message) -> str:
    chunk = f" chunk {message.chunk}" if message.chunk else ""
    return f"{kind.name.lower()} of micro-batch {message.micro_batch}{chunk}"


def _name(action: Action) -> str:
    chunk = f" chunk {action.chunk}" if action.chunk else ""
    return f"{VERBS[type(action).__name__]} of micro-batch {action.micro_batch}{chunk}"
