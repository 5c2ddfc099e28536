"""Muon: matrices of layers are moved by orthogonalised momentum, all other weights by AdamW."""

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
from megatron.optim.matrix_owners import Held, MatrixPartition, from_owners, owners, runs_of, to_owners
from megatron.torch_compat import newton_schulz
from tds.param_info import Matrices

# One step on a matrix W [m, n] with gradient G:
#
#     B <- mu B + (1 - mu) G                    on what this rank has of it
#     U  = mu B + (1 - mu) G, or B without Nesterov's momentum
#     O  = Newton-Schulz(U)                     on the whole matrix, by its owner (``matrix_owners``), in bf16
#     W <- (1 - lr decay) W - lr scale(m, n) O  on what this rank has of it
#
# That is ``torch.optim.Muon``, to the bit. Query, key and value, and gate and up, which one weight holds, are matrices
# of their own, and m and n are always those of the whole matrix: so the update is one in every layout.
#
# | --muon-scale-mode | scale(m, n) | is |
# |---|---|---|
# | match_rms_adamw | 0.2 sqrt(max(m, n)) | Moonlight's: an update has the RMS that AdamW's usually have |
# | spectral | sqrt(max(m, n)) | Megatron's; with --muon-extra-scale-factor 0.2 that of Moonlight |
# | original | sqrt(max(1, m / n)) | Jordan's; Megatron's shape_scaling |
# | unit_rms_norm | sqrt(m / n) | Megatron's |
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
    """How Muon moves matrices; the words are those of the flags ``--muon-...``."""

    momentum: float = 0.95
    nesterov: bool = True
    num_ns_steps: int = 5
    scale_mode: str = "match_rms_adamw"
    extra_scale_factor: float = 1.0
    split_qkv: bool = True
    split_qkv_heads: bool = False

    def scale(self, rows: int, columns: int) -> float:
        """Return what the learning rate of a whole matrix is multiplied by."""
        return self.extra_scale_factor * SCALES[self.scale_mode](rows, columns)

    def matrices(self, packed: Matrices) -> Matrices:
        """Return the matrices that are orthogonalised, each on its own."""
        return packed.split(qkv=self.split_qkv, heads=self.split_qkv_heads)


@dataclass(frozen=True)
class MuonWeight:
    """A weight of which this rank has a part: how ranks hold it, and the matrices in it."""

    cut: MatrixPartition
    matrices: Matrices

    def flops(self, steps: int) -> int:
        """Return what its Newton-Schulz steps cost."""
        return sum(newton_schulz_flops(*shape, steps) for shape in self.matrices.shapes(self.cut.shape))


