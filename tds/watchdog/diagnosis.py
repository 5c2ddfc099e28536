"""Which rank is missing: each rank's report, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from tds.schedule import Action, Kind, Message

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
