"""What is said and written down once per log interval. docs/seeing.md has each name with its unit and formula."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

from megatron.training import compile_time
from megatron.training.data_order import epochs_text, epochs_values, tokens_values
from megatron.training.evaluation import SPLITS, perplexity
from megatron.training.metrics import EVALUATIONS, METRICS
from megatron.training.of_ranks import OfRanks, by_stage, gather
from megatron.training.parts import Run
from megatron.training.report import progress_line
from megatron.training.samples import StepSamples
from megatron.training.screen import human_time
from megatron.training.step_result import StepResult
from megatron.training.straggler import slowest


def tell_step(run: Run, result: StepResult, lr: float, span: StepSamples) -> None:
    """Say and write down the numbers since the last log step. Collective: all ranks measure bubble, work and waits."""
    step, total = run.progress.step, run.config.batch.train_iters
    bubble, ranks = run.engine.bubble(), gather(run)
    if run.screen is None or run.rates is None:
        return
    rates = run.rates.drain(run.pause_s, max(ranks.waited_s))
    if bubble is not None:
        predicted = None if run.predicted_bubble is None else run.predicted_bubble(span.num_micro_batches)
        rates |= {"bubble": bubble, "bubble_predicted": predicted}
    run.pause_s = 0.0
    epochs = epochs_text(run.data, run.progress.samples_consumed)
    run.screen.line(progress_line(run.progress, total, result, lr, rates, epochs))
    compiled = compile_time.values(ranks.compiled) if run.compiling.is_on else {}
    if compiled and (words := compile_time.line(compiled)):
        run.screen.line(f"step {step} | {words}")
    told = run.suspect.judge(slowest(ranks.own_s, ranks.waited_each_s, run.world.grid.topology))
    if told is not None:
        run.screen.line(f"step {step} | {told}")
    if run.metrics is not None:
        run.metrics.write("train", step, _values(run, result, lr, rates, ranks) | compiled)


def _values(run: Run, result: StepResult, lr: float, rates: dict[str, Any], ranks: OfRanks) -> dict[str, Any]:
    consumed, topology = run.progress.samples_consumed, run.world.grid.topology
    has_gradients = math.isfinite(result.loss) or not result.is_refused  # else they were thrown away ahead of the norms
    norms = {"layer_norms": run.layer_norms.norms} if run.layer_norms is not None and has_gradients else {}
    return {
        "loss": result.loss,
        "perplexity": perplexity(result.loss),
        **{name: value for name, value in result.losses.items() if name not in ("loss", "lm loss")},
        "learning_rate": lr,
        "grad_norm": result.grad_norm,
        **norms,
        "loss_scale": result.loss_scale,
        "samples": consumed,
        "tokens": consumed * run.config.tokens_per_sample,
        **tokens_values(run.data, consumed, run.config.tokens_per_sample),
        **epochs_values(run.data, consumed),
        "skipped": run.progress.skipped,
        **rates,
        "checkpoint_stall_s": run.saves.drain_stalled_s(),
        "work_s": by_stage(ranks.own_s, topology, statistics.fmean),
        "memory_bytes": by_stage(ranks.memory_bytes, topology, max),
        "time": time.time(),
    }


def end_rows(run: Run, seconds: float) -> Iterator[tuple[str, str]]:
    """Yield the rows of the summary at the end."""
    progress, folder = run.progress, run.folder
    yield "steps", f"{progress.step} ({progress.skipped} skipped), {progress.samples_consumed:,} samples"
    if run.last_loss is not None:
        yield "last training loss", f"{run.last_loss:.4f}"
    for kind, name in SPLITS.items():
        if kind in run.evaluated:
            yield f"{name} loss", f"{run.evaluated[kind]:.4f}"
    if run.rates is not None and (speed := run.rates.mean_tokens_per_s()) is not None:
        yield "tokens/s", f"{speed:,.0f} on the mean"
    size = run.world.grid.topology.world_size
    yield "time", f"{human_time(seconds)} on {size} rank{'' if size == 1 else 's'}"
    if run.config.checkpoint.eval_only:
        yield "evaluations", str(folder / EVALUATIONS)
    else:
        yield "metrics", f"{folder / METRICS}, {folder / 'tensorboard'}"
    if run.last_loss is not None:
        yield "picture", str(folder / "loss.png")
    yield "checkpoint", str(run.saved or run.loaded or "none")
