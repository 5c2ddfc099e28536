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
from tds.deepspeed.shared_layers import held_in
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

    def __init__(self, seed: int, wide: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = _seeded(seed, nn.Linear(wide, wide, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Words(nn.Module):
    """An embedding that is also the output head."""

    def __init__(self, seed: int, size: int, wide: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = _seeded(seed, nn.Embedding(size, wide, dtype=dtype))
        self.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


def head(words: Words, x: torch.Tensor) -> torch.Tensor:
    return x @ words.weight.t()


class Table(nn.Module):
    """A vector that layers look up and use non-linearly."""

    def __init__(self, seed: int, wide: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _seeded(seed, nn.Linear(1, wide, dtype=dtype)).bias

    def forward(self) -> torch.Tensor:
        return torch.sin(self.weight)


class Sharer(nn.Module):
    """tanh(x W + b + table + mixer(x)), with a shared table and a shared mixer."""

    table: Table
    mixer: Dense

    def __init__(self, seed: int, wide: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = _seeded(seed, nn.Linear(wide, wide, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x) + self.table() + self.mixer(x))


class Spread(nn.Module):
    """Maps one tensor to five: float, bool, float, int64, and float without gradient."""

    def __init__(self, seed: int, wide: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = _seeded(seed, nn.Linear(wide, 2 * wide, dtype=dtype))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, right = self.inner(x).chunk(2, dim=-1)
        indices = torch.arange(x.shape[-1], device=x.device)
        return left, x > 0, right, indices, x.detach() * 0.5


class Mix(nn.Module):
    """Maps five tensors to five; uses and changes both float tensors that have gradients."""

    def __init__(self, seed: int, wide: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.left = _seeded(seed, nn.Linear(wide, wide, dtype=dtype))
        self.right = _seeded(seed + 1, nn.Linear(wide, wide, dtype=dtype))

    def forward(self, x: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        a, mask, b, indices, factor = x
        assert mask.dtype is torch.bool and indices.dtype is torch.int64 and factor.dtype is a.dtype
        a = torch.where(mask, torch.tanh(self.left(a)), a)
        b = b + self.right(b * factor)[..., indices]
        return a, ~mask, b, indices.flip(0), factor


class Gather(nn.Module):
    """Maps five tensors to one."""

    def __init__(self, seed: int, wide: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.bias = _seeded(seed, nn.Linear(1, wide, dtype=dtype)).bias

    def forward(self, x: tuple[torch.Tensor, ...]) -> torch.Tensor:
        a, mask, b, indices, factor = x
        return (a * mask + b * b)[..., indices] + factor + self.bias


@dataclass
class Toy:
    """A model, its data and its training settings.

    Args:
        kind: "chain" (dense layers), "tied" (an embedding that is also the head), "sharing" (layers with shared
            modules) or "many" (layers that exchange five tensors).
        wide: hidden size.
        rows: samples in a micro-batch.
        loss: "scalar" (a mean per micro-batch) or "pair" (a ``Weighted`` sum and count).
        options: arguments of ``PipelineModule``.
        pipeline: section "pipeline" of the engine's configuration.
        config: other keys of the engine's configuration.
    """

    kind: str = "chain"
    layers: int = 5
    wide: int = 6
    rows: int = 3
    micro_batches: int = 4
    dtype: torch.dtype = torch.float64
    loss: str = "scalar"
    clip: float = 1e9
    options: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def specs(self) -> list[Any]:
        wide, dtype = self.wide, self.dtype
        if self.kind == "tied":
            return [
                TiedLayerSpec("words", Words, 7, 11, wide, dtype),
                *[LayerSpec(Dense, 10 + i, wide, dtype) for i in range(self.layers - 2)],
                TiedLayerSpec("words", Words, 7, 11, wide, dtype, forward_fn=head),
            ]
        if self.kind == "sharing":
            return self.sharing_specs()
        if self.kind == "many":
            middle = [LayerSpec(Mix, 10 * i + 30, wide, dtype) for i in range(self.layers - 2)]
            return [LayerSpec(Spread, 20, wide, dtype), *middle, LayerSpec(Gather, 21, wide, dtype)]
        return [LayerSpec(Dense, 10 + i, wide, dtype) for i in range(self.layers)]

    def sharing_specs(self) -> list[Any]:
        """Return layers with a shared table per half of the model, and a mixer shared by all layers but one.

        The second layer shares nothing. The keys are in decreasing order.
        """
        wide, dtype = self.wide, self.dtype
        tables = [Shared("zeta", Table, 50, wide, dtype), Shared("alpha", Table, 51, wide, dtype)]
        mixer = Shared("mixer", Dense, 52, wide, dtype)
        layers: list[Any] = []
        for i in range(self.layers):
            shares = {"table": tables[2 * i >= self.layers], "mixer": mixer}
            layers.append(SharingLayerSpec(Sharer, 10 + i, wide, dtype, shares=shares))
        layers[1] = LayerSpec(Dense, 11, wide, dtype)
        return layers

    def loss_fn(self, output: torch.Tensor, labels: Any) -> Any:
        target, mask = labels
        if self.kind == "tied":
            losses = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view_as(mask)
        else:
            losses = ((output - target) ** 2).mean(-1)
        if self.loss == "scalar":
            return losses.mean()
        return tds.loss.Weighted((losses * mask).sum(), mask.sum())

    def batch(self, index: int, wide_rows: int | None = None) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(1000 + index)
        rows = self.rows if wide_rows is None else wide_rows
        mask = (torch.rand(rows, 4, generator=generator, dtype=torch.float64) < 0.2 + 0.15 * (index % 5)).to(self.dtype)
        if self.kind == "tied":
            ids = torch.randint(0, 11, (2, rows, 4), generator=generator)
            return ids[0], (ids[1], mask)
        x = torch.randn(2, rows, 4, self.wide, generator=generator, dtype=torch.float64).to(self.dtype)
        return x[0], (x[1], mask)

    def batches(self, replica: int = 0) -> list[tuple[Any, Any]]:
        return [self.batch(replica * self.micro_batches + i) for i in range(self.micro_batches)]


def reference(toy: Toy, replicas: int = 1) -> tuple[torch.Tensor, Tensors]:
    """Train the toy in this process; return the mean loss, and gradients by the names of the pipeline module."""
    torch.manual_seed(0)
    shared: dict[str, nn.Module] = {}
    shared_modules = nn.ModuleDict()
    steps: list[Any] = []
    names: dict[str, nn.Parameter] = {}
    for index, spec in enumerate(toy.specs()):
        if isinstance(spec, TiedLayerSpec):
            module = shared.setdefault(spec.key, shared.get(spec.key) or spec.build())
            names |= {f"tied_modules.{spec.key}.{n}": p for n, p in module.named_parameters()}
            steps.append(module if spec.forward_fn is None else lambda x, m=module, f=spec.forward_fn: f(m, x))
        else:
            with held_in(shared_modules):
                module = spec.build()
            names |= {f"{index}.{n}": p for n, p in module.named_parameters()}
            steps.append(module)
    names |= {f"tied_modules.{n}": p for n, p in shared_modules.named_parameters()}
    total = torch.zeros((), dtype=toy.dtype)
    weight = 0.0
    for replica in range(replicas):
        for x, labels in toy.batches(replica):
            for step in steps:
                x = step(x)
            loss = toy.loss_fn(x, labels)
            is_weighted = isinstance(loss, tds.loss.Weighted)
            value, count = (loss.total, loss.count) if is_weighted else (loss, 1.0)
            weight += float(count)
            total += value.detach()
            (value if is_weighted else value / toy.micro_batches).backward()
    divisor = weight if toy.loss == "pair" else float(replicas)
    gradients = {n: p.grad / divisor for n, p in names.items() if p.grad is not None}
    return total / weight, gradients


def make_engine(toy: Toy, num_stages: int, initialize: Any = tds.initialize, module: Any = None, **more: Any) -> Any:
    """Build the toy's pipeline engine. Collective over the whole world."""
    tds.init_distributed("gloo", verbose=False)
    _share_groups()
    options = {"num_stages": num_stages, "partition_method": "uniform", **toy.options, **more}
    if module is None:
        module = PipelineModule(toy.specs(), loss_fn=toy.loss_fn, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    config = {
        "train_micro_batch_size_per_gpu": toy.rows,
        "gradient_accumulation_steps": toy.micro_batches,
        "gradient_clipping": toy.clip,
        "pipeline": toy.pipeline,
        **toy.config,
    }
    return initialize(model=module, optimizer=optimizer, config=config)[0]


def train(engine: Any, toy: Toy, batches: list[Any] | None = None) -> tuple[torch.Tensor, Tensors, float | None]:
    """Train on one global batch; return the loss, the gradients that the optimizer received, and their norm."""
    grads: Tensors = {}

    def keep(*_: Any) -> None:
        grads.update({n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None})

    handle = engine.optimizer.register_step_pre_hook(keep)
    if batches is None:
        batches = toy.batches(engine.grid.get_data_parallel_rank())
    loss = engine.train_batch(iter(batches))
    handle.remove()
    return loss, grads, engine.get_global_grad_norm()


def run_toys(rank: int, toys: list[Toy], num_stages: int, more: dict[str, Any] | None = None) -> list[Any]:
    """Train each toy in turn on this rank; return the results of ``train``.

    Toys that differ only in loss, schedule or number of micro-batches share an engine, because building one is slow.
    """
    engines: dict[str, Any] = {}
    results = []
    for toy in toys:
        fixed = {name: value for name, value in toy.pipeline.items() if name != "schedule"}
        key = repr(replace(toy, micro_batches=1, loss="scalar", pipeline=fixed))
        engine = engines.get(key)
        if engine is None:
            engine = engines[key] = make_engine(toy, num_stages, **(more or {}))
        engine.set_train_batch_size(toy.rows * toy.micro_batches * engine.grid.data_parallel_size)
        engine.set_schedule(
            toy.pipeline.get("schedule", "interleaved" if getattr(engine.module, "chunks", 1) > 1 else "1f1b")
        )
        engine.module.loss_fn = toy.loss_fn
        results.append(train(engine, toy))
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


def norm_of(gradients: Tensors) -> float:
    return float(torch.stack([g.double().norm() for g in gradients.values()]).norm())


def worst(got: Tensors, wanted: Tensors) -> float:
    """Return the largest norm of a difference, relative to the norm of the expected gradient."""
    floor = 1e-6 * norm_of(wanted)
    return max(float((got[n] - wanted[n]).norm() / max(float(wanted[n].norm()), floor)) for n in got)


def check_equal(results: list[Any], toy: Toy, replicas: int = 1, tolerance: float | None = None) -> None:
    """Compare every rank's results with one process; bitwise without ``tolerance``, except for the norm."""
    loss, gradients = reference(toy, replicas)
    names: set[str] = set()
    for got_loss, got, norm in results:
        names |= set(got)
        if tolerance is None:
            assert torch.equal(got_loss, loss), (toy, got_loss, loss)
            for name, gradient in got.items():
                assert torch.equal(gradient, gradients[name]), (toy, name, worst(got, gradients))
        else:
            assert abs(float(got_loss - loss)) <= tolerance, (toy, got_loss, loss)
            assert worst(got, gradients) <= tolerance, (toy, worst(got, gradients))
        if norm is not None:
            expected_norm = norm_of(gradients)
            assert abs(norm - expected_norm) <= (1e-12 if toy.dtype is torch.float64 else 1e-6) * expected_norm, (
                norm,
                expected_norm,
            )
    assert names == set(gradients), names ^ set(gradients)
