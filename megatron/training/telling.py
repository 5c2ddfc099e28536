"""What is said and written down once per log interval."""

from __future__ import annotations

from typing import Any

import torch

from megatron.mpu.mappings import all_reduce
from megatron.training.data_order import epochs_text, epochs_values
from megatron.training.parts import Run
from megatron.training.report import progress_line
from megatron.training.step_result import StepResult
from megatron.training.straggler import slowest


def tell_step(run: Run, result: StepResult, lr: float, samples: int) -> None:
    """Say and write down the numbers of this log interval. Collective: all ranks measure bubble, work and waits."""
    step, total = run.progress.step, run.config.batch.train_iters
    if run.screen is not None and run.rates is not None:
        run.rates.count_step(samples)
        run.screen.advance(step, result.loss)
    if step % run.config.run.log_interval and step != total:
        return
    bubble, times = run.engine.bubble(), _times_of_all_ranks(run)
    if run.screen is None or run.rates is None:
        return
    waited_s, own_s, waited_each_s = times.tolist()
    rates = {**run.rates.drain(run.pause_s, max(waited_s)), **({} if bubble is None else {"bubble": bubble})}
    run.pause_s = 0.0
    epochs = epochs_text(run.data, run.progress.samples_consumed)
    run.screen.line(progress_line(run.progress, total, result, lr, rates, epochs))
    told = run.suspect.judge(slowest(own_s, waited_each_s, run.world.grid.topology))
    if told is not None:
        run.screen.line(f"step {step} | {told}")
    if run.metrics is not None:
        run.metrics.write("train", step, _values(run, result, lr, rates))


def _times_of_all_ranks(run: Run) -> torch.Tensor:
    """Return each rank's wait for data since the last report, its own work a step and its wait a step. Collective.

    Shapes:
        [3, ranks], in seconds
    """
    waited = 0.0 if run.batches is None else run.batches.drain_waited_s()
    own_s, steps = run.engine.busy()
    times = torch.zeros(3, run.world.grid.topology.world_size, dtype=torch.float32, device=run.world.device)
    times[:, run.world.rank] = torch.tensor([waited, own_s / max(steps, 1), waited / max(steps, 1)])
    return all_reduce(times, run.world.grid.world)


def _values(run: Run, result: StepResult, lr: float, rates: dict[str, Any]) -> dict[str, Any]:
    return {
        "loss": result.loss,
        **{name: value for name, value in result.losses.items() if name not in ("loss", "lm loss")},
        "learning_rate": lr,
        "grad_norm": result.grad_norm,
        "loss_scale": result.loss_scale,
        "samples": run.progress.samples_consumed,
        **epochs_values(run.data, run.progress.samples_consumed),
        "skipped": run.progress.skipped,
        **rates,
    }
