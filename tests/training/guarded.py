"""Small runs whose losses and gradients a test spoils, and what each rank saw of them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pretrain_gpt2
from megatron.config import resolve_dtype
from megatron.errors import NumericsError, StopRequest
from megatron.runtime.exit_signals import StopRequests
from megatron.training import initialize, loss_forms, single_stage_engine, trainer
from megatron.training.startup import run
from megatron.training.step_result import StepResult
from megatron.training.step_samples import StepSamples
from megatron.training.trainer import Trainer
from tds.loss import Weighted
from tests.helpers import runs
from tests.helpers.harness import run_ranks

GRID = "--model-parallel-size 2 --pipe-parallel-size 2"
SHORT = "--train-iters 12 --eval-iters 0 --stability-window 4 --stability-sigma 20 --step-timeout 25"
Plant = Callable[[int], None]


@dataclass
class Seen:
    """What one rank saw. ``digests`` are of weights and optimizer state, ahead of each step and at the end."""

    error: str = ""
    is_of_this_rank: bool = False
    was_stopped: bool = False
    digests: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


def train(num_ranks: int, prefix: Path, folder: Path, extra: str = "", plant: Plant | None = None) -> list[Seen]:
    """Train in forked ranks; return what each saw."""
    argv = runs.flags(prefix, folder, f"{SHORT} {extra}")
    return run_ranks(num_ranks, _rank, argv, num_ranks, plant, deadline_s=100.0)


def spoil(
    firsts: Collection[int], factor: float, *, rank_hit: int | None = None, micro_hit: int | None = None
) -> Plant:
    """Return a plant that multiplies the losses of the steps whose first sample is among ``firsts``."""

    def plant(rank: int) -> None:
        now = {"first": -1, "micro": -1}
        plain = loss_forms.as_weighted

        def noted(*facts: int) -> StepSamples:
            made = StepSamples(*facts)
            now.update(first=made.first, micro=-1)
            return made

        def spoiled(loss: Any) -> Any:
            weighted = plain(loss)
            now["micro"] += 1
            is_hit = now["first"] in firsts and rank_hit in (None, rank) and micro_hit in (None, now["micro"])
            return Weighted(weighted.total * factor, weighted.count) if is_hit else weighted

        trainer.StepSamples = noted  # type: ignore[assignment, misc]
        loss_forms.as_weighted = single_stage_engine.as_weighted = spoiled

    return plant


def _rank(rank: int, argv: list[str], num_ranks: int, plant: Plant | None) -> Seen:
    seen = Seen()
    _watch(seen)
    runs.leave_out_what_takes_long()
    if plant is not None:
        plant(rank)
    config = resolve_dtype(runs.parse_as(pretrain_gpt2, argv, num_ranks), "fp32")
    here = initialize.start(config)
    stop = StopRequests()
    stop.limit(config.run.exit_interval, 0.0, 0.0)
    script = pretrain_gpt2
    providers = (script.train_valid_test_datasets_provider, script.model_provider, script.forward_step)
    try:
        run(config, here, *providers, "gpt2", stop, runs.PLANTED)
    except NumericsError as error:
        seen.error, seen.is_of_this_rank = str(error), error.is_of_this_rank
    except StopRequest:
        seen.was_stopped = True
    sys.stdout.flush()
    return seen


def _watch(seen: Seen) -> None:
    """Note what is there ahead of each step, and at the end."""
    step = Trainer.train_step

    def watched_step(run: Trainer) -> StepResult:
        seen.digests.append(_digest(run))
        seen.firsts.append(run.progress.samples_consumed)
        seen.steps.append(run.progress.step)
        seen.scales.append(run.engine.optimizer.loss_scale)
        try:
            return step(run)
        except NumericsError:
            seen.digests.append(_digest(run))
            raise
        finally:
            seen.rates.append(run.engine.optimizer.param_groups[0]["lr"])

    Trainer.train_step = watched_step  # type: ignore[method-assign]


def _digest(run: Trainer) -> str:
    optimizer = run.engine.optimizer
    tensors = [p.detach() for p in run.engine.module.parameters()]
    tensors += [v for state in optimizer.inner.state.values() for v in state.values() if hasattr(v, "numpy")]
    return hashlib.sha256(b"".join(t.contiguous().float().numpy().tobytes() for t in tensors)).hexdigest()[:12]
