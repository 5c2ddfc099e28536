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
from tds.schedule.simulate import IN_A_V, IN_FILE, bubble, in_flight, order_named, placement_for, splits
from tests.helpers.orders import SMALL, all_stages, small_cases, stages_of
from tests.tds.schedule.test_v_schedules import stages_in_a_v

BY_HAND = "0F0,,0B0\n1F0, 1I0 ,1W0\n"


def written(folder: Path, text: str, name: str = "order.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_file_of_torchs_form_is_an_order(tmp_path: Path) -> None:
    found = read_schedule(written(tmp_path, BY_HAND))
    assert found(2, 1, 0) == [Forward(0), Backward(0)]
    assert found(2, 1, 1) == [Forward(0), BackwardInput(0), BackwardWeight(0)]
    assert (found.placement, found.num_micro_batches, found.peaks, found.splits) == (Placement(2), 1, [1, 1], True)


def test_a_pair_of_torchs_is_its_two_actions_in_turn(tmp_path: Path) -> None:
    """As ``torch.distributed.pipelining.schedules.ScheduleDualPipeV`` writes them."""
    turns = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    pairs = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n"
    theirs = _Action.from_str("(0F1;0B0)OVERLAP_F_B")
    assert theirs is not None and theirs.sub_actions is not None
    assert [str(each) for each in theirs.sub_actions] == ["0F1", "0B0"]
    own, found = (read_schedule(written(tmp_path, text, f"{len(text)}.csv")) for text in (turns, pairs))
    assert all_stages(found, 2, 2) == all_stages(own, 2, 2)


def test_what_is_written_is_read_back_and_torch_reads_each_cell(tmp_path: Path) -> None:
    cases = [(stages_of(name, p, m, c), Placement(p, c)) for name, p, m, c in small_cases()[100::97]]
    cases += [(stages_in_a_v(name, p, 5), Placement(p, 2, V)) for name in IN_A_V for p in (2, 3)]
    for number, (stages, placement) in enumerate(cases):
        path = str(tmp_path / f"{number}.csv")
        write_schedule(path, stages, placement)
        found = read_schedule(path)
        assert all_stages(found, placement.num_stages, found.num_micro_batches) == stages
        assert found.placement == placement or placement.num_stages == 1
        for stage, line in enumerate(Path(path).read_text().splitlines()):
            for cell, action in zip(line.split(","), stages[stage], strict=True):
                theirs = _Action.from_str(cell)
                assert theirs is not None and str(theirs) == cell
                own = placement.piece(stage, action.chunk), action.micro_batch
                assert (theirs.stage_index, theirs.microbatch_index) == own


@pytest.mark.parametrize(
    ("text", "words"),
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
def test_what_is_no_order_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        read_schedule(written(tmp_path, text))


def test_a_file_is_for_its_own_sizes(tmp_path: Path) -> None:
    found = read_schedule(written(tmp_path, BY_HAND))
    for sizes in ((3, 1, 0), (2, 4, 1)):
        with pytest.raises(
            ScheduleError, match=f"of 2 stages and 1 micro-batches, got {sizes[0]} stages and {sizes[1]} "
        ):
            found(*sizes)
    with pytest.raises(FileNotFoundError):
        read_schedule(str(tmp_path / "none.csv"))


@SMALL
@given(st.sampled_from(IN_A_V), st.integers(2, 4), st.integers(1, 6))
def test_what_is_reckoned_of_a_file_is_what_is_reckoned_of_its_schedule(name: str, p: int, m: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/order.csv"
        write_schedule(path, stages_in_a_v(name, p, m), Placement(p, 2, V))
        named = IN_FILE + path
        assert [in_flight(p, m, named, 2, s) for s in range(p)] == [in_flight(p, m, name, 2, s) for s in range(p)]
        assert bubble(p, m, named, 2) == pytest.approx(bubble(p, m, name, 2), abs=0.05)
        assert placement_for(named) == V and order_named(named, 2)(p, m, 0) == stages_in_a_v(name, p, m)[0]
        assert splits(named) == any(isinstance(a, BackwardInput) for own in stages_in_a_v(name, p, m) for a in own)
