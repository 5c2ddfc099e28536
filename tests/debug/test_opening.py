"""What a dump is refused for where the ranks meet, and that one that writes nothing says so."""

from __future__ import annotations

from pathlib import Path

import pretrain_gpt2
from megatron.debug.dump_files import read_dump
from megatron.errors import ConfigError
from megatron.training import parity
from megatron.training.callbacks import debugger
from tests.helpers import dumps
from tests.helpers.harness import run_ranks


def _error_and_warnings(rank: int, extra: str, folder: Path, first_step: int) -> tuple[str, list[str]]:
    """Return the error of a run on two stages that begins with a step, and what was warned of."""
    warnings: list[str] = []
    debugger.log.warning = warnings.append  # type: ignore[assignment]

    class TrainerAtStep(parity.Trainer):
        def __init__(self, *args):
            super().__init__(*args)
            self.progress.step = first_step

    parity.Trainer = TrainerAtStep
    arguments = dumps.make_argv(pretrain_gpt2, (1, 2, 1), 2, folder, f"--fp32 {extra}")
    try:
        dumps._run_rank(rank, arguments, 2, "pretrain_gpt2", 2, None)
    except ConfigError as error:
        return str(error), warnings
    return "", warnings


def test_dump_matching_no_module_on_any_stage_is_rejected(tmp_path: Path) -> None:
    errors = run_ranks(2, _error_and_warnings, "--debug-dump-modules ^layer0", tmp_path / "none", 0)
    for error, _ in errors:
        assert "--debug-dump-modules must match a module or parameter, got '^layer0', which matches none of " in error
    assert (
        run_ranks(2, _error_and_warnings, "--debug-dump-modules ^layers.1.*weight$", tmp_path / "one", 0)
        == [("", [])] * 2
    )
    assert {record.rank for record in read_dump(tmp_path / "one").records} == {1}


def test_unwritable_dump_folder_fails_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "rank-00001.jsonl").mkdir()
    for error, _ in run_ranks(2, _error_and_warnings, "", tmp_path, 0):
        assert "must name a folder that every rank can write to, got rank 1 (stage 1, tensor 0, data 0): " in error
        assert "Is a directory" in error


def test_resuming_after_dump_steps_warns_once(tmp_path: Path) -> None:
    (_, warnings), (_, other_warnings) = run_ranks(
        2, _error_and_warnings, "--debug-dump-steps 1,4-6", tmp_path / "late", 6
    )
    assert other_warnings == [] and len(warnings) == 1
    assert "has no effect: the run continues with step 7, after --debug-dump-steps 1,4-6" in warnings[0]
    assert run_ranks(2, _error_and_warnings, "--debug-dump-steps 1,4-6", tmp_path / "in", 5) == [("", [])] * 2
