"""Muon: updates matrices of layers by orthogonalized momentum, and all other weights by AdamW."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.config.newton_schulz import newton_schulz_flops, step_coefficients
from megatron.mpu.groups import SINGLE, Group
from megatron.optim.matrix_owners import MatrixPartition, OwnerGrid, assign_owners, exchange_batches
from megatron.optim.moment2 import AdaptiveArgs, normalize_elements, normalize_neurons, num_neurons
from megatron.optim.newton_schulz import exchange_dtype, newton_schulz, result_dtype
from tds.param_info import Matrices

# One step on a matrix W [m, n] with gradient G:
#
#     B <- mu B + (1 - mu) G                    on this rank's slice
#     U  = mu B + (1 - mu) G, or B without Nesterov's momentum
#     O  = Newton-Schulz(U)                     on the full matrix, by its owner (``matrix_owners``)
#     O  = O divided by its second moment       only for adaptive_muon (``moment2``)
#     W <- (1 - lr decay) W - lr scale(m, n) O  on this rank's slice
#
# By default the results are bitwise equal to those of ``torch.optim.Muon``. Query, key and value, and gate and up,
# which are packed in one weight, are separate matrices, and m and n are always those of the full matrix. Therefore the
# update is the same in every layout.
#
# | --muon-scale-mode | scale(m, n) | origin |
# |---|---|---|
# | match_rms_adamw | 0.2 sqrt(max(m, n)) | Moonlight; updates have about the RMS of AdamW's updates |
# | spectral | sqrt(max(m, n)) | Megatron; with --muon-extra-scale-factor 0.2 equal to Moonlight's |
# | original | sqrt(max(1, m / n)) | Jordan; Megatron's shape_scaling |
# | unit_rms_norm | sqrt(m / n) | Megatron |
#
# With adamuon, the RMS of O is already about 1, so match_rms_adamw scales by 0.2.
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
    """Settings of Muon, named like the flags ``--muon-...``.

    Args:
        adaptive: settings of --optimizer adaptive_muon; None: updates are not divided by a second moment.
    """

    momentum: float = 0.95
    nesterov: bool = True
    num_ns_steps: int = 5
    coefficient_type: str = "simple"
    fp32_matmul_prec: str = "bf16"
    scale_mode: str = "match_rms_adamw"
    extra_scale_factor: float = 1.0
    split_qkv: bool = True
    split_qkv_heads: bool = False
    adaptive: AdaptiveArgs | None = None

    def scale(self, rows: int, columns: int) -> float:
        """Return the learning-rate factor for a full matrix of this shape."""
        if self.scale_mode == "match_rms_adamw" and self.moment2_method == "adamuon":
            return self.extra_scale_factor * 0.2
        return self.extra_scale_factor * SCALES[self.scale_mode](rows, columns)

    def matrices(self, packed: Matrices) -> Matrices:
        """Split ``packed`` into the matrices that are orthogonalized separately."""
        return packed.split(qkv=self.split_qkv, heads=self.split_qkv_heads)

    @property
    def moment2_method(self) -> str:
        """adamuon, normuon or, without a second moment, none."""
        return "none" if self.adaptive is None else self.adaptive.moment2_method


@dataclass(frozen=True)
class MuonWeight:
    """Partition over ranks, and matrices, of a weight of which this rank has a slice.

    Args:
        is_expert: the weight is replicated over the expert-data group only, not over all replicas.
    """

    partition: MatrixPartition
    matrices: Matrices
    is_expert: bool = False

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and columns of each matrix."""
        return self.matrices.shapes(self.partition.shape)

    @property
    def num_neurons(self) -> int:
        """Number of second moments that NorMuon stores for all matrices in the weight."""
        return sum(num_neurons(*shape) for shape in self.shapes)

    def flops(self, steps: int) -> int:
        """Return the FLOPs for ``steps`` Newton-Schulz steps on all matrices in the weight."""
        return sum(newton_schulz_flops(*shape, steps) for shape in self.shapes)


@dataclass(frozen=True)
class _Batch:
    """Weights whose slices are exchanged together: their indices and their owners in ``grid``."""

    grid: OwnerGrid
    indices: range | list[int]
    owners: list[int]


