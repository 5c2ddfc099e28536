"""Small mixers with the delta rule: their args, and the mixers with known weights."""

from __future__ import annotations

from typing import Any

import torch

from megatron.models.common.delta_mixer import DeltaMixer
from megatron.models.common.gated_delta_net import GatedDeltaNet
from megatron.models.common.kimi_delta import KimiDeltaAttention
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.shard import shard_of
from tests.helpers.llama_samples import llama_model_args
from tests.helpers.model_samples import make_full_weight

GDN_FIELDS: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net", "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 6, "linear_value_head_dim": 5,
}  # fmt: skip
KDA_FIELDS: dict[str, Any] = {
    "experimental_attention_variant": "kimi_delta", "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 6,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "gdn": GDN_FIELDS,
    "gdn, negative eigenvalues": {**GDN_FIELDS, "linear_allow_neg_eigval": True},
    "kda": KDA_FIELDS,
    "kda, full gates": {**KDA_FIELDS, "linear_full_rank_gates": True, "linear_decay_limit": 5.0},
}


def delta_model_args(variant: str, **overrides: Any) -> ModelArgs:
    """Return the args of a small decoder whose layers have the mixer of ``variant``."""
    return llama_model_args(**{**VARIANTS[variant], "layernorm_epsilon": 1e-3, **overrides})


def make_mixer(variant: str, parallel: ParallelContext | None = None, **overrides: Any) -> DeltaMixer:
    """Return a mixer in fp64 with its shards of known weights."""
    args = delta_model_args(variant, **overrides)
    mixer_class = KimiDeltaAttention if args.experimental_attention_variant == "kimi_delta" else GatedDeltaNet
    mixer = mixer_class(args, parallel or ParallelContext(), 0).double()
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            shard = shard_of(parameter)
            shard.unpadded(parameter).copy_(shard.narrow(make_full_weight(name, shard.global_shape)))
    return mixer
