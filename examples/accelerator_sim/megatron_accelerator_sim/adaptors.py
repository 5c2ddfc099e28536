"""The patches that the device needs: one each for torch, DeepSpeed and this project."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.accelerators import Adaptor, Patch

Call = Callable[..., Any]


def _attention(original: Call) -> Call:
    """Return an attention function that uses the CPU's fused kernel, which torch selects only for known devices."""
    import torch

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if query.device.type != "sim" or attn_mask is not None or dropout_p or enable_gqa:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(query, key, value, dropout_p, is_causal, scale=scale)[0]

    return attend


def _memory(original: Call) -> Call:
    """Return a replacement for DeepSpeed's memory query ``original`` that asks the current accelerator.

    DeepSpeed binds the original to the accelerator that is selected when DeepSpeed is imported.
    """

    def query_current(*args: Any) -> int:
        from deepspeed.accelerator import get_accelerator

        return getattr(get_accelerator(), original.__name__)(*args)

    return query_current


ADAPTORS = (
    Adaptor(
        "torch",
        "fused attention",
        (
            Patch(
                "torch.nn.functional.scaled_dot_product_attention",
                _attention,
                "torch decomposes attention on an unknown device; values would be close to the CPU's, but not equal",
            ),
        ),
    ),
    Adaptor(
        "deepspeed",
        "memory in use",
        tuple(
            Patch(
                f"deepspeed.runtime.utils.torch_{name}",
                _memory,
                "DeepSpeed binds it on import to the accelerator that is selected at that time",
            )
            for name in ("memory_reserved", "max_memory_reserved")
        ),
    ),
    Adaptor(
        "megatron",
        "blocks of dropout masks",
        (
            Patch(
                "megatron.mpu.philox_dropout.CHUNK_COUNTERS",
                lambda blocks: {**blocks, "sim": blocks["cpu"]},
                "layout-independent masks would use block sizes for GPU memory instead of a CPU's caches",
            ),
        ),
    ),
)
