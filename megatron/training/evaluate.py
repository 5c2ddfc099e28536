"""The loss on a split that is not trained on."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from megatron.errors import StopRequest
from megatron.training.data import numbers_text
from megatron.training.exit_signals import how_to_go_on
from megatron.training.run import Run
from megatron.training.timeouts import EVALUATING

SPLITS = {"valid": "validation", "test": "test"}
"""What a person reads of each."""


def evaluate(run: Run, kind: str) -> float | None:
    """Return the mean loss over --eval-iters global batches of the ``kind`` split, and say it. Collective.

    Of several corpora each is read by itself, and the mean is that by their weights. A signal breaks it off: None, for
    the run stops after this step.

    Raises:
        StopRequest: a signal came in the evaluation on the test split, after the last step.
    """
    with run.phases.over(EVALUATING):
        return _evaluate(run, kind)


def _evaluate(run: Run, kind: str) -> float | None:
    weights = run.data.corpora.get(kind, {})
    losses: dict[str, float] = {}
    for corpus in weights or [None]:
        loss = _mean_loss(run, kind, corpus)
        if loss is None:
            return None
        losses[corpus or ""] = loss
    _log_evaluation(run, kind, weighted_mean(losses, weights or {"": 1.0}), losses if weights else {})
    return weighted_mean(losses, weights or {"": 1.0})


def _mean_loss(run: Run, kind: str, corpus: str | None) -> float | None:
    """Return the mean loss over --eval-iters global batches, of one corpus if it is named. Collective."""
    iterations = run.config.batch.eval_iters
    batches = run.data.batches(kind, run.config, run.world, corpus=corpus)
    loss = 0.0
    for _ in range(iterations):
        loss += run.engine.evaluate_batch(batches) / iterations
        is_signalled, *_ = run.world.any([run.stop.signal_name is not None])
        if is_signalled:
            if kind == "test":
                raise StopRequest(
                    f"stopped in the evaluation on the test split; the run is saved in {run.folder}. "
                    f"{how_to_go_on(run.folder)}"
                )
            return None
    return loss


def _log_evaluation(run: Run, kind: str, loss: float, losses: Mapping[str, float]) -> None:
    values: dict[str, Any] = {"loss": loss, "perplexity": perplexity(loss)}
    if run.screen is not None:
        each = f" | {numbers_text(losses, '.4f')}" if losses else ""
        run.screen.line(
            f"step {run.progress.step} | {SPLITS[kind]} loss {loss:.4f} | perplexity {values['perplexity']:.2f}{each}"
        )
    run.evaluated[kind] = loss
    if run.metrics is not None:
        notes = [of_evaluation(run)] if run.config.checkpoint.eval_only else []
        run.metrics.write(kind, run.progress.step, values | ({"losses": dict(losses)} if losses else {}), *notes)


def of_evaluation(run: Run) -> dict[str, Any]:
    """Return what was evaluated, for a record that does not stand beside the settings of its own run."""
    return {"time": time.time(), "checkpoint": str(run.loaded), "config": run.config.to_dict()}


def weighted_mean(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the mean of ``values`` by ``weights``, in which one of weight 0 has no say."""
    return sum(weights[name] * value for name, value in values.items() if weights[name]) / sum(weights.values())


def perplexity(loss: float) -> float:
    """Return e to the loss; infinite where that has no number."""
    return math.exp(loss) if loss < 700 else math.inf
