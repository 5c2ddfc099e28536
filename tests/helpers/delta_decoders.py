"""Tiny decoders of Hugging Face's classes with delta-rule layers, and our flags for each."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import torch

from megatron.config import Config
from megatron.models.common.huggingface import HFFormat
from tests.helpers.dense_decoders import fp64_model
from tests.helpers.modern_decoders import FULL, LLAMA3, YARN, ModelCase

LINEAR = "linear_attention"
LAYERS = [LINEAR, FULL, LINEAR]
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.6}}
_HEADS = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 5, "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3, "layer_types": LAYERS,
}  # fmt: skip
_HEAD_FLAGS = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 6 --linear-key-head-dim 5 --linear-value-head-dim 7 --linear-conv-kernel-dim 3"
)
_EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 14, "shared_expert_intermediate_size": 22,
    "experts_implementation": "eager",
}  # fmt: skip
_EXPERT_FLAGS = (
    "--num-experts 5 --moe-router-topk 2 --moe-ffn-hidden-size 14 --moe-shared-expert-intermediate-size 22 "
    "--moe-shared-expert-gate"
)
_QWEN = {"hidden_size": 38, "num_key_value_heads": 2, **_HEADS, **_PARTIAL}
_QWEN_FLAGS = (
    f"--hidden-size 38 --num-query-groups 2 {_HEAD_FLAGS} --qk-norm head --apply-layernorm-1p --attention-output-gate "
    "--rotary-base 100 --rotary-percent 0.6"
)
_OLMO = {"hidden_size": 60, "num_key_value_heads": 3, **_HEADS}
_LATENT = {
    "hidden_size": 38, "kv_lora_rank": 11, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
    "num_key_value_heads": 6, "linear_head_dim": 5, "linear_num_heads": 4, "linear_conv_kernel_dim": 3,
    "layer_types": LAYERS,
}  # fmt: skip
_KIMI_EXPERTS = {
    "num_local_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 14, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.5, "mlp_layer_types": ["dense", "sparse", "sparse"],
    "experts_implementation": "eager",
}  # fmt: skip
DELTA_CASES = {
    "qwen3_next": ModelCase(
        "Qwen3Next",
        {**_QWEN, **_EXPERTS, "mlp_only_layers": [1]},
        f"{_QWEN_FLAGS} {_EXPERT_FLAGS} --moe-layer-freq [1,0,1]",
    ),
    "qwen3_5_text": ModelCase(
        "Qwen3_5",
        {**_QWEN, "tie_word_embeddings": True},
        f"{_QWEN_FLAGS} --tie-embeddings-and-output-weights",
        config="TextConfig",
    ),
    "qwen3_5_moe_text": ModelCase(
        "Qwen3_5Moe", {**_QWEN, **_EXPERTS}, f"{_QWEN_FLAGS} {_EXPERT_FLAGS}", config="TextConfig"
    ),
    "olmo_hybrid": ModelCase(
        "OlmoHybrid",
        {**_OLMO, **_ROPE},
        f"--hidden-size 60 --num-query-groups 3 {_HEAD_FLAGS} --norm-placement after --qk-norm all --rotary-base 100 "
        "--linear-allow-neg-eigval --linear-norm-epsilon 1e-5 --linear-norm-placement before",
    ),
    "kimi_linear": ModelCase(
        "KimiLinear",
        {**_LATENT, **_KIMI_EXPERTS},
        "--hidden-size 38 --multi-latent-attention --kv-lora-rank 11 --qk-head-dim 6 --qk-pos-emb-head-dim 4 "
        "--v-head-dim 7 --latent-norm-epsilon 1e-6 --position-embedding-type none "
        "--experimental-attention-variant kimi_delta --linear-attention-freq 2 --linear-num-key-heads 4 "
        "--linear-num-value-heads 4 --linear-key-head-dim 5 --linear-value-head-dim 5 --linear-conv-kernel-dim 3 "
        "--num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 14 --moe-shared-expert-intermediate-size 28 "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 1.5 "
        "--moe-layer-freq [0,1,1] --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    ),
    "bailing_hybrid": ModelCase(
        "BailingHybrid",
        {**_LATENT, **_KIMI_EXPERTS, **_ROPE, "linear_num_heads": 6, "kda_lower_bound": -3.0},
        "--hidden-size 38 --multi-latent-attention --kv-lora-rank 11 --qk-head-dim 6 --qk-pos-emb-head-dim 4 "
        "--v-head-dim 7 --latent-norm-epsilon 1e-6 --rotary-base 100 --attention-output-gate "
        "--experimental-attention-variant kimi_delta --linear-attention-freq 2 --linear-num-key-heads 6 "
        "--linear-num-value-heads 6 --linear-key-head-dim 5 --linear-value-head-dim 5 --linear-conv-kernel-dim 3 "
        "--linear-full-rank-gates --linear-decay-limit 3 "
        "--num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 14 --moe-shared-expert-intermediate-size 28 "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 1.5 "
        "--moe-layer-freq [0,1,1] --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    ),
}  # fmt: skip
"""model_type -> a small model of this type."""
VARIANT_CASES = {
    "qwen3_next, unnormalized": ModelCase(
        "Qwen3Next",
        {
            **_QWEN, **_EXPERTS, "layer_types": [LINEAR, LINEAR, FULL], "norm_topk_prob": False,
            "num_key_value_heads": 6, "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_text, all linear": ModelCase(
        "Qwen3_5",
        {**_QWEN, "layer_types": [LINEAR] * 3, "linear_num_key_heads": 6, "rope_parameters": None},
        config="TextConfig",
    ),
    "olmo_hybrid, no positions": ModelCase(
        "OlmoHybrid",
        {
            **_OLMO, "rope_parameters": {"rope_type": "default", "rope_theta": None}, "linear_allow_neg_eigval": False,
            "layer_types": [LINEAR, FULL, FULL], "tie_word_embeddings": True,
        },
    ),
    "olmo_hybrid, scaled": ModelCase("OlmoHybrid", {**_OLMO, "rope_parameters": LLAMA3, "linear_num_key_heads": 3}),
    "bailing_hybrid, softplus": ModelCase(
        "BailingHybrid",
        {
            **_LATENT, **_KIMI_EXPERTS, "linear_num_heads": 6, "kda_safe_gate": False, "q_lora_rank": 9,
            "rope_parameters": YARN,
        },
    ),
    "kimi_linear, all linear": ModelCase("KimiLinear", {**_LATENT, **_KIMI_EXPERTS, "layer_types": [LINEAR] * 3}),
    "kimi_linear, query latent": ModelCase(
        "KimiLinear", {**_LATENT, **_KIMI_EXPERTS, "q_lora_rank": 9, "n_group": 1, "topk_group": 1, "v_head_dim": 12}
    ),
}  # fmt: skip
"""Name, which starts with the model_type -> a model with other features."""


def random_delta_case(seed: int) -> ModelCase:
    """Return a model of a random class with random sizes."""
    rng = random.Random(seed)
    case = DELTA_CASES[rng.choice(list(DELTA_CASES))]
    num_groups, num_keys, num_layers = rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.randint(2, 5)
    num_heads, head_size = num_groups * rng.choice([1, 2, 3]), rng.choice([6, 8, 14])
    types = [rng.choice([LINEAR, FULL]) for _ in range(num_layers - 2)] + [FULL, LINEAR]
    settings: dict[str, Any] = {
        "num_hidden_layers": num_layers, "num_attention_heads": num_heads, "num_key_value_heads": num_groups,
        "head_dim": head_size, "hidden_size": num_heads * head_size, "intermediate_size": rng.choice([7, 30]),
        "layer_types": rng.sample(types, num_layers), "linear_conv_kernel_dim": rng.choice([1, 2, 4, 5]),
        "tie_word_embeddings": rng.random() < 0.5, "rms_norm_eps": rng.choice([1e-6, 1e-2]),
    }  # fmt: skip
    if case.prefix in ("KimiLinear", "BailingHybrid"):
        settings |= {
            "num_key_value_heads": num_heads, "qk_nope_head_dim": rng.choice([3, 8]),
            "linear_num_heads": num_keys if case.prefix == "KimiLinear" else num_heads,
            "qk_rope_head_dim": rng.choice([2, 6]), "kv_lora_rank": rng.choice([5, 8]),
            "v_head_dim": rng.choice([3, 8]), "linear_head_dim": rng.choice([3, 8]), "tie_word_embeddings": False,
        }  # fmt: skip
        num_dense = rng.randint(0, num_layers - 1)
        settings["mlp_layer_types"] = ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
    else:
        settings |= {
            "linear_num_key_heads": num_keys, "linear_num_value_heads": num_keys * rng.choice([1, 2, 4]),
            "linear_key_head_dim": rng.choice([3, 8]), "linear_value_head_dim": rng.choice([2, 9]),
        }  # fmt: skip
    if case.prefix.startswith("Qwen3"):
        share = {6: 1 / 3, 8: 0.25, 14: 1.0}[head_size]
        settings["rope_parameters"] = {**_PARTIAL["rope_parameters"], "partial_rotary_factor": share}
        if case.prefix == "Qwen3Next":
            settings["mlp_only_layers"] = [] if rng.random() < 0.5 else [num_layers - 1]
    return ModelCase(case.prefix, {**case.settings, **settings}, config=case.config)


def make_huggingface_model(case: ModelCase, **overrides: Any) -> Any:
    """Return Hugging Face's model in fp64; weights and biases of routers are large enough to matter."""
    model = fp64_model(case, **overrides)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn_like(tensor) * 0.2)
            elif name.endswith("mlp.gate.weight"):
                tensor.mul_(5.0)
    return model