class Muon(torch.optim.Optimizer):
    """Muon on the groups that say ``"is_muon": True``, ``adam`` on the others.

    The state of a weight with Muon is its ``momentum_buffer``, with the dtype and shape of the main param; others
    have the states of AdamW.

    Args:
        groups: of main params.
        adam: makes the optimizer of the other groups.
        weights: of the main params in the groups with Muon, in their order; the same on all ranks of ``tensor`` and
            ``data``.
        tensor, data: the ranks that hold parts of a weight, or copies, among which owners share the work.
        place: the device on which matrices are orthogonalised; main params may be on a CPU.

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
        place: torch.device | None = None,
    ) -> None:
        others = [group for group in groups if not group.get("is_muon")]
        super().__init__(groups, {"lr": lr})
        self._adam = adam(others) if others else None  # it fills in its own defaults, in the same groups
        if self._adam is not None:
            self.state_dtypes = getattr(self._adam, "state_dtypes", {})
            self.state: defaultdict[torch.Tensor, Any] = self._adam.state
        self._args, self._weights = args, weights
        self._tensor, self._data, self._place = tensor, data, place
        self._runs = list(runs_of([weight.cut for weight in weights], tensor.size * data.size))
        self._owners = self._share_out()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all weights by their gradients. Collective over ``tensor`` and ``data``."""
        if self._adam is not None:
            self._adam.step()
        main_params = (
            (main_param, group) for group in self.param_groups if group.get("is_muon") for main_param in group["params"]
        )
        for run in self._runs:
            self._step_on(run, list(islice(main_params, len(run))))

    def _step_on(self, run: range, main_params: list[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        """Update the weights ``run``, which travel together."""
        weights = [self._weights[number] for number in run]
        updates = [self._momentum(main_param) for main_param, _ in main_params]
        if not any(group["lr"] for _, group in main_params):  # as where states are only made: nothing would move
            return
        moved = self._orthogonalised(weights, [self._owners[number] for number in run], updates)
        for weight, (main_param, group), update in zip(weights, main_params, moved, strict=True):
            self._move(weight, main_param, group, update.to(main_param.device))

    def _momentum(self, main_param: torch.Tensor) -> torch.Tensor:
        """Let the momentum take the gradient of ``main_param``; return in bf16 what is orthogonalised."""
        gradient, state = main_param.grad, self.state[main_param]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(main_param, memory_format=torch.contiguous_format)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - self._args.momentum)
        update = gradient.lerp(buffer, self._args.momentum) if self._args.nesterov else buffer
        return update.to(torch.bfloat16).to(self._place or main_param.device)

    def _share_out(self) -> list[tuple[int, int]]:
        """Return of each weight which replica, and which tensor rank there, orthogonalises its matrices."""
        found: list[tuple[int, int]] = []
        for run in self._runs:
            costs = [self._weights[number].flops(self._args.num_ns_steps) for number in run]
            found += [divmod(o, self._tensor.size) for o in owners(costs, self._data.size * self._tensor.size)]
        return found

    def _orthogonalised(
        self, weights: Sequence[MuonWeight], owned_by: Sequence[tuple[int, int]], parts: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return this rank's parts of the orthogonalised ``weights``, given those of what is to be. Collective."""
        over_data = [
            Held(w.cut.local_shape, w.cut.data, replica) for w, (replica, _) in zip(weights, owned_by, strict=True)
        ]
        here = [index for index, (replica, _) in enumerate(owned_by) if replica == self._data.rank]
        over_tensor = [Held(weights[index].cut.shape, weights[index].cut.tensor, owned_by[index][1]) for index in here]
        like = parts[0]
        local = to_owners(over_data, parts, self._data)
        wholes = to_owners(over_tensor, local, self._tensor) if here else []
        own = [index for index in here if owned_by[index][1] == self._tensor.rank]
        done = [self._orthogonal(weights[index].matrices, whole) for index, whole in zip(own, wholes, strict=True)]
        local = from_owners(over_tensor, done, self._tensor, like) if here else []
        return from_owners(over_data, local, self._data, like)

    def _orthogonal(self, matrices: Matrices, whole: torch.Tensor) -> torch.Tensor:
        """Return ``whole`` [m, n] with each of its matrices made orthogonal."""
        found = torch.empty_like(whole)
        for source, place in zip(matrices.views(whole), matrices.views(found), strict=True):
            matrix = source.flatten(0, 1).clone(memory_format=torch.contiguous_format)
            place.copy_(newton_schulz(matrix, self._args.num_ns_steps).view_as(place))
        return found

    def _move(self, weight: MuonWeight, main_param: torch.Tensor, group: dict[str, Any], update: torch.Tensor) -> None:
        """Decay ``main_param`` and move it against ``update``, by the scale of the whole matrix that each row is of."""
        if not main_param.numel():
            return
        main_param.mul_(1 - group["lr"] * group["weight_decay"])
        scales = [self._args.scale(*shape) for shape in weight.matrices.shapes(weight.cut.shape)]
        if len(set(scales)) == 1:
            main_param.add_(update, alpha=-(group["lr"] * scales[0]))
            return
        scale_of_row = self._scale_of_rows(weight, scales)
        for scale in dict.fromkeys(scales):
            rows = (scale_of_row == scale).nonzero().flatten().to(main_param.device)
            moved = main_param.index_select(0, rows).add_(update.index_select(0, rows), alpha=-(group["lr"] * scale))
            main_param.index_copy_(0, rows, moved)

    def _scale_of_rows(self, weight: MuonWeight, scales: Sequence[float]) -> torch.Tensor:
        """Return the scale of each row that this rank has."""
        found = torch.empty(weight.cut.shape[0], 1, dtype=torch.float64)
        for scale, rows in zip(scales, weight.matrices.views(found), strict=True):
            rows.fill_(scale)
        for cut, group in ((weight.cut.tensor, self._tensor), (weight.cut.data, self._data)):
            if cut is not None and cut.dim == 0:
                found = cut.slice(found, group.rank)
        return found.flatten()
