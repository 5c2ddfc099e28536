"""Pipeline schedules: pure functions that return the ordered actions of each stage."""

from typing import Any

from tds.renamed import warn_renamed
from tds.schedule.actions import (
    LOOP,
    PLACEMENTS,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Message,
    MessageType,
    Order,
    Placement,
    V,
    received_message,
    sent_message,
)
from tds.schedule.schedule_file import FileSchedule, read_schedule, write_schedule
from tds.schedule.schedules import (
    SCHEDULE_NAMES,
    forward_only,
    gpipe,
    interleaved,
    one_forward_one_backward,
    schedule_named,
    zero_bubble_h1,
)
from tds.schedule.simulate import Choice, Costs, Span, Timeline, choose, simulate
from tds.schedule.v_schedules import dual_pipe_v, zero_bubble_v
from tds.schedule.validate import ScheduleError, validate

_FORMER_NAMES = {"Kind": "MessageType", "received": "received_message", "sent": "sent_message"}


def __getattr__(name: str) -> Any:
    """Look up a function or class under its former name, with a warning."""
    if name not in _FORMER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed(f"{__name__}.{name}", _FORMER_NAMES[name])
    return globals()[_FORMER_NAMES[name]]


__all__ = [
    "LOOP",
    "PLACEMENTS",
    "SCHEDULE_NAMES",
    "Action",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Choice",
    "Costs",
    "FileSchedule",
    "Forward",
    "Message",
    "MessageType",
    "Order",
    "Placement",
    "ScheduleError",
    "Span",
    "Timeline",
    "V",
    "choose",
    "dual_pipe_v",
    "forward_only",
    "gpipe",
    "interleaved",
    "one_forward_one_backward",
    "read_schedule",
    "received_message",
    "schedule_named",
    "sent_message",
    "simulate",
    "validate",
    "write_schedule",
    "zero_bubble_h1",
    "zero_bubble_v",
]
