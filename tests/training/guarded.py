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

GRID_FLAGS = "--model-parallel-size 2 --pipe-parallel-size 2"
SHORT_RUN_FLAGS = "--train-iters 12 --eval-iters 0 --stability-window 4 --stability-sigma 20 --step-timeout 25"
FaultInjector = Callable[[int], None]


@dataclass
class RankRecord:
    """What one rank saw. ``digests`` are of weights and optimizer state, ahead of each step and at the end."""

    error: str = ""
    is_of_this_rank: bool = False
    was_stopped: bool = False
    digests: list[str] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    loss_scales: list[float] = field(default_factory=list)
    first_samples: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


def train(
    num_ranks: int, prefix: Path, folder: Path, extra_args: str = "", inject_fault: FaultInjector | None = None
) -> list[RankRecord]:
    """Train in forked ranks; return what each saw."""
    argv = runs.make_flags(prefix, folder, f"{SHORT_RUN_FLAGS} {extra_args}")
    return run_ranks(num_ranks, _run_rank, argv, num_ranks, inject_fault, deadline_s=100.0)


def scale_losses(
    first_samples: Collection[int],
    factor: float,
    *,
    faulty_rank: int | None = None,
    faulty_micro_batch: int | None = None,
) -> FaultInjector:
    """Return a plant that multiplies the losses of the steps whose first sample is among ``first_samples``."""

    def inject_fault(rank: int) -> None:
        current = {"first": -1, "micro": -1}
        original_as_weighted = loss_forms.as_weighted

        def record_samples(*args: int) -> StepSamples:
            step_samples = StepSamples(*args)
            current.update(first=step_samples.first, micro=-1)
            return step_samples

        def scale_loss(loss: Any) -> Any:
            weighted = original_as_weighted(loss)
            current["micro"] += 1
            is_faulty = (
                current["first"] in first_samples
                and faulty_rank in (None, rank)
                and faulty_micro_batch in (None, current["micro"])
            )
            return Weighted(weighted.total * factor, weighted.count) if is_faulty else weighted

        trainer.StepSamples = record_samples  # type: ignore[assignment, misc]
        loss_forms.as_weighted = single_stage_engine.as_weighted = scale_loss

    return inject_fault


def _run_rank(rank: int, argv: list[str], num_ranks: int, inject_fault: FaultInjector | None) -> RankRecord:
    record = RankRecord()
    _record_steps(record)
    runs.disable_slow_features()
    if inject_fault is not None:
        inject_fault(rank)
    config = resolve_dtype(runs.parse_script_config(pretrain_gpt2, argv, num_ranks), "fp32")
    world = initialize.start(config)
    stop_requests = StopRequests()
    stop_requests.set_limits(config.run.exit_interval, 0.0, 0.0)
    script = pretrain_gpt2
    providers = (script.train_valid_test_datasets_provider, script.model_provider, script.forward_step)
    try:
        run(config, world, *providers, "gpt2", stop_requests, runs.INJECTED_CALLBACKS)
    except NumericsError as error:
        record.error, record.is_of_this_rank = str(error), error.is_of_this_rank
    except StopRequest:
        record.was_stopped = True
    sys.stdout.flush()
    return record


def _record_steps(record: RankRecord) -> None:
    """Note what is there ahead of each step, and at the end."""
    original_train_step = Trainer.train_step

    def record_step(trainer: Trainer) -> StepResult:
        record.digests.append(_state_digest(trainer))
        record.first_samples.append(trainer.progress.samples_consumed)
        record.steps.append(trainer.progress.step)
        record.loss_scales.append(trainer.engine.optimizer.loss_scale)
        try:
            return original_train_step(trainer)
        except NumericsError:
            record.digests.append(_state_digest(trainer))
            raise
        finally:
            record.learning_rates.append(trainer.engine.optimizer.param_groups[0]["lr"])

    Trainer.train_step = record_step  # type: ignore[method-assign]


def _state_digest(trainer: Trainer) -> str:
    optimizer = trainer.engine.optimizer
    tensors = [p.detach() for p in trainer.engine.module.parameters()]
    tensors += [v for state in optimizer.inner.state.values() for v in state.values() if hasattr(v, "numpy")]
    return hashlib.sha256(b"".join(t.contiguous().float().numpy().tobytes() for t in tensors)).hexdigest()[:12]
