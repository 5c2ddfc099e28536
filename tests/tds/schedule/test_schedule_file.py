"""Orders in torch's compute-only CSV are read, proven and written, and refused with the place or the circle named."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action

from tds.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Placement,
    ScheduleError,
    V,
    read_schedule,
    write_schedule,
)
from tds.schedule.simulate import (
    FILE_PREFIX,
    V_SCHEDULES,
    bubble,
    has_split_backwards,
    in_flight,
    order_named,
    placement_for,
)
from tests.helpers.orders import SMALL, actions_by_stage, schedule_by_stage, small_pipelines
from tests.tds.schedule.test_v_schedules import v_stages

EXAMPLE = "0F0,,0B0\n1F0, 1I0 ,1W0\n"


def write_file(folder: Path, text: str, name: str = "order.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_torch_csv_is_read_as_schedule(tmp_path: Path) -> None:
    schedule = read_schedule(write_file(tmp_path, EXAMPLE))
    assert schedule(2, 1, 0) == [Forward(0), Backward(0)]
    assert schedule(2, 1, 1) == [Forward(0), BackwardInput(0), BackwardWeight(0)]
    assert (schedule.placement, schedule.num_micro_batches, schedule.peaks, schedule.has_split_backwards) == (
        Placement(2),
        1,
        [1, 1],
        True,
    )


def test_overlap_pair_is_read_as_two_actions(tmp_path: Path) -> None:
    """As ``torch.distributed.pipelining.schedules.ScheduleDualPipeV`` writes them."""
    separate = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    paired = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n"
    action = _Action.from_str("(0F1;0B0)OVERLAP_F_B")
    assert action is not None and action.sub_actions is not None
    assert [str(sub_action) for sub_action in action.sub_actions] == ["0F1", "0B0"]
    separate_schedule, paired_schedule = (
        read_schedule(write_file(tmp_path, text, f"{len(text)}.csv")) for text in (separate, paired)
    )
    assert actions_by_stage(paired_schedule, 2, 2) == actions_by_stage(separate_schedule, 2, 2)


def test_written_schedule_is_read_back_by_tds_and_torch(tmp_path: Path) -> None:
    cases = [(schedule_by_stage(name, p, m, c), Placement(p, c)) for name, p, m, c in small_pipelines()[100::97]]
    cases += [(v_stages(name, p, 5), Placement(p, 2, V)) for name in V_SCHEDULES for p in (2, 3)]
    for idx, (stages, placement) in enumerate(cases):
        path = str(tmp_path / f"{idx}.csv")
        write_schedule(path, stages, placement)
        schedule = read_schedule(path)
        assert actions_by_stage(schedule, placement.num_stages, schedule.num_micro_batches) == stages
        assert schedule.placement == placement or placement.num_stages == 1
        for stage, line in enumerate(Path(path).read_text().splitlines()):
            for cell, action in zip(line.split(","), stages[stage], strict=True):
                torch_action = _Action.from_str(cell)
                assert torch_action is not None and str(torch_action) == cell
                expected = placement.virtual_stage(stage, action.chunk), action.micro_batch
                assert (torch_action.stage_index, torch_action.microbatch_index) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", r"line 2: a cell must consist of .* such as 0F0, got '1X0'"),
        ("0F0,0SEND_F0,0B0\n", "got '0SEND_F0'. Use the compute-only format"),
        ("0F0,(0F1;0SEND_F0)OVERLAP_F_B\n", r"line 1: .*, got '\(0F1;0SEND_F0\)OVERLAP_F_B'"),
        ("0F0,()OVERLAP_F_B\n", r"line 1: .*, got '\(\)OVERLAP_F_B'"),
        ("", "must have a line with actions"),
        ("0F0,0B0\n,,\n", "must have a line with actions"),
        ("1F0,1B0\n0F0,0B0\n", r"must be placed in a loop .* or in a V .*, got stage 0: \[1\]; stage 1: \[0\]"),
        ("0F0,0B0,1F0,1B0\n2F0,2B0,3F0,3B0\n", r"got stage 0: \[0, 1\]; stage 1: \[2, 3\]"),
        ("0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n", "cannot run: stage 0 must have one Backward for each"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            r"cannot run: stages wait for each other: stage 0 at Backward\(micro_batch=0, chunk=0\) for stage 1; stage "
            r"1 at Forward\(micro_batch=1, chunk=0\) for stage 0$",
        ),
    ],
)
def test_invalid_schedule_file_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        read_schedule(write_file(tmp_path, text))


def test_schedule_file_rejects_other_sizes(tmp_path: Path) -> None:
    schedule = read_schedule(write_file(tmp_path, EXAMPLE))
    for schedule_args in ((3, 1, 0), (2, 4, 1)):
        with pytest.raises(
            ScheduleError,
            match=f"for 2 stages and 1 micro-batches, got {schedule_args[0]} stages and {schedule_args[1]} ",
        ):
            schedule(*schedule_args)
    with pytest.raises(FileNotFoundError):
        read_schedule(str(tmp_path / "none.csv"))


@SMALL
@given(st.sampled_from(V_SCHEDULES), st.integers(2, 4), st.integers(1, 6))
def test_file_schedule_estimates_equal_named_schedule(name: str, p: int, m: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/order.csv"
        write_schedule(path, v_stages(name, p, m), Placement(p, 2, V))
        file_name = FILE_PREFIX + path
        assert [in_flight(p, m, file_name, 2, s) for s in range(p)] == [in_flight(p, m, name, 2, s) for s in range(p)]
        assert bubble(p, m, file_name, 2) == pytest.approx(bubble(p, m, name, 2), abs=0.05)
        assert placement_for(file_name) == V and order_named(file_name, 2)(p, m, 0) == v_stages(name, p, m)[0]
        assert has_split_backwards(file_name) == any(
            isinstance(a, BackwardInput) for actions in v_stages(name, p, m) for a in actions
        )
