"""Runs that are killed, again and again, go on by themselves as if nothing had been (rows A01 to A07).

``benchmarks/kill.py`` does the same with hundreds of random kills.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import kill
from benchmarks.kill import Outcome, broken, losses, newest_step, run_killed, run_whole
from benchmarks.kill_job import ALL, LOAD, PHASES, STEP, Case, Moment, draw_moments, preload, write_corpus
from megatron import files
from megatron.checkpoint.manifest import CHECKPOINTS
from tests.helpers.runs import train_ranks


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    preload()
    return write_corpus(tmp_path_factory.mktemp("tokens"))


def assert_undisturbed(outcome: Outcome, kills: int) -> None:
    """The run has survived so many kills, and nothing else was found."""
    message = "\n".join(outcome.problems)
    assert not outcome.problems, message
    assert len(outcome.kills) == kills


@pytest.mark.slow  # kills ahead of file operations and of loads, above and below, are in the short run
def test_ten_random_kills_in_one_run_cost_nothing_but_time(tokens: Path, tmp_path: Path) -> None:
    """Rows A01, A02, A05, A18, D21: two tensor ranks by two stages, dropout, saved in the background at each step."""
    case, moments = Case("t2p2", steps=30, keep_last=2, is_async=True), [*draw_moments(random.Random(10), 4, 10)]
    assert {moment.phase for moment in moments} == {*PHASES}
    whole = run_whole(case, tokens, tmp_path / "whole")
    outcome = run_killed(case, whole, tmp_path / "killed", random.Random(6), moments)
    assert_undisturbed(outcome, 10)


def kills_in_loads(number: int, num_ranks: int, draw: random.Random) -> Iterator[Moment]:
    """Yield one kill behind the first checkpoint, then ``number`` while a checkpoint is loaded."""
    yield Moment(STEP, 3, 0.0, ALL, 0)
    for _ in range(number):
        yield Moment(LOAD, 1, draw.uniform(0, 0.03), ALL, draw.randrange(num_ranks))


@pytest.mark.parametrize("layout", ["one", pytest.param("t2p2", marks=pytest.mark.slow)])
def test_a_load_that_is_killed_five_times_in_a_row_succeeds_at_last(layout: str, tokens: Path, tmp_path: Path) -> None:
    """Row A07."""
    case, draw = Case(layout, steps=12), random.Random(7)
    whole = run_whole(case, tokens, tmp_path / "whole")
    outcome = run_killed(case, whole, tmp_path / "killed", draw, kills_in_loads(5, case.num_ranks, draw))
    assert_undisturbed(outcome, 6)


def keep_each_moment(run: Path, kept: Path) -> Callable[[int], None]:
    """Return a plant that copies the checkpoints as they are ahead of each file operation on them, of each rank."""

    def plant(rank: int) -> None:
        count = iter(range(10**6))

        def copy(operation: str, path: Path) -> None:
            if (run / CHECKPOINTS) in path.parents:
                shutil.copytree(run / CHECKPOINTS, kept / f"{rank}-{next(count):04d}-{operation}" / CHECKPOINTS)

        files.before_operation = copy

    return plant


def content(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.slow), True], ids=["sync", "async"])
def test_at_each_file_operation_of_each_rank_all_that_bears_a_checkpoints_name_is_whole(
    is_async: bool, tokens: Path, tmp_path: Path
) -> None:
    """Rows A03 to A06: what a kill of all ranks at that moment would leave; the last and the one before, never a part.

    The state is that of training, in 2 x 2 ranks; old checkpoints are removed, and ``latest`` is written anew.
    """
    run, whole, kept = tmp_path / "run", tmp_path / "whole", tmp_path / "kept"
    assert train_ranks(4, Case("t2p2", 3).flags(tokens, whole))[0] == [0] * 4
    case = Case("t2p2", 3, keep_last=1, is_async=is_async)
    assert train_ranks(4, case.flags(tokens, run), keep_each_moment(run, kept))[0] == [0] * 4
    wanted = {step: content(whole / CHECKPOINTS / f"step-{step:08d}") for step in (1, 2, 3)}
    for rank in range(4):
        found = []
        moments = sorted(kept.glob(f"{rank}-*"))
        for moment in moments:
            assert not [*broken(moment)], moment.name
            found.append(newest_step(moment))
            if found[-1]:
                assert content(moment / CHECKPOINTS / f"step-{found[-1]:08d}") == wanted[found[-1]], moment.name
        assert found == sorted(found) and {*found} == ({0, 1, 2, 3} if rank == 0 else {0, 1, 2})
        operations = {moment.name.split("-")[2] for moment in moments}
        of_all = {"create", "write", "fsync"}
        of_0 = {"make_folder", "sync_folder", "rename", "remove", "remove_folder"}
        assert operations == (of_all | of_0 if rank == 0 else of_all)


@pytest.mark.parametrize(
    ("operation", "step"),
    [
        ("remove", 1),
        pytest.param("fsync", 0, marks=pytest.mark.slow),
        pytest.param("rename", 0, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_from_what_is_left_amidst_a_save(operation: str, step: int, tokens: Path, tmp_path: Path) -> None:
    """Rows A04 and A06: half-written and half-removed folders are ignored, and removed by the next save."""
    case = Case("one", 3, keep_last=1)
    run, kept, again = tmp_path / "run", tmp_path / "kept", tmp_path / "again"
    assert train_ranks(1, case.flags(tokens, run), keep_each_moment(run, kept))[0] == [0]
    moment = sorted(kept.glob(f"*-{operation}"))[step]
    hidden = {path.name for path in (moment / CHECKPOINTS).iterdir() if path.name.startswith(".")}
    assert hidden
    os.rename(moment, again)
    assert train_ranks(1, case.flags(tokens, again))[0] == [0]
    begun = newest_step(again) - len(losses(again))
    assert losses(again) == losses(run)[begun:] and len(losses(again)) > 0
    assert {path.name for path in (again / CHECKPOINTS).iterdir()} <= {"latest", "step-00000002", "step-00000003"}


@pytest.mark.slow  # benchmarks/kill.py is run before a release
def test_the_benchmark_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    few = ["--kills", "1", "--layout", "one", "--steps", "4", "--folder", str(folder)]
    tally = kill.main([*few, "--json", str(tmp_path / "kills.json")])
    assert tally.kills >= 1 and not tally.failed and not [*folder.iterdir()]
    assert '"bricked": 0' in (tmp_path / "kills.json").read_text()
    assert "as undisturbed" in capfd.readouterr().out


def test_the_benchmark_names_a_folder_that_cannot_be_made(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        kill.main(["--folder", str(tmp_path / "file")])
    assert f"--folder must be a folder that can be created, got {tmp_path / 'file'}" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", ["t2d2", "p2d2", "p2", "d2"])
def test_ten_random_kills_in_other_layouts(layout: str, tokens: Path, tmp_path: Path) -> None:
    case, draw = Case(layout, steps=40, interval=2, is_async=layout in ("t2d2", "p2")), random.Random(8)
    whole = run_whole(case, tokens, tmp_path / "whole")
    outcome = run_killed(case, whole, tmp_path / "killed", draw, draw_moments(draw, case.num_ranks, 10))
    assert_undisturbed(outcome, 10)
