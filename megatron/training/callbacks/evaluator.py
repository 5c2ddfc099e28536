"""Evaluator: loss on the validation split (--eval-interval) and, at the end, on the test split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.runtime.exit_signals import resume_advice
from megatron.training.data import first_validation_sample
from megatron.training.data_progress import format_by_corpus
from megatron.training.step_result import StepResult
from megatron.training.timeouts import EVALUATING
from megatron.training.trainer import Callback, perplexity

SPLITS = {"valid": "validation", "test": "test"}
"""Names of the splits in messages."""


class Evaluator(Callback):
    """Evaluates the mean loss over --eval-iters global batches; several corpora are averaged by their weights.

    Samples are read at the sequence length of the next step, because longer positions are not trained yet.

    Args:
        every: steps between evaluations on the validation split; 0: none during training.
        has_test: evaluate the test split after the last step.

    Attributes:
        losses: last loss by split.
    """

    def __init__(self, every: int, has_test: bool = True) -> None:
        self.every, self.has_test = every, has_test
        self.losses: dict[str, float] = {}

    def on_step_end(self, result: StepResult) -> None:
        self.evaluate("valid")

    def on_train_end(self) -> None:
        if self.has_test and not self.trainer.stop_text:
            self.evaluate("test")

    def evaluate(self, split: str) -> float | None:
        """Evaluate a split; report and return the mean loss. Collective.

        Returns:
            The loss, or None if a signal interrupted the evaluation. The run then stops after this step; during the
            evaluation on the test split it stops immediately.
        """
        with self.trainer.phases.during(EVALUATING):
            weights = self.trainer.data.corpora.get(split, {})
            losses: dict[str, float] = {}
            for corpus in weights or [None]:
                loss = self._mean_loss(split, corpus)
                if loss is None:
                    return None
                losses[corpus or ""] = loss
            mean = weighted_mean(losses, weights or {"": 1.0})
            self._report(split, mean, losses if weights else {})
            return mean

    def _mean_loss(self, split: str, corpus: str | None) -> float | None:
        """Compute the mean loss over --eval-iters global batches from a split or one of its corpora. Collective."""
        trainer = self.trainer
        iterations = trainer.config.batch.eval_iters
        length = trainer.eval_seq_length
        batch_size = trainer.config.batch.global_batch_size(trainer.world.grid.data.size)
        first = first_validation_sample(trainer.config, trainer.progress.step, batch_size) if split == "valid" else 0
        batches = trainer.data.batches(split, trainer.config, trainer.world, first, corpus=corpus, length=length)
        loss = 0.0
        for _ in range(iterations):
            loss += trainer.engine.evaluate_batch(batches) / iterations
            is_signalled, *_ = trainer.world.any_rank([trainer.stop.signal_name is not None])
            if is_signalled:
                if split == "test":
                    trainer.stop_text = (
                        f"stopped during the evaluation of the test split; the run is saved in {trainer.folder}. "
                        f"{resume_advice(trainer.folder)}"
                    )
                return None
        return loss

    def _report(self, split: str, loss: float, corpus_losses: Mapping[str, float]) -> None:
        """Log the loss on a split and its corpora, and call ``on_evaluate_end``."""
        values: dict[str, Any] = {"loss": loss, "perplexity": perplexity(loss)}
        corpus_text = f" | {format_by_corpus(corpus_losses, '.4f')}" if corpus_losses else ""
        self.trainer.print_line(
            f"step {self.trainer.progress.step} | {SPLITS[split]} loss {loss:.4f} | "
            f"perplexity {values['perplexity']:.2f}{corpus_text}"
        )
        self.losses[split] = loss
        self.trainer.call("on_evaluate_end", split, values | ({"losses": dict(corpus_losses)} if corpus_losses else {}))


def weighted_mean(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Compute the weighted mean of ``values``; values with weight 0 are ignored, even if they are not finite."""
    return sum(weights[name] * value for name, value in values.items() if weights[name]) / sum(weights.values())