class Muon(torch.optim.Optimizer):
    """Muon for the parameter groups with ``"is_muon": True``, ``adam`` for the others.

    | state of a weight in a Muon group | dtype and shape |
    |---|---|
    | ``momentum_buffer`` | those of the main param |
    | ``moment2_buffer``, with adamuon | those of the main param |
    | ``moment2_buffer``, with normuon | [number of neurons of the full matrices], the same on every rank |

    Other weights have AdamW's states.

    Args:
        groups: parameter groups of main params.
        adam: builds the optimizer for the other groups.
        weights: descriptions of the Muon groups' main params, in order; the same on all ranks of ``tensor`` and
            ``data``.
        tensor, data: groups of ranks that hold slices or copies of a weight. The work is distributed over both.
        expert_data, expert_tensor: replace ``data`` and ``tensor`` (unless None) for weights with ``is_expert``.
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
        expert_data: Group = SINGLE,
        expert_tensor: Group | None = None,
        device: torch.device | None = None,
    ) -> None:
        adam_groups = [group for group in groups if not group.get("is_muon")]
        super().__init__(groups, {"lr": lr})
        self._adam = adam(adam_groups) if adam_groups else None  # adds its defaults to the same group dictionaries
        if self._adam is not None:
            self.state_dtypes = getattr(self._adam, "state_dtypes", {})
            self.state: defaultdict[torch.Tensor, Any] = self._adam.state
        self._args, self._weights, self._device = args, weights, device
        self._coefficients = step_coefficients(args.coefficient_type, args.num_ns_steps)
        self._batches = [
            *self._make_batches(OwnerGrid(tensor, data), is_expert=False),
            *self._make_batches(
                OwnerGrid(tensor if expert_tensor is None else expert_tensor, expert_data), is_expert=True
            ),
        ]

    def _make_batches(self, grid: OwnerGrid, *, is_expert: bool) -> Iterator[_Batch]:
        """Yield the batches of weights in ``grid``, each weight with one owner."""
        indices = [idx for idx, weight in enumerate(self._weights) if weight.is_expert == is_expert]
        for positions in exchange_batches([self._weights[idx].partition for idx in indices], grid.num_owners):
            batch = [indices[position] for position in positions]
            costs = [self._weights[idx].flops(self._args.num_ns_steps) for idx in batch]
            yield _Batch(grid, batch, assign_owners(costs, grid.num_owners))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights by their gradients. Collective over ``tensor``, ``data`` and ``expert_data``."""
        if self._adam is not None:
            self._adam.step()
        main_params = [
            (main_param, group) for group in self.param_groups if group.get("is_muon") for main_param in group["params"]
        ]
        for batch in self._batches:
            self._update_batch(batch, [main_params[idx] for idx in batch.indices])

    def _update_batch(self, batch: _Batch, main_params: list[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        """Update the weights of ``batch``."""
        weights = [self._weights[idx] for idx in batch.indices]
        for weight, (main_param, _) in zip(weights, main_params, strict=True):
            self._make_state(weight, main_param)
        updates = [self._update_momentum(main_param) for main_param, _ in main_params]
        # With a rate of 0, as in the first step of Megatron's warm-up, weights do not change, but second moments do.
        if self._args.adaptive is None and not any(group["lr"] for _, group in main_params):
            return
        moments = None
        if self._args.moment2_method == "normuon":
            moments = [self.state[main_param]["moment2_buffer"] for main_param, _ in main_params]
        orthogonalized = self._orthogonalize(batch, updates, moments)
        for weight, (main_param, group), update in zip(weights, main_params, orthogonalized, strict=True):
            update = update.to(main_param.device)
            if self._args.adaptive is not None and self._args.moment2_method == "adamuon":
                moment2 = self.state[main_param]["moment2_buffer"]
                update = normalize_elements(update.to(moment2.dtype), moment2, self._args.adaptive)
            self._apply_update(batch.grid, weight, main_param, group, update)

    def _make_state(self, weight: MuonWeight, main_param: torch.Tensor) -> None:
        """Create the states of ``main_param`` as zeros, if it has none."""
        state = self.state[main_param]
        if state:
            return
        state["momentum_buffer"] = torch.zeros_like(main_param, memory_format=torch.contiguous_format)
        if self._args.moment2_method == "adamuon":
            state["moment2_buffer"] = torch.zeros_like(main_param, memory_format=torch.contiguous_format)
        elif self._args.moment2_method == "normuon":
            state["moment2_buffer"] = main_param.new_zeros(weight.num_neurons)

    def _update_momentum(self, main_param: torch.Tensor) -> torch.Tensor:
        """Update the momentum from the gradient; return the update to orthogonalize."""
        gradient, buffer = main_param.grad, self.state[main_param]["momentum_buffer"]
        assert gradient is not None
        buffer.lerp_(gradient, 1 - self._args.momentum)
        update = gradient.lerp(buffer, self._args.momentum) if self._args.nesterov else buffer
        dtype = exchange_dtype(self._args.fp32_matmul_prec, main_param.dtype)
        return update.to(dtype).to(self._device or main_param.device)

    def _orthogonalize(
        self, batch: _Batch, slices: list[torch.Tensor], moments: list[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Orthogonalize the updates given as ``slices`` on all ranks; return this rank's slices. Collective.

        Args:
            moments: NorMuon's second moments of each weight, which are updated in place on every rank.
        """
        weights = [self._weights[idx] for idx in batch.indices]
        partitions = [weight.partition for weight in weights]
        owned = batch.grid.owned(batch.owners)
        full_updates = batch.grid.gather(partitions, batch.owners, slices)
        dtype = result_dtype(self._args.fp32_matmul_prec, slices[0].dtype)
        results = []
        for idx, full in zip(owned, full_updates, strict=True):
            if moments is None:
                results.append(self._orthogonalize_matrices(weights[idx].matrices, full, dtype))
                continue
            moment2 = moments[idx].to(full.device, copy=True)
            results.append(self._orthogonalize_matrices(weights[idx].matrices, full, moment2.dtype, moment2))
            moments[idx].copy_(moment2)
        if moments is None:
            return batch.grid.scatter(partitions, batch.owners, results, like=slices[0].new_empty(0, dtype=dtype))
        like = slices[0].new_empty(0, dtype=moments[0].dtype)
        vectors = [MatrixPartition((moment2.numel(), 1), None, None) for moment2 in moments]
        sent = [moments[idx].unsqueeze(1).to(like.device) for idx in owned]
        for moment2, received in zip(moments, batch.grid.scatter(vectors, batch.owners, sent, like=like), strict=True):
            moment2.copy_(received.squeeze(1))
        return batch.grid.scatter(partitions, batch.owners, results, like=like)

    def _orthogonalize_matrices(
        self, matrices: Matrices, update: torch.Tensor, dtype: torch.dtype, moment2: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Orthogonalize each matrix in ``update`` [m, n]; return the results in ``dtype``.

        Args:
            moment2: NorMuon's second moments of all matrices, which are updated in place; None: not NorMuon.
        """
        result = torch.empty_like(update, dtype=dtype)
        start = 0
        for source, target in zip(matrices.views(update), matrices.views(result), strict=True):
            matrix = source.flatten(0, 1).clone(memory_format=torch.contiguous_format)
            orthogonal = newton_schulz(matrix, self._coefficients, self._args.fp32_matmul_prec).to(dtype)
            if moment2 is not None and self._args.adaptive is not None:
                neurons = moment2[start : start + num_neurons(*matrix.shape)]
                start += neurons.numel()
                orthogonal = normalize_neurons(orthogonal, neurons, self._args.adaptive)
            target.copy_(orthogonal.unflatten(0, target.shape[:2]))
        return result

    def _apply_update(
        self, grid: OwnerGrid, weight: MuonWeight, main_param: torch.Tensor, group: dict[str, Any], update: torch.Tensor
    ) -> None:
        """Apply weight decay and ``update`` to ``main_param``; a row's update is scaled by its matrix's factor."""
        if not main_param.numel():
            return
        main_param.mul_(1 - group["lr"] * group["weight_decay"])
        scales = [self._args.scale(*shape) for shape in weight.shapes]
        if len(set(scales)) == 1:
            main_param.add_(update, alpha=-(group["lr"] * scales[0]))
            return
        scale_of_row = _scale_of_rows(grid, weight, scales)
        for scale in dict.fromkeys(scales):
            rows = (scale_of_row == scale).nonzero().flatten().to(main_param.device)
            updated = main_param.index_select(0, rows).add_(update.index_select(0, rows), alpha=-(group["lr"] * scale))
            main_param.index_copy_(0, rows, updated)


def _scale_of_rows(grid: OwnerGrid, weight: MuonWeight, scales: Sequence[float]) -> torch.Tensor:
    """Return the update scale of each local row, [rows]; ``scales`` has one scale per matrix."""
    row_scales = torch.empty(weight.partition.shape[0], 1, dtype=torch.float64)
    for scale, rows in zip(scales, weight.matrices.views(row_scales), strict=True):
        rows.fill_(scale)
    for partition, group in ((weight.partition.tensor, grid.tensor), (weight.partition.data, grid.data)):
        if partition is not None and partition.dim == 0:
            row_scales = partition.slice(row_scales, group.rank)
    return row_scales.flatten()
