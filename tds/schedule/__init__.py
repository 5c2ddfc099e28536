"""Pipeline schedules: pure functions that return the ordered actions of each stage."""

from tds.schedule.actions import (
    LOOP,
    PLACEMENTS,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Kind,
    Message,
    Order,
    Placement,
    V,
    received,
    sent,
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
    "Kind",
    "Message",
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
    "received",
    "schedule_named",
    "sent",
    "simulate",
    "validate",
    "write_schedule",
    "zero_bubble_h1",
    "zero_bubble_v",
]
