"""``partition_method="profile"``: each layer is timed in a short probe, and the cut is made by time.

The probe builds one layer at a time on every rank, runs it forwards and backwards on one micro-batch, and frees it
again. All ranks do the same at the same time, so layers may contain collectives of the tensor group. Random numbers are
put back, so the initial weights are what they would have been without a probe.

A layer that appears many times (same class, as many parameters, same shapes in, about the same time) is timed each
time, and all count as their median: else noise would cut where there is no difference.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tds.clocks import Clock, clock_for
from tds.deepspeed.api import LayerSpec, TiedLayerSpec, checkpointing
from tds.deepspeed.shared_layers import held_in, layer_parameters
from tds.device import random_numbers_kept, to_device
from tds.engine.stage_table import LayerCost
from tds.loss import Weighted, named_losses
from tds.param_info import copy_infos
from tds.partition import partition_by_times
from tds.schedule import LOOP

PASSES = 3
"""Timed passes over each layer, after one to warm up; the fastest counts."""
NOISE = 0.25
"""Layers that look alike and differ by a smaller share than this are taken for the same."""


@dataclass(frozen=True)
class ProfiledCut:
    """Where to cut: piece ``i`` holds the layers ``bounds[i] ... bounds[i + 1]``."""

    bounds: list[int]
    layers: tuple[LayerCost, ...]


def profiled_cut(
    specs: Sequence[Any], *, num_stages: int, num_chunks: int = 1, placement: str = LOOP,
    batch: Any, loss_fn: Callable[..., Any] | None,
    device: torch.device, recomputes: bool = False,
) -> ProfiledCut:  # fmt: skip
    """Return the cut that makes the slowest stage as fast as can be. Collective over all ranks.

    Args:
        batch: one micro-batch (inputs, labels), of the same shapes on every rank.
        recomputes: forwards run once more in the backward.

    Raises:
        ValueError: no batch, or fewer layers than pieces.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            'partition_method="profile" times the layers on one micro-batch, got profile_batch='
            f"{'None' if batch is None else type(batch).__name__}. Pass PipelineModule(..., "
            "profile_batch=(inputs, labels)) on every rank."
        )
    layers = average_over_ranks(profile_layers(specs, batch, loss_fn, device), device)
    if recomputes:
        layers = [replace(each, backward_s=each.backward_s + each.forward_s) for each in layers]
    layers = even_out(layers)
    times, parameters = [each.total_s for each in layers], [each.parameters for each in layers]
    return ProfiledCut(partition_by_times(times, parameters, num_stages, num_chunks, placement), tuple(layers))


def profile_layers(
    specs: Sequence[Any], batch: Any, loss_fn: Callable[..., Any] | None, device: torch.device
) -> list[LayerCost]:
    """Return what each layer costs on this rank; the loss counts with the last one."""
    inputs, labels = to_device(batch[0], device), to_device(batch[1], device)
    clock = clock_for(device)
    costs = []
    with all_random_numbers_kept(device), torch.enable_grad():
        for index, spec in enumerate(specs):
            module, run = build(spec, device)
            if index == len(specs) - 1:
                run = functools.partial(_with_loss, run, loss_fn, labels)
            cost, inputs = _profile_one(
                name_of_layer(spec), module, run, inputs, clock, is_last=index == len(specs) - 1
            )
            costs.append(cost)
            del module, run
    return costs


def build(spec: Any, device: torch.device) -> tuple[torch.nn.Module | None, Callable[[Any], Any]]:
    """Return (a layer's module if it has one, what to call) of a layer of a ``PipelineModule``."""
    if isinstance(spec, LayerSpec):
        with held_in(torch.nn.ModuleDict()) as shared:
            module = spec.build().to(device)
        shared.to(device)
    elif isinstance(spec, torch.nn.Module):
        module = copy.deepcopy(spec)  # the user's own must not collect gradients or statistics
        copy_infos(spec, module)
        module.to(device)
    else:
        return None, spec
    module.train()
    forward_fn = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
    return module, module if forward_fn is None else functools.partial(forward_fn, module)


