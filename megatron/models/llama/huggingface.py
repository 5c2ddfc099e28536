"""Bit-exact conversion of decoders with RMSNorm, rotary positions and a gated activation to and from Hugging Face.

All types share one table of weight names. A ``Preset`` per ``model_type`` lists the settings that the type always has
and those that its config.json can express. A model is exported as the first type that can express all of its settings,
in this order:

| model_type | features |
|---|---|
| llama | biases in all linear layers or in none; no windows |
| mistral | a window in all layers or in none |
| qwen2 | biases of queries, keys and values; windows per layer (Qwen 2 and 2.5) |
| qwen3 | a norm of each query and key head; windows per layer |
| gemma2 | norms before and after, stored minus 1; scaled embedding; soft-caps; windows per layer |
| gemma3_text | as gemma2, with head norms, no soft-cap of scores, and a separate base in layers with a window |
| olmo2 | norms after attention and feed-forward, and over all query and all key heads |
| mixtral, qwen3_moe, qwen2_moe, glm4_moe | a mistral, qwen3, qwen2 and llama with experts (``huggingface_experts``) |
| smollm3, afmoe, gpt_oss, mimo_v2_flash | NoPE layers, output gates, sinks (``huggingface_extras``) |
| deepseek_v2, deepseek_v3, glm4_moe_lite | multi-latent attention (``huggingface_latent``) and experts |
| youtu, minicpm3 | multi-latent attention and dense layers; minicpm3 has scaled embeddings, residuals and logits |
| dots1 | a glm4_moe with windows per layer |
| olmoe, minimax_m2 | norms over all query and all key heads, and experts |
| ernie4_5_moe | a llama with experts that a bias balances; rotary pairs are adjacent elements |

``huggingface_dense_types`` has further types with other names, keys or mechanisms, which are tried afterwards.

| ours | Hugging Face | change |
|---|---|---|
| embedding.word.weight [v, h] | model.embed_tokens.weight | |
| layers.{i}.attention.query_key_value.* | ...self_attn.q_proj.*, .k_proj.*, .v_proj.* | queries, key, value per group |
| layers.{i}.attention.query_norm, .key_norm | ...self_attn.q_norm, .k_norm | |
| layers.{i}.attention.dense.* | ...self_attn.o_proj.* | |
| layers.{i}.mlp.up.* | ...mlp.gate_proj.*, .up_proj.* | gate, value per row |
| layers.{i}.mlp.down.* | ...mlp.down_proj.* | |
| final_norm.weight | model.norm.weight | |
| head.weight (only when untied) | lm_head.weight | |

The Hugging Face names of a layer's norms depend on ``norm_placement``:

| ours | before | both | after |
|---|---|---|---|
| input_norm | input_layernorm | input_layernorm | |
| attention_output_norm | | post_attention_layernorm | post_attention_layernorm |
| post_attention_norm | post_attention_layernorm | pre_feedforward_layernorm | |
| mlp_output_norm | | post_feedforward_layernorm | post_feedforward_layernorm |

In Hugging Face files, as in ours, query and key rows are ordered for rotary embeddings that pair the two halves of a
head. Meta's files (and GPT-J) pair adjacent elements: permute their rows first, as Hugging Face's converter does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron.config import Config
from megatron.config.decoder import ARCHITECTURE, has_sinks, has_window, query_groups, window_layers
from megatron.config.layer_types import has_experts
from megatron.errors import CheckpointError
from megatron.models.common.huggingface import (
    HFFormat,
    WeightMapping,
    by_recipes,
    keep_tensor_name,
    leave_hf_model_unchanged,
    unsupported_mechanisms,
    unsupported_settings,
)
from megatron.models.common.huggingface_mtp import DEEPSEEK as DEEPSEEK_MTP
from megatron.models.common.huggingface_mtp import MTPNames, layer_names
from megatron.models.common.rotary_rows import RotaryRows
from megatron.models.llama.huggingface_experts import (
    AFMOE_EXPERTS,
    DEEPSEEK2,
    DEEPSEEK3,
    DOTS1,
    ERNIE,
    GLM4,
    GLM4_LITE,
    GPT_OSS_EXPERTS,
    MIMO_EXPERTS,
    MINIMAX,
    MIXTRAL,
    OLMOE,
    QWEN2,
    QWEN3,
    ExpertNames,
    expert_fields,
    expert_problems,
    expert_recipes,
    expert_values,
)
from megatron.models.llama.huggingface_extras import (
    AFMOE,
    GPT_OSS,
    MIMO,
    MIMO_ROTARY_SHARE,
    MIMO_WINDOW,
    SMOLLM3,
    TypeExtras,
    gpt_oss_expert_recipes,
    mimo_windows,
    reject_mxfp4,
    smollm3_rotary_layers,
)
from megatron.models.llama.huggingface_latent import LATENT_SETTINGS, latent_fields, latent_recipes, latent_values
from megatron.models.llama.huggingface_rotary import ROTARY_KEYS, rotary_fields, rotary_values
from megatron.models.llama.huggingface_windows import (
    FULL,
    SLIDING,
    WINDOW_KEYS,
    layer_types_of,
    layer_types_problems,
    window_settings,
)

_ACTIVATIONS = {
    "silu": "gated-silu",
    "swish": "gated-silu",
    "gelu_pytorch_tanh": "gated-gelu",
    "gelu_new": "gated-gelu",
}
_HF_ACTIVATIONS = {"gated-silu": "silu", "gated-gelu": "gelu_pytorch_tanh"}
_PRE_NORMS = {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_POST_NORMS = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
_NORMS = {
    "before": _PRE_NORMS,
    "after": _POST_NORMS,
    "both": {**_PRE_NORMS, "post_attention_norm": "pre_feedforward_layernorm", **_POST_NORMS},
}
_HF_WORD, _HF_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMMON_SETTINGS = {"position_embedding_type": "rope", "normalization": "RMSNorm"}
_WINDOW_FIELDS = {"window_size", "window_attn_skip_freq"}
ROTARY_BUFFERS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb(_local)?\.(original_)?inv_freq")
"""Buffers saved by older versions, per layer or once per model."""
_REQUIRED_VALUES = {"use_mrope": False, "use_bidirectional_attention": False}
"""Setting that changes results and that we do not support -> the only accepted value, besides None."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Settings of one ``model_type``: which of our settings it fixes and which ones its config.json can express.

    Args:
        architecture: name of the Hugging Face class.
        fixed: our settings that all models of the type share, without those that equal GPT-2's or are in
            ``_COMMON_SETTINGS``.
        free: our settings that config.json can express, in addition to sizes, rotary positions and biases.
        defaults: defaults of the Hugging Face class for missing keys.
        has_biases: True if all linear layers may have biases.
        window: "all": in all layers or none; "layer": per layer; "": no windows.
        is_hidden_size_divisible: the hidden size must be a multiple of the number of heads.
        experts: names and settings of the experts; None for dense layers.
        extras: settings that only this type has.
        norms: Hugging Face names of norms that differ from those of ``norm_placement``.
        has_adjacent_pairs: rotary pairs are adjacent elements.
        aliases: further values of ``model_type`` in config.json of published models of the type.
        example: settings of models of the type for ``--model``, if the defaults of the class are not supported.
        mtp: names of the multi-token prediction layers; None: folders of the type have none.
        sinks: name of the sinks in the attention module.
        local_rotary: layers with a window have rotary parameters of their own: "base": in a key of their own, "nested":
            in ``rope_parameters`` by layer type; "": they have those of all layers.
        rotary_share: default of the class for the rotated share of each head.
    """

    model_type: str
    architecture: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    free: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_biases: bool = False
    window: str = ""
    is_hidden_size_divisible: bool = False
    experts: ExpertNames | None = None
    extras: TypeExtras | None = None
    norms: Mapping[str, str] = field(default_factory=dict)
    has_adjacent_pairs: bool = False
    aliases: tuple[str, ...] = ()
    example: Mapping[str, Any] = field(default_factory=dict)
    mtp: MTPNames | None = None
    sinks: str = "sinks"
    local_rotary: str = ""
    rotary_share: float = 0.5

    @property
    def is_latent(self) -> bool:
        """True if the type has multi-latent attention."""
        return "multi_latent_attention" in self.fixed

    @property
    def is_gemma(self) -> bool:
        return self.model_type.startswith("gemma")

    @property
    def activation_key(self) -> str:
        """Key of the activation in config.json."""
        return "hidden_activation" if self.is_gemma else "hidden_act"


_GEMMA_SETTINGS = {"layernorm_1p": True, "norm_placement": "both", "scale_embeddings": True}
_GEMMA_DEFAULTS = {
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_QWEN_DEFAULTS = {
    "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
_LATENT_FREE = frozenset({"mscale", "mscale_all_dim"})
PRESETS = (
    Preset(model_type="llama", architecture="LlamaForCausalLM", has_biases=True, is_hidden_size_divisible=True),
    Preset(
        model_type="mistral",
        architecture="MistralForCausalLM",
        free=frozenset(_WINDOW_FIELDS),
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        window="all",
    ),
    Preset(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        fixed={"add_qkv_bias": True},
        free=frozenset(_WINDOW_FIELDS),
        defaults=_QWEN_DEFAULTS,
        window="layer",
    ),
    Preset(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        fixed={"qk_norm": "head"},
        free=frozenset(_WINDOW_FIELDS),
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
        window="layer",
    ),
    Preset(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        fixed=_GEMMA_SETTINGS,
        free=frozenset({*_WINDOW_FIELDS, "softmax_scale", "attn_logit_softcapping", "final_logit_softcapping"}),
        defaults={
            **_GEMMA_DEFAULTS, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "sliding_window_pattern": 2,
        },
        window="layer",
        is_hidden_size_divisible=True,
    ),
    Preset(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        fixed={**_GEMMA_SETTINGS, "qk_norm": "head"},
        free=frozenset({*_WINDOW_FIELDS, "softmax_scale", "final_logit_softcapping", "rotary_local_base"}),
        local_rotary="base",
        defaults={
            **_GEMMA_DEFAULTS, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
        },
        window="layer",
        is_hidden_size_divisible=True,
    ),
    Preset(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        fixed={"norm_placement": "after", "qk_norm": "all"},
        defaults={"rms_norm_eps": 1e-5},
    ),
    Preset(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        free=frozenset(_WINDOW_FIELDS),
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            **MIXTRAL.defaults,
        },
        window="all",
        experts=MIXTRAL,
    ),
    Preset(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        fixed={"qk_norm": "head"},
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768, **QWEN3.defaults},
        experts=QWEN3,
    ),
    Preset(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        fixed={"add_qkv_bias": True},
        defaults={"num_key_value_heads": 16, "max_position_embeddings": 32768, **QWEN2.defaults},
        experts=QWEN2,
    ),
    Preset(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        free=frozenset({"qk_norm", "add_qkv_bias", "rotary_percent"}),
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, **GLM4.defaults,
        },
        experts=GLM4,
        mtp=DEEPSEEK_MTP,
    ),
    Preset(
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        free=frozenset({*_WINDOW_FIELDS, "no_rope_freq"}),
        defaults={
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True,
        },
        has_biases=True,
        window="layer",
        extras=SMOLLM3,
    ),
    Preset(
        model_type="afmoe",
        architecture="AfmoeForCausalLM",
        fixed={"norm_placement": "both", "qk_norm": "head", "attention_output_gate": True},
        free=frozenset({*_WINDOW_FIELDS, "no_rope_freq", "scale_embeddings"}),
        defaults={
            "head_dim": 128, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "sliding_window": 1024,
            "sliding_window_pattern": 4, **AFMOE_EXPERTS.defaults,
        },
        window="layer",
        experts=AFMOE_EXPERTS,
        extras=AFMOE,
        norms={"post_attention_norm": "pre_mlp_layernorm", "mlp_output_norm": "post_mlp_layernorm"},
    ),
    Preset(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        fixed={
            "softmax_type": "learnable", "hidden_bias": True, "activation": "gated-quick-gelu",
            "glu_linear_offset": 1.0,
        },
        free=frozenset({*_WINDOW_FIELDS, "activation_func_clamp_value"}),
        defaults={
            "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0, "sliding_window": 128, "sliding_window_pattern": 2, "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            **GPT_OSS_EXPERTS.defaults,
        },
        window="layer",
        experts=GPT_OSS_EXPERTS,
        extras=GPT_OSS,
    ),
    Preset(
        model_type="mimo_v2_flash",
        architecture="MiMoV2FlashForCausalLM",
        fixed={"softmax_type": "learnable", "sink_layers": "window"},
        free=frozenset({
            *_WINDOW_FIELDS, "rotary_percent", "rotary_local_base", "v_head_dim", "window_num_query_groups",
            "attention_value_scale", "add_qkv_bias",
        }),
        defaults={
            "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "sliding_window": MIMO_WINDOW, "attention_value_scale": 0.707,
            **MIMO_EXPERTS.defaults,
        },
        window="layer",
        experts=MIMO_EXPERTS,
        extras=MIMO,
        sinks="attention_sink_bias",
        local_rotary="nested",
        rotary_share=MIMO_ROTARY_SHARE,
        example={"layer_types": layer_types_of([layer % 6 != 0 for layer in range(1, 61)])},
    ),
    Preset(
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        fixed=LATENT_SETTINGS,
        free=_LATENT_FREE,
        defaults={
            "max_position_embeddings": 4096, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, **DEEPSEEK3.defaults,
        },
        experts=DEEPSEEK3,
        mtp=DEEPSEEK_MTP,
        has_adjacent_pairs=True,
        aliases=("kimi_k2",),
    ),
    Preset(
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        fixed=LATENT_SETTINGS,
        free=_LATENT_FREE,
        defaults={
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
            "v_head_dim": 128, **DEEPSEEK2.defaults,
        },
        is_hidden_size_divisible=True,
        experts=DEEPSEEK2,
        has_adjacent_pairs=True,
        example={"num_experts_per_tok": 6},
    ),
    Preset(
        model_type="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        fixed=LATENT_SETTINGS,
        free=_LATENT_FREE,
        defaults={
            "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "kv_lora_rank": 512, "q_lora_rank": 768,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, **GLM4_LITE.defaults,
        },
        experts=GLM4_LITE,
        mtp=DEEPSEEK_MTP,
        has_adjacent_pairs=True,
    ),
    Preset(
        model_type="youtu",
        architecture="YoutuForCausalLM",
        fixed=LATENT_SETTINGS,
        free=_LATENT_FREE,
        defaults={
            "max_position_embeddings": 131072, "tie_word_embeddings": True, "kv_lora_rank": 512, "q_lora_rank": 1536,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        },
        has_adjacent_pairs=True,
    ),
    Preset(
        model_type="minicpm3",
        architecture="MiniCPM3ForCausalLM",
        fixed=LATENT_SETTINGS,
        free=_LATENT_FREE | {"embedding_multiplier", "residual_scale", "dim_model_base"},
        defaults={
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "kv_lora_rank": 256,
            "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_emb": 12, "scale_depth": 1.4,
            "dim_model_base": 256,
        },
    ),
    Preset(
        model_type="dots1",
        architecture="Dots1ForCausalLM",
        fixed={"qk_norm": "head"},
        free=frozenset(_WINDOW_FIELDS),
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 62, **DOTS1.defaults},
        window="layer",
        experts=DOTS1,
        example={"norm_topk_prob": True},
    ),
    Preset(
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        fixed={"qk_norm": "all"},
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **OLMOE.defaults},
        is_hidden_size_divisible=True,
        experts=OLMOE,
    ),
    Preset(
        model_type="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        fixed={"qk_norm": "all"},
        free=frozenset({"rotary_percent"}),
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5000000.0,
            "partial_rotary_factor": 1.0, **MINIMAX.defaults,
        },
        experts=MINIMAX,
    ),
    Preset(
        model_type="ernie4_5_moe",
        architecture="Ernie4_5_MoeForCausalLM",
        defaults={
            "num_key_value_heads": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "tie_word_embeddings": True, **ERNIE.defaults,
        },
        experts=ERNIE,
        has_adjacent_pairs=True,
    ),
)  # fmt: skip
"""All presets; the type of a model is the first one that can express its settings."""


# Weights. Their names depend on the settings of our model, not on those in config.json.


def recipes(preset: Preset, config: Config) -> dict[str, WeightMapping]:
    """Return the mapping of each of our weights, by name."""
    model = config.model
    mappings = {
        "embedding.word.weight": WeightMapping((_HF_WORD,)),
        "final_norm.weight": WeightMapping(("model.norm.weight",)),
    }
    head_rows = RotaryRows(model.kv_hidden_size, 0, model.kv_hidden_size)
    rotary_rows = (head_rows, head_rows, None) if preset.has_adjacent_pairs else ()
    for layer_idx, our_layer, hf_layer in layer_names(preset.mtp, model):
        for our_name, hf_name in {**_NORMS[model.norm_placement], **preset.norms}.items():
            mappings[f"{our_layer}.{our_name}.weight"] = WeightMapping((f"{hf_layer}.{hf_name}.weight",))
        if model.softmax_type == "learnable" and has_sinks(model, has_window=has_window(model, layer_idx)):
            mappings[f"{our_layer}.attention.sinks.weight"] = WeightMapping((f"{hf_layer}.self_attn.{preset.sinks}",))
        for name in ("query", "key") if model.qk_norm not in ("none", "l2") else ():
            mappings[f"{our_layer}.attention.{name}_norm.weight"] = WeightMapping(
                (f"{hf_layer}.self_attn.{name[0]}_norm.weight",)
            )
        for suffix in ("weight", "bias") if model.hidden_bias or model.add_qkv_bias else ("weight",):
            projections = ("q", "gate", "k", "v") if model.attention_output_gate else ("q", "k", "v")
            hf_names = tuple(f"{hf_layer}.self_attn.{name}_proj.{suffix}" for name in projections)
            mappings[f"{our_layer}.attention.query_key_value.{suffix}"] = WeightMapping(
                hf_names, num_blocks=query_groups(model, layer_idx), row_orders=rotary_rows
            )
        if model.multi_latent_attention:
            del mappings[f"{our_layer}.attention.query_key_value.weight"]
            mappings |= latent_recipes(model, our_layer, hf_layer, has_adjacent_pairs=preset.has_adjacent_pairs)
        for suffix in ("weight", "bias") if model.hidden_bias else ("weight",):
            mappings[f"{our_layer}.attention.dense.{suffix}"] = WeightMapping(
                (f"{hf_layer}.self_attn.o_proj.{suffix}",)
            )
            if preset.experts is GPT_OSS_EXPERTS:
                mappings |= gpt_oss_expert_recipes(model, our_layer, hf_layer)
                continue
            if preset.experts is not None and has_experts(model, layer_idx):
                mappings |= expert_recipes(preset.experts, model, our_layer, hf_layer)
                continue
            gate_and_up = tuple(f"{hf_layer}.mlp.{name}_proj.{suffix}" for name in ("gate", "up"))
            mappings[f"{our_layer}.mlp.up.{suffix}"] = WeightMapping(gate_and_up, num_blocks=model.ff_hidden_size)
            mappings[f"{our_layer}.mlp.down.{suffix}"] = WeightMapping((f"{hf_layer}.mlp.down_proj.{suffix}",))
    if model.untie_embeddings:
        mappings["head.weight"] = WeightMapping((_HF_HEAD,))
    return mappings if preset.mtp is None else mappings | preset.mtp.recipes(model)


def copies(preset: Preset, config: Config) -> dict[str, str]:
    """Map each copy of word embedding or head in multi-token prediction layers to the name of its original."""
    return {} if preset.mtp is None else preset.mtp.copies(config.model, _HF_WORD, _HF_HEAD)


def heights(config: Config) -> dict[str, int]:
    """Return the numbers of rows of the query, gate, key and value weights and biases, by the suffix of their names."""
    model = config.model
    num_rows = {"q": model.attention_size, "self_attn.gate": model.attention_size}
    # with another number of groups in layers with a window, names include their layer
    layers = range(model.num_layers) if model.window_num_query_groups else ()
    for prefix, groups in (
        ("", model.num_query_groups),
        *((f"model.layers.{layer_idx}.self_attn.", query_groups(model, layer_idx)) for layer_idx in layers),
    ):
        num_rows |= {f"{prefix}k": groups * model.kv_hidden_size, f"{prefix}v": groups * model.value_size}
    return {f"{name}_proj.{suffix}": rows for name, rows in num_rows.items() for suffix in ("weight", "bias")}


# Settings, from ours to config.json.


def problems(preset: Preset, config: Config) -> Iterator[str]:
    """Yield a message for each setting of ``config`` that the type cannot express."""
    model, model_type = config.model, preset.model_type
    free = {*preset.free, "rotary_scaling", "rotary_truncate", *(["num_experts"] if preset.experts is not None else [])}
    yield from unsupported_settings(model, {**_COMMON_SETTINGS, **preset.fixed}, free=free)
    if preset.experts is not None:
        yield from expert_problems(preset.experts, model)
    if preset.experts is OLMOE and model.attention_size != model.hidden_size:
        yield (
            "--kv-hidden-size must be --hidden-size / --num-attention-heads, got "
            f"{model.kv_hidden_size} and {model.hidden_size} / {model.num_attention_heads}"
        )
    if preset.mtp is not None:
        yield from preset.mtp.problems(model)
    if preset.experts is GLM4 and model.qk_norm == "all":
        yield "--qk-norm must be none or head, got all"
    if preset.extras is not None:
        yield from preset.extras.problems(model, window_layers(config.model))
    if model.activation not in _HF_ACTIVATIONS and "activation" not in preset.fixed:
        yield f"--activation must be {' or '.join(_HF_ACTIVATIONS)}, got {model.activation}"
    if model.hidden_bias and not preset.has_biases and "hidden_bias" not in preset.fixed:
        yield f"{model_type} does not support --hidden-bias"
    if preset.is_hidden_size_divisible and model.hidden_size % model.num_attention_heads:
        yield (
            "--hidden-size must be a multiple of --num-attention-heads, got "
            f"{model.hidden_size} and {model.num_attention_heads}"
        )
    if preset.window == "all" and model.window_size and not all(window_layers(config.model)):
        yield (
            f"{model_type} supports windows in all layers only, got --window-attn-skip-freq "
            f"{model.window_attn_skip_freq}"
        )
    if (
        model.softmax_scale
        and "softmax_scale" in preset.free
        and _attention_scalar(config) ** -0.5 != model.softmax_scale
    ):
        yield (
            f"--softmax-scale must be 1 / sqrt(n) for an integer n (query_pre_attn_scalar), got {model.softmax_scale!r}"
        )


def fields(preset: Preset, config: Config) -> dict[str, Any]:
    """Return the contents of config.json for ``config``."""
    model = config.model
    hf_config = {
        "architectures": [preset.architecture],
        "model_type": preset.model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ff_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_hidden_size,
        preset.activation_key: _HF_ACTIVATIONS.get(model.activation, "silu"),
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "attention_bias": model.hidden_bias,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,  # not in the Hugging Face model; read back only by us
        "tie_word_embeddings": not model.untie_embeddings,
        **_window_fields(preset, config),
        **rotary_fields(
            model,
            has_local=bool(preset.local_rotary),
            has_partial_rotary="rotary_percent" in preset.free,
            is_nested=preset.local_rotary == "nested",
        ),
        **({} if preset.experts is None else expert_fields(preset.experts, model)),
    }
    if preset.mtp is not None:
        hf_config[preset.mtp.config_key] = model.mtp_num_layers
    if preset.experts is GLM4:
        hf_config |= {"use_qk_norm": model.qk_norm == "head", "attention_bias": model.add_qkv_bias}
    if preset.has_biases:
        hf_config["mlp_bias"] = model.hidden_bias
    if preset.is_latent:
        del hf_config["head_dim"]  # it would replace the size of the rotated part
        hf_config |= latent_fields(model)
    if preset.model_type == "minicpm3":
        hf_config |= {
            "scale_emb": model.embedding_multiplier,
            "scale_depth": model.residual_scale or None,
            "dim_model_base": model.dim_model_base or None,
        }
    if preset.model_type in ("qwen2", "qwen2_moe"):
        del hf_config["attention_bias"]  # always on, and only for queries, keys and values
    if preset.is_gemma:
        hf_config["query_pre_attn_scalar"] = _attention_scalar(config)
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            hf_config[name] = getattr(model, name) or None
    if preset.extras is not None:
        hf_config = preset.extras.written_keys(hf_config) | preset.extras.fields(model, window_layers(config.model))
    return hf_config


def _attention_scalar(config: Config) -> int:
    """Return the integer whose square root divides the attention scores."""
    model = config.model
    return round(model.softmax_scale**-2) if model.softmax_scale else model.kv_hidden_size


def _window_fields(preset: Preset, config: Config) -> dict[str, Any]:
    """Return the window fields. The Hugging Face window size includes the token itself, ours does not."""
    has_window = window_layers(config.model)
    window_size = config.model.window_size + 1 if any(has_window) else None
    if not preset.window:
        return {}
    if preset.window == "all":
        return {"sliding_window": window_size}
    result: dict[str, Any] = {
        "sliding_window": window_size,
        "layer_types": layer_types_of(has_window),
    }
    if preset.extras is not None:
        return result
    if preset.is_gemma:  # its class requires an integer even if no layer uses it
        return {**result, "sliding_window": window_size or preset.defaults["sliding_window"]}
    if window_size is None:
        return {**result, "use_sliding_window": False}
    return {**result, "use_sliding_window": True, "max_window_layers": has_window.index(True)}


# Settings, from config.json to ours.


def values(preset: Preset, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Convert the contents of a config.json to our settings, by field name (without sections).

    Raises:
        CheckpointError: a setting is not supported; the message lists all of them.
    """
    settings = {**preset.defaults, **(hf_config if preset.extras is None else preset.extras.read_keys(hf_config))}
    activation = settings.get(preset.activation_key) or preset.defaults.get(preset.activation_key, "silu")
    hidden_size, num_heads, num_layers = (
        settings["hidden_size"],
        settings["num_attention_heads"],
        settings["num_hidden_layers"],
    )
    windows, unsupported = _window_values(preset, settings, num_layers)
    if preset.is_latent:
        rotary, unsupported_rotary = latent_values(settings, has_adjacent_pairs=preset.has_adjacent_pairs)
    else:
        rotary, unsupported_rotary = rotary_values(
            settings,
            has_local=bool(preset.local_rotary),
            has_windows="window_size" in windows,
            has_partial_rotary="rotary_percent" in preset.free,
            default_share=preset.rotary_share,
        )
    experts, unsupported_experts = ({}, []) if preset.experts is None else expert_values(preset.experts, settings)
    extras: dict[str, Any] = {}
    unsupported_extras: list[str] = []
    if preset.extras is not None:
        has_window = _layers_with_window(preset, settings, num_layers)
        extras, unsupported_extras = preset.extras.values(settings, has_window)
    unsupported = [
        *unsupported_rotary, *unsupported, *unsupported_experts, *_other_values(preset, settings), *unsupported_extras,
    ]  # fmt: skip
    if activation not in _ACTIVATIONS:
        unsupported.append(f"{preset.activation_key} {activation!r} (supported: {', '.join(_ACTIVATIONS)})")
    if unsupported:
        raise CheckpointError(
            f"our decoders do not support these settings of {preset.model_type}: {'; '.join(unsupported)}"
        )
    head_size = settings.get("head_dim") or hidden_size // num_heads
    if preset.model_type == "minicpm3":
        rotary |= {
            "embedding_multiplier": float(settings["scale_emb"]),
            "residual_scale": float(settings["scale_depth"] or 0.0),
            "dim_model_base": settings["dim_model_base"] or 0,
        }
    gemma: dict[str, Any] = {}
    glm: dict[str, Any] = {}
    if preset.experts is GLM4:
        glm = {
            "qk_norm": "head" if settings.get("use_qk_norm") else "none",
            "add_qkv_bias": bool(settings.get("attention_bias")),
        }
    if preset.is_gemma:
        scalar = settings["query_pre_attn_scalar"]
        gemma = {
            name: float(settings.get(name) or 0.0) for name in ("attn_logit_softcapping", "final_logit_softcapping")
        }
        gemma["softmax_scale"] = 0.0 if scalar == head_size else scalar**-0.5
    mtp = {} if preset.mtp is None else {"mtp_num_layers": settings.get(preset.mtp.config_key) or 0}
    return {
        **_COMMON_SETTINGS,
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_query_groups": settings.get("num_key_value_heads") or num_heads,
        "kv_hidden_size": head_size,
        "ff_hidden_size": settings["intermediate_size"],
        "activation": _ACTIVATIONS[activation],
        "hidden_bias": preset.has_biases and settings.get("attention_bias", False),
        "layernorm_epsilon": settings.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": settings.get("max_position_embeddings", 2048),
        "vocab_size": settings["vocab_size"],
        "untie_embeddings": not settings.get("tie_word_embeddings", False),
        "attention_dropout": settings.get("attention_dropout") or 0.0,
        "hidden_dropout": settings.get("hidden_dropout", 0.0),
        "init_method_std": settings.get("initializer_range", 0.02),
        **gemma,
        **windows,
        **rotary,
        **experts,
        **glm,
        **mtp,
        **preset.fixed,
        **extras,
    }


