"""``partition_method="profile"``: time each layer in a short probe and partition the layers by time.

The probe builds one layer at a time on every rank, runs its forward and backward on one micro-batch, and frees it. All
ranks probe the same layer at the same time, so layers may contain tensor-group collectives. Random number states are
restored, so the initial weights do not depend on the probe.

Similar layers have equal class, number of parameters and input shapes, and about equal time. All of them are timed, and
each one gets their median time. Otherwise noise would influence the partition.
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
from tds.deepspeed.shared_layers import layer_parameters, use_shared_modules
from tds.device import preserve_rng_states, to_device
from tds.engine.stage_table import LayerCost
from tds.loss import Weighted, named_losses
from tds.param_info import copy_infos
from tds.partition import partition_by_times
from tds.schedule import LOOP

NUM_PASSES = 3
"""Number of timed passes over each layer, after a warm-up pass; the fastest one is used."""
NOISE_FRACTION = 0.25
"""Similar layers whose times differ by less than this fraction get the same time."""


@dataclass(frozen=True)
class ProfiledPartition:
    """A partition and the layer costs it is based on.

    Virtual stage ``i`` has the layers ``bounds[i] ... bounds[i + 1]``.
    """

    bounds: list[int]
    layers: tuple[LayerCost, ...]


def profile_partition(
    specs: Sequence[Any], *, num_stages: int, num_chunks: int = 1, placement: str = LOOP,
    batch: Any, loss_fn: Callable[..., Any] | None,
    device: torch.device, recomputes: bool = False,
) -> ProfiledPartition:  # fmt: skip
    """Find the partition that minimises the slowest stage's time. Collective over all ranks.

    Args:
        specs: all model layers, as passed to ``PipelineModule``.
        batch: one micro-batch (inputs, labels), with equal shapes on every rank.
        recomputes: layers are recomputed, so the forward time is added to the backward time.

    Raises:
        ValueError: there is no batch, or there are fewer layers than virtual stages.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            'partition_method="profile" times the layers on one micro-batch, got profile_batch='
            f"{'None' if batch is None else type(batch).__name__}. Pass PipelineModule(..., "
            "profile_batch=(inputs, labels)) on every rank."
        )
    layers = average_over_ranks(profile_layers(specs, batch, loss_fn, device), device)
    if recomputes:
        layers = [replace(cost, backward_s=cost.backward_s + cost.forward_s) for cost in layers]
    layers = smooth_times(layers)
    times, parameters = [cost.total_s for cost in layers], [cost.num_parameters for cost in layers]
    return ProfiledPartition(partition_by_times(times, parameters, num_stages, num_chunks, placement), tuple(layers))


def profile_layers(
    specs: Sequence[Any], batch: Any, loss_fn: Callable[..., Any] | None, device: torch.device
) -> list[LayerCost]:
    """Measure the cost of each layer on this rank; the last one includes the loss."""
    inputs, labels = to_device(batch[0], device), to_device(batch[1], device)
    clock = clock_for(device)
    costs = []
    with preserve_all_rng_states(device), torch.enable_grad():
        for index, spec in enumerate(specs):
            module, run = build_layer(spec, device)
            if index == len(specs) - 1:
                run = functools.partial(_with_loss, run, loss_fn, labels)
            cost, inputs = _profile_one(layer_name(spec), module, run, inputs, clock, is_last=index == len(specs) - 1)
            costs.append(cost)
            del module, run
    return costs


