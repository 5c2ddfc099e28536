"""What a start of the ranks that is not followed by another one makes of the job: its exit code, and one line.

"75 if durable" is 75 once a checkpoint of this job is durable, or when SLURM's warning was the first signal; else the
first signal's own code.

| the ranks ended | the job was asked to stop | the job's code | the line |
|---|---|---|---|
| by a second signal, at once | yes | 128 + its number | that a second signal came |
| by the request, for which they were not ready | yes | 75 if durable | how to go on; who ended, unless 75 |
| with 1 or 4, before the request, and would start again | then | 75 if durable | the same |
| with 75 | perhaps | 75 | none: rank 0 has said it |
| all with 2 | perhaps | 2 | none: rank 0 has said it |
| otherwise | perhaps | the culprit's | who ended, and why it does not start again |
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass

from megatron.launch.restarts import RESTARTED
from megatron.launch.signals import RESUMABLE, Signals
from megatron.launch.verdict import Exit

BY_REQUEST = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1)


@dataclass(frozen=True, kw_only=True)
class End:
    """How one start ended, as this node knows it.

    ``late`` holds what is said of ranks that took longer than --stop-grace; ``is_said``: a rank of this node has
    printed why the job ends; ``is_alike``: the ranks of this node, one of which says so, ended with 2 of themselves.
    """

    code: int
    verdict: Exit | None
    exits: Collection[Exit]
    late: str
    was_asked_to_stop: bool
    is_said: bool
    is_alike: bool

    @property
    def is_by_request(self) -> bool:
        """Whether the ranks ended of a signal that they had no handler for yet."""
        return self.verdict is not None and self.verdict.status in BY_REQUEST

    def __str__(self) -> str:
        """Say in words what ended this start."""
        verdict = self.verdict
        if verdict is None or verdict.status in (0, RESUMABLE):
            ended = f"ended by {verdict}" if verdict is not None else "ended by another node, or node 0 was lost"
            return self.late or ended
        also = [str(one.rank) for one in self.exits if one.is_stuck and one.rank != verdict.rank]
        told = f"ended by {verdict}"
        if verdict.is_stuck and also:
            told += f", as had rank {', '.join(also)}"
        if verdict.words and not self.is_said:
            told += f": {verdict.words}"
        return told + (f" ({verdict.hint})" if verdict.hint else "")


def settle(end: End, signals: Signals, durable: int | None, *, restarts: int, reason: str) -> tuple[int, str | None]:
    """Return the job's exit code and the line that says so, by the table at the top of this file.

    Args:
        durable: the step of the newest checkpoint of this job.
        restarts: --max-restarts.
        reason: why there is no other start; may be empty.
    """
    if signals.is_ended:
        code = 128 + signals.seen[1]
        return code, f"ended at once by a second signal, code {code}"
    code, is_between = end.code, restarts > 0 and end.code in RESTARTED and not end.was_asked_to_stop
    if signals.is_asked_to_stop and end.is_by_request:
        code = signals.code if durable is None else RESUMABLE
    elif signals.is_asked_to_stop and is_between and durable is not None:
        code = RESUMABLE
    if code == RESUMABLE != end.code:
        return code, f"{signals.first_name} while the ranks could not save; {_how_to_go_on(durable)}; code {code}"
    if code == RESUMABLE or (code == 2 and end.is_alike):
        return code, None
    return code, f"{end}{f'; {reason}' if reason else ''}; the job ends with code {code}"


def _how_to_go_on(durable: int | None) -> str:
    if durable is None:
        return "nothing was lost: start the same command later"
    return f"the checkpoint of step {durable} is durable: go on with the same command and --load RUN_FOLDER"
