"""Tiny SmolLM3, AFMoE and gpt-oss of Hugging Face's classes with odd sizes, and our flags for each.

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
            "sliding_window": 4, "layer_types": [SLIDING, SLIDING, FULL], "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
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
}  # fmt: skip
"""As the hub has them, in small."""


def make_extras_model(case: str, dtype: torch.dtype = torch.float64, **overrides: Any) -> Any:
    """Return Hugging Face's model with random weights; routers, sinks and gates are large enough to matter."""
    torch.manual_seed(1)
    model = EXTRA_CASES[case].huggingface_model(dtype, **overrides)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("sinks"):
                tensor.copy_(torch.randn_like(tensor) + 3.0)
            elif name.endswith("expert_bias"):
                tensor.copy_(torch.randn_like(tensor) * 0.2)
            elif name.endswith(("router.gate.weight", "router.weight", "self_attn.gate_proj.weight")):
                tensor.mul_(5.0)
    return model


def to_extras_file_tensors(tensors: dict[str, torch.Tensor], case: str) -> dict[str, torch.Tensor]:
    """Convert the tensors of a Hugging Face model to the names and shapes in its files."""
    return to_file_tensors(tensors, case) if case == "afmoe" else tensors


@contextmanager
def disable_upcasts() -> Iterator[None]:
    """Make norms, angles, softmax and routers of these models compute in fp64, by the same formulas."""

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def angles(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inv_freq, scale = rotary_frequencies(self.config)
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

    with ExitStack() as stack:
        for model in EXTRA_CASES.values():
            name = model.module or model.prefix.lower()
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            for suffix, forward in (("RMSNorm", norm), ("RotaryEmbedding", angles)):
                stack.enter_context(patch.object(getattr(module, f"{model.prefix}{suffix}"), "forward", forward))
            if model.prefix == "Afmoe":
                stack.enter_context(patch.object(module.AfmoeTokenChoiceRouter, "forward", afmoe_router))
        stack.enter_context(patch.object(torch.nn.functional, "softmax", softmax))
        yield
