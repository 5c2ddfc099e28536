"""Who opens the data of a run, and what happens where the ends of the pipeline do not see the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import parse
from megatron.training.batch_iterators import TimedBatches
from megatron.training.data import evaluated_splits
from tests.helpers.runs import launch_script, make_flags, train_ranks

SHORT = "--num-layers 4 --train-iters 2 --eval-iters 1 --eval-interval 1 --gas 4"


def make_open_recorder(folder: Path, corpus: Path) -> Callable[[int], None]:
    """Return a plant that writes into ``folder``, by rank, which of the corpus's files are opened."""

    def patch_rank(rank: int) -> None:
        descriptor = os.open(folder / str(rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)

        def audit_hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and str(arguments[0]).startswith(str(corpus.parent)):
                os.write(descriptor, f"{Path(str(arguments[0])).name}\n".encode())

        sys.addaudithook(audit_hook)

    return patch_rank


def opened_files(corpus: Path, folder: Path, layout: str) -> list[set[str]]:
    """Return the data files that each of four ranks has opened in a run of two steps and two evaluations.

    The sidecar, a few lines about the end-of-document token, is read by every rank and left out.
    """
    folder.mkdir()
    cache = f"--data-cache-path {folder / 'cache'}"
    argv = make_flags(corpus, folder / "run", f"{SHORT} {layout} {cache}")
    assert train_ranks(4, argv, make_open_recorder(folder, corpus))[0] == [0] * 4
    names_by_rank = [(folder / str(rank)).read_text().split() for rank in range(4)]
    return [{name for name in names if not name.endswith(".meta.json")} for names in names_by_rank]


def test_middle_stages_do_not_open_data(corpus: Path, tmp_path: Path) -> None:
    first, *middle, last = opened_files(corpus, tmp_path / "deep", "--pipe-parallel-size 4 --check-data-agreement")
    assert middle == [set(), set()]
    assert first == last and {"texts.bin", "texts.idx"} <= first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "readers"),
    [
        ("--pipe-parallel-size 2 --model-parallel-size 2", (0, 2)),
        ("--model-parallel-size 4", (0,)),
        ("--pipe-parallel-size 2", (0, 1, 2, 3)),
        ("--pipe-parallel-size 2 --num-workers 1", (0, 1, 2, 3)),
    ],
)
def test_first_tensor_rank_of_first_and_last_stage_opens_data(
    layout: str, readers: tuple[int, ...], corpus: Path, tmp_path: Path
) -> None:
    files_by_rank = opened_files(corpus, tmp_path / "here", layout)
    assert {rank for rank, files in enumerate(files_by_rank) if files} == set(readers)


def alter_samples_on_rank_1(rank: int) -> None:
    """Let the second rank read something else in the second step."""
    if rank != 1:
        return
    original_next = TimedBatches.__next__
    count = 0

    def altered_next(self: TimedBatches) -> Any:
        nonlocal count
        batch = original_next(self)
        count += 1
        if count == 3:
            batch["text"][0, 5] += 1
        return batch

    TimedBatches.__next__ = altered_next  # type: ignore[method-assign]


def test_sample_mismatch_between_stages_ends_run_with_check_flag(corpus: Path, tmp_path: Path) -> None:
    short_args = "--train-iters 2 --eval-iters 0 --pipe-parallel-size 2"
    argv = make_flags(corpus, tmp_path / "run", f"{short_args} --check-data-agreement")
    with pytest.raises(AssertionError) as raised:
        train_ranks(2, argv, alter_samples_on_rank_1)
    message = str(raised.value)
    assert message.count("DataError: all ranks of a replica that read data must read the same micro-batches") == 2
    assert "micro-batch 0 differs: checksum" in message and "rank 1 (stage 1, replica 0, tensor 0)" in message
    assert not list((tmp_path / "run").glob("checkpoints/*")), "nothing of it is saved"


@pytest.mark.parametrize(
    ("args", "valid", "test"),
    [
        ("--data-path a", True, True),
        ("--data-path a --split 98,2,0", True, False),
        ("--data-path a --split 98,2", True, False),
        ("--data-path a --split 100,0,0", False, False),
        ("--data-path a --split 98,0,2", False, True),
        ("--data-path a --eval-interval 0", False, True),
        ("--data-path a --eval-iters 0", False, False),
        ("--data-path mock --split 100,0,0", True, True),
        ("--data-path none", True, True),
        ("--train-data-path a --valid-data-path a", True, False),
        ("--train-data-path a --valid-data-path a --test-data-path a", True, True),
        ("--data-path a --split 98,2,0 --load x --eval-only", False, True),
    ],
)
def test_splits_without_documents_or_files_are_not_evaluated(args: str, valid: bool, test: bool) -> None:
    config = parse([*args.split(), "--dry-run"], world_size=1, env={})
    assert evaluated_splits(config) == {"valid": valid, "test": test}
    skip_notes = [note for note in config.notes if "validation is skipped" in note]
    assert bool(skip_notes) == ("100,0,0" in args and "mock" not in args or "98,0,2" in args)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["--split 98,2,0", "--split 100,0,0", "apart"])
def test_run_without_test_split_exits_normally(corpus: Path, tmp_path: Path, split: str) -> None:
    """A run without a test split used to end with a traceback after its last step."""
    argv = make_flags(corpus, tmp_path / "run", f"{SHORT} {'' if split == 'apart' else split}")
    if split == "apart":
        idx = argv.index("--split")
        del argv[idx : idx + 2]
        idx = argv.index("--data-path")
        argv[idx : idx + 2] = ["--train-data-path", str(corpus), "--valid-data-path", str(corpus)]
    assert launch_script(1, argv, tmp_path / "log") == [0], (tmp_path / "log").read_text()
