"""Log line for a run that is started again after it has reached one of its limits."""

from __future__ import annotations

from megatron.training.trainer import Trainer


def finished_text(trainer: Trainer) -> str:
    """Format the log line for a run that has already reached one of its limits."""
    batch, progress = trainer.config.batch, trainer.progress
    if batch.train_samples is not None:
        num_left = batch.train_samples - progress.samples_consumed
        if not trainer.batch_sizes.steps_within(batch.train_samples, progress.samples_consumed):
            batch_size = trainer.batch_sizes.at(progress.samples_consumed)
            remainder_text = f"; the remaining {num_left} are fewer than a step of {batch_size}" if num_left > 0 else ""
            return (
                f"{progress.samples_consumed} of --train-samples {batch.train_samples} are consumed already, after "
                f"step {progress.step}{remainder_text}. Raise --train-samples to continue"
            )
    steps = trainer.run_length.steps
    if batch.train_tokens is not None and (steps is None or progress.step < steps):
        return (
            f"the tokens of --train-tokens {batch.train_tokens} are consumed already, after step {progress.step}. "
            "Raise --train-tokens to continue"
        )
    return f"all {steps} steps are done already; raise --train-iters to continue"
