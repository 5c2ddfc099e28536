"""Tiny SmolLM3, AFMoE, gpt-oss and MiMo-V2-Flash of Hugging Face's classes with odd sizes, and our flags for each.

As in ``modern_decoders`` and ``expert_models``, ``disable_upcasts`` keeps norms, angles, softmax and routers in fp64.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from tests.helpers.expert_models import to_file_tensors
from tests.helpers.modern_decoders import FULL, SLIDING, YARN, ModelCase, rotary_frequencies

EXTRA_CASES = {
    "smollm3": ModelCase(
        "SmolLM3",
        {
            "hidden_size": 38, "num_key_value_heads": 2, "no_rope_layers": [1, 0, 1], "use_sliding_window": True,
            "sliding_window": 4, "layer_types": [SLIDING, SLIDING, FULL], "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
        "--hidden-size 38 --num-query-groups 2 --rotary-base 100 --no-rope-freq 2 --window-size 3 "
        "--window-attn-skip-freq 3",
    ),
    "afmoe": ModelCase(
        "Afmoe",
        {
            "hidden_size": 38, "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3,
            "moe_intermediate_size": 14, "num_shared_experts": 2, "num_dense_layers": 1, "route_scale": 1.5,
            "layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 4, "mup_enabled": True,
            "experts_implementation": "eager", "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
        "--hidden-size 38 --num-query-groups 2 --rotary-base 100 --norm-placement both --qk-norm head "
        "--attention-output-gate --window-size 3 --window-attn-skip-freq 2 --no-rope-freq 2 --scale-embeddings "
        "--num-experts 6 --moe-router-topk 3 --moe-ffn-hidden-size 14 --moe-layer-freq [0,1,1] "
        "--moe-shared-expert-intermediate-size 28 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 1.5",
    ),
    "gpt_oss": ModelCase(
        "GptOss",
        {
            "hidden_size": 38, "num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 3,
            "layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 4, "swiglu_limit": 0.4,
            "experts_implementation": "eager", "rope_parameters": {**YARN, "truncate": False},
        },
        "--hidden-size 38 --num-query-groups 2 --rotary-base 500 --rotary-scaling yarn --rotary-scaling-factor 4 "
        "--rotary-original-positions 8 --rotary-beta-fast 2 --rotary-beta-slow 0.1 --no-rotary-truncate --hidden-bias "
        "--softmax-type learnable --window-size 3 --window-attn-skip-freq 2 --quick-geglu "
        "--activation-func-clamp-value 0.4 --glu-linear-offset 1 --num-experts 6 --moe-router-topk 3 "
        "--moe-ffn-hidden-size 54",
        module="gpt_oss",
    ),
    "mimo_v2_flash": ModelCase(
        "MiMoV2Flash",
        {
            "hidden_size": 38, "num_attention_heads": 8, "num_key_value_heads": 2, "v_head_dim": 7,
            "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 1.5, "moe_intermediate_size": 14, "attention_bias": True,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 4, "attention_value_scale": 0.6,
            "experts_implementation": "eager", "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.67},
                SLIDING: {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.67},
            },
        },
        "--hidden-size 38 --num-attention-heads 8 --num-query-groups 2 --window-num-query-groups 4 --v-head-dim 7 "
        "--attention-value-scale 0.6 --add-qkv-bias --rotary-base 500 --rotary-local-base 100 --rotary-percent 0.67 "
        "--softmax-type learnable "
        "--sink-layers window --window-size 3 --window-attn-skip-freq [0,1,1] --num-experts 8 --moe-router-topk 4 "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-ffn-hidden-size 14 --moe-layer-freq [0,1,1] "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 1.5",
        module="mimo_v2_flash",
    ),
}  # fmt: skip

COMMON_FIELDS = {
    "hidden_size": 36, "intermediate_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2,
    "num_hidden_layers": 6, "vocab_size": 29, "initializer_range": 0.02, "rms_norm_eps": 1e-06, "use_cache": True,
    "attention_dropout": 0.0, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYER_TYPES = [SLIDING, "full_attention"] * 3
HUB_CONFIGS: dict[str, dict[str, Any]] = {
    "smollm3": {  # SmolLM3-3B
        **COMMON_FIELDS, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False,
        "hidden_act": "silu", "layer_types": ["full_attention"] * 6, "max_position_embeddings": 65536,
        "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0, 1, 1],
        "pretraining_tp": 2, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
        "use_sliding_window": False,
    },
    "afmoe": {  # Trinity-Mini
        **COMMON_FIELDS, "architectures": ["AfmoeForCausalLM"], "model_type": "afmoe", "head_dim": 16,
        "global_attn_every_n_layers": 4, "hidden_act": "silu", "max_position_embeddings": 131072,
        "moe_intermediate_size": 8, "mup_enabled": True, "n_group": 1, "num_dense_layers": 2, "num_experts": 8,
        "num_experts_per_tok": 2, "num_shared_experts": 1, "rope_scaling": None, "rope_theta": 10000,
        "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid", "sliding_window": 2048,
        "tie_word_embeddings": False, "topk_group": 1,
    },
    "gpt_oss": {  # gpt-oss-20b, without its quantisation
        **COMMON_FIELDS, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "initial_context_length": 4096,
        "layer_types": LAYER_TYPES, "max_position_embeddings": 131072, "num_experts_per_tok": 4,
        "num_local_experts": 8, "output_router_logits": False, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    },
    "mimo_v2_flash": {  # MiMo-V2-Flash, with the keys of its own code and without its quantisation
        **{key: value for key, value in COMMON_FIELDS.items() if key != "rms_norm_eps"},
        "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash",
        "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True,
        "attention_bias": False, "attention_chunk_size": 128, "num_attention_heads": 8,
        "attention_value_scale": 0.707, "head_dim": 192, "hidden_act": "silu", "hybrid_block_size": None,
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0], "layernorm_epsilon": 1e-05, "max_position_embeddings": 262144,
        "moe_intermediate_size": 8, "moe_layer_freq": [0, 1, 1, 1, 1, 1], "n_group": 1, "n_routed_experts": 8,
        "n_shared_experts": None, "norm_topk_prob": True, "num_experts_per_tok": 2, "partial_rotary_factor": 0.334,
        "rope_theta": 5000000, "routed_scaling_factor": None, "scoring_func": "sigmoid", "sliding_window": 128,
        "sliding_window_size": 128, "swa_head_dim": 192, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4,
        "swa_rope_theta": 10000, "swa_v_head_dim": 128, "tie_word_embeddings": False, "topk_group": 1,
        "topk_method": "noaux_tc", "v_head_dim": 128,
    },
}  # fmt: skip
"""As the hub has them, in small."""


def make_extras_model(case: str, dtype: torch.dtype = torch.float64, **overrides: Any) -> Any:
    """Return Hugging Face's model with random weights; routers, sinks and gates are large enough to matter."""
    torch.manual_seed(1)
    model = EXTRA_CASES[case].huggingface_model(dtype, **overrides)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("sinks"):
                tensor.copy_(torch.randn_like(tensor) + 3.0)
            elif name.endswith(("expert_bias", "e_score_correction_bias")):
                tensor.copy_(torch.randn_like(tensor) * 0.2)
            elif name.endswith(("gate.weight", "router.weight", "self_attn.gate_proj.weight")):
                tensor.mul_(5.0)
    return model


