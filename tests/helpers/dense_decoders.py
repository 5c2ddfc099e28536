"""Tiny decoders of Hugging Face's dense classes with every feature of the class and unusual sizes, and our flags."""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from megatron.models.common.huggingface import HFFormat
from megatron.models.llama.huggingface_dense_types import shortest_decimal
from megatron.models.llama.huggingface_formats import FORMATS
from tests.helpers.modern_decoders import FULL, LLAMA3, SLIDING, YARN, ModelCase
from tests.helpers.upcasts import fp64_instead_of_fp32

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.5, 3.0], "long_factor": [2.0, 5.0, 9.5],
    "partial_rotary_factor": 0.6,
}  # fmt: skip
LONGROPE_FLAGS = (
    "--rotary-base 500 --rotary-percent 0.6 --rotary-scaling longrope --rotary-short-factors [1.0,1.5,3.0] "
    "--rotary-long-factors [2.0,5.0,9.5]"
)
TEMPERATURE = {
    **YARN, "original_max_position_embeddings": 3, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.3,
}  # fmt: skip


ATTENTION_FACTOR = (1.0 * (0.1 * math.log(4.0)) + 1.0) / (0.5 * (0.1 * math.log(4.0)) + 1.0)
RESIDUAL_SCALE = shortest_decimal(0.37 * math.sqrt(3), lambda scale: scale / math.sqrt(3) == 0.37)


def default_rope(base: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base, **more}


