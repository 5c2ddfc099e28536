"""Rows of start table, progress line, end summary; stages.json."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron import device, files
from megatron.config import CheckpointConfig, Config
from megatron.config.checkpoint import DEFAULT_KEPT
from megatron.log import human_count, human_time
from megatron.models import registry
from megatron.models.common.memory import peak_flops
from megatron.mpu.mappings import all_reduce
from megatron.mpu.shard import shard_of
from megatron.mpu.topology import Topology
from megatron.training import device_setup
from megatron.training.dry_run import is_known, layers_text, place_text, plan_rows, simulated_bubble, stage_memory
from megatron.training.initialize import World
from megatron.training.train_state import TrainState
from megatron.training.train_step import StepResult
from tds.gradients import is_counted_in_norm

# The start table, the progress line and the end summary, as text.

MATMUL_SIZE = 1024
MATMUL_SECONDS = 0.3


class Rates:
    """Speed since the last report: tokens/s, FLOP/s and the share of what the devices could do (MFU).

    MFU counts no recomputation, of GPT-2 the causal half of attention (``6 N + 6 L a d s`` FLOPs per token), of T5 all
    of it; ``6 N`` for a model of the user's own, of which only the number of parameters is known.

    Args:
        counted: as ``count_parameters`` returns it.
    """

    def __init__(self, config: Config, peak_flops: float | None, counted: Sequence[int]) -> None:
        self.tokens_per_sample = config.tokens_per_sample
        of_own_model = 6.0 * counted[0] * self.tokens_per_sample
        self.flops_per_sample = (
            registry.costs_of(config).flops_per_sample if is_known(config, counted) else of_own_model
        )
        self.peak_flops = peak_flops
        self._since, self._steps, self._samples = time.perf_counter(), 0, 0
        self._first: float | None = None
        self._later_s, self._later_samples = 0.0, 0

    def count_step(self, samples: int) -> None:
        """Take note of one finished step over so many samples."""
        self._steps += 1
        self._samples += samples

    def drain(self, pause_s: float = 0.0, waited_s: float = 0.0) -> dict[str, Any]:
        """Return the rates since the last call.

        Args:
            pause_s: time in between that was not training (evaluation, saving).
            waited_s: time in which the training waited for data.
        """
        now = time.perf_counter()
        seconds = max(now - self._since - pause_s, 1e-9)
        steps, samples, self._steps, self._samples, self._since = self._steps, self._samples, 0, 0, now
        tokens_per_s = self.tokens_per_sample * samples / seconds
        if self._first is None:
            self._first = tokens_per_s
        else:
            self._later_s, self._later_samples = self._later_s + seconds, self._later_samples + samples
        flops = self.flops_per_sample * samples / seconds
        return {
            "step_s": seconds / max(steps, 1),
            "tokens_per_s": tokens_per_s,
            "flops_per_s": flops,
            "mfu": flops / self.peak_flops if self.peak_flops else None,
            "data_wait": waited_s / seconds,
        }

    def mean_tokens_per_s(self) -> float | None:
        """Return the speed behind the first record, which holds what is slow once; the first's where it is the last."""
        return self.tokens_per_sample * self._later_samples / self._later_s if self._later_s else self._first


def count_parameters(module: torch.nn.Module, world: World) -> list[int]:
    """Return the parameters of the whole model, then those that one rank of each stage holds on average. Collective.

    A tied weight counts once in the whole model and on each stage that holds it; padded rows do not count.
    """
    grid = world.grid
    counts = torch.zeros(1 + grid.pipe.size, dtype=torch.float64, device=world.device)
    for parameter in module.parameters():
        size = shard_of(parameter).unpadded(parameter).numel()
        counts[1 + grid.pipe.rank] += size / grid.tensor.size
        counts[0] += size * is_counted_in_norm(parameter, grid.tensor.rank)
    return [round(count) for count in all_reduce(counts, grid.model).tolist()]


def peak_of_all_ranks(world: World) -> float | None:
    """Return what all devices together could do: by a table for GPUs, measured on CPU. Collective."""
    if world.kind != "cpu":
        peak = peak_flops(device.name(world.kind))
        return peak * world.grid.topology.world_size if peak else None
    total = torch.tensor([_measured_product_rate()], dtype=torch.float64)
    return all_reduce(total, world.grid.world).item()


def _measured_product_rate() -> float:
    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, generator=torch.Generator().manual_seed(0))
    a @ a
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < MATMUL_SECONDS:
        a @ a
        done += 1
    return 2.0 * MATMUL_SIZE**3 * done / (time.perf_counter() - start)