EXAMPLE_SIZES = {
    "num_hidden_layers": 60,  # a multiple of all window periods
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 256,
}
"""Arbitrary sizes for ``architecture``, which returns only settings that do not depend on sizes."""


def architecture(preset: Preset) -> dict[str, Any]:
    """Return our settings, without sizes, that correspond to the defaults of the Hugging Face class."""
    all_settings = values(preset, {**EXAMPLE_SIZES, **preset.example})
    return {name: all_settings[name] for name in ARCHITECTURE if name in all_settings}


def _other_values(preset: Preset, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each setting that changes results and that we do not support for this type."""
    yield from unsupported_mechanisms(settings)
    for name, accepted in _REQUIRED_VALUES.items():
        if settings.get(name) not in (None, accepted):
            yield f"{name} {settings[name]!r} (supported: {accepted!r})"
    if preset.experts is ERNIE and settings.get("use_bias"):
        yield "use_bias True (supported: False)"
    if preset.experts is OLMOE and settings.get("clip_qkv") is not None:
        yield f"clip_qkv {settings['clip_qkv']!r} after the norms of queries and keys (supported: None)"
    biases = settings.get("attention_bias") or False
    if preset.has_biases and (settings.get("mlp_bias") or False) != biases:
        yield f"attention_bias {biases} with mlp_bias {not biases} (supported: both or neither)"
    has_fixed_biases = preset.model_type.startswith("qwen2") or preset.experts in (GLM4, GPT_OSS_EXPERTS, MIMO_EXPERTS)
    if not preset.has_biases and not has_fixed_biases and biases:
        yield "attention_bias True (supported: False)"
    if preset.model_type == "gemma3_text" and settings.get("attn_logit_softcapping"):
        yield (
            f"attn_logit_softcapping {settings['attn_logit_softcapping']!r} (supported: None; the Hugging Face model "
            "ignores it)"
        )


def _window_values(preset: Preset, settings: Mapping[str, Any], num_layers: int) -> tuple[dict[str, Any], list[str]]:
    """Return our window fields, empty without windows, and the window settings that we do not support."""
    layer_types, window_size = settings.get("layer_types"), _window_size(preset, settings)
    if layer_types is not None and (unsupported := layer_types_problems(layer_types, num_layers)):
        return {}, unsupported
    has_window = _layers_with_window(preset, settings, num_layers)
    if not preset.window and (window_size is not None or any(has_window)):
        return {}, [f"sliding_window {window_size!r} with a window in {sum(has_window)} layers (supported: none)"]
    if preset.window == "all" and window_size is not None and not all(has_window):
        return {}, [f"layer_types with {FULL} and sliding_window {window_size!r} (supported: {SLIDING} in all layers)"]
    return window_settings(has_window, window_size)


def _window_size(preset: Preset, settings: Mapping[str, Any]) -> int | None:
    """Return the window size of config.json; Qwen's has no effect without ``use_sliding_window``."""
    if preset.model_type.startswith("qwen") and not settings.get("use_sliding_window", False):
        return None
    window_size: int | None = settings.get("sliding_window")
    return window_size


def _layers_with_window(preset: Preset, settings: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return a bool per layer: True if it has a window."""
    layer_types = settings.get("layer_types")
    if layer_types is not None:
        return [layer_type == SLIDING for layer_type in layer_types]
    return _default_windows(preset, settings, _window_size(preset, settings), num_layers)


def _default_windows(
    preset: Preset, settings: Mapping[str, Any], window_size: int | None, num_layers: int
) -> list[bool]:
    """Return the window flag of each layer for a config.json without ``layer_types``."""
    if preset.extras is SMOLLM3:
        uses_window = settings.get("use_sliding_window", False) and window_size is not None
        return [uses_window and not has_rotary for has_rotary in smollm3_rotary_layers(settings)[:num_layers]]
    if preset.extras is MIMO:
        return mimo_windows(num_layers)
    if preset.is_gemma or preset.extras is not None:
        period = settings["sliding_window_pattern"]
        return [layer_number % period != 0 for layer_number in range(1, num_layers + 1)]
    first_window_layer = settings.get("max_window_layers", 0) if preset.window == "layer" else 0
    return [
        bool(preset.window) and window_size is not None and layer >= first_window_layer for layer in range(num_layers)
    ]


def _rename_tensor(name: str, config: Config) -> str | None:
    """Return ``name``, or None for a tensor of a multi-token prediction layer that our model does not have."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    num_layers = config.model.num_layers + config.model.mtp_num_layers
    return None if match is not None and int(match[1]) >= num_layers else name


def _rename_mimo_tensor(name: str, config: Config) -> str | None:
    """Return ``name``, or None for multi-token prediction layers, which the class ignores as well."""
    return None if name.startswith("model.mtp.") else name


def _rename_gpt_oss_tensor(name: str, config: Config) -> str:
    """Return ``name``.

    Raises:
        CheckpointError: the tensor is quantised.
    """
    reject_mxfp4(name)
    return name


def _use_eager_experts(hf_model: Any, config: Config) -> None:
    """Compute the Hugging Face experts one by one; the default, grouped products, does not support fp64."""
    hf_model.set_experts_implementation("eager")


def _required_fields(preset: Preset) -> tuple[str, ...]:
    """Return the names of the size settings that a model of the type requires."""
    if preset.experts is None:
        return ()
    has_shared_expert = preset.experts in (QWEN2, AFMOE_EXPERTS)
    names = ["num_experts", *(["moe_shared_expert_intermediate_size"] if has_shared_expert else [])]
    return (*names, *(["window_num_query_groups"] if preset.extras is MIMO else []))


def _tensor_renaming(preset: Preset) -> Callable[[str, Config], str | None]:
    """Return the function that renames or skips tensors in files of the type."""
    if preset.extras is GPT_OSS:
        return _rename_gpt_oss_tensor
    if preset.extras is MIMO:
        return _rename_mimo_tensor
    has_extra_layers = preset.experts is not None and preset.experts.has_deepseek_keys and preset.extras is None
    return _rename_tensor if has_extra_layers else keep_tensor_name


def _make_format(preset: Preset) -> HFFormat:
    return HFFormat(
        model_types=(preset.model_type, *preset.aliases),
        problems=partial(problems, preset),
        fields=partial(fields, preset),
        values=partial(values, preset),
        **by_recipes(partial(recipes, preset), heights),
        word=_HF_WORD,
        copies=partial(copies, preset),
        key_groups=(ROTARY_KEYS, WINDOW_KEYS),
        ignored_names=ROTARY_BUFFERS,
        rename_tensor=_tensor_renaming(preset),
        patch_hf_model=_use_eager_experts if preset.experts is not None else leave_hf_model_unchanged,
        logit_tolerance=1e-5,  # Hugging Face computes norms and rotary angles in fp32
        architecture=partial(architecture, preset),
        fixed={**_COMMON_SETTINGS, **preset.fixed},
        required_fields=_required_fields(preset),
    )


FORMATS = tuple(_make_format(preset) for preset in PRESETS)
FORMAT = FORMATS[0]
"""The format of ``llama``; weight names are the same in all formats."""
