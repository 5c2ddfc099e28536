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
from benchmarks.kill import Outcome, broken_checkpoints, newest_step, read_losses, run_killed, run_undisturbed
from benchmarks.kill_job import ALL, LOAD, PHASES, STEP, Case, Moment, draw_moments, preload, write_corpus
from megatron import files
from megatron.checkpoint.manifest import CHECKPOINTS
from tests.helpers.runs import train_ranks


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    preload()
    return write_corpus(tmp_path_factory.mktemp("tokens"))


def assert_recovered(outcome: Outcome, num_kills: int) -> None:
    """The run has survived so many kills, and nothing else was found."""
    message = "\n".join(outcome.problems)
    assert not outcome.problems, message
    assert len(outcome.kills) == num_kills


@pytest.mark.slow  # kills ahead of file operations and of loads, above and below, are in the short run
def test_run_recovers_from_ten_random_kills(tokens: Path, tmp_path: Path) -> None:
    """Rows A01, A02, A05, A18, D21: two tensor ranks by two stages, dropout, saved in the background at each step."""
    case, moments = Case("t2p2", steps=30, keep_last=2, is_async=True), [*draw_moments(random.Random(10), 4, 10)]
    assert {moment.phase for moment in moments} == {*PHASES}
    reference = run_undisturbed(case, tokens, tmp_path / "whole")
    outcome = run_killed(case, reference, tmp_path / "killed", random.Random(6), moments)
    assert_recovered(outcome, 10)


def kills_in_loads(num_kills: int, num_ranks: int, rng: random.Random) -> Iterator[Moment]:
    """Yield one kill behind the first checkpoint, then ``num_kills`` while a checkpoint is loaded."""
    yield Moment(STEP, 3, 0.0, ALL, 0)
    for _ in range(num_kills):
        yield Moment(LOAD, 1, rng.uniform(0, 0.03), ALL, rng.randrange(num_ranks))


@pytest.mark.parametrize("layout", ["one", pytest.param("t2p2", marks=pytest.mark.slow)])
def test_load_succeeds_after_five_consecutive_kills(layout: str, tokens: Path, tmp_path: Path) -> None:
    """Row A07."""
    case, rng = Case(layout, steps=12), random.Random(7)
    reference = run_undisturbed(case, tokens, tmp_path / "whole")
    outcome = run_killed(case, reference, tmp_path / "killed", rng, kills_in_loads(5, case.num_ranks, rng))
    assert_recovered(outcome, 6)


def copy_before_each_operation(run_dir: Path, copies_dir: Path) -> Callable[[int], None]:
    """Return a plant that copies the checkpoints as they are ahead of each file operation on them, of each rank."""

    def patch_rank(rank: int) -> None:
        count = iter(range(10**6))

        def copy_checkpoints(operation: str, path: Path) -> None:
            if (run_dir / CHECKPOINTS) in path.parents:
                shutil.copytree(
                    run_dir / CHECKPOINTS, copies_dir / f"{rank}-{next(count):04d}-{operation}" / CHECKPOINTS
                )

        files.before_operation = copy_checkpoints

    return patch_rank


def read_tensor_files(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.slow), True], ids=["sync", "async"])
def test_checkpoints_are_complete_before_every_file_operation(is_async: bool, tokens: Path, tmp_path: Path) -> None:
    """Rows A03 to A06: what a kill of all ranks at that moment would leave; the last and the one before, never a part.

    The state is that of training, in 2 x 2 ranks; old checkpoints are removed, and ``latest`` is written anew.
    """
    run_dir, reference, copies_dir = tmp_path / "run", tmp_path / "whole", tmp_path / "kept"
    assert train_ranks(4, Case("t2p2", 3).flags(tokens, reference))[0] == [0] * 4
    case = Case("t2p2", 3, keep_last=1, is_async=is_async)
    assert train_ranks(4, case.flags(tokens, run_dir), copy_before_each_operation(run_dir, copies_dir))[0] == [0] * 4
    expected = {step: read_tensor_files(reference / CHECKPOINTS / f"step-{step:08d}") for step in (1, 2, 3)}
    for rank in range(4):
        newest_steps = []
        moments = sorted(copies_dir.glob(f"{rank}-*"))
        for moment in moments:
            assert not [*broken_checkpoints(moment)], moment.name
            newest_steps.append(newest_step(moment))
            if newest_steps[-1]:
                assert (
                    read_tensor_files(moment / CHECKPOINTS / f"step-{newest_steps[-1]:08d}")
                    == expected[newest_steps[-1]]
                ), moment.name
        assert newest_steps == sorted(newest_steps) and {*newest_steps} == ({0, 1, 2, 3} if rank == 0 else {0, 1, 2})
        operations = {moment.name.split("-")[2] for moment in moments}
        common_operations = {"create", "write", "fsync"}
        rank_0_operations = {"make_folder", "sync_folder", "rename", "remove", "remove_folder"}
        assert operations == (common_operations | rank_0_operations if rank == 0 else common_operations)


@pytest.mark.parametrize(
    ("operation", "step"),
    [
        ("remove", 1),
        pytest.param("fsync", 0, marks=pytest.mark.slow),
        pytest.param("rename", 0, marks=pytest.mark.slow),
    ],
)
def test_run_resumes_after_interrupted_save(operation: str, step: int, tokens: Path, tmp_path: Path) -> None:
    """Rows A04 and A06: half-written and half-removed folders are ignored, and removed by the next save."""
    case = Case("one", 3, keep_last=1)
    run_dir, copies_dir, resumed_dir = tmp_path / "run", tmp_path / "kept", tmp_path / "again"
    assert train_ranks(1, case.flags(tokens, run_dir), copy_before_each_operation(run_dir, copies_dir))[0] == [0]
    moment = sorted(copies_dir.glob(f"*-{operation}"))[step]
    hidden = {path.name for path in (moment / CHECKPOINTS).iterdir() if path.name.startswith(".")}
    assert hidden
    os.rename(moment, resumed_dir)
    assert train_ranks(1, case.flags(tokens, resumed_dir))[0] == [0]
    start_step = newest_step(resumed_dir) - len(read_losses(resumed_dir))
    assert read_losses(resumed_dir) == read_losses(run_dir)[start_step:] and len(read_losses(resumed_dir)) > 0
    assert {path.name for path in (resumed_dir / CHECKPOINTS).iterdir()} <= {"latest", "step-00000002", "step-00000003"}


@pytest.mark.slow  # benchmarks/kill.py is run before a release
def test_kill_benchmark_reports_no_failures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    args = ["--kills", "1", "--layout", "one", "--steps", "4", "--folder", str(folder)]
    tally = kill.main([*args, "--json", str(tmp_path / "kills.json")])
    assert tally.kills >= 1 and not tally.failed and not [*folder.iterdir()]
    assert '"bricked": 0' in (tmp_path / "kills.json").read_text()
    assert "as undisturbed" in capfd.readouterr().out


def test_kill_benchmark_rejects_invalid_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        kill.main(["--folder", str(tmp_path / "file")])
    assert f"--folder must be a folder that can be created, got {tmp_path / 'file'}" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", ["t2d2", "p2d2", "p2", "d2"])
def test_other_layouts_recover_from_ten_random_kills(layout: str, tokens: Path, tmp_path: Path) -> None:
    case, rng = Case(layout, steps=40, interval=2, is_async=layout in ("t2d2", "p2")), random.Random(8)
    reference = run_undisturbed(case, tokens, tmp_path / "whole")
    outcome = run_killed(case, reference, tmp_path / "killed", rng, draw_moments(rng, case.num_ranks, 10))
    assert_recovered(outcome, 10)
