"""When a run writes a checkpoint."""

from __future__ import annotations

from megatron.training.data_order import to_save
from megatron.training.parts import Run
from megatron.training.state import save_state


def save_when_due(run: Run) -> None:
    """Write a checkpoint if --save-interval says so after this step. Collective."""
    interval = run.config.checkpoint.save_interval
    if interval and run.progress.step % interval == 0:
        save(run)


def save(run: Run) -> None:
    """Write a checkpoint of now, unless this step has one. Collective."""
    if run.saved_step == run.progress.step:
        return
    told = to_save(run.data, run.progress.samples_consumed, run.data_loaded)
    run.saved = save_state(
        run.folder,
        run.progress,
        config=run.config,
        module=run.engine.module,
        optimizer=run.engine.optimizer,
        world=run.world,
        fingerprint=told.fingerprint,
        order=told.order,
        loaded=run.loaded,
    )
    run.saved_step = run.progress.step
    if run.screen is not None:
        run.screen.line(f"step {run.progress.step} | saved {run.saved}")
