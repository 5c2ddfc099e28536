"""A model with every type of weight that ZeRO 3 handles, and steps on it with different data on each replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.mpu.groups import SINGLE, Grid
from megatron.optim import MixedPrecisionOptimizer, OffloadConfig, build_optimizer

HIDDEN_SIZE, VOCAB_SIZE = 16, 20


@dataclass
class OpaqueTensor:
    """A wrapper of a layer's input and output, in which generic code such as pytree finds no tensors."""

    x: torch.Tensor


class Layer(nn.Module):
    """A feed-forward layer with a residual connection, a scalar weight and a weight shared with another layer."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN_SIZE)
        self.up, self.down = nn.Linear(HIDDEN_SIZE, 2 * HIDDEN_SIZE), nn.Linear(2 * HIDDEN_SIZE, HIDDEN_SIZE)
        self.scale = nn.Parameter(torch.ones(()))
        self.shared = shared

    def forward(self, wrapped: OpaqueTensor) -> OpaqueTensor:
        x = self.shared(self.norm(wrapped.x))
        return OpaqueTensor(wrapped.x + self.scale * self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    """Model with tied embeddings, two layers that share a weight, an unused weight and a frozen weight.

    Args:
        recompute: recompute the layers in the backward pass.
    """

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        shared = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)
        self.layers = nn.ModuleList(Layer(shared) for _ in range(2))
        self.unused = nn.Parameter(torch.ones(32, 2))
        self.frozen = nn.Parameter(torch.full((HIDDEN_SIZE,), 0.5), requires_grad=False)
        self.recompute = recompute
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            if parameter.dim() and parameter.requires_grad:
                parameter.data.normal_(generator=generator).mul_(0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) * self.frozen.to(self.words.weight.dtype)  # [b, h]
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(lambda x, layer=layer: layer(OpaqueTensor(x)).x, x, use_reentrant=False)
            else:
                x = layer(OpaqueTensor(x)).x
        return torch.log_softmax((x @ self.words.weight.t()).double(), -1)


def make_model_and_optimizer(
    grid: Grid, zero_stage: int, *, recompute: bool = False, **overrides: Any
) -> tuple[Model, MixedPrecisionOptimizer]:
    """Return the model with an optimizer of this ZeRO stage, by default AdamW in fp32."""
    module = Model(recompute)
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1} | overrides
    optimizer = build_optimizer(module.parameters(), zero_stage=zero_stage, data=grid.data, **options)
    optimizer.store.shard_weights(module)
    return module, optimizer


def make_tokens(replica: int, step: int, micro_batch: int) -> torch.Tensor:
    """Return random tokens. Replicas have different numbers of tokens, because the loss is a sum over all tokens."""
    seed = 1000 * step + 10 * micro_batch + replica
    return torch.randint(VOCAB_SIZE, (5 + 2 * replica,), generator=torch.Generator().manual_seed(seed))


def compute_loss(module: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Return the sum of the next-token losses."""
    return -module(tokens[:-1]).gather(1, tokens[1:, None]).sum()


def take_step(module: Model, optimizer: MixedPrecisionOptimizer, grid: Grid, step: int, gas: int = 1) -> float:
    """Train one step of ``gas`` micro-batches with the calls that an engine makes; return this replica's loss."""
    losses = []
    for micro_batch in range(gas):
        loss = compute_loss(module, make_tokens(grid.data.rank, step, micro_batch))
        if micro_batch == gas - 1:
            optimizer.begin_last_backward()
        (loss * optimizer.loss_scale).backward()
        optimizer.end_micro_batch()
        losses.append(loss.item())
    optimizer.finish_gradient_sums(1 / 17)
    optimizer.step()
    return sum(losses)


def gather_full_weights(module: Model, optimizer: MixedPrecisionOptimizer, grid: Grid) -> dict[str, torch.Tensor]:
    """Gather all weights and return a copy of each full weight, as used in computation. Collective."""
    units = optimizer.store.units
    for unit in units.units if units is not None else ():
        unit.gather()
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    if units is not None:
        units.free()
    return weights


def make_single_replica() -> tuple[Model, MixedPrecisionOptimizer]:
    """Return the model and its optimizer on one replica, with ZeRO 3 and offloaded weights."""
    module = Model()
    optimizer = build_optimizer(
        module.parameters(), zero_stage=3, data=SINGLE, lr=1e-2, offload=OffloadConfig(parameters=True)
    )
    optimizer.store.shard_weights(module)
    return module, optimizer
