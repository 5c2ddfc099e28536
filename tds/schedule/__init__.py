"""Schedules as data: pure functions that say what each stage does, in order."""

from tds.schedule.actions import Action, Backward, BackwardInput, BackwardWeight, Forward
from tds.schedule.messages import Kind, Message, received, sent
from tds.schedule.orders import forward_only, gpipe, one_forward_one_backward, schedule_named
from tds.schedule.validate import ScheduleError, validate

__all__ = [
    "Action",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Forward",
    "Kind",
    "Message",
    "ScheduleError",
    "forward_only",
    "gpipe",
    "one_forward_one_backward",
    "received",
    "schedule_named",
    "sent",
    "validate",
]
