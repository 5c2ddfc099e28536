"""Console: a table at the start, progress lines during training, a summary at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from megatron import log
from megatron.log import human_count, human_time
from megatron.training import data_progress, start_table
from megatron.training.callbacks.checkpointer import Checkpointer
from megatron.training.callbacks.evaluator import SPLITS, Evaluator
from megatron.training.callbacks.metrics_writer import EVALUATIONS, METRICS
from megatron.training.callbacks.pipeline_picture import PipelinePicture
from megatron.training.callbacks.speed_monitor import SpeedMonitor
from megatron.training.console import TrainingConsole
from megatron.training.step_result import StepResult
from megatron.training.trainer import Callback


class Console(Callback):
    """Prints tables and progress lines; must be called after the callbacks whose metrics it prints.

    Args:
        mode: auto, bar or plain (--progress).
        total_steps: steps at the end of the progress bar.
        param_counts: parameter count in the full model, then per rank of each stage.
    """

    on_all_ranks = False

    def __init__(self, mode: str, total_steps: int, param_counts: Sequence[int]) -> None:
        self.screen = TrainingConsole(mode, total_steps)
        self.every = 1 if self.screen.has_bar else 0
        self.param_counts = param_counts

    def on_train_start(self) -> None:
        trainer, config = self.trainer, self.trainer.config
        self._started_at = time.monotonic()
        self._should_log_fusion = config.fuses_accumulation(trainer.world.device_type)
        trainer.print_line = self.screen.line
        for note in config.notes:
            log.info(note)
        for warning in config.dropped.values():
            log.warning(warning)
        samples_to_read = trainer.batch_sizes.consumed_after(trainer.steps_left, trainer.progress.samples_consumed)
        monitor = trainer.find(SpeedMonitor)
        rows = start_table.start_rows(
            config,
            trainer.world,
            trainer.engine.module,
            self.param_counts,
            trainer.folder,
            data_progress.corpus_rows(trainer.data, samples_to_read),
            None if monitor is None else monitor.peak_flops,
        )
        self.screen.table(trainer.folder.name, rows)

    def on_after_update(self, result: StepResult) -> None:
        self.screen.total_steps = self.trainer.last_step
        self.screen.advance(self.trainer.progress.step, result.loss)

    def on_log(self, metrics: dict[str, Any]) -> None:
        trainer = self.trainer
        if self._should_log_fusion:
            self._should_log_fusion = False
            log.info(start_table.fusion_text(trainer.engine.module, trainer.engine.optimizer.reducer.fused_params))
        epochs = data_progress.epochs_text(trainer.data, trainer.progress.samples_consumed)
        trainer.print_line(progress_line(trainer.progress.step, trainer.last_step, metrics, epochs))

    def on_train_end(self) -> None:
        self.close()
        if not self.trainer.stop_text:
            self.screen.table("Done", self.end_rows(time.monotonic() - self._started_at))

    def on_exception(self, error: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """Remove the progress bar."""
        with suppress(Exception):  # must not hide an error of the run
            self.screen.close()

    def end_rows(self, seconds: float) -> Iterator[tuple[str, str]]:
        """Yield rows for the final summary."""
        trainer, find = self.trainer, self.trainer.find
        progress, folder = trainer.progress, trainer.folder
        yield "steps", f"{progress.step} ({progress.num_skipped_steps} skipped), {progress.samples_consumed:,} samples"
        if trainer.last_loss is not None:
            yield "last training loss", f"{trainer.last_loss:.4f}"
        if evaluator := find(Evaluator):
            for split in [name for name in SPLITS if name in evaluator.losses]:
                yield f"{SPLITS[split]} loss", f"{evaluator.losses[split]:.4f}"
        if (monitor := find(SpeedMonitor)) and (speed := monitor.rates.mean_tokens_per_s()) is not None:
            yield "tokens/s", f"{speed:,.0f} on average"
        num_ranks = trainer.world.grid.topology.world_size
        yield "time", f"{human_time(seconds)} on {num_ranks} rank{'' if num_ranks == 1 else 's'}"
        if trainer.config.checkpoint.eval_only:
            yield "evaluations", str(folder / EVALUATIONS)
        else:
            yield "metrics", f"{folder / METRICS}, {folder / 'tensorboard'}"
        if trainer.last_loss is not None:
            yield "picture", str(folder / "loss.png")
        if checkpointer := find(Checkpointer):
            yield "checkpoint", str(checkpointer.committed or checkpointer.loaded or "none")
        if (picture := find(PipelinePicture)) and picture.text is not None:
            yield "pipeline", picture.text


def progress_line(step: int, total: int, metrics: Mapping[str, Any], epochs: str = "") -> str:
    """Format a log interval's metrics as a progress line; ``epochs`` is the text from ``epochs_text``."""
    mfu = f" | MFU {100 * metrics['mfu']:.1f} %" if metrics["mfu"] else ""
    remaining = human_time((total - step) * metrics["step_s"])
    bubble = f" | bubble {100 * metrics['bubble']:.1f} %" if "bubble" in metrics else ""
    length = f" | sequence {metrics['seq_length']}" if "seq_length" in metrics else ""
    experts = f" | load imbalance {max(load.values()):.2f}" if (load := metrics.get("moe_load_imbalance")) else ""
    logit = f" | max logit {metrics['max_attention_logit']:.2f}" if "max_attention_logit" in metrics else ""
    skipped = f" | skipped {metrics['skipped']}" if metrics["skipped"] else ""
    return (
        f"step {step:>{len(str(total))}}/{total} | loss {metrics['loss']:.4f} | lr {metrics['learning_rate']:.3e} | "
        f"grad norm {metrics['grad_norm']:.3f} | loss scale {metrics['loss_scale']:g}{experts}{logit} | "
        f"{metrics['tokens_per_s']:,.0f} tokens/s | {human_count(metrics['flops_per_s'])}FLOP/s{mfu}{bubble}{length} | "
        f"data wait {100 * metrics['data_wait']:.1f} %{f' | {epochs}' if epochs else ''}{skipped} | left {remaining}"
    )
