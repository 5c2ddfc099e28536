"""Tiny Hugging Face models with multi-latent attention and odd sizes, and our flags for each."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from tests.helpers.modern_decoders import COMMON_SETTINGS, FLAGS, YARN, ModelCase, rotary_frequencies

LATENT_FLAGS = (
    f"{FLAGS.replace('--kv-channels 10 ', '')} --multi-latent-attention --latent-norm-epsilon 1e-6 --kv-lora-rank 9 "
    "--qk-head-dim 5 --qk-pos-emb-head-dim 4"
)
YARN_FLAGS = (
    "--rotary-base 500 --rotary-scaling yarn --rotary-scaling-factor 4 --rotary-original-positions 8 "
    "--rotary-beta-fast 2 --rotary-beta-slow 0.1"
)
_SIZES = {"num_key_value_heads": 6, "kv_lora_rank": 9, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 3}
_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 14, "experts_implementation": "eager"}
_EXPERT_FLAGS = "--num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 14"


@dataclass(frozen=True)
class LatentCase(ModelCase):
    """A Hugging Face model with multi-latent attention; ``head_dim`` is not set, since it is the rotated part."""

    def huggingface_config(self, **overrides: Any) -> Any:
        import transformers

        common = {name: value for name, value in COMMON_SETTINGS.items() if name != "head_dim"}
        config_class = getattr(transformers, f"{self.prefix}{self.config}")
        return config_class(**{**common, **_SIZES, **self.settings, **overrides}, attn_implementation="eager")


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0],
    "original_max_position_embeddings": 8,
}  # fmt: skip
"""As MiniCPM3-4B; a sample of the comparisons is longer than the original length."""
LATENT_CASES = {
    "deepseek_v3": LatentCase(
        "DeepseekV3",
        {
            **_EXPERTS, "hidden_size": 38, "q_lora_rank": 7, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
            "n_shared_experts": 2, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0, "rope_parameters": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.7},
        },
        f"--hidden-size 38 --q-lora-rank 7 --v-head-dim 3 {YARN_FLAGS} --mscale 1.3 --mscale-all-dim 0.7 "
        f"{_EXPERT_FLAGS} --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 1.5 "
        "--moe-shared-expert-intermediate-size 28 --moe-layer-freq [0,1,1]",
        module="deepseek_v3",
    ),
    "deepseek_v2": LatentCase(
        "DeepseekV2",
        {
            **_EXPERTS, "hidden_size": 42, "q_lora_rank": None, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
            "topk_method": "group_limited_greedy", "n_shared_experts": 1, "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
        f"--hidden-size 42 --v-head-dim 3 {YARN_FLAGS} --mscale 0.7 --mscale-all-dim 0.7 {_EXPERT_FLAGS} "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-group-score-topk 1 --moe-router-pre-softmax "
        "--moe-router-topk-scaling-factor 1.5 --moe-shared-expert-intermediate-size 14 --moe-layer-freq [0,1,1]",
        module="deepseek_v2",
    ),
    "glm4_moe_lite": LatentCase(
        "Glm4MoeLite",
        {
            **_EXPERTS, "hidden_size": 38, "q_lora_rank": 7, "v_head_dim": 11, "n_routed_experts": 8,
            "n_shared_experts": 1, "routed_scaling_factor": 1.8, "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
        f"--hidden-size 38 --q-lora-rank 7 --v-head-dim 11 --rotary-base 100 {_EXPERT_FLAGS} "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 1.8 "
        "--moe-shared-expert-intermediate-size 14 --moe-layer-freq [0,1,1]",
        module="glm4_moe_lite",
    ),
    "youtu": LatentCase(
        "Youtu",
        {
            "hidden_size": 38, "q_lora_rank": 7, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
        "--hidden-size 38 --q-lora-rank 7 --v-head-dim 3 --rotary-base 300 --tie-embeddings-and-output-weights",
        module="youtu",
    ),
    "minicpm3": LatentCase(
        "MiniCPM3",
        {
            "hidden_size": 42, "q_lora_rank": 7, "tie_word_embeddings": True, "scale_emb": 3.5, "scale_depth": 1.4,
            "dim_model_base": 13, "rope_parameters": LONGROPE,
        },
        "--hidden-size 42 --q-lora-rank 7 --v-head-dim 3 --tie-embeddings-and-output-weights "
        "--embedding-multiplier 3.5 --residual-scale 1.4 --dim-model-base 13 --rotary-base 500 "
        "--rotary-scaling longrope --rotary-scaling-factor 4 --rotary-original-positions 8 "
        "--rotary-short-factors [1.0,1.5] --rotary-long-factors [2.0,5.0]",
        module="minicpm3",
    ),
}  # fmt: skip


def random_latent_case(seed: int) -> LatentCase:
    """Return a random model of one of Hugging Face's classes."""
    rng = random.Random(seed)
    model = LATENT_CASES[rng.choice(list(LATENT_CASES))]
    num_layers, num_heads = rng.randint(2, 3), rng.choice([1, 2, 3, 5])
    yarn = {**YARN, **rng.choice([{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.4, "mscale_all_dim": 1.1}])}
    yarn = {**yarn, **rng.choice([{}, {"attention_factor": 1.2}, {"beta_fast": 1.0, "beta_slow": 1.0}])}
    settings: dict[str, Any] = {
        **model.settings, "num_hidden_layers": num_layers, "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads, "hidden_size": num_heads * rng.choice([6, 10]),
        "q_lora_rank": rng.choice([None, 3, 11]), "kv_lora_rank": rng.choice([1, 5, 12]),
        "qk_nope_head_dim": rng.choice([1, 6, 9]), "qk_rope_head_dim": rng.choice([2, 6]),
        "v_head_dim": rng.choice([1, 5, 14]), "intermediate_size": rng.choice([7, 30]),
        "rope_parameters": rng.choice([yarn, yarn, {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}]),
    }  # fmt: skip
    if "mlp_layer_types" in settings:
        settings["mlp_layer_types"] = [rng.choice(["dense", "sparse"]) for _ in range(num_layers - 1)] + ["sparse"]
    return LatentCase(model.prefix, settings, module=model.module)