def to_extras_file_tensors(tensors: dict[str, torch.Tensor], case: str) -> dict[str, torch.Tensor]:
    """Convert the tensors of a Hugging Face model to the names and shapes in its files."""
    if case == "mimo_v2_flash":
        tensors = {
            name.replace("self_attn.sinks", "self_attn.attention_sink_bias"): tensor for name, tensor in tensors.items()
        }
    return to_file_tensors(tensors, case) if case in ("afmoe", "mimo_v2_flash") else tensors


@contextmanager
def disable_upcasts() -> Iterator[None]:
    """Make norms, angles, softmax and routers of these models compute in fp64, by the same formulas."""

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def angles(
        self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inv_freq, scale = rotary_frequencies(self.config, layer_type)
        freqs = position_ids[..., None].double() * inv_freq
        is_doubled = not type(self).__name__.startswith("GptOss")
        freqs = torch.cat((freqs, freqs), dim=-1) if is_doubled else freqs
        return freqs.cos() * scale, freqs.sin() * scale

    def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.softmax(x, dim)

    def afmoe_router(self: Any, x: torch.Tensor, expert_bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = F.linear(x.reshape(-1, x.shape[-1]), self.gate.weight)
        scores = logits.sigmoid()
        experts = torch.topk(scores + expert_bias, k=self.top_k, dim=1)[1]
        values = scores.gather(1, experts)
        return logits, values / (values.sum(-1, keepdim=True) + 1e-20) * self.route_scale, experts

    def mimo_router(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = F.linear(x.reshape(-1, x.shape[-1]), self.weight)
        scores = logits.sigmoid()
        by_group = (scores + self.e_score_correction_bias).unflatten(1, (self.num_group, -1))
        groups = by_group.topk(2, dim=-1)[0].sum(-1).topk(self.topk_group, dim=-1)[1]
        is_chosen = torch.zeros_like(by_group[:, :, 0]).scatter(1, groups, 1.0) > 0
        experts = by_group.masked_fill(~is_chosen[:, :, None], -torch.inf).flatten(1).topk(self.top_k, dim=-1)[1]
        values = scores.gather(1, experts)
        return logits, values / (values.sum(-1, keepdim=True) + 1e-20) * self.routed_scaling_factor, experts

    with ExitStack() as stack:
        for model in EXTRA_CASES.values():
            name = model.module or model.prefix.lower()
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            for suffix, forward in (("RMSNorm", norm), ("RotaryEmbedding", angles)):
                stack.enter_context(patch.object(getattr(module, f"{model.prefix}{suffix}"), "forward", forward))
            if model.prefix == "Afmoe":
                stack.enter_context(patch.object(module.AfmoeTokenChoiceRouter, "forward", afmoe_router))
            if model.prefix == "MiMoV2Flash":
                stack.enter_context(patch.object(module.MiMoV2FlashTopkRouter, "forward", mimo_router))
        stack.enter_context(patch.object(torch.nn.functional, "softmax", softmax))
        yield
