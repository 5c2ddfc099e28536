"""Second moments of orthogonalized updates: --optimizer adaptive_muon.

For the orthogonalized update O of a matrix [m, n], both in the dtype of main params:

| --adaptive-muon-moment2-method | second moment | update |
|---|---|---|
| adamuon | v <- b2 v + (1 - b2) O^2, one per element | O / (sqrt(v) + eps) |
| normuon | v <- b2 v + (1 - b2) mean(O^2), one per neuron | O / sqrt(max(v, eps)), rescaled to the norm of O |

NorMuon's neurons are the rows of a matrix with m >= n, and otherwise the columns. It restores the Frobenius norm of the
full update. Both methods follow ``emerging_optimizers.AdaptiveMuon`` 0.3, Megatron's implementation: there is no bias
correction, and the learning-rate scale of Muon is applied afterwards.

Source: Si et al. 2025, "AdaMuon"; Li et al. 2025, "NorMuon: making Muon more efficient and scalable".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AdaptiveArgs:
    """Settings named like the flags ``--adaptive-muon-...``."""

    moment2_method: str = "adamuon"
    beta2: float = 0.95
    eps: float = 1e-8


def num_neurons(rows: int, columns: int) -> int:
    """Return the number of second moments of a matrix with normuon."""
    return max(rows, columns)


def normalize_elements(update: torch.Tensor, moment2: torch.Tensor, args: AdaptiveArgs) -> torch.Tensor:
    """Update the second moment of each element in place; return the normalized ``update``.

    Shapes:
        update, moment2: any slice of a matrix
    """
    moment2.lerp_(update.square(), 1 - args.beta2)
    return update / (moment2.sqrt() + args.eps)


def normalize_neurons(update: torch.Tensor, moment2: torch.Tensor, args: AdaptiveArgs) -> torch.Tensor:
    """Update the second moment of each neuron in place; return the normalized ``update``.

    Shapes:
        update [m, n], a full matrix
        moment2 [max(m, n)]
    """
    dim = -1 if update.shape[0] >= update.shape[1] else -2
    column_or_row = moment2.unsqueeze(dim)
    column_or_row.lerp_(update.square().mean(dim=dim, keepdim=True), 1 - args.beta2)
    normalized = update * column_or_row.clamp_min(args.eps).rsqrt_()
    norm = torch.linalg.vector_norm(normalized).clamp_min(args.eps)
    return normalized * (torch.linalg.vector_norm(update) / norm)
