"""Commands of ``tools/check_layout.py`` in a page, run in forks of this process instead of new ones.

A command starts three processes that import torch and DeepSpeed, which takes longer than the steps that it compares.
The forks compute the same values as the command.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.runtime import exit_guard
from tests.helpers.harness import run_ranks
from tools import check_layout

PREFIX = "python tools/check_layout.py "


def run_command(command: str) -> str:
    """Return the output of a documented command, and its exit code as the last line."""
    assert command.startswith(PREFIX), command
    output = io.StringIO()
    argv = [str(check_layout.ROOT / "tools" / "check_layout.py"), *shlex.split(command.removeprefix(PREFIX))]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(check_layout, "run", run_in_forks),
        mock.patch.dict("os.environ"),
        contextlib.redirect_stdout(output),
    ):
        code = check_layout.main()
    return f"{output.getvalue()}{code}\n"


def run_in_forks(
    out_dir: Path, layout: check_layout.Layout, flags: list[str], model: str, steps: int, num_replicas: int
) -> list[Any]:
    """Train in ``layout`` in forked processes; return each rank's trace, as ``check_layout.run``."""
    out_dir.mkdir()
    worker_args = out_dir, model, steps, num_replicas, [*flags, *layout.flags]
    run_ranks(layout.world_size, run_worker, *worker_args, deadline_s=300.0)
    return [check_layout.read_trace(out_dir / f"rank-{rank}") for rank in range(layout.world_size)]


def run_worker(rank: int, *worker_args: Any) -> None:
    with (
        mock.patch.object(exit_guard, "guard", lambda train, name: train()),
        mock.patch("megatron.training.initialize.stop"),  # the harness ends the process group
    ):
        check_layout.worker(*worker_args)