DENSE_CASES = {
    "olmo3": ModelCase(
        "Olmo3",
        {
            "hidden_size": 38, "num_key_value_heads": 2, "sliding_window": 4, "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": {FULL: YARN, SLIDING: default_rope(100.0)},
        },
        "--hidden-size 38 --num-query-groups 2 --norm-placement after --qk-norm all --window-size 3 "
        "--window-attn-skip-freq 2 --rotary-base 500 --rotary-scaling yarn --rotary-scaling-factor 4 "
        "--rotary-original-positions 8 --rotary-beta-fast 2 --rotary-beta-slow 0.1 --rotary-local-base 100",
    ),
    "seed_oss": ModelCase(
        "SeedOss",
        {
            "hidden_size": 38, "num_key_value_heads": 2, "attention_dropout": 0.0, "residual_dropout": 0.0,
            "rope_parameters": default_rope(300.0),
        },
        "--hidden-size 38 --num-query-groups 2 --add-qkv-bias --rotary-base 300",
    ),
    "ernie4_5": ModelCase(
        "Ernie4_5",
        {
            "hidden_size": 38, "num_key_value_heads": 3, "use_bias": True, "tie_word_embeddings": True,
            "rope_parameters": default_rope(300.0),
        },
        "--hidden-size 38 --num-query-groups 3 --hidden-bias --tie-embeddings-and-output-weights --rotary-base 300",
    ),
    "hunyuan_v1_dense": ModelCase(
        "HunYuanDenseV1",
        {
            "hidden_size": 38, "num_key_value_heads": 3,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 3.0, "factor": 1.0},
        },
        "--hidden-size 38 --num-query-groups 3 --qk-norm head --qk-norm-order after "
        f"--rotary-base {100.0 * 3.0 ** (10 / 8)!r}",
        module="hunyuan_v1_dense",
    ),
    "ministral3": ModelCase(
        "Ministral3",
        {"hidden_size": 38, "num_key_value_heads": 2, "sliding_window": 5, "rope_parameters": TEMPERATURE},
        "--hidden-size 38 --num-query-groups 2 --window-size 4 --rotary-base 500 --rotary-scaling yarn "
        "--rotary-scaling-factor 4 --rotary-original-positions 3 --rotary-beta-fast 2 --rotary-beta-slow 0.1 "
        f"--rotary-attention-factor {ATTENTION_FACTOR!r} "
        "--attention-temperature-scale 0.3 --attention-temperature-floor 3",
    ),
    "granite": ModelCase(
        "Granite",
        {
            "hidden_size": 42, "num_key_value_heads": 3, "attention_bias": True, "mlp_bias": True,
            "tie_word_embeddings": True, "embedding_multiplier": 3.5, "logits_scaling": 7.0,
            "residual_multiplier": 0.37, "attention_multiplier": 0.21, "rope_parameters": default_rope(100.0),
        },
        "--hidden-size 42 --num-query-groups 3 --hidden-bias --tie-embeddings-and-output-weights "
        f"--embedding-multiplier 3.5 --dim-model-base 6 --residual-scale {RESIDUAL_SCALE!r} --softmax-scale 0.21 "
        "--rotary-base 100",
    ),
    "phi3": ModelCase(
        "Phi3",
        {
            "hidden_size": 60, "num_key_value_heads": 2, "sliding_window": 5, "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 28,
        },
        "--hidden-size 60 --num-query-groups 2 --window-size 4 --rotary-original-positions 28 "
        f"--rotary-scaling-factor {32 / 28!r} {LONGROPE_FLAGS}",
    ),
    "stablelm": ModelCase(
        "StableLm",
        {
            "hidden_size": 60, "num_key_value_heads": 2, "layer_norm_eps": 1e-3, "use_qkv_bias": True,
            "qk_layernorm": True, "use_parallel_residual": True,
            "rope_parameters": default_rope(100.0, partial_rotary_factor=0.4),
        },
        "--hidden-size 60 --num-query-groups 2 --normalization LayerNorm --add-qkv-bias --qk-norm per-head "
        "--parallel-residual shared-norm --rotary-base 100 --rotary-percent 0.4",
    ),
    "apertus": ModelCase(
        "Apertus",
        {"hidden_size": 38, "num_key_value_heads": 3, "rope_parameters": LLAMA3},
        "--hidden-size 38 --num-query-groups 3 --qk-norm head --activation xielu --rotary-base 500 "
        "--rotary-scaling llama3 --rotary-scaling-factor 4 --rotary-original-positions 16",
    ),
    "arcee": ModelCase(
        "Arcee",
        {
            "hidden_size": 42, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True,
            "rope_parameters": YARN,
        },
        "--hidden-size 42 --num-query-groups 2 --hidden-bias --activation squared-relu --rotary-base 500 "
        "--rotary-scaling yarn --rotary-scaling-factor 4 --rotary-original-positions 8 --rotary-beta-fast 2 "
        "--rotary-beta-slow 0.1",
    ),
    "nemotron": ModelCase(
        "Nemotron",
        {
            "hidden_size": 38, "num_key_value_heads": 2, "norm_eps": 1e-3, "attention_bias": True, "mlp_bias": True,
            "rope_parameters": default_rope(100.0, partial_rotary_factor=0.6),
        },
        "--hidden-size 38 --num-query-groups 2 --normalization LayerNorm --apply-layernorm-1p --hidden-bias "
        "--activation squared-relu --rotary-base 100 --rotary-percent 0.6",
    ),
    "cohere2": ModelCase(
        "Cohere2",
        {
            "hidden_size": 60, "num_key_value_heads": 3, "layer_norm_eps": 1e-3, "sliding_window": 4,
            "layer_types": [SLIDING, FULL, SLIDING], "logit_scale": 0.3, "rope_parameters": default_rope(100.0),
        },
        "--hidden-size 60 --num-query-groups 3 --normalization LayerNorm --no-norm-bias "
        "--parallel-residual shared-norm --tie-embeddings-and-output-weights --window-size 3 "
        "--window-attn-skip-freq 2 --no-rope-freq 2 "
        "--logit-scale 0.3 --rotary-base 100",
    ),
    "glm4": ModelCase(
        "Glm4",
        {
            "hidden_size": 38, "num_key_value_heads": 2,
            "rope_parameters": default_rope(100.0, partial_rotary_factor=0.6),
        },
        "--hidden-size 38 --num-query-groups 2 --add-qkv-bias --norm-placement both --rotary-base 100 "
        "--rotary-percent 0.6",
    ),
}  # fmt: skip
"""model_type -> a model of this type."""
VARIANT_CASES = {
    "phi3, long": ModelCase(
        "Phi3", {**DENSE_CASES["phi3"].settings, "original_max_position_embeddings": 4, "sliding_window": None}
    ),
    "phi3, default": ModelCase(
        "Phi3", {"hidden_size": 42, "num_key_value_heads": 3, "rope_parameters": default_rope(100.0)}
    ),
    "stablelm, sequential": ModelCase(
        "StableLm", {"hidden_size": 60, "num_key_value_heads": 3, "rope_parameters": default_rope(100.0)}
    ),
    "granite, other factors": ModelCase(
        "Granite",
        {
            "hidden_size": 42, "num_key_value_heads": 2, "logits_scaling": 2.7, "attention_multiplier": 10**-0.5,
            "rope_parameters": default_rope(100.0),
        },
    ),
    "seed_oss, all biases": ModelCase(
        "SeedOss",
        {**DENSE_CASES["seed_oss"].settings, "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "olmo3, one base": ModelCase(
        "Olmo3",
        {
            **DENSE_CASES["olmo3"].settings, "layer_types": [FULL, SLIDING, SLIDING],
            "rope_parameters": {FULL: default_rope(100.0), SLIDING: default_rope(100.0)},
        },
    ),
    "apertus, default": ModelCase(
        "Apertus", {"hidden_size": 38, "num_key_value_heads": 2, "rope_parameters": default_rope(100.0)}
    ),
    "hunyuan_v1_dense, default": ModelCase(
        "HunYuanDenseV1",
        {"hidden_size": 42, "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "cohere2, untied": ModelCase(
        "Cohere2",
        {**DENSE_CASES["cohere2"].settings, "num_key_value_heads": 2, "layer_types": [SLIDING, SLIDING, FULL],
         "tie_word_embeddings": False},
    ),
}  # fmt: skip
"""Name, which starts with the model_type -> a model with other features."""


def random_dense_case(seed: int) -> ModelCase:
    """Return a model of a random class with random sizes."""
    rng = random.Random(seed)
    model = DENSE_CASES[rng.choice(list(DENSE_CASES))]
    num_groups = rng.choice([1, 2, 3])
    num_heads, head_size = num_groups * rng.choice([1, 2, 3]), rng.choice([6, 8, 14])
    num_layers = rng.randint(1, 5)
    settings: dict[str, Any] = {
        "num_hidden_layers": num_layers, "num_attention_heads": num_heads, "num_key_value_heads": num_groups,
        "head_dim": head_size, "hidden_size": num_heads * rng.choice([5, 7]),
        "intermediate_size": num_groups * rng.choice([7, 10]), "tie_word_embeddings": rng.random() < 0.5,
    }  # fmt: skip
    if model.prefix in ("Phi3", "StableLm", "Cohere2"):  # heads have hidden size / number of heads elements
        settings["hidden_size"] = num_heads * head_size
    if "layer_types" in model.settings:
        settings["layer_types"] = [rng.choice([SLIDING, FULL]) for _ in range(num_layers - 1)] + [SLIDING]
    if model.prefix == "Phi3":
        num_pairs = head_size // 4
        factors = {key: [rng.uniform(1.0, 4.0) for _ in range(num_pairs)] for key in ("short_factor", "long_factor")}
        settings["rope_parameters"] = {**LONGROPE, **factors, "partial_rotary_factor": 2 * num_pairs / head_size}
        settings["original_max_position_embeddings"] = rng.choice([4, 28])
    if "partial_rotary_factor" in (partial := model.settings["rope_parameters"]) and model.prefix != "Phi3":
        settings["rope_parameters"] = {**partial, "partial_rotary_factor": 0.5 if head_size == 8 else 1.0}
    return ModelCase(model.prefix, {**model.settings, **settings}, config=model.config)


def format_of_case(case: ModelCase) -> HFFormat:
    """Return the Hugging Face format of the model type of ``case``."""
    model_type = case.huggingface_config().model_type
    (hf_format,) = (candidate for candidate in FORMATS if model_type in candidate.model_types)
    return hf_format


def fp64_model(case: ModelCase, **overrides: Any) -> Any:
    """Return Hugging Face's model in fp64; call it in ``fp64_instead_of_fp32`` as well."""
    import transformers

    getattr(transformers, f"{case.prefix}ForCausalLM")  # imported before, so that no default of its module is changed
    with fp64_instead_of_fp32():
        return case.huggingface_model(torch.float64, **overrides)
