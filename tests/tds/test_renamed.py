"""Former names of attributes and functions warn and return what the current names return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tds import schedule
from tds.deepspeed.engine import PipelineEngine
from tds.param_info import Shard
from tds.renamed import Renamed


@dataclass(frozen=True, slots=True)
class Ruler:
    """A class with a renamed field, property and method."""

    length: int = 3
    size = Renamed("length")
    twice = Renamed("double")
    of_size = Renamed("from_length")

    def double(self) -> int:
        return 2 * self.length

    @classmethod
    def from_length(cls, length: int) -> Ruler:
        return cls(length)


def test_former_name_warns_with_class_and_current_name() -> None:
    with pytest.warns(DeprecationWarning, match="Ruler.size is now length; the next release removes") as record:
        assert Ruler(5).size == 5
    assert record[0].filename == __file__


def test_former_names_of_methods_and_class_methods_are_bound() -> None:
    with pytest.warns(DeprecationWarning, match="Ruler.twice"):
        assert Ruler(5).twice() == 10
    with pytest.warns(DeprecationWarning, match="Ruler.of_size"):
        assert Ruler.of_size(4) == Ruler(4)


@pytest.mark.parametrize(
    ("former", "current"), [("Kind", "MessageType"), ("received", "received_message"), ("sent", "sent_message")]
)
def test_schedule_package_has_former_names(former: str, current: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"tds.schedule.{former} is now {current}"):
        value: Any = getattr(schedule, former)
    assert value is getattr(schedule, current)


def test_schedule_package_rejects_unknown_names() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'sending'"):
        _ = schedule.sending


def test_placement_has_former_names() -> None:
    placement = schedule.Placement(2, 2, schedule.V)
    with pytest.warns(DeprecationWarning, match="Placement"):
        former = placement.kind, placement.num_pieces, placement.piece(1, 1), placement.own_pieces(0)
    assert former == (schedule.V, 4, placement.virtual_stage(1, 1), placement.virtual_stages_of(0))


def test_message_and_shard_have_former_names() -> None:
    message = schedule.Message(schedule.MessageType.HEADER, 0, 0, 1)
    with pytest.warns(DeprecationWarning, match="Message.kind is now message_type"):
        assert message.kind is schedule.MessageType.HEADER
    shard, full = Shard((4, 2), 0, 1, 2), torch.arange(8).view(4, 2)
    with pytest.warns(DeprecationWarning, match="Shard.cut is now narrow"):
        assert torch.equal(shard.cut(full), full[1:3])


def test_pipeline_engine_has_former_name_of_stop_watchdog() -> None:
    with pytest.warns(DeprecationWarning, match="PipelineEngine.let_watch is now stop_watchdog"):
        assert PipelineEngine.let_watch is PipelineEngine.stop_watchdog
