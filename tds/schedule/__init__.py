"""Schedules as data: pure functions that say what each stage does, in order."""

from tds.schedule.actions import Action, Backward, BackwardInput, BackwardWeight, Forward
from tds.schedule.choose import Choice, choose
from tds.schedule.costs import Costs
from tds.schedule.interleaved import interleaved
from tds.schedule.messages import Kind, Message, received, sent
from tds.schedule.one_chunk import gpipe, one_forward_one_backward
from tds.schedule.orders import SCHEDULE_NAMES, forward_only, schedule_named
from tds.schedule.running import ScheduleError
from tds.schedule.simulate import Span, Timeline, simulate
from tds.schedule.sizes import Order
from tds.schedule.validate import validate
from tds.schedule.zero_bubble import zero_bubble_h1

__all__ = [
    "SCHEDULE_NAMES",
    "Action",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Choice",
    "Costs",
    "Forward",
    "Kind",
    "Message",
    "Order",
    "ScheduleError",
    "Span",
    "Timeline",
    "choose",
    "forward_only",
    "gpipe",
    "interleaved",
    "one_forward_one_backward",
    "received",
    "schedule_named",
    "sent",
    "simulate",
    "validate",
    "zero_bubble_h1",
]