def _profile_one(
    name: str, module: torch.nn.Module | None, run: Callable[[Any], Any], inputs: Any, clock: Clock, *, is_last: bool
) -> tuple[LayerCost, Any]:
    """Return what one layer costs, and what it passes on."""
    weights = list(dict.fromkeys(layer_parameters(module)))
    forward_s, backward_s = [], []
    kept: dict[int, int] = {}
    output = None
    for number in range(1 + PASSES):
        fresh = _fresh(inputs)
        with _counting(kept, weights) if number == 0 else contextlib.nullcontext():
            before = clock.mark()
            output = run(fresh)
            between = clock.mark()
        _backward(output, is_last)
        after = clock.mark()
        if number:
            forward_s.append(clock.seconds(before, between))
            backward_s.append(clock.seconds(between, after))
        for weight in weights:
            weight.grad = None
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    cost = LayerCost(name, trained, min(forward_s), min(backward_s), sum(kept.values()), _shapes(inputs))
    return cost, None if is_last else _fresh(output)


def _with_loss(run: Callable[[Any], Any], loss_fn: Callable[..., Any] | None, labels: Any, inputs: Any) -> Any:
    output = run(inputs)
    return output if loss_fn is None else loss_fn(output, labels)


def _backward(output: Any, is_loss: bool) -> None:
    if is_loss:
        first = next(iter(named_losses(output, 0).values()))
        output = first.total if isinstance(first, Weighted) else first
    tensors = [each for each in _tensors(output) if each.requires_grad]
    if tensors:
        torch.autograd.backward(tensors, [torch.ones_like(each) for each in tensors])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _fresh(value: Any) -> Any:
    """Return the same structure with every tensor a leaf of its own, as a stage receives it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _fresh(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_fresh, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(_fresh, value))
    return value


@contextlib.contextmanager
def _counting(kept: dict[int, int], weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Note the bytes of each storage that autograd keeps within, apart from those of the weights."""
    own = {weight.untyped_storage().data_ptr() for weight in weights}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield


def average_over_ranks(layers: Sequence[LayerCost], device: torch.device) -> list[LayerCost]:
    """Return the layers with the mean times of all ranks. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(layers)
    rows = [[each.forward_s, each.backward_s] for each in layers]
    total = torch.tensor(rows, dtype=torch.float32, device=device)
    dist.all_reduce(total)
    means = (total / dist.get_world_size()).tolist()
    return [replace(each, forward_s=f, backward_s=b) for each, (f, b) in zip(layers, means, strict=True)]


def even_out(layers: Sequence[LayerCost]) -> list[LayerCost]:
    """Return the layers with the median times of those that look alike and take about as long."""
    alike: dict[tuple[str, int, str], list[LayerCost]] = {}
    for each in layers[:-1]:  # the last one has the loss
        alike.setdefault((each.name, each.parameters, each.shapes), []).append(each)

    def typical(each: LayerCost) -> LayerCost:
        same = alike[each.name, each.parameters, each.shapes]
        forward_s = statistics.median(one.forward_s for one in same)
        backward_s = statistics.median(one.backward_s for one in same)
        if abs(each.total_s - forward_s - backward_s) > NOISE * (forward_s + backward_s):
            return each  # the same class, but with more to do
        return replace(each, forward_s=forward_s, backward_s=backward_s)

    return [*map(typical, layers[:-1]), *layers[-1:]]


@contextlib.contextmanager
def all_random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Put all random numbers back as they were: Python's, numpy's, torch's and DeepSpeed's for recompute."""
    tracker = checkpointing.get_cuda_rng_tracker()
    states, python, array = tracker.get_states(), random.getstate(), np.random.get_state()
    with random_numbers_kept(device):
        yield
    tracker.set_states(states)
    random.setstate(python)
    np.random.set_state(array)


def name_of_layer(spec: Any) -> str:
    """Return the class of a layer of a ``PipelineModule``, or the name of its function."""
    if isinstance(spec, LayerSpec):
        return spec.typename.__name__
    return getattr(spec, "__name__", type(spec).__name__)


def _shapes(value: Any) -> str:
    return " ".join(f"{each.dtype}{list(each.shape)}" for each in _tensors(value))
