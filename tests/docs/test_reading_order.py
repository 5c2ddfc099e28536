"""docs/reading_order.md: a training step runs code of every file in its table of five sittings."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron.optim.optimizer import MixedPrecisionOptimizer
from tests.helpers.runs import make_flags, train_ranks, write_corpus

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/reading_order.md", "docs/zh/reading_order.md")


def read_sitting_files(page: str) -> list[str]:
    """Return the files of megatron and tds in the rows of the five sittings."""
    rows = re.findall(r"^\| [1-5] \|.*$", (ROOT / page).read_text("utf-8"), flags=re.M)
    return [file for row in rows for file in re.findall(r"`((?:megatron|tds)/[\w/]+\.py)`", row)]


@pytest.fixture(scope="module")
def executed_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the files whose functions ran in the third step of a run on one stage or on two."""
    corpus, folder = write_corpus(tmp_path_factory.mktemp("corpus")), tmp_path_factory.mktemp("files")

    def record_third_step(rank: int) -> None:
        executed: set[str] = set()
        updates = 0

        def on_event(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                executed.add(frame.f_code.co_filename)

        def after_update(optimizer: Any, *_: Any) -> None:
            nonlocal updates
            updates += isinstance(optimizer, MixedPrecisionOptimizer)
            sys.setprofile(on_event if updates == 2 else None)
            if updates == 3:
                (folder / f"{num_stages}-{rank}.json").write_text(json.dumps(sorted(executed)))

        register_optimizer_step_post_hook(after_update)

    for num_stages in (1, 2):
        run_flags = f"--train-iters 4 --log-interval 10 --eval-iters 0 --pipe-parallel-size {num_stages}"
        run_dir = tmp_path_factory.mktemp("run") / "run"
        codes, _ = train_ranks(num_stages, make_flags(corpus, run_dir, run_flags), record_third_step)
        assert codes == [0] * num_stages
    files = {Path(file) for path in folder.iterdir() for file in json.loads(path.read_text())}
    return {file.relative_to(ROOT).as_posix() for file in files if file.is_relative_to(ROOT)}


def test_training_step_executes_every_listed_file(executed_files: set[str]) -> None:
    files = read_sitting_files(PAGES[0])
    assert files and [file for file in files if file not in executed_files] == []


def test_pages_list_equal_files() -> None:
    assert read_sitting_files(PAGES[1]) == read_sitting_files(PAGES[0])
