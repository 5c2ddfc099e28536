"""Programs that use megatron-core run in processes of their own, in which ``megatron`` is NVIDIA's package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.megatron_core import PACKAGE_DIR, ProgramFailure, requires_megatron_core, run_megatron_core

pytestmark = [pytest.mark.slow, requires_megatron_core]
PROGRAM = "tests.megatron_core.modules_program"


def test_program_imports_megatron_core_and_not_our_package(tmp_path: Path) -> None:
    run_megatron_core(PROGRAM, tmp_path, num_ranks=2, words=["a", "b"])
    for rank in (0, 1):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert report["words"] == ["a", "b"] and report["sum"] == 3  # of ranks 1 and 2, over gloo
        assert Path(report["core"]).is_relative_to(PACKAGE_DIR) and report["ours"] is False
        assert report["type"] == "torch.cuda.FloatTensor" and report["devices"] == ["cpu"] * 4


def test_failed_rank_raises_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(ProgramFailure, match=r"(?s)--- rank 1 exit 1\n.*ZeroDivisionError"):
        run_megatron_core(PROGRAM, tmp_path, num_ranks=2, deadline_s=20, words=[], failing_rank=1)
