"""LatentFeatures: flags for multi-latent attention (MLA), named as in Megatron-LM, and their checks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from megatron.config.layer_features import VANILLA
from megatron.config.option import option

_option = partial(
    option, family_kind="decoder", elsewhere="multi-latent attention is supported in decoders only; remove it"
)


@dataclass(frozen=True, kw_only=True)
class LatentFeatures:
    """Multi-latent attention; a base of ``DecoderFeatures``.

    The fields other than ``v_head_dim`` need ``multi_latent_attention``.
    """

    multi_latent_attention: bool = _option(
        False,
        "project keys and values from one latent vector per token, and rotate a separate part of queries and keys, as "
        "DeepSeek-V2",
    )
    q_lora_rank: int = _option(
        0, "size of the latent that queries are projected from; 0: they are projected from the hidden state", minimum=0
    )
    kv_lora_rank: int = _option(32, "size of the latent that keys and values are projected from", minimum=1)
    qk_head_dim: int = _option(128, "size of the part of a query or key head that is not rotated", minimum=1)
    qk_pos_emb_head_dim: int = _option(
        64, "size of the rotated part of a query or key head; all heads share the rotated part of the key", minimum=2
    )
    v_head_dim: int = _option(
        0,
        "size of a value head",
        minimum=1,
        shown_default="128 with multi-latent attention, otherwise kv-hidden-size",
        elsewhere="it is supported in decoders only; remove it",
    )
    mscale: float = _option(
        1.0,
        "yarn with multi-latent attention: the rotated parts are multiplied by (0.1 this ln(rotary-scaling-factor) + "
        "1), divided by the same term with --mscale-all-dim",
        above=0,
    )
    mscale_all_dim: float = _option(
        0.0,
        "yarn with multi-latent attention: scores are multiplied by (0.1 this ln(rotary-scaling-factor) + 1)^2",
        minimum=0,
    )
    latent_norm_epsilon: float = _option(
        0.0, "epsilon of the norms of latents; DeepSeek's is 1e-6", above=0, shown_default="norm-epsilon"
    )

    def _derive_latent_sizes(self) -> None:
        """Set the fields that follow from others; without multi-latent attention, reset those that need it."""
        if not self.multi_latent_attention:
            for name in LATENT_ONLY:
                object.__setattr__(self, name, LatentFeatures.__dataclass_fields__[name].default)
            if self.v_head_dim == getattr(self, "kv_hidden_size", 0):
                object.__setattr__(self, "v_head_dim", 0)
            return
        if not self.v_head_dim:
            object.__setattr__(self, "v_head_dim", LATENT_VALUE_SIZE)
        object.__setattr__(self, "kv_hidden_size", self.qk_head_dim + self.qk_pos_emb_head_dim)
        if getattr(self, "qk_norm", "none") == "head":
            # Megatron's --qk-layernorm, which selects norms of the latents; the parser rejects --qk-norm head
            object.__setattr__(self, "qk_norm", "none")
        if not self.latent_norm_epsilon:
            object.__setattr__(self, "latent_norm_epsilon", getattr(self, "layernorm_epsilon", 1e-5))

    @property
    def value_size(self) -> int:
        """Size of a value head."""
        return self.v_head_dim or int(getattr(self, "kv_hidden_size", 0))

    @property
    def padded_head_size(self) -> int:
        """Head size in attention kernels, which need queries, keys and values of one size."""
        return max(self.value_size, int(getattr(self, "kv_hidden_size", 0)))

    @property
    def has_yarn(self) -> bool:
        return getattr(self, "rotary_scaling", "none") == "yarn"

    @property
    def latent_softmax_scale(self) -> float:
        """Factor for the scores in multi-latent attention."""
        scale: float = getattr(self, "softmax_scale", 0.0) or float(getattr(self, "kv_hidden_size", 1)) ** -0.5
        return scale * self._yarn_term(self.mscale_all_dim) ** 2

    @property
    def latent_rotary_factor(self) -> float:
        """Factor for the rotated parts of queries and keys; 0 if ``Rotary`` computes it, as for longrope.

        Source: DeepSeek-AI 2024, "DeepSeek-V2", and its code.
        """
        explicit_factor = float(getattr(self, "rotary_attention_factor", 0.0))
        if explicit_factor or not self.has_yarn:
            return explicit_factor
        return self._yarn_term(self.mscale) / self._yarn_term(self.mscale_all_dim)

    def _yarn_term(self, mscale: float) -> float:
        return yarn_term(getattr(self, "rotary_scaling_factor", 1.0), mscale) if self.has_yarn else 1.0


LATENT_ONLY = tuple(field.name for field in fields(LatentFeatures) if field.name != "v_head_dim")
"""Fields without effect in other attention, except the first, which selects multi-latent attention."""
LATENT_VALUE_SIZE = 128
"""Default of ``v_head_dim`` with multi-latent attention."""
REFITTED = ("mscale", "mscale_all_dim", "latent_norm_epsilon")
"""Fields that may differ when weights are loaded: the weights fit, but the outputs change."""
ARCHITECTURE = ("multi_latent_attention", "mscale", "mscale_all_dim", "latent_norm_epsilon")
"""Fields that ``--model`` sets, without sizes."""
SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""Sizes of multi-latent attention."""


def yarn_term(factor: float, mscale: float) -> float:
    """Compute YaRN's term 0.1 mscale ln(factor) + 1; it is 1 if ``factor`` does not extend the length."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def latent_problems(model: Any) -> Iterator[str]:
    """Yield an error message for each setting in ``model``, a model section, that multi-latent attention excludes."""
    if not model.multi_latent_attention:
        return
    if model.position_embedding_type not in ("rope", "none"):
        yield (
            "--multi-latent-attention needs --position-embedding-type rope or none, got "
            f"{model.position_embedding_type}. Add it, or remove --multi-latent-attention"
        )
    if model.qk_pos_emb_head_dim % 2:
        yield (
            "--qk-pos-emb-head-dim must be even, because rotary positions rotate pairs of elements, got "
            f"{model.qk_pos_emb_head_dim}. Change it"
        )
    if model.rotary_percent != 1.0:
        yield (
            "--rotary-percent does not apply to --multi-latent-attention, whose rotated part has its own size, got "
            f"{model.rotary_percent:g}. Remove it, or change --qk-pos-emb-head-dim"
        )
    if model.num_query_groups != model.num_attention_heads:
        yield (
            "--multi-latent-attention has a key and a value head for each query head, got --num-query-groups "
            f"{model.num_query_groups} and --num-attention-heads {model.num_attention_heads}. Remove "
            "--num-query-groups"
        )
    unsupported = {
        "--hidden-bias": model.hidden_bias,
        "--add-qkv-bias": model.add_qkv_bias,
        f"--qk-norm {model.qk_norm}": model.qk_norm != "none",
        f"--clip-qkv {model.clip_qkv:g}": model.clip_qkv > 0,
        f"--softmax-type {model.softmax_type}": model.softmax_type != VANILLA,
        f"--no-rope-freq {model.no_rope_freq}": bool(model.no_rope_freq),
        f"--attention-temperature-scale {model.attention_temperature_scale:g}": model.attention_temperature_scale > 0,
        f"--attention-value-scale {model.attention_value_scale:g}": model.attention_value_scale != 1.0,
        f"--window-num-query-groups {model.window_num_query_groups}": model.window_num_query_groups > 0,
    }
    flags = [flag for flag, is_set in unsupported.items() if is_set]
    if flags:
        yield (
            f"--multi-latent-attention does not support {', '.join(flags)}. Remove --multi-latent-attention or the "
            "other flags"
        )
