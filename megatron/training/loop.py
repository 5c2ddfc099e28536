"""The loop: step, report, evaluate, save, stop."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from megatron.errors import StopRequest
from megatron.mpu.mappings import all_reduce
from megatron.training.data_order import epochs_text, epochs_values, numbers_text
from megatron.training.engines import StepResult
from megatron.training.parts import Run
from megatron.training.report import progress_line, set_learning_rate
from megatron.training.saver import save, save_when_due


def train(run: Run) -> None:
    """Step until --train-iters. Collective.

    Raises:
        StopRequest: a signal or limit ended the run early; it is saved and can go on.
    """
    config = run.config
    total = config.batch.train_iters
    run.batches = run.data.batches("train", config, run.world, run.progress.samples_consumed)
    with run.batches or nullcontext():
        while run.progress.step < total:
            train_step(run)
            step = run.progress.step
            with _Pause(run):
                if config.batch.eval_interval and config.batch.eval_iters and step % config.batch.eval_interval == 0:
                    evaluate(run, "valid")
                save_when_due(run)
            reason = agree_to_stop(run)
            if reason is not None and step < total:
                save(run)
                raise StopRequest(
                    f"stopped after step {step} of {total}: {reason}. Everything is saved in {run.saved}. "
                    f"Go on with --load {run.folder} --save {run.folder}, or add --resume to the run script"
                )
    save(run)


def train_step(run: Run) -> None:
    """Take one step and report it. Collective."""
    batch, replicas = run.config.batch, run.world.grid.data.size
    samples = batch.sizes(replicas).at(run.progress.samples_consumed)
    lr = run.learning_rate.at(run.progress.updates)
    set_learning_rate(run.engine.optimizer, lr)
    result = run.engine.train_step(run.batches, run.progress.step, samples // (batch.batch_size * replicas))
    _advance(run, result, samples)
    _report(run, result, lr, samples)


def agree_to_stop(run: Run, signals_only: bool = False) -> str | None:
    """Return why the run stops after this step, on all ranks or on none. Collective."""
    reason = run.stop.signal_name if signals_only else run.stop.reason(run.progress.step)
    vote = torch.tensor([float(reason is not None)], device=run.world.device)
    if all_reduce(vote, run.world.grid.world, dist.ReduceOp.MAX).item() == 0.0:
        return None
    return reason or "another rank was asked to stop"


def evaluate(run: Run, kind: str) -> float:
    """Return the mean loss over --eval-iters global batches of the ``kind`` split, and say it. Collective.

    Of several corpora each is read by itself, and the mean is that by their weights.
    """
    weights = run.data.corpora.get(kind, {})
    losses = {corpus: _mean_loss(run, kind, corpus) for corpus in weights}
    loss = weighted_mean(losses, weights) if losses else _mean_loss(run, kind)
    values: dict[str, Any] = {"loss": loss, "perplexity": perplexity(loss)}
    if run.screen is not None:
        name = {"valid": "validation", "test": "test"}[kind]
        each = f" | {numbers_text(losses, '.4f')}" if losses else ""
        run.screen.line(
            f"step {run.progress.step} | {name} loss {loss:.4f} | perplexity {values['perplexity']:.2f}{each}"
        )
    if run.metrics is not None:
        run.metrics.write(kind, run.progress.step, values | ({"losses": losses} if losses else {}))
    return loss


def _mean_loss(run: Run, kind: str, corpus: str | None = None) -> float:
    """Return the mean loss over --eval-iters global batches, of one corpus if it is named. Collective."""
    iterations = run.config.batch.eval_iters
    batches = run.data.batches(kind, run.config, run.world, corpus=corpus)
    loss = 0.0
    for _ in range(iterations):
        loss += run.engine.evaluate_batch(batches) / iterations
        if kind == "test" and agree_to_stop(run, signals_only=True):
            raise StopRequest(f"stopped in the evaluation on the test split; the run is saved in {run.folder}")
    return loss


def weighted_mean(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the mean of ``values`` by ``weights``, in which one of weight 0 has no say."""
    return sum(weights[name] * value for name, value in values.items() if weights[name]) / sum(weights.values())


def perplexity(loss: float) -> float:
    """Return e to the loss; infinite where that has no number."""
    return math.exp(loss) if loss < 700 else math.inf


def _advance(run: Run, result: StepResult, samples: int) -> None:
    progress = run.progress
    progress.step += 1
    progress.updates += 0 if result.is_skipped else 1
    progress.samples_consumed += samples
    run.last_loss = result.loss


def _report(run: Run, result: StepResult, lr: float, samples: int) -> None:
    """Say and write down the numbers of this log interval. Collective: all ranks measure bubble and wait for data."""
    step, total = run.progress.step, run.config.batch.train_iters
    if run.screen is not None and run.rates is not None:
        run.rates.count_step(samples)
        run.screen.advance(step, result.loss)
    if step % run.config.run.log_interval and step != total:
        return
    bubble, waited_s = run.engine.bubble(), _longest_wait(run)
    if run.screen is None or run.rates is None:
        return
    rates = {**run.rates.drain(run.pause_s, waited_s), **({} if bubble is None else {"bubble": bubble})}
    run.pause_s = 0.0
    epochs = epochs_text(run.data, run.progress.samples_consumed)
    run.screen.line(progress_line(run.progress, total, result, lr, rates, epochs))
    if run.metrics is not None:
        run.metrics.write("train", step, _values(run, result, lr, rates))


def _longest_wait(run: Run) -> float:
    """Return the seconds that the rank which waited longest has waited for data since the last report. Collective."""
    waited = 0.0 if run.batches is None else run.batches.drain_waited_s()
    seconds = torch.tensor([waited], dtype=torch.float32, device=run.world.device)
    return all_reduce(seconds, run.world.grid.world, dist.ReduceOp.MAX).item()


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


class _Pause:
    """Time that is not training, left out of tokens/s."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.run.pause_s += time.perf_counter() - self.start