def bounds_of(config: Config, module: torch.nn.Module) -> Sequence[int]:
    """Return the bounds of the pieces of ``module``, in layers as the pipeline counts them."""
    bounds: Sequence[int] = getattr(module, "parts", [0, registry.costs_of(config).num_units])
    return bounds


def start_rows(
    config: Config,
    world: World,
    module: torch.nn.Module,
    counted: Sequence[int],
    folder: Path,
    data_rows: Iterable[tuple[str, str]],
    peak: float | None,
) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table at the start."""
    bounds = bounds_of(config, module)
    yield "device", device.name(world.kind) + (f", {human_count(peak)}FLOP/s in all" if peak else "")
    yield from device_setup.device_rows(world.kind)
    yield from device_setup.fused_kernel_rows(config, world.kind)
    forecast = functools.partial(simulated_bubble, recomputes=config.parallel.checkpoint_activations)
    yield from plan_rows(config, world.grid.topology, bounds, config.precision.dtype or "", counted, forecast)
    yield "loss", _loss_row(module)
    yield from device_setup.determinism_rows(config, world.kind)
    yield from data_rows
    yield "run folder", str(folder)
    if not config.checkpoint.eval_only:
        yield "checkpoints", _saves_row(config.checkpoint)


def _saves_row(flags: CheckpointConfig) -> str:
    """Say when the run saves."""
    steps = f"every {flags.save_interval} steps" if flags.save_interval else ""
    minutes = f"every {flags.minutes:g} minutes" if flags.minutes else ""
    kept = f" (the last {DEFAULT_KEPT} of these stay)" if flags.is_default_interval else ""
    when = " and ".join(part for part in (steps, minutes) if part)
    how = ", in the background" if flags.async_save else ""
    return f"{when + kept + ', ' if when else ''}at the end, and when stopped{how}"


def _loss_row(module: torch.nn.Module) -> str:
    """Say how the losses of micro-batches become one: a model that knows says so by ``loss_weighting = "tokens"``."""
    if getattr(module, "loss_weighting", None) == "tokens":
        return "mean over the valid tokens of the global batch"
    return "mean over micro-batches and replicas (of a pair (sum, count): over all that is counted)"


def progress_line(
    progress: TrainState, total: int, result: StepResult, lr: float, rates: dict[str, Any], epochs: str = ""
) -> str:
    """Return one line of numbers for this log interval; ``epochs`` says how often the corpora have been read."""
    mfu = f" | MFU {100 * rates['mfu']:.1f} %" if rates["mfu"] else ""
    left = human_time((total - progress.step) * rates["step_s"])
    bubble = f" | bubble {100 * rates['bubble']:.1f} %" if "bubble" in rates else ""
    skipped = f" | skipped {progress.skipped}" if progress.skipped else ""
    return (
        f"step {progress.step:>{len(str(total))}}/{total} | loss {result.loss:.4f} | lr {lr:.3e} | "
        f"grad norm {result.grad_norm:.3f} | loss scale {result.loss_scale:g} | "
        f"{rates['tokens_per_s']:,.0f} tokens/s | {human_count(rates['flops_per_s'])}FLOP/s{mfu}{bubble} | "
        f"data wait {100 * rates['data_wait']:.1f} %{f' | {epochs}' if epochs else ''}{skipped} | left {left}"
    )


# ``stages.json`` in the run folder: what each stage holds, for tools that show a run. Rank 0 writes it.

NAME = "stages.json"


def stage_facts(
    config: Config, topology: Topology, bounds: Sequence[int], counted: Sequence[int], before: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return of each stage its layers, the parameters on a rank, and the memory that was estimated for one, in bytes.

    That estimate is of the model and its training alone; beside it stands what a rank held before.

    Args:
        bounds: of the pieces, as ``megatron.training.dry_run.plan_rows`` takes them.
        counted: parameters of the whole model, then of one rank of each stage.
        before: by "stage 0" and so on, the most bytes that a rank of it held before the model was made.
    """
    known, stages = is_known(config, counted), topology.pipe
    memory = stage_memory(config, topology, bounds, config.precision.dtype or "") if known else None
    return [
        {
            "stage": stage,
            "ranks": topology.data * topology.tensor,
            "layers": place_text(config, bounds, stages, stage) if known else layers_text(bounds, stages, stage),
            "parameters": counted[1 + stage],
            "estimated_bytes": memory[stage].total if memory is not None else None,
            "before_bytes": before[f"stage {stage}"],
        }
        for stage in range(stages)
    ]


def write(folder: Path, facts: list[dict[str, Any]]) -> None:
    """Write what ``stage_facts`` returned."""
    files.replace_bytes(folder / NAME, json.dumps(facts, indent=2).encode() + b"\n")
