"""How saves end, and who is told: the screen, the metrics, the log and the launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from megatron import log
from megatron.checkpoint import Durable
from megatron.errors import CheckpointError
from megatron.training import progress_file
from megatron.training.parts import Run


def look(run: Run) -> None:
    """Take note of what has happened in the background; never waits. Not collective."""
    if run.saves.background is not None:
        _take(run, run.saves.background.poll)


def settle(run: Run) -> None:
    """Wait for the save in the background and take note of how it ended. Collective."""
    if run.saves.background is not None:
        _take(run, run.saves.background.finish)


def note_durable(run: Run, step: int, path: Path, text: str, values: Mapping[str, float]) -> None:
    """The checkpoint ``path`` of ``step`` is whole and committed."""
    run.saved = path
    tell(run, step, text, values)
    if run.world.rank == 0:
        progress_file.note_committed_step(step)


def note_failure(run: Run, step: int, error: CheckpointError) -> None:
    """The save of ``step`` failed; the run may go on."""
    run.saves.note_failure(error, step)
    if run.world.rank == 0:
        kept = f"the last one is {run.saved}" if run.saved else "there is none yet"
        log.error(f"step {step}: NOT SAVED: {str(error).rstrip('.')}. Older checkpoints are untouched ({kept})")
    if run.metrics is not None:
        run.metrics.write("save", step, {"failed": 1})


def tell(run: Run, step: int, text: str, values: Mapping[str, float]) -> None:
    """Show ``text`` and record ``values``, of the checkpoint of ``step``, on rank 0."""
    if run.screen is not None:
        run.screen.line(f"step {step} | {text}")
    if run.metrics is not None:
        run.metrics.write("save", step, dict(values))


def _take(run: Run, ask: Callable[[], Durable | None]) -> None:
    try:
        done = ask()
    except CheckpointError as error:
        step, run.saved_step = run.saved_step, -1
        note_failure(run, step, error)
        return
    if done is not None:
        text = f"durable {done.seconds:.2f} s after it was staged: saved {done.path}"
        note_durable(run, done.step, done.path, text, {"durable_s": done.seconds, "durable_bytes": done.num_bytes})
