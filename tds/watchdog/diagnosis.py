"""Rank reports, and the verdict that names the missing rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from tds.schedule import Action, Message, MessageType

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
    """A rank's state. ``count`` changes with each wait, so that many short waits do not look like a long one."""

    phase: str
    action: Action | None
    waiting: tuple[str, MessageType, Message] | None
    collective: str | None
    count: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        """Compare states; ``waiting`` by identity, because the communicator creates a new tuple for each wait."""
        if not isinstance(other, State) or self.waiting is not other.waiting:
            return False
        fields = self.phase, self.action, self.collective, self.count
        return fields == (other.phase, other.action, other.collective, other.count)


def report(
    phase: str,
    action: Action | None,
    waiting: tuple[str, MessageType, Message] | None,
    collective: str | None,
    since_s: float,
    ranks: Sequence[int],
) -> Report:
    """Build a rank's report.

    Args:
        phase: "in train_batch", "in eval_batch", or the activity of the rank outside of these calls.
        action: the current action of the schedule.
        waiting: the message that the rank waits for.
        collective: the collective that the rank is in.
        since_s: duration of this state in seconds.
        ranks: the global ranks of the rank's pipeline, by stage.
    """
    since = f"for {since_s:.1f} s"
    before_action = f" before its {_format_action(action)}" if action is not None else ""
    if collective is not None:
        return Report(True, None, since_s, f"has been {collective}{before_action} {since}")
    if waiting is not None:
        direction, message_type, message = waiting
        peer = f"stage {message.peer} (rank {ranks[message.peer]})"
        verb, to = ("waited", "from") if direction == "receiving" else ("tried to send", "to")
        described = f"the {_format_content(message_type, message)} {to} {peer}"
        words = f"has {verb} {'for ' if direction == 'receiving' else ''}{described}{before_action} {since}"
        return Report(True, ranks[message.peer], since_s, words)
    if action is not None:
        return Report(False, None, since_s, f"has been in its {_format_action(action)} {since}")
    return Report(False, None, since_s, f"has been {phase} {since}")


def with_device_action(host_report: Report, action: Action | None) -> Report:
    """Add the device's current action to ``host_report``.

    Args:
        action: the action that the device runs; None: unknown, or the host does not queue work on a device.
    """
    return (
        host_report
        if action is None
        else replace(host_report, words=f"{host_report.words}; its device runs its {_format_action(action)}")
    )


def format_history(history: Iterable[tuple[str, MessageType, Message] | str]) -> str:
    """Format the last messages and collectives as one line, the newest last."""
    return f"last messages: {', '.join(map(_format_message, list(history))) or 'none'}"


def _format_message(entry: tuple[str, MessageType, Message] | str) -> str:
    if isinstance(entry, str):
        return entry
    done, message_type, message = entry
    return f"{done} {_format_content(message_type, message)} {'to' if done == 'sent' else 'from'} stage {message.peer}"


def verdict(
    reports: Mapping[int, Report],
    names: Sequence[str],
    alarm_rank: int,
    last_locations: Mapping[int, str] | None = None,
) -> str:
    """Name the missing rank in one sentence.

    Ranks without a report are stopped or gone. If all ranks have reported, the missing rank is the last rank in the
    chain of waits that starts at ``alarm_rank``. If the chain ends in a collective or a cycle, the missing rank is the
    rank that has been working for the longest time.

    Args:
        reports: the reports, by rank.
        names: the name of every rank.
        alarm_rank: the rank that raised the alarm.
        last_locations: last known locations of ranks without a report.
    """
    silent = [rank for rank in range(len(names)) if rank not in reports]
    if silent:
        listed = ", ".join(names[rank] for rank in silent[:8]) + (f" and {len(silent) - 8} more" if silent[8:] else "")
        text = f"{listed} is missing and does not answer: stopped, dead or disconnected"
        return text + "".join(
            f"; last known location of rank {rank}: {location}" for rank, location in (last_locations or {}).items()
        )
    rank, seen = alarm_rank, {alarm_rank}
    while (next_rank := reports[rank].waits_for) is not None and next_rank not in seen:
        rank = next_rank
        seen.add(rank)
    if reports[rank].is_waiting:
        working = [candidate for candidate in reports if not reports[candidate].is_waiting]
        if not working:
            return f"no rank is working, all ranks wait for each other; {names[rank]} {reports[rank].words}"
        rank = max(working, key=lambda candidate: reports[candidate].since_s)
    return f"{names[rank]} is missing: it {reports[rank].words}"


def _format_content(message_type: MessageType, message: Message) -> str:
    chunk = f" chunk {message.chunk}" if message.chunk else ""
    return f"{message_type.name.lower()} of micro-batch {message.micro_batch}{chunk}"


def _format_action(action: Action) -> str:
    chunk = f" chunk {action.chunk}" if action.chunk else ""
    return f"{VERBS[type(action).__name__]} of micro-batch {action.micro_batch}{chunk}"
