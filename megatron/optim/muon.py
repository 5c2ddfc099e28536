"""Muon: updates matrices of layers by orthogonalized momentum, and all other weights by AdamW."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from megatron.config.newton_schulz import newton_schulz_flops
from megatron.mpu.groups import SINGLE, Group
from megatron.optim.matrix_owners import (
    ExchangedTensor,
    MatrixPartition,
    assign_owners,
    exchange_batches,
    from_owners,
    to_owners,
)
from megatron.torch_compat import newton_schulz
from tds.param_info import Matrices

# One step on a matrix W [m, n] with gradient G:
#
#     B <- mu B + (1 - mu) G                    on this rank's slice
#     U  = mu B + (1 - mu) G, or B without Nesterov's momentum
#     O  = Newton-Schulz(U)                     on the full matrix, by its owner (``matrix_owners``), in bf16
#     W <- (1 - lr decay) W - lr scale(m, n) O  on this rank's slice
#
# The results are bitwise equal to those of ``torch.optim.Muon``. Query, key and value, and gate and up, which are
# packed in one weight, are separate matrices, and m and n are always those of the full matrix. Therefore the update is
# the same in every layout.
#
# | --muon-scale-mode | scale(m, n) | origin |
# |---|---|---|
# | match_rms_adamw | 0.2 sqrt(max(m, n)) | Moonlight; updates have about the RMS of AdamW's updates |
# | spectral | sqrt(max(m, n)) | Megatron; with --muon-extra-scale-factor 0.2 equal to Moonlight's |
# | original | sqrt(max(1, m / n)) | Jordan; Megatron's shape_scaling |
# | unit_rms_norm | sqrt(m / n) | Megatron |
#
# Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
# scalable for LLM training", section 2.2.

SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "spectral": lambda m, n: math.sqrt(max(m, n)),
    "original": lambda m, n: math.sqrt(max(1, m / n)),
    "unit_rms_norm": lambda m, n: math.sqrt(m / n),
}


@dataclass(frozen=True)
class MuonArgs:
    """Settings of Muon, named like the flags ``--muon-...``."""

    momentum: float = 0.95
    nesterov: bool = True
    num_ns_steps: int = 5
    scale_mode: str = "match_rms_adamw"
    extra_scale_factor: float = 1.0
    split_qkv: bool = True
    split_qkv_heads: bool = False

    def scale(self, rows: int, columns: int) -> float:
        """Return the learning-rate factor for a full matrix of this shape."""
        return self.extra_scale_factor * SCALES[self.scale_mode](rows, columns)

    def matrices(self, packed: Matrices) -> Matrices:
        """Split ``packed`` into the matrices that are orthogonalized separately."""
        return packed.split(qkv=self.split_qkv, heads=self.split_qkv_heads)


@dataclass(frozen=True)
class MuonWeight:
    """A weight that this rank holds a slice of: its partition over ranks, and its matrices."""

    partition: MatrixPartition
    matrices: Matrices

    def flops(self, steps: int) -> int:
        """Return the FLOPs for ``steps`` Newton-Schulz steps on all matrices in the weight."""
        return sum(newton_schulz_flops(*shape, steps) for shape in self.matrices.shapes(self.partition.shape))


class Muon(torch.optim.Optimizer):
    """Muon for the parameter groups with ``"is_muon": True``, ``adam`` for the others.

    A weight in a Muon group has one state, ``momentum_buffer``, with the main param's dtype and shape. Other weights
    have AdamW's states.

    Args:
        groups: parameter groups of main params.
        adam: builds the optimizer for the other groups.
        weights: descriptions of the Muon groups' main params, in order; the same on all ranks of ``tensor`` and
            ``data``.
        tensor, data: groups of ranks that hold slices or copies of a weight. The work is distributed over both.
        device: device on which matrices are orthogonalized; main params may be on a CPU.

    Source: Jordan et al. 2024; Liu et al. 2025.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        adam: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        weights: Sequence[MuonWeight],
        args: MuonArgs,
        *,
        lr: float,
        tensor: Group = SINGLE,
        data: Group = SINGLE,
        device: torch.device | None = None,
    ) -> None:
        adam_groups = [group for group in groups if not group.get("is_muon")]
        super().__init__(groups, {"lr": lr})
        self._adam = adam(adam_groups) if adam_groups else None  # adds its defaults to the same group dictionaries
        if self._adam is not None:
            self.state_dtypes = getattr(self._adam, "state_dtypes", {})
            self.state: defaultdict[torch.Tensor, Any] = self._adam.state
        self._args, self._weights = args, weights
        self._tensor, self._data, self._device = tensor, data, device
        self._batches = list(exchange_batches([weight.partition for weight in weights], tensor.size * data.size))
        self._owners = self._assign_owners()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights by their gradients. Collective over ``tensor`` and ``data``."""
        if self._adam is not None:
            self._adam.step()
        main_params = (
            (main_param, group) for group in self.param_groups if group.get("is_muon") for main_param in group["params"]
        )
        for batch in self._batches:
            self._update_batch(batch, list(islice(main_params, len(batch))))

    def _update_batch(self, batch: range, main_params: list[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        """Update the weights at indices ``batch``, whose slices are exchanged together."""
        weights = [self._weights[idx] for idx in batch]
        updates = [self._update_momentum(main_param) for main_param, _ in main_params]
        # Skip the exchange if all learning rates are 0, for example if a caller only creates the states.
        if not any(group["lr"] for _, group in main_params):
            return
        orthogonalized = self._orthogonalize(weights, [self._owners[idx] for idx in batch], updates)
        for weight, (main_param, group), update in zip(weights, main_params, orthogonalized, strict=True):
            self._apply_update(weight, main_param, group, update.to(main_param.device))

    def _update_momentum(self, main_param: torch.Tensor) -> torch.Tensor:
        """Update the momentum from the gradient; return the update to orthogonalize, in bf16."""
        gradient, state = main_param.grad, self.state[main_param]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(main_param, memory_format=torch.contiguous_format)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - self._args.momentum)
        update = gradient.lerp(buffer, self._args.momentum) if self._args.nesterov else buffer
        return update.to(torch.bfloat16).to(self._device or main_param.device)

    def _assign_owners(self) -> list[tuple[int, int]]:
        """Assign each weight to an owner (replica, tensor rank), which orthogonalizes the matrices."""
        owner_of_weight: list[tuple[int, int]] = []
        for batch in self._batches:
            costs = [self._weights[idx].flops(self._args.num_ns_steps) for idx in batch]
            owner_of_weight += [
                divmod(owner, self._tensor.size) for owner in assign_owners(costs, self._data.size * self._tensor.size)
            ]
        return owner_of_weight

    def _orthogonalize(
        self, weights: Sequence[MuonWeight], owner_of_weight: Sequence[tuple[int, int]], slices: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Orthogonalize the updates given as ``slices`` on all ranks; return this rank's slices. Collective."""
        over_data = [
            ExchangedTensor(w.partition.local_shape, w.partition.data, replica)
            for w, (replica, _) in zip(weights, owner_of_weight, strict=True)
        ]
        replica_idx = [idx for idx, (replica, _) in enumerate(owner_of_weight) if replica == self._data.rank]
        over_tensor = [
            ExchangedTensor(weights[idx].partition.shape, weights[idx].partition.tensor, owner_of_weight[idx][1])
            for idx in replica_idx
        ]
        like = slices[0]
        shards = to_owners(over_data, slices, self._data)
        full_updates = to_owners(over_tensor, shards, self._tensor) if replica_idx else []
        owned_idx = [idx for idx in replica_idx if owner_of_weight[idx][1] == self._tensor.rank]
        orthogonalized = [
            self._orthogonalize_matrices(weights[idx].matrices, full)
            for idx, full in zip(owned_idx, full_updates, strict=True)
        ]
        shards = from_owners(over_tensor, orthogonalized, self._tensor, like) if replica_idx else []
        return from_owners(over_data, shards, self._data, like)

    def _orthogonalize_matrices(self, matrices: Matrices, update: torch.Tensor) -> torch.Tensor:
        """Orthogonalize each matrix in ``update`` [m, n]."""
        result = torch.empty_like(update)
        for source, target in zip(matrices.views(update), matrices.views(result), strict=True):
            matrix = source.flatten(0, 1).clone(memory_format=torch.contiguous_format)
            target.copy_(newton_schulz(matrix, self._args.num_ns_steps).view_as(target))
        return result

    def _apply_update(
        self, weight: MuonWeight, main_param: torch.Tensor, group: dict[str, Any], update: torch.Tensor
    ) -> None:
        """Apply weight decay and ``update`` to ``main_param``; a row's update is scaled by its matrix's factor."""
        if not main_param.numel():
            return
        main_param.mul_(1 - group["lr"] * group["weight_decay"])
        scales = [self._args.scale(*shape) for shape in weight.matrices.shapes(weight.partition.shape)]
        if len(set(scales)) == 1:
            main_param.add_(update, alpha=-(group["lr"] * scales[0]))
            return
        scale_of_row = self._scale_of_rows(weight, scales)
        for scale in dict.fromkeys(scales):
            rows = (scale_of_row == scale).nonzero().flatten().to(main_param.device)
            updated = main_param.index_select(0, rows).add_(update.index_select(0, rows), alpha=-(group["lr"] * scale))
            main_param.index_copy_(0, rows, updated)

    def _scale_of_rows(self, weight: MuonWeight, scales: Sequence[float]) -> torch.Tensor:
        """Return the update scale of each local row, [rows]; ``scales`` has one scale per matrix."""
        row_scales = torch.empty(weight.partition.shape[0], 1, dtype=torch.float64)
        for scale, rows in zip(scales, weight.matrices.views(row_scales), strict=True):
            rows.fill_(scale)
        for partition, group in ((weight.partition.tensor, self._tensor), (weight.partition.data, self._data)):
            if partition is not None and partition.dim == 0:
                row_scales = partition.slice(row_scales, group.rank)
        return row_scales.flatten()
