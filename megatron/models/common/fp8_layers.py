"""Selection of the weights of a transformer layer whose products are in FP8."""

from __future__ import annotations

from torch import nn

from megatron.models.common.latent_attention import KeyValueProjection, LatentProjection
from megatron.mpu.fp8 import use_fp8
from megatron.mpu.groups import SINGLE
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear


def use_fp8_products(attention: nn.Module | None, mlp: nn.Module | None, recipe: str) -> None:
    """Compute the products of an attention and a feed-forward half in FP8.

    These are the projections of attention, the feed-forward layers and the experts. The following products are not in
    FP8: routers, gates of shared experts and of heads, and the projections from latents to keys and values, because
    context-parallel ranks compute these for a few heads at a time.

    Args:
        recipe: see ``megatron.mpu.fp8``.
    """
    for half in (attention, mlp):
        for module in () if half is None else half.modules():
            if isinstance(module, KeyValueProjection) or module is getattr(half, "output_gate", None):
                continue
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                use_fp8(module.weight, recipe, module.group, int(isinstance(module, RowParallelLinear)))
            elif isinstance(module, LatentProjection):
                use_fp8(module.weight, recipe, SINGLE, None)