def build_layer(spec: Any, device: torch.device) -> tuple[torch.nn.Module | None, Callable[[Any], Any]]:
    """Build a layer of a ``PipelineModule``; return (its module or None, the function that runs it)."""
    if isinstance(spec, LayerSpec):
        with use_shared_modules(torch.nn.ModuleDict()) as shared:
            module = spec.build().to(device)
        shared.to(device)
    elif isinstance(spec, torch.nn.Module):
        module = copy.deepcopy(spec)  # the user's module must not collect gradients or statistics
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
    """Measure one layer; return (its cost, inputs of the next layer)."""
    weights = list(dict.fromkeys(layer_parameters(module)))
    forward_s, backward_s = [], []
    saved_bytes: dict[int, int] = {}
    output = None
    for pass_idx in range(1 + NUM_PASSES):
        leaf_inputs = _clone_as_leaves(inputs)
        with _record_saved_bytes(saved_bytes, weights) if pass_idx == 0 else contextlib.nullcontext():
            before = clock.mark()
            output = run(leaf_inputs)
            between = clock.mark()
        _backward(output, is_last)
        after = clock.mark()
        if pass_idx:
            forward_s.append(clock.seconds(before, between))
            backward_s.append(clock.seconds(between, after))
        for weight in weights:
            weight.grad = None
    num_trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    cost = LayerCost(name, num_trained, min(forward_s), min(backward_s), sum(saved_bytes.values()), _shapes(inputs))
    return cost, None if is_last else _clone_as_leaves(output)


def _with_loss(run: Callable[[Any], Any], loss_fn: Callable[..., Any] | None, labels: Any, inputs: Any) -> Any:
    output = run(inputs)
    return output if loss_fn is None else loss_fn(output, labels)


def _backward(output: Any, is_loss: bool) -> None:
    if is_loss:
        first = next(iter(named_losses(output, 0).values()))
        output = first.total if isinstance(first, Weighted) else first
    tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    if tensors:
        torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from _tensors(element)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _clone_as_leaves(value: Any) -> Any:
    """Copy the structure with tensors that are leaves, as a stage receives them."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _clone_as_leaves(element) for key, element in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_clone_as_leaves, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(_clone_as_leaves, value))
    return value


@contextlib.contextmanager
def _record_saved_bytes(storage_bytes: dict[int, int], weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Record in ``storage_bytes`` the bytes of each storage that autograd saves in the block, except weights."""
    weight_storages = {weight.untyped_storage().data_ptr() for weight in weights}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weight_storages:
            storage_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield


def average_over_ranks(layers: Sequence[LayerCost], device: torch.device) -> list[LayerCost]:
    """Average the layer times over all ranks. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(layers)
    rows = [[cost.forward_s, cost.backward_s] for cost in layers]
    total = torch.tensor(rows, dtype=torch.float32, device=device)
    dist.all_reduce(total)
    means = (total / dist.get_world_size()).tolist()
    return [replace(cost, forward_s=f, backward_s=b) for cost, (f, b) in zip(layers, means, strict=True)]


def smooth_times(layers: Sequence[LayerCost]) -> list[LayerCost]:
    """Replace about equal times of similar layers by their median."""
    similar_layers: dict[tuple[str, int, str], list[LayerCost]] = {}
    for cost in layers[:-1]:  # the last one includes the loss
        similar_layers.setdefault((cost.name, cost.num_parameters, cost.shapes), []).append(cost)

    def with_median_times(cost: LayerCost) -> LayerCost:
        similar = similar_layers[cost.name, cost.num_parameters, cost.shapes]
        forward_s = statistics.median(layer.forward_s for layer in similar)
        backward_s = statistics.median(layer.backward_s for layer in similar)
        if abs(cost.total_s - forward_s - backward_s) > NOISE_FRACTION * (forward_s + backward_s):
            return cost  # this layer has the same class, but does different work
        return replace(cost, forward_s=forward_s, backward_s=backward_s)

    return [*map(with_median_times, layers[:-1]), *layers[-1:]]


@contextlib.contextmanager
def preserve_all_rng_states(device: torch.device) -> Iterator[None]:
    """Restore all random number states at the end of the block: Python, NumPy, torch and DeepSpeed's tracker."""
    tracker = checkpointing.get_cuda_rng_tracker()
    states, python_state, numpy_state = tracker.get_states(), random.getstate(), np.random.get_state()
    with preserve_rng_states(device):
        yield
    tracker.set_states(states)
    random.setstate(python_state)
    np.random.set_state(numpy_state)


def layer_name(spec: Any) -> str:
    """Return the class or function name of a layer in a ``PipelineModule``."""
    if isinstance(spec, LayerSpec):
        return spec.typename.__name__
    return getattr(spec, "__name__", type(spec).__name__)


def _shapes(value: Any) -> str:
    return " ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in _tensors(value))
