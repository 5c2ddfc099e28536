"""training_log: the numbers of a log interval, brought together over ranks, said and written."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron import device
from megatron.log import human_time
from megatron.mpu.mappings import all_reduce
from megatron.mpu.topology import Topology
from megatron.training import compile
from megatron.training.compile import Compiled
from megatron.training.data import epochs_text, epochs_values, tokens_values
from megatron.training.evaluate import SPLITS, perplexity
from megatron.training.initialize import World
from megatron.training.metrics import EVALUATIONS, METRICS, slowest
from megatron.training.report import progress_line
from megatron.training.run import Run
from megatron.training.train_step import StepResult, StepSamples

# What each rank measures of a log interval, known to all: times, and the most memory that it has held.

MIB = 2**20


class RankMetrics(NamedTuple):
    """One number of each rank, in seconds or bytes, and what was compiled there.

    ``waited_s`` for data since the last report, ``own_s`` of own work a step, ``waited_each_s`` for data a step.
    """

    waited_s: list[float]
    own_s: list[float]
    waited_each_s: list[float]
    memory_bytes: list[float]
    compiled: list[Compiled]


def gather(run: Run) -> RankMetrics:
    """Return what all ranks have measured since the last call. Collective.

    Shapes:
        the message is [7, ranks]; memory goes in MiB, which fp32 holds in steps of 8 KiB at 80 GiB
    """
    waited = 0.0 if run.batches is None else run.batches.drain_waited_s()
    own_s, steps = run.engine.busy()
    held = device.peak_memory_bytes(run.world.kind) / MIB
    mine = [waited, own_s / max(steps, 1), waited / max(steps, 1), held, *run.compiling.drain()]
    told = torch.zeros(len(mine), run.world.grid.topology.world_size, dtype=torch.float32, device=run.world.device)
    told[:, run.world.rank] = torch.tensor(mine)
    waited_s, own_s, waited_each_s, memory, *compiled = all_reduce(told, run.world.grid.world).tolist()
    each_compiled = [
        Compiled(seconds, round(made), round(found)) for seconds, made, found in zip(*compiled, strict=True)
    ]
    return RankMetrics(waited_s, own_s, waited_each_s, [MIB * each for each in memory], each_compiled)


def by_stage(values: Sequence[float], topology: Topology, join: Callable[[Sequence[float]], float]) -> dict[str, float]:
    """Return "stage 0" and so on with what ``join`` makes of the numbers of its ranks."""
    ranks = topology.groups("data", "tensor")
    return {f"stage {stage}": join([values[rank] for rank in each]) for stage, each in enumerate(ranks)}


def most_of_each_stage(number: float, world: World) -> dict[str, float]:
    """Return by stage the greatest of the bytes that each rank gives. Collective."""
    told = torch.zeros(world.grid.topology.world_size, dtype=torch.float32, device=world.device)
    told[world.rank] = number / MIB
    return by_stage([MIB * each for each in all_reduce(told, world.grid.world).tolist()], world.grid.topology, max)


# What is said and written down once per log interval. docs/seeing.md has each name with its unit and formula.


def training_log(run: Run, result: StepResult, lr: float, span: StepSamples) -> None:
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
    compiled = compile.compile_metrics(ranks.compiled) if run.compiling.is_on else {}
    if compiled and (words := compile.compile_line(compiled)):
        run.screen.line(f"step {step} | {words}")
    told = run.suspect.judge(slowest(ranks.own_s, ranks.waited_each_s, run.world.grid.topology))
    if told is not None:
        run.screen.line(f"step {step} | {told}")
    if run.metrics is not None:
        run.metrics.write("train", step, _values(run, result, lr, rates, ranks) | compiled)


def _values(run: Run, result: StepResult, lr: float, rates: dict[str, Any], ranks: RankMetrics) -> dict[str, Any]:
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
