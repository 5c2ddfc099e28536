"""Toy pipelines, and their comparison with the same models in one process."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from typing import Any

import deepspeed
import torch
import torch._dynamo  # the first optimizer of a process imports it (1.5 s); imported here once for all forked ranks
import torch.nn.functional as F
from torch import nn

import tds
from tds.deepspeed.shared_layers import use_shared_modules
from tds.pipe import LayerSpec, PipelineModule, Shared, SharingLayerSpec, TiedLayerSpec

Tensors = dict[str, torch.Tensor]


def _seeded(seed: int, module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return module


class Dense(nn.Module):
    """tanh(x W + b)."""

    def __init__(self, seed: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = _seeded(seed, nn.Linear(hidden_size, hidden_size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class TiedEmbedding(nn.Module):
    """An embedding that is also the output head."""

    def __init__(self, seed: int, size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = _seeded(seed, nn.Embedding(size, hidden_size, dtype=dtype))
        self.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


def output_head(embedding: TiedEmbedding, x: torch.Tensor) -> torch.Tensor:
    return x @ embedding.weight.t()


class SharedVector(nn.Module):
    """A vector that layers look up and use non-linearly."""

    def __init__(self, seed: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _seeded(seed, nn.Linear(1, hidden_size, dtype=dtype)).bias

    def forward(self) -> torch.Tensor:
        return torch.sin(self.weight)


class SharingLayer(nn.Module):
    """tanh(x W + b + table + mixer(x)), with a shared table and a shared mixer."""

    table: SharedVector
    mixer: Dense

    def __init__(self, seed: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = _seeded(seed, nn.Linear(hidden_size, hidden_size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x) + self.table() + self.mixer(x))


class SplitLayer(nn.Module):
    """Maps one tensor to five: float, bool, float, int64, and float without gradient."""

    def __init__(self, seed: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = _seeded(seed, nn.Linear(hidden_size, 2 * hidden_size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, right = self.inner(x).chunk(2, dim=-1)
        indices = torch.arange(x.shape[-1], device=x.device)
        return left, x > 0, right, indices, x.detach() * 0.5


class MixLayer(nn.Module):
    """Maps five tensors to five; uses and changes both float tensors that have gradients."""

    def __init__(self, seed: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.left = _seeded(seed, nn.Linear(hidden_size, hidden_size, dtype=dtype))
        self.right = _seeded(seed + 1, nn.Linear(hidden_size, hidden_size, dtype=dtype))

    def forward(self, x: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        a, mask, b, indices, factor = x
        assert mask.dtype is torch.bool and indices.dtype is torch.int64 and factor.dtype is a.dtype
        a = torch.where(mask, torch.tanh(self.left(a)), a)
        b = b + self.right(b * factor)[..., indices]
        return a, ~mask, b, indices.flip(0), factor


class MergeLayer(nn.Module):
    """Maps five tensors to one."""

    def __init__(self, seed: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.bias = _seeded(seed, nn.Linear(1, hidden_size, dtype=dtype)).bias

    def forward(self, x: tuple[torch.Tensor, ...]) -> torch.Tensor:
        a, mask, b, indices, factor = x
        return (a * mask + b * b)[..., indices] + factor + self.bias


@dataclass
class Toy:
    """A model, its data and its training settings.

    Args:
        model_type: "chain" (dense layers), "tied" (an embedding that is also the head), "sharing" (layers with shared
            modules) or "many" (layers that exchange five tensors).
        hidden_size: hidden size.
        micro_batch_size: samples in a micro-batch.
        loss_type: "scalar" (a mean per micro-batch) or "pair" (a ``Weighted`` sum and count).
        options: arguments of ``PipelineModule``.
        pipeline: section "pipeline" of the engine's configuration.
        config: other keys of the engine's configuration.
    """

    model_type: str = "chain"
    num_layers: int = 5
    hidden_size: int = 6
    micro_batch_size: int = 3
    num_micro_batches: int = 4
    dtype: torch.dtype = torch.float64
    loss_type: str = "scalar"
    grad_clip: float = 1e9
    options: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def layer_specs(self) -> list[Any]:
        hidden_size, dtype = self.hidden_size, self.dtype
        if self.model_type == "tied":
            return [
                TiedLayerSpec("words", TiedEmbedding, 7, 11, hidden_size, dtype),
                *[LayerSpec(Dense, 10 + i, hidden_size, dtype) for i in range(self.num_layers - 2)],
                TiedLayerSpec("words", TiedEmbedding, 7, 11, hidden_size, dtype, forward_fn=output_head),
            ]
        if self.model_type == "sharing":
            return self.sharing_specs()
        if self.model_type == "many":
            middle = [LayerSpec(MixLayer, 10 * i + 30, hidden_size, dtype) for i in range(self.num_layers - 2)]
            return [
                LayerSpec(SplitLayer, 20, hidden_size, dtype),
                *middle,
                LayerSpec(MergeLayer, 21, hidden_size, dtype),
            ]
        return [LayerSpec(Dense, 10 + i, hidden_size, dtype) for i in range(self.num_layers)]

    def sharing_specs(self) -> list[Any]:
        """Return layers with a shared table per half of the model, and a mixer shared by all layers but one.

        The second layer shares nothing. The keys are in decreasing order.
        """
        hidden_size, dtype = self.hidden_size, self.dtype
        tables = [
            Shared("zeta", SharedVector, 50, hidden_size, dtype),
            Shared("alpha", SharedVector, 51, hidden_size, dtype),
        ]
        mixer = Shared("mixer", Dense, 52, hidden_size, dtype)
        layers: list[Any] = []
        for i in range(self.num_layers):
            shares = {"table": tables[2 * i >= self.num_layers], "mixer": mixer}
            layers.append(SharingLayerSpec(SharingLayer, 10 + i, hidden_size, dtype, shares=shares))
        layers[1] = LayerSpec(Dense, 11, hidden_size, dtype)
        return layers

    def loss_fn(self, output: torch.Tensor, labels: Any) -> Any:
        target, mask = labels
        if self.model_type == "tied":
            losses = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view_as(mask)
        else:
            losses = ((output - target) ** 2).mean(-1)
        if self.loss_type == "scalar":
            return losses.mean()
        return tds.loss.Weighted((losses * mask).sum(), mask.sum())

    def make_batch(self, idx: int, num_rows: int | None = None) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(1000 + idx)
        rows = self.micro_batch_size if num_rows is None else num_rows
        mask = (torch.rand(rows, 4, generator=generator, dtype=torch.float64) < 0.2 + 0.15 * (idx % 5)).to(self.dtype)
        if self.model_type == "tied":
            ids = torch.randint(0, 11, (2, rows, 4), generator=generator)
            return ids[0], (ids[1], mask)
        x = torch.randn(2, rows, 4, self.hidden_size, generator=generator, dtype=torch.float64).to(self.dtype)
        return x[0], (x[1], mask)

    def make_batches(self, replica: int = 0) -> list[tuple[Any, Any]]:
        return [self.make_batch(replica * self.num_micro_batches + i) for i in range(self.num_micro_batches)]


def train_reference(toy: Toy, num_replicas: int = 1) -> tuple[torch.Tensor, Tensors]:
    """Train the toy in this process; return the mean loss, and gradients by the names of the pipeline module."""
    torch.manual_seed(0)
    shared: dict[str, nn.Module] = {}
    shared_modules = nn.ModuleDict()
    layers: list[Any] = []
    params_by_name: dict[str, nn.Parameter] = {}
    for layer_idx, spec in enumerate(toy.layer_specs()):
        if isinstance(spec, TiedLayerSpec):
            module = shared.setdefault(spec.key, shared.get(spec.key) or spec.build())
            params_by_name |= {f"tied_modules.{spec.key}.{n}": p for n, p in module.named_parameters()}
            layers.append(module if spec.forward_fn is None else lambda x, m=module, f=spec.forward_fn: f(m, x))
        else:
            with use_shared_modules(shared_modules):
                module = spec.build()
            params_by_name |= {f"{layer_idx}.{n}": p for n, p in module.named_parameters()}
            layers.append(module)
    params_by_name |= {f"tied_modules.{n}": p for n, p in shared_modules.named_parameters()}
    total_loss = torch.zeros((), dtype=toy.dtype)
    total_weight = 0.0
    for replica in range(num_replicas):
        for x, labels in toy.make_batches(replica):
            for layer in layers:
                x = layer(x)
            loss = toy.loss_fn(x, labels)
            is_weighted = isinstance(loss, tds.loss.Weighted)
            value, count = (loss.total, loss.count) if is_weighted else (loss, 1.0)
            total_weight += float(count)
            total_loss += value.detach()
            (value if is_weighted else value / toy.num_micro_batches).backward()
    divisor = total_weight if toy.loss_type == "pair" else float(num_replicas)
    gradients = {n: p.grad / divisor for n, p in params_by_name.items() if p.grad is not None}
    return total_loss / total_weight, gradients


def make_engine(
    toy: Toy, num_stages: int, initialize: Any = tds.initialize, module: Any = None, **engine_options: Any
) -> Any:
    """Build the toy's pipeline engine. Collective over the whole world."""
    tds.init_distributed("gloo", verbose=False)
    _share_groups()
    options = {"num_stages": num_stages, "partition_method": "uniform", **toy.options, **engine_options}
    if module is None:
        module = PipelineModule(toy.layer_specs(), loss_fn=toy.loss_fn, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    config = {
        "train_micro_batch_size_per_gpu": toy.micro_batch_size,
        "gradient_accumulation_steps": toy.num_micro_batches,
        "gradient_clipping": toy.grad_clip,
        "pipeline": toy.pipeline,
        **toy.config,
    }
    return initialize(model=module, optimizer=optimizer, config=config)[0]


def train_batch(engine: Any, toy: Toy, batches: list[Any] | None = None) -> tuple[torch.Tensor, Tensors, float | None]:
    """Train on one global batch; return the loss, the gradients that the optimizer received, and their norm."""
    grads: Tensors = {}

    def save_grads(*_: Any) -> None:
        grads.update({n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None})

    handle = engine.optimizer.register_step_pre_hook(save_grads)
    if batches is None:
        batches = toy.make_batches(engine.grid.get_data_parallel_rank())
    loss = engine.train_batch(iter(batches))
    handle.remove()
    return loss, grads, engine.get_global_grad_norm()


def run_toys(rank: int, toys: list[Toy], num_stages: int, engine_options: dict[str, Any] | None = None) -> list[Any]:
    """Train each toy in turn on this rank; return the results of ``train_batch``.

    Toys that differ only in loss, schedule or number of micro-batches share an engine, because building one is slow.
    """
    engines: dict[str, Any] = {}
    results = []
    for toy in toys:
        pipeline_options = {name: value for name, value in toy.pipeline.items() if name != "schedule"}
        key = repr(replace(toy, num_micro_batches=1, loss_type="scalar", pipeline=pipeline_options))
        engine = engines.get(key)
        if engine is None:
            engine = engines[key] = make_engine(toy, num_stages, **(engine_options or {}))
        engine.set_train_batch_size(toy.micro_batch_size * toy.num_micro_batches * engine.grid.data_parallel_size)
        engine.set_schedule(
            toy.pipeline.get("schedule", "interleaved" if getattr(engine.module, "chunks", 1) > 1 else "1f1b")
        )
        engine.module.loss_fn = toy.loss_fn
        results.append(train_batch(engine, toy))
    return results


def preload_zero() -> None:
    """Import the modules that ZeRO imports on first use before ranks are forked; torch's compiler takes seconds."""
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def _share_groups() -> None:
    """Make the engines of one test share process groups, which take longer to create than the rest of an engine."""
    original = deepspeed.comm.new_group
    cache: dict[tuple[int, ...], Any] = {}

    def new_group(ranks: Any) -> Any:
        key = tuple(ranks)
        if key not in cache:
            cache[key] = original(list(key))
        return cache[key]

    if getattr(original, "is_shared", False):
        return
    new_group.is_shared = True  # type: ignore[attr-defined]
    deepspeed.comm.new_group = new_group


def grad_norm(gradients: Tensors) -> float:
    return float(torch.stack([g.double().norm() for g in gradients.values()]).norm())


def worst_relative_error(actual: Tensors, expected: Tensors) -> float:
    """Return the largest norm of a difference, relative to the norm of the expected gradient."""
    floor = 1e-6 * grad_norm(expected)
    return max(float((actual[n] - expected[n]).norm() / max(float(expected[n].norm()), floor)) for n in actual)


def check_equal(results: list[Any], toy: Toy, num_replicas: int = 1, tolerance: float | None = None) -> None:
    """Compare every rank's results with one process; bitwise without ``tolerance``, except for the norm."""
    loss, gradients = train_reference(toy, num_replicas)
    names: set[str] = set()
    for rank_loss, rank_grads, norm in results:
        names |= set(rank_grads)
        if tolerance is None:
            assert torch.equal(rank_loss, loss), (toy, rank_loss, loss)
            for name, gradient in rank_grads.items():
                assert torch.equal(gradient, gradients[name]), (toy, name, worst_relative_error(rank_grads, gradients))
        else:
            assert abs(float(rank_loss - loss)) <= tolerance, (toy, rank_loss, loss)
            assert worst_relative_error(rank_grads, gradients) <= tolerance, (
                toy,
                worst_relative_error(rank_grads, gradients),
            )
        if norm is not None:
            expected_norm = grad_norm(gradients)
            assert abs(norm - expected_norm) <= (1e-12 if toy.dtype is torch.float64 else 1e-6) * expected_norm, (
                norm,
                expected_norm,
            )
    assert names == set(gradients), names ^ set(gradients)
