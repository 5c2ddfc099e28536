"""Tiny Hugging Face models with experts and odd sizes, and the names of their weights in files.

Their classes store the experts of a layer in two tensors; their files, like ours, have a tensor for each expert. Norms,
angles and softmax are computed in fp64 as in ``modern_decoders``, and routers by functions of this module.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from megatron.config import Config
from megatron.models.common.huggingface import HFFormat
from tests.helpers.modern_decoders import ModelCase, rotary_frequencies

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
MOE_CASES = {
    "mixtral": ModelCase(
        "Mixtral",
        {
            "hidden_size": 38, "num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2,
            "experts_implementation": "eager", **_ROPE,
        },
        "--hidden-size 38 --num-query-groups 2 --rotary-base 100 --num-experts 5 --moe-ffn-hidden-size 54",
        module="mixtral",
    ),
    "qwen3_moe": ModelCase(
        "Qwen3Moe",
        {
            "hidden_size": 38, "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3,
            "moe_intermediate_size": 14, "norm_topk_prob": True, "mlp_only_layers": [1],
            "experts_implementation": "eager", **_ROPE,
        },
        "--hidden-size 38 --num-query-groups 2 --rotary-base 100 --qk-norm head --num-experts 6 --moe-router-topk 3 "
        "--moe-ffn-hidden-size 14 --moe-layer-freq [1,0,1]",
        module="qwen3_moe",
    ),
    "qwen2_moe": ModelCase(
        "Qwen2Moe",
        {
            "hidden_size": 60, "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3,
            "moe_intermediate_size": 14, "shared_expert_intermediate_size": 22, "experts_implementation": "eager",
            **_ROPE,
        },
        "--hidden-size 60 --num-query-groups 2 --rotary-base 100 --add-qkv-bias --num-experts 6 --moe-router-topk 3 "
        "--moe-ffn-hidden-size 14 --moe-router-pre-softmax --moe-shared-expert-intermediate-size 22 "
        "--moe-shared-expert-gate",
        module="qwen2_moe",
    ),
    "glm4_moe": ModelCase(
        "Glm4Moe",
        {
            "hidden_size": 38, "head_dim": 12, "num_key_value_heads": 2, "n_routed_experts": 8,
            "num_experts_per_tok": 4, "moe_intermediate_size": 14, "n_group": 4, "topk_group": 2, "use_qk_norm": True,
            "attention_bias": True, "n_shared_experts": 2, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0,
            "experts_implementation": "eager",
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
        "--hidden-size 38 --kv-channels 12 --num-query-groups 2 --rotary-base 100 --rotary-percent 0.5 --qk-norm head "
        "--add-qkv-bias --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 14 --moe-router-num-groups 4 "
        "--moe-router-group-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-topk-scaling-factor 1.5 --moe-shared-expert-intermediate-size 28 --moe-layer-freq [0,1,1]",
        module="glm4_moe",
    ),
    "dots1": ModelCase(
        "Dots1",
        {
            "hidden_size": 38, "num_key_value_heads": 2, "n_routed_experts": 6, "num_experts_per_tok": 3,
            "moe_intermediate_size": 14, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
            "first_k_dense_replace": 1, "sliding_window": 4, "max_window_layers": 2, "experts_implementation": "eager",
            **_ROPE,
        },
        "--hidden-size 38 --num-query-groups 2 --rotary-base 100 --qk-norm head --num-experts 6 --moe-router-topk 3 "
        "--moe-ffn-hidden-size 14 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 14 --moe-layer-freq [0,1,1] "
        "--window-size 3 --window-attn-skip-freq [0,0,1]",
        module="dots1",
    ),
    "olmoe": ModelCase(
        "Olmoe",
        {
            "hidden_size": 60, "num_key_value_heads": 2, "num_experts": 5, "num_experts_per_tok": 2,
            "experts_implementation": "eager", **_ROPE,
        },
        "--hidden-size 60 --num-query-groups 2 --rotary-base 100 --qk-norm all --num-experts 5 --moe-router-topk 2 "
        "--moe-ffn-hidden-size 54 --moe-router-pre-softmax",
        module="olmoe",
    ),
    "minimax_m2": ModelCase(
        "MiniMaxM2",
        {
            "hidden_size": 38, "head_dim": 12, "num_key_value_heads": 2, "num_local_experts": 5,
            "num_experts_per_tok": 2, "experts_implementation": "eager",
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
        "--hidden-size 38 --kv-channels 12 --num-query-groups 2 --rotary-base 100 --rotary-percent 0.5 --qk-norm all "
        "--num-experts 5 --moe-router-topk 2 --moe-ffn-hidden-size 54 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias",
        module="minimax_m2",
    ),
    "ernie4_5_moe": ModelCase(
        "Ernie4_5_Moe",
        {
            "hidden_size": 38, "num_key_value_heads": 2, "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 14,
            "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "tie_word_embeddings": False,
            "experts_implementation": "eager", **_ROPE,
        },
        "--hidden-size 38 --num-query-groups 2 --rotary-base 100 --num-experts 6 --moe-router-topk 3 "
        "--moe-ffn-hidden-size 14 --moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 28 "
        "--moe-layer-freq [0,1,1]",
        module="ernie4_5_moe",
    ),
}  # fmt: skip


def make_huggingface_model(case: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return Hugging Face's model with random weights; router weights and expert biases are large enough to matter."""
    torch.manual_seed(1)
    model = MOE_CASES[case].huggingface_model(dtype)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn_like(tensor) * 0.2)
            elif name.endswith("gate.weight"):
                tensor.mul_(5.0)
    return model