@contextmanager
def disable_upcasts() -> Iterator[None]:
    """Make norms, angles, softmax, routers and scaled embeddings compute in fp64, by the same formulas."""

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def angles(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inv_freq, scale = rotary_frequencies(self.config, length=int(position_ids.max()) + 1)
        freqs = position_ids[..., None].double() * inv_freq
        doubled = torch.cat((freqs, freqs), dim=-1)
        return doubled.cos() * scale, doubled.sin() * scale

    def complex_angles(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        inv_freq, scale = rotary_frequencies(self.config)
        freqs = position_ids[..., None].double() * inv_freq
        return torch.polar(torch.ones_like(freqs), freqs) * scale

    def rotate(query: torch.Tensor, key: torch.Tensor, freqs_cis: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = [
            torch.view_as_complex(x.clone(memory_format=torch.contiguous_format).unflatten(-1, (-1, 2)))
            for x in (query, key)
        ]
        return tuple(torch.view_as_real(x * freqs_cis.unsqueeze(1)).flatten(3) for x in pairs)

    def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.softmax(x, dim)

    def sigmoid_router(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = F.linear(x.view(-1, self.hidden_dim), self.weight)
        scores = logits.sigmoid()
        grouped = (scores + self.e_score_correction_bias).view(len(scores), self.num_group, -1)
        experts = _topk_of_groups(grouped, grouped.topk(2, dim=-1)[0].sum(-1), self.topk_group, self.top_k)
        values = scores.gather(1, experts)
        return logits, values / (values.sum(-1, keepdim=True) + 1e-20) * self.routed_scaling_factor, experts

    def softmax_router(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = F.linear(x.view(-1, self.hidden_dim), self.weight)
        scores = torch.softmax(logits, -1)
        if self.topk_method == "greedy":
            experts = scores.topk(self.top_k, dim=-1)[1]
        else:
            grouped = scores.view(len(scores), self.num_group, -1)
            experts = _topk_of_groups(grouped, grouped.amax(-1), self.topk_group, self.top_k)
        return logits, scores.gather(1, experts) * self.routed_scaling_factor, experts

    def scaled_embedding(self: Any, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(input_ids, self.weight) * self.scalar_embed_scale

    with ExitStack() as stack:
        for model in LATENT_CASES.values():
            module = importlib.import_module(f"transformers.models.{model.module}.modeling_{model.module}")
            is_v2 = model.prefix == "DeepseekV2"
            forwards = {"RMSNorm": norm, "RotaryEmbedding": complex_angles if is_v2 else angles}
            if "n_routed_experts" in model.settings:
                forwards["TopkRouter"] = softmax_router if is_v2 else sigmoid_router
            if model.prefix == "MiniCPM3":
                forwards["ScaledWordEmbedding"] = scaled_embedding
            for suffix, forward in forwards.items():
                stack.enter_context(patch.object(getattr(module, f"{model.prefix}{suffix}"), "forward", forward))
            if is_v2:
                stack.enter_context(patch.object(module, "apply_rotary_emb", rotate))
        stack.enter_context(patch.object(torch.nn.functional, "softmax", softmax))
        yield


def _topk_of_groups(grouped: torch.Tensor, group_scores: torch.Tensor, topk_group: int, top_k: int) -> torch.Tensor:
    """Return the indices [n, k] of the best scores of ``grouped`` [n, groups, E/groups] in the best groups."""
    best = group_scores.topk(topk_group, dim=-1)[1]
    is_selected = torch.zeros_like(group_scores).scatter_(1, best, 1.0).bool()
    return grouped.masked_fill(~is_selected.unsqueeze(-1), float("-inf")).flatten(1).topk(top_k, dim=-1)[1]
