"""set_matrices and matrices_of: the matrices packed in a layer's weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tds.param_info import Matrices, info_of, set_info


def set_matrices(parameter: torch.nn.Parameter, widths: Sequence[int] = (), head: int = 0) -> torch.nn.Parameter:
    """Record the ``Matrices`` packed in a layer's weight ``parameter`` [m, n]; called when layers are built.

    Args:
        widths: number of rows of each matrix in one period, if the rows of several matrices alternate (``Matrices``);
            empty: the weight is one matrix.
        head: rows per attention head; 0: the rows are not divided into heads.
    """
    return set_info(parameter, replace(info_of(parameter), matrices=Matrices(tuple(widths), head)))


def matrices_of(parameter: torch.Tensor) -> Matrices | None:
    """Return the matrices in ``parameter``; None for embeddings, heads, norms and biases."""
    return info_of(parameter).matrices
