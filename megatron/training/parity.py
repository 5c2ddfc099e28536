"""Training step traces, for comparison between layouts.

Tests and ``tools/check_layout.py`` compare a layout's traces with a single process's trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import named_parameters
from megatron.config import Config
from megatron.mpu.shard import Shard, shard_of
from megatron.training import global_vars
from megatron.training.data import RunData
from megatron.training.mock_data import mock_tokenizer
from megatron.training.run_callbacks import debugging_callbacks, make_callbacks
from megatron.training.setup import build_engine, make_streams
from megatron.training.step_engine import ForwardStep, StepEngine
from megatron.training.trainer import Trainer
from megatron.training.world import World

MIN_NORM_FRACTION = 1.0e-6  # fraction of the global norm; smaller gradients are zero by symmetry


@dataclass
class Trace:
    """Step values on one rank.

    Args:
        losses: training loss by step.
        other_losses: all other losses in step order, such as load-balance losses of experts, and the largest attention
            logits if they are measured.
        expert_tokens: tokens by step, layer and expert, with the dropped tokens in the last column; int64.
        gradients: first step's gradients, reduced and before clipping; shards of global tensors by name.
        weights: weights after the last step; shards of global tensors by name.
        eval_losses: evaluation losses.
    """

    losses: list[float] = field(default_factory=list)
    other_losses: list[float] = field(default_factory=list)
    expert_tokens: list[torch.Tensor] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: dict[str, tuple[Shard, torch.Tensor]] = field(default_factory=dict)
    weights: dict[str, tuple[Shard, torch.Tensor]] = field(default_factory=dict)
    eval_losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """The largest differences over all steps, tensors and ranks.

    Args:
        worst_gradient: gradient with the largest difference, by name.
        expert_tokens: token counts that differ, for experts and dropped tokens.
    """

    first_loss: float
    loss: float
    first_norm: float
    norm: float
    gradient: float
    weight: float
    worst_gradient: str
    expert_tokens: int = 0


def trace_steps(
    config: Config,
    world: World,
    dataset: Any,
    model_provider: Callable[[], torch.nn.Module],
    forward_step: ForwardStep,
    *,
    num_steps: int,
    eval_every: int = 0,
    tokenizer: Any = None,
) -> Trace:
    """Train ``num_steps`` steps on ``dataset`` and return this rank's trace. Collective.

    Args:
        world: this rank's device and grid position.
        eval_every: also evaluate one global batch every N steps, which must not affect training; 0: never.
        tokenizer: tokenizer for scripts; None: a mock tokenizer for random tokens.
    """
    streams = make_streams(config, world)
    global_vars.set_current(config, tokenizer or mock_tokenizer(config), streams)
    engine = build_engine(config, world, streams, model_provider, forward_step)
    debuggers = make_callbacks(debugging_callbacks(config, world, engine, streams))
    data = RunData({"train": dataset, "valid": dataset} if world.reads_data else {}, None)
    trace = Trace()
    _capture_first_gradients(engine, trace)
    trainer = Trainer(config, world, engine, data, Path(), debuggers)
    with trainer.open_batches():
        for step in range(num_steps):
            result = trainer.train_step()
            trace.losses.append(result.loss)
            trace.other_losses += result.losses.values()
            if engine.logits is not None:
                trace.other_losses.append(engine.logits.largest())
            if (expert_load := result.expert_load) is not None:
                trace.expert_tokens.append(torch.cat([expert_load.tokens, expert_load.dropped.unsqueeze(1)], dim=1))
            trace.grad_norms.append(result.grad_norm)
            if eval_every and (step + 1) % eval_every == 0:
                valid_batches = data.batches("valid", config, world, length=trainer.eval_seq_length)
                trace.eval_losses.append(engine.evaluate_batch(valid_batches))
    for name, parameter in named_parameters(engine.module):
        main_param = engine.optimizer.main_param_of(parameter) if parameter.requires_grad else parameter
        shard = shard_of(main_param)
        trace.weights[name] = (shard, _copy_to_host(shard.unpadded(main_param)))
    return trace


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to host memory, where tensors can be compared across processes and devices."""
    return tensor.detach().to("cpu", copy=True)


def compare(reference: Trace, ranks: Sequence[Trace]) -> Difference:
    """Return the largest differences between the traces of ``ranks`` and the trace of one process.

    Every shard of every rank, including copies, is compared with the same part of the reference.

    Raises:
        ValueError: the ranks together do not have the same parameters as the reference.
    """
    names = {name for trace in ranks for name in trace.gradients}
    if names != set(reference.gradients):
        raise ValueError(f"the layouts have different parameters: {sorted(names ^ set(reference.gradients))}")
    min_norm = MIN_NORM_FRACTION * reference.grad_norms[0]
    gradient, worst_gradient = max(
        _differences(reference.gradients, [rank_trace.gradients for rank_trace in ranks], min_norm), default=(0.0, "")
    )
    weight, _ = max(
        _differences(reference.weights, [rank_trace.weights for rank_trace in ranks], 1e-12), default=(0.0, "")
    )
    return Difference(
        first_loss=max(abs(rank_trace.losses[0] - reference.losses[0]) for rank_trace in ranks),
        loss=max(
            _max_difference(reference.losses + reference.other_losses, rank_trace.losses + rank_trace.other_losses)
            for rank_trace in ranks
        ),
        first_norm=max(
            _max_relative_difference(reference.grad_norms[:1], rank_trace.grad_norms[:1]) for rank_trace in ranks
        ),
        norm=max(_max_relative_difference(reference.grad_norms, rank_trace.grad_norms) for rank_trace in ranks),
        gradient=gradient,
        weight=weight,
        worst_gradient=worst_gradient,
        expert_tokens=sum(_num_unequal(reference.expert_tokens, rank_trace.expert_tokens) for rank_trace in ranks),
    )


def _capture_first_gradients(engine: StepEngine, trace: Trace) -> None:
    """Copy the gradients that the first ``optimizer.step()`` receives into ``trace``."""
    optimizer = engine.optimizer
    step = optimizer.step

    def capturing_step(closure: None = None) -> None:
        optimizer.reducer.sum_over_groups()
        if not trace.gradients:
            for name, parameter in named_parameters(engine.module):
                gradient, shard = optimizer.gradient_of(parameter), optimizer.gradient_shard(parameter)
                if gradient is not None:
                    values = shard.unpadded(gradient) * optimizer.gradient_factor / optimizer.loss_scale
                    trace.gradients[name] = (shard, _copy_to_host(values))
        step()

    optimizer.step = capturing_step  # type: ignore[method-assign]


def _differences(
    reference: Mapping[str, tuple[Shard, torch.Tensor]],
    ranks: Sequence[Mapping[str, tuple[Shard, torch.Tensor]]],
    min_norm: float,
) -> list[tuple[float, str]]:
    """Return (relative Frobenius difference, name) for every shard on every rank."""
    differences = []
    for shards in ranks:
        for name, (shard, values) in shards.items():
            expected = shard.narrow(reference[name][1])
            scale = max(reference[name][1].norm().item(), min_norm)
            differences.append(((values - expected).norm().item() / scale, name))
    return differences


def _max_difference(a: Sequence[float], b: Sequence[float]) -> float:
    return max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)


def _num_unequal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> int:
    return sum(int((x != y).sum()) for x, y in zip(a, b, strict=True))


def _max_relative_difference(a: Sequence[float], b: Sequence[float]) -> float:
    return max((abs(x - y) / max(abs(x), 1e-300) for x, y in zip(a, b, strict=True)), default=0.0)