def to_file_tensors(tensors: dict[str, torch.Tensor], config: Config, model_type: str) -> dict[str, torch.Tensor]:
    """Convert the tensors of a Hugging Face model to the names and shapes in published files."""
    model = config.model
    key_width = model.linear_num_key_heads * model.linear_key_head_dim
    widths = [key_width, key_width, model.linear_num_value_heads * model.linear_value_head_dim]
    file_tensors: dict[str, torch.Tensor] = {}
    for class_name, tensor in tensors.items():
        name = class_name.replace(".forget_gate.", ".")
        if model_type == "bailing_hybrid":
            name = name.replace(".self_attn.o_proj.", ".attention.dense.").replace(".self_attn.", ".attention.")
            name = name.replace("embed_tokens", "word_embeddings").replace("e_score_correction_bias", "expert_bias")
        if model_type == "kimi_linear":
            name = re.sub(r"\.mlp\.(experts|gate|shared_experts)\.", r".block_sparse_moe.\1.", name)
        match = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)
        if match is not None:
            for idx, expert in enumerate(tensor):
                gate, up, down = (
                    ("w1", "w3", "w2") if model_type == "kimi_linear" else ("gate_proj", "up_proj", "down_proj")
                )
                parts = dict(zip((gate, up), expert.chunk(2), strict=True)) if match[2] == "gate_up" else {down: expert}
                file_tensors |= {f"{match[1]}.{idx}.{part}.weight": rows for part, rows in parts.items()}
        elif name.endswith("conv1d.weight") and model_type in ("olmo_hybrid", "kimi_linear", "bailing_hybrid"):
            stem = name.removesuffix("conv1d.weight")
            convolutions = zip("qkv", tensor.split(widths), strict=True)
            file_tensors |= {f"{stem}{letter}_conv1d.weight": rows for letter, rows in convolutions}
        else:
            file_tensors[name] = tensor
    if model_type == "olmo_hybrid":
        is_linear = {name.partition(".linear_attn")[0] for name in file_tensors if ".linear_attn." in name}
        for layer in is_linear:
            for in_class, in_file in (
                ("input_layernorm", "attention_layer_norm"),
                ("post_attention_layernorm", "feedforward_layer_norm"),
            ):
                if f"{layer}.{in_class}.weight" in file_tensors:
                    file_tensors[f"{layer}.{in_file}.weight"] = file_tensors.pop(f"{layer}.{in_class}.weight")
    return file_tensors


def accept_model_tensors(hf_format: HFFormat) -> HFFormat:
    """Return ``hf_format`` with a ``to_ours`` that accepts the tensors of a Hugging Face model instead of its files."""
    model_type = hf_format.model_types[0]

    def to_ours(hf_tensors: dict[str, torch.Tensor], config: Config) -> dict[str, torch.Tensor]:
        return hf_format.to_ours(to_file_tensors(hf_tensors, config, model_type), config)

    return replace(hf_format, to_ours=to_ours)
