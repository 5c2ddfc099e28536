"""Attention with values that differ in size from queries and keys, computed by kernels that need equal sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

# The smaller heads are padded with zeros. They change neither the scores, provided that their scale is given, nor the
# other elements of the output.


def pad_head(x: torch.Tensor, size: int) -> torch.Tensor:
    """Pad ``x`` [..., d] with zeros to [..., size]; return ``x`` itself if d is not smaller."""
    padding = size - x.shape[-1]
    return F.pad(x, (0, padding)) if padding > 0 else x


def pad_heads(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap an attention function from ``megatron.ops`` for values of any size; the scale must be set.

    Shapes of the returned function:
        query  [b, a/t, s, d]
        key    [b, g/t, s_k, d], value [b, g/t, s_k, d_v]
        output [b, a/t, s, d_v]
    """

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        size = max(query.shape[-1], value.shape[-1])
        padded = [pad_head(x, size) for x in (query, key, value)]
        return function(*padded, *args, **kwargs)[..., : value.shape[-1]]

    return attend
