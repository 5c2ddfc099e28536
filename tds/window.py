"""How many messages a stage may have on their way to a neighbour before it waits for the oldest.

Without a limit a stage that runs ahead, as the first does in an evaluation, would keep all that it has sent. With one
a schedule can come to stand still: every stage waits to send, and none gets to the action that would take a message;
around a ring of chunks this really happens. Which limits are safe depends on the whole schedule, so each is tried on
it. The trial is strict: it counts messages that are not taken, while a real sender is freed when the receive is
posted, which is earlier, and it holds the action back, while a real stage does it first and waits after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from tds.schedule import Action, ScheduleError, validate


@functools.lru_cache(maxsize=32)
def send_window(
    order: Callable[[int, int, int], Sequence[Action]],
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    is_training: bool = True,
) -> int:
    """Return a limit with which the schedule runs to its end: p + 1 where that is enough.

    Raises:
        ScheduleError: it does not run whatever the limit.
    """
    stages = [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]
    window, all_of_them = num_stages + 1, num_micro_batches * num_chunks
    while window < all_of_them:
        try:
            validate(stages, num_micro_batches, num_chunks=num_chunks, is_training=is_training, window=window)
            return window
        except ScheduleError:
            window *= 2
    validate(stages, num_micro_batches, num_chunks=num_chunks, is_training=is_training)
    return all_of_them