def to_file_tensors(tensors: dict[str, torch.Tensor], case: str) -> dict[str, torch.Tensor]:
    """Convert the tensors of a Hugging Face model to the names and shapes in its files."""
    file_tensors: dict[str, torch.Tensor] = {}
    block, (gate, up, down) = (
        ("block_sparse_moe", ("w1", "w3", "w2"))
        if case in ("mixtral", "minimax_m2")
        else ("mlp", ("gate_proj", "up_proj", "down_proj"))
    )
    for name, tensor in tensors.items():
        file_name = name.replace(".mlp.", f".{block}.").replace(".gate.moe_statics.", ".moe_statics.")
        stem = file_name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for expert, weight in enumerate(tensor):
                file_tensors[f"{stem}.{expert}.{gate}.weight"], file_tensors[f"{stem}.{expert}.{up}.weight"] = (
                    weight.chunk(2)
                )
        elif name.endswith("experts.down_proj"):
            file_tensors |= {f"{stem}.{expert}.{down}.weight": weight for expert, weight in enumerate(tensor)}
        else:
            file_tensors[file_name] = tensor
    return file_tensors


def accept_model_tensors(hf_format: HFFormat, case: str) -> HFFormat:
    """Return ``hf_format`` with a ``to_ours`` that accepts the tensors of a Hugging Face model instead of its files.

    ``from_ours`` is unchanged and returns the names in files.
    """

    def to_ours(hf_tensors: dict[str, torch.Tensor], config: Config) -> dict[str, torch.Tensor]:
        return hf_format.to_ours(to_file_tensors(hf_tensors, case), config)

    return replace(hf_format, to_ours=to_ours)


@contextmanager
def disable_upcasts() -> Iterator[None]:
    """Make norms, angles, softmax and routers of these models compute in fp64, by the same formulas."""

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def angles(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inv_freq, scale = rotary_frequencies(self.config)
        freqs = position_ids[..., None].double() * inv_freq
        doubled = torch.cat((freqs, freqs), dim=-1)
        return doubled.cos() * scale, doubled.sin() * scale

    def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.softmax(x, dim)

    def mixtral(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = F.linear(x.reshape(-1, self.hidden_dim), self.weight)
        values, experts = torch.topk(torch.softmax(logits, -1), self.top_k, dim=-1)
        return logits, values / values.sum(-1, keepdim=True), experts

    def glm(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = F.linear(x.view(-1, self.hidden_dim), self.weight)
        scores = logits.sigmoid()
        biased = scores + self.e_score_correction_bias
        grouped = biased.view(-1, self.num_group, self.num_experts // self.num_group)
        best = grouped.topk(2, dim=-1)[0].sum(-1).topk(self.topk_group, dim=-1)[1]
        is_selected = torch.zeros(len(x.view(-1, self.hidden_dim)), self.num_group).scatter_(1, best, 1.0).bool()
        biased = grouped.masked_fill(~is_selected.unsqueeze(-1), float("-inf")).flatten(1)
        experts = biased.topk(self.top_k, dim=-1)[1]
        values = scores.gather(1, experts)
        return logits, values / (values.sum(-1, keepdim=True) + 1e-20) * self.routed_scaling_factor, experts

    def ernie(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = F.linear(x, self.weight)
        probabilities = torch.softmax(logits, -1)
        experts = torch.topk(probabilities + self.moe_statics.e_score_correction_bias[0], self.top_k, dim=-1)[1]
        values = probabilities.gather(1, experts)
        return logits, values / values.sum(-1, keepdim=True), experts

    def minimax(self: Any, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = F.linear(x.reshape(-1, self.hidden_dim), self.weight)
        experts = torch.topk(logits.sigmoid() + bias, self.top_k, dim=-1)[1]
        values = logits.sigmoid().gather(1, experts)
        return logits, values / values.sum(-1, keepdim=True), experts

    def rotate_neighbours(*tensors: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
        query, key, cosine, sine = tensors
        cosine, sine = (x[:, None, :, : x.shape[-1] // 2] for x in (cosine, sine))
        rotated = []
        for x in (query, key):
            first, second = x[..., 0::2], x[..., 1::2]
            pairs = first * cosine - second * sine, second * cosine + first * sine
            rotated.append(torch.stack(pairs, dim=-1).flatten(-2))
        return tuple(rotated)

    routers = {
        "Mixtral": ("TopKRouter", mixtral), "Glm4Moe": ("TopkRouter", glm), "Dots1": ("TopkRouter", glm),
        "Ernie4_5_Moe": ("TopKRouter", ernie), "MiniMaxM2": ("TopKRouter", minimax),
    }  # fmt: skip
    with ExitStack() as stack:
        for model in MOE_CASES.values():
            module = importlib.import_module(f"transformers.models.{model.module}.modeling_{model.module}")
            router = [routers[model.prefix]] if model.prefix in routers else []
            for suffix, forward in [("RMSNorm", norm), ("RotaryEmbedding", angles), *router]:
                stack.enter_context(patch.object(getattr(module, f"{model.prefix}{suffix}"), "forward", forward))
            if model.prefix == "Ernie4_5_Moe":
                stack.enter_context(patch.object(module, "apply_rotary_pos_emb", rotate_neighbours))
        stack.enter_context(patch.object(torch.nn.functional, "softmax", softmax))
        yield
