"""The Hugging Face types with Mamba-2 layers: mamba2, nemotron_h, falcon_h1 and granitemoehybrid.

| model_type | layers |
|---|---|
| mamba2 | Mamba-2 only |
| nemotron_h | each layer is Mamba-2, attention, a feed-forward layer or experts; no positions |
| falcon_h1 | attention and Mamba-2 with the same input, then a feed-forward layer; a constant factor for each part |
| granitemoehybrid | Mamba-2 or attention, then a feed-forward layer or experts; the factors of Granite |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config import Config
from megatron.config.branch_multipliers import BranchMultipliers, parse_multipliers
from megatron.config.experts import SIGMOID
from megatron.config.layer_types import (
    ATTENTION,
    EXPERTS,
    MAMBA2,
    MLP,
    NO_MIXER,
    NO_MLP,
    NO_VARIANT,
    PARALLEL_MAMBA,
    LayerType,
    layer_types,
)
from megatron.config.model import ModelConfig
from megatron.config.recurrent import GROUP_NORM, NO_NORM, NORM_FIRST
from megatron.models.common.huggingface import WeightMapping
from megatron.models.llama.huggingface_dense_types import granite_fields, granite_values
from megatron.models.llama.huggingface_experts import sinkhorn_problems
from megatron.models.llama.huggingface_hybrid import (
    HybridType,
    Problems,
    Recipes,
    activation_problems,
    attention_recipes,
    layer_type_problems,
    make_format,
)
from megatron.models.llama.huggingface_mamba import mamba_problems, mamba_recipes, time_step_fields, time_step_values
from megatron.models.llama.huggingface_rotary import rotary_fields, rotary_values

UNLIMITED_POSITIONS = 2**20
"""``max_position_embeddings`` of a model whose config.json has none."""


# Mamba 2.


def _rename_backbone(name: str, config: Config) -> str:
    """Return the published name of the tensor ``name``.

    Some versions of transformers write "model" instead of "backbone"; mamba-ssm writes "embedding" instead of
    "embeddings".
    """
    if name.startswith("model."):
        name = f"backbone.{name.removeprefix('model.')}"
    return name.replace(".embedding.weight", ".embeddings.weight")


def _rename_nemotron(name: str, config: Config) -> str | None:
    """Return the name of ``_rename_backbone``; None for multi-token prediction layers, which the class ignores."""
    return None if name.startswith("mtp.") else _rename_backbone(name, config)


def _mamba2_recipes(model: ModelConfig, layer_idx: int, ours: str, theirs: str) -> Recipes:
    return {
        f"{ours}.input_norm.weight": WeightMapping((f"{theirs}.norm.weight",)),
        **mamba_recipes(model, f"{ours}.recurrent", f"{theirs}.mixer"),
    }


def _mamba2_fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_heads": model.mamba_num_heads,
        "head_dim": model.mamba_head_dim,
        "state_size": model.mamba_state_dim,
        "expand": model.mamba_num_heads * model.mamba_head_dim // model.hidden_size,
        "conv_kernel": model.mamba_conv_kernel_dim,
        "n_groups": model.mamba_num_groups,
        "use_bias": model.mamba_proj_bias,
        "use_conv_bias": model.mamba_conv_bias,
        "hidden_act": "silu",
        "residual_in_fp32": False,
        **time_step_fields(model),
    }


def _mamba2_values(settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    width, expanded = settings["num_heads"] * settings["head_dim"], settings["expand"] * settings["hidden_size"]
    unsupported = activation_problems(settings, "hidden_act", ("silu", "swish"))
    if width != expanded:
        unsupported.append(
            f"num_heads x head_dim {settings['num_heads']} x {settings['head_dim']} = {width} (supported: expand x "
            f"hidden_size = {expanded})"
        )
    return {
        "hybrid_layer_pattern": "M" * settings["num_hidden_layers"],
        "num_attention_heads": settings["num_heads"],  # without effect: no layer has attention
        "kv_hidden_size": settings["head_dim"],
        "max_position_embeddings": UNLIMITED_POSITIONS,
        "mamba_num_heads": settings["num_heads"],
        "mamba_head_dim": settings["head_dim"],
        "mamba_state_dim": settings["state_size"],
        "mamba_num_groups": settings["n_groups"],
        "mamba_conv_kernel_dim": settings["conv_kernel"],
        "mamba_conv_bias": settings["use_conv_bias"],
        "mamba_proj_bias": settings["use_bias"],
        **time_step_values(settings),
    }, unsupported


def _mamba2_problems(model: ModelConfig) -> Iterator[str]:
    yield from mamba_problems(model)
    yield from layer_type_problems(
        model, lambda layer_type: layer_type == LayerType(MAMBA2, NO_MLP), "all layers must be Mamba-2 (M)"
    )
    width = model.mamba_num_heads * model.mamba_head_dim
    if width % model.hidden_size:
        yield (
            "--mamba-num-heads x --mamba-head-dim must be a multiple of --hidden-size, got "
            f"{model.mamba_num_heads} x {model.mamba_head_dim} and {model.hidden_size}"
        )


# Nemotron-H. Its class in transformers clamps time steps to at least ``time_step_min`` and ignores ``time_step_limit``,
# and so does an imported model. Megatron-LM trains without this bound (--finetune --mamba-dt-limit-min 0).

_NO_TIME_STEP_MIN = 1e-30
"""``time_step_min`` of a model without a lower bound; the class takes its logarithm."""
_LETTERS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
"""Entry of ``layers_block_type`` -> letter of ``hybrid_layer_pattern``."""
_DEFAULT_BLOCK_TYPES = ("linear_attention", "moe", "full_attention", "mlp")
_SQUARED_RELU = "relu2"
_FORMER_NEMOTRON_KEYS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
}
"""Key of an older config.json -> key that the class reads; the older key takes precedence in the class."""


def _nemotron_recipes(model: ModelConfig, layer_idx: int, ours: str, theirs: str) -> Recipes:
    layer_type, mixer = layer_types(model)[layer_idx], f"{theirs}.mixer"
    norm = "post_attention_norm" if layer_type.mixer == NO_MIXER else "input_norm"
    mappings = {f"{ours}.{norm}.weight": WeightMapping((f"{theirs}.norm.weight",))}
    if layer_type.mixer == MAMBA2:
        return mappings | mamba_recipes(model, f"{ours}.recurrent", mixer)
    if layer_type.mixer == ATTENTION:
        return mappings | attention_recipes(model, f"{ours}.attention", mixer)
    if layer_type.feed_forward == MLP:
        return mappings | _ungated_recipes(f"{ours}.mlp", mixer)
    mappings[f"{ours}.mlp.router.weight"] = WeightMapping((f"{mixer}.gate.weight",))
    mappings[f"{ours}.mlp.router.expert_bias"] = WeightMapping((f"{mixer}.gate.e_score_correction_bias",))
    for idx in range(model.num_experts):
        mappings |= _ungated_recipes(f"{ours}.mlp.experts.{idx}", f"{mixer}.experts.{idx}")
    return mappings | _ungated_recipes(f"{ours}.mlp.shared_expert", f"{mixer}.shared_experts")


def _ungated_recipes(ours: str, theirs: str) -> Recipes:
    return {f"{ours}.{name}.weight": WeightMapping((f"{theirs}.{name}_proj.weight",)) for name in ("up", "down")}


def _nemotron_fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "hybrid_override_pattern": model.hybrid_layer_pattern.replace("|", ""),
        "intermediate_size": model.ff_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_hidden_size,
        "max_position_embeddings": model.max_position_embeddings,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "mlp_hidden_act": _SQUARED_RELU,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": model.mamba_num_heads,
        "mamba_head_dim": model.mamba_head_dim,
        "ssm_state_size": model.mamba_state_dim,
        "n_groups": model.mamba_num_groups,
        "conv_kernel": model.mamba_conv_kernel_dim,
        "use_conv_bias": model.mamba_conv_bias,
        "use_bias": model.mamba_proj_bias,
        "time_step_min": model.mamba_dt_limit_min or _NO_TIME_STEP_MIN,
        "n_routed_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor,
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "norm_topk_prob": True,
    }


def _nemotron_values(settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    settings |= {key: settings.pop(former) for former, key in _FORMER_NEMOTRON_KEYS.items() if former in settings}
    unsupported = [
        *activation_problems(settings, "mlp_hidden_act", (_SQUARED_RELU,)),
        *activation_problems(settings, "mamba_hidden_act", ("silu", "swish")),
    ]
    if upper_limit := time_step_values(settings)["mamba_dt_limit_max"]:
        unsupported.append(f"time_step_limit up to {upper_limit} (supported: no upper limit, as in the class)")
    # as in the class, a list of types takes precedence over the pattern
    block_types = settings.get("layers_block_type") or settings.get("layer_types")
    pattern: str = settings.get("hybrid_override_pattern") or ""
    if block_types is None and settings.get("hybrid_override_pattern") is None:
        block_types = _DEFAULT_BLOCK_TYPES
    if block_types is not None:
        unsupported += [f"layers_block_type {name!r}" for name in dict.fromkeys(block_types) if name not in _LETTERS]
        pattern = "".join(_LETTERS.get(name, "") for name in block_types)
    if not pattern:
        unsupported.append("hybrid_override_pattern without letters (supported: a letter for each layer)")
    settings["num_hidden_layers"] = len(pattern)
    has_experts = "E" in pattern
    if has_experts and not settings["norm_topk_prob"]:
        unsupported.append("norm_topk_prob False (supported: True)")
    return {
        "hybrid_layer_pattern": pattern,
        "num_attention_heads": settings["num_attention_heads"],
        "num_query_groups": settings["num_key_value_heads"] or settings["num_attention_heads"],
        "kv_hidden_size": settings["head_dim"],
        "ff_hidden_size": settings["intermediate_size"],
        "max_position_embeddings": settings["max_position_embeddings"],
        "mamba_num_heads": settings["mamba_num_heads"],
        "mamba_head_dim": settings["mamba_head_dim"],
        "mamba_state_dim": settings["ssm_state_size"],
        "mamba_num_groups": settings["n_groups"],
        "mamba_conv_kernel_dim": settings["conv_kernel"],
        "mamba_conv_bias": settings["use_conv_bias"],
        "mamba_proj_bias": settings["use_bias"],
        "mamba_dt_limit_min": settings["time_step_min"] if settings["time_step_min"] > _NO_TIME_STEP_MIN else 0.0,
        **(_nemotron_expert_values(settings) if has_experts else {}),
    }, unsupported


def _nemotron_expert_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    num_groups, group_topk = settings["n_group"] or 1, settings["topk_group"] or 1
    values = {
        "num_experts": settings["n_routed_experts"],
        "moe_router_topk": settings["num_experts_per_tok"],
        "moe_ffn_hidden_size": settings["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": settings["moe_shared_expert_intermediate_size"],
        "moe_router_topk_scaling_factor": settings["routed_scaling_factor"] or 1.0,
        "moe_router_score_function": SIGMOID,
        "moe_router_enable_expert_bias": True,
    }
    if num_groups == 1 or num_groups == group_topk:
        return values
    values |= {"moe_router_num_groups": num_groups, "moe_router_group_topk": group_topk}
    if settings["num_experts_per_tok"] // group_topk != 2:
        values["moe_router_group_score_topk"] = 2
    return values


def _nemotron_problems(model: ModelConfig) -> Iterator[str]:
    yield from mamba_problems(model)
    yield from layer_type_problems(
        model,
        lambda layer_type: layer_type.num_halves == 1 and layer_type.mixer in (MAMBA2, ATTENTION, NO_MIXER),
        "each layer must be Mamba-2, attention, a feed-forward layer or experts (--hybrid-layer-pattern)",
    )
    if not model.hybrid_layer_pattern:
        yield "--hybrid-layer-pattern is required"
    if model.mamba_dt_limit_max:
        yield f"--mamba-dt-limit-max must be 0, got {model.mamba_dt_limit_max:g}"
    if model.activation != "squared-relu":
        yield f"--activation must be squared-relu, got {model.activation}"
    if model.num_experts:
        yield from sinkhorn_problems(model)
        for name, required in (
            ("moe_router_score_function", SIGMOID), ("moe_router_enable_expert_bias", True),
            ("moe_router_pre_softmax", False), ("moe_shared_expert_gate", False), ("moe_expert_capacity_factor", 0.0),
        ):  # fmt: skip
            if getattr(model, name) != required:
                yield f"--{name.replace('_', '-')} must be {required}, got {getattr(model, name)}"
        if not model.moe_shared_expert_intermediate_size:
            yield "a shared expert is required. Set --moe-shared-expert-intermediate-size"
        if model.moe_router_num_groups and model.num_group_scores != 2:
            yield f"--moe-router-group-score-topk must be 2, got {model.num_group_scores}"


# Falcon-H1.

_FALCON_MULTIPLIERS = {
    "attention_input": "attention_in_multiplier",
    "key": "key_multiplier",
    "attention_output": "attention_out_multiplier",
    "mamba_input": "ssm_in_multiplier",
    "mamba_output": "ssm_out_multiplier",
}
"""Our factor -> key of config.json; the others are in the lists ``ssm_multipliers`` and ``mlp_multipliers``."""
_SSM_MULTIPLIERS = ("mamba_z", "mamba_x", "mamba_b", "mamba_c", "mamba_dt")
_MLP_MULTIPLIERS = ("mlp_gate", "mlp_output")


def _head_size_problems(settings: Mapping[str, Any], width: int) -> Problems:
    """Return a message if the size of the Mamba-2 heads in config.json does not fit their number and ``width``."""
    num_heads, size = settings["mamba_n_heads"], settings.get("mamba_d_head")
    if size in (None, "auto") and width % num_heads == 0 or size == width / num_heads:
        return []
    return [f"mamba_n_heads x mamba_d_head {num_heads} x {size} (supported: a product of {width})"]


def _falcon_recipes(model: ModelConfig, layer_idx: int, ours: str, theirs: str) -> Recipes:
    gate_and_up = tuple(f"{theirs}.feed_forward.{name}_proj.weight" for name in ("gate", "up"))
    return {
        f"{ours}.input_norm.weight": WeightMapping((f"{theirs}.input_layernorm.weight",)),
        f"{ours}.post_attention_norm.weight": WeightMapping((f"{theirs}.pre_ff_layernorm.weight",)),
        f"{ours}.mlp.up.weight": WeightMapping(gate_and_up, num_blocks=model.ff_hidden_size),
        f"{ours}.mlp.down.weight": WeightMapping((f"{theirs}.feed_forward.down_proj.weight",)),
        **attention_recipes(model, f"{ours}.attention", f"{theirs}.self_attn"),
        **mamba_recipes(model, f"{ours}.recurrent", f"{theirs}.mamba"),
    }


def _falcon_fields(model: ModelConfig) -> dict[str, Any]:
    factors = parse_multipliers(model.branch_multipliers)
    width = model.mamba_num_heads * model.mamba_head_dim
    return {
        "intermediate_size": model.ff_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_hidden_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "attention_bias": False,
        "mlp_bias": False,
        "mamba_d_ssm": width,
        "mamba_n_heads": model.mamba_num_heads,
        "mamba_d_head": model.mamba_head_dim,
        "mamba_n_groups": model.mamba_num_groups,
        "mamba_d_state": model.mamba_state_dim,
        "mamba_d_conv": model.mamba_conv_kernel_dim,
        "mamba_conv_bias": model.mamba_conv_bias,
        "mamba_proj_bias": model.mamba_proj_bias,
        "projectors_bias": model.mamba_proj_bias,
        "mamba_rms_norm": model.mamba_norm != NO_NORM,
        "mamba_norm_before_gate": model.mamba_norm == NORM_FIRST,
        **time_step_fields(model),
        "embedding_multiplier": model.embedding_multiplier,
        "lm_head_multiplier": model.logit_multiplier,
        **{key: getattr(factors, name) for name, key in _FALCON_MULTIPLIERS.items()},
        "ssm_multipliers": [getattr(factors, name) for name in _SSM_MULTIPLIERS],
        "mlp_multipliers": [getattr(factors, name) for name in _MLP_MULTIPLIERS],
        **rotary_fields(model, has_local=False),
    }


def _falcon_values(settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    num_heads = settings["num_attention_heads"]
    width = settings["mamba_d_ssm"]
    if width is None:
        width = settings["mamba_expand"] * settings["hidden_size"]
    rotary, unsupported = rotary_values(settings, has_local=False, has_windows=False)
    unsupported = [*unsupported, *activation_problems(settings, "hidden_act", ("silu", "swish"))]
    unsupported += _head_size_problems(settings, width)
    lists = {}
    for key, names in (("ssm_multipliers", _SSM_MULTIPLIERS), ("mlp_multipliers", _MLP_MULTIPLIERS)):
        lists[key] = settings[key] or [1.0] * len(names)
        if len(lists[key]) != len(names):
            unsupported.append(f"{key} with {len(lists[key])} entries (supported: {len(names)})")
    if bool(settings["projectors_bias"]) != bool(settings["mamba_proj_bias"]):
        unsupported.append("mamba_proj_bias and projectors_bias that differ (supported: both or neither)")
    norm = NORM_FIRST if settings["mamba_norm_before_gate"] else GROUP_NORM
    factors = BranchMultipliers(
        **{name: float(settings[key]) for name, key in _FALCON_MULTIPLIERS.items()},
        **dict(zip(_SSM_MULTIPLIERS, map(float, lists["ssm_multipliers"]), strict=False)),
        **dict(zip(_MLP_MULTIPLIERS, map(float, lists["mlp_multipliers"]), strict=False)),
    )
    return {
        "num_attention_heads": num_heads,
        "num_query_groups": settings["num_key_value_heads"] or num_heads,
        "kv_hidden_size": settings.get("head_dim") or settings["hidden_size"] // num_heads,
        "ff_hidden_size": settings["intermediate_size"],
        "max_position_embeddings": settings["max_position_embeddings"],
        "mamba_num_heads": settings["mamba_n_heads"],
        "mamba_head_dim": width // settings["mamba_n_heads"],
        "mamba_state_dim": settings["mamba_d_state"],
        "mamba_num_groups": settings["mamba_n_groups"],
        "mamba_conv_kernel_dim": settings["mamba_d_conv"],
        "mamba_conv_bias": settings["mamba_conv_bias"],
        "mamba_proj_bias": settings["mamba_proj_bias"],
        "mamba_norm": norm if settings["mamba_rms_norm"] else NO_NORM,
        "embedding_multiplier": float(settings["embedding_multiplier"]),
        "logit_scale": float(settings["lm_head_multiplier"]),
        "branch_multipliers": str(factors),
        **time_step_values(settings),
        **rotary,
    }, unsupported


def _falcon_problems(model: ModelConfig) -> Iterator[str]:
    yield from mamba_problems(model, has_other_norms=True)
    yield from layer_type_problems(
        model,
        lambda layer_type: layer_type == LayerType(PARALLEL_MAMBA, MLP),
        "all layers must have attention and Mamba-2 in parallel (--experimental-attention-variant parallel_mamba2)",
    )
    if model.activation != "gated-silu":
        yield f"--activation must be gated-silu, got {model.activation}"


# Granite 4.

_EXPERT_KEYS = {
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "intermediate_size": "moe_ffn_hidden_size",
    "shared_intermediate_size": "moe_shared_expert_intermediate_size",
}
"""Key of config.json -> our setting, in a model with experts."""


def _granite_recipes(model: ModelConfig, layer_idx: int, ours: str, theirs: str) -> Recipes:
    layer_type = layer_types(model)[layer_idx]
    mappings = {
        f"{ours}.input_norm.weight": WeightMapping((f"{theirs}.input_layernorm.weight",)),
        f"{ours}.post_attention_norm.weight": WeightMapping((f"{theirs}.post_attention_layernorm.weight",)),
    }
    if layer_type.mixer == MAMBA2:
        mappings |= mamba_recipes(model, f"{ours}.recurrent", f"{theirs}.mamba")
    else:
        mappings |= attention_recipes(model, f"{ours}.attention", f"{theirs}.self_attn")
    shared = f"{theirs}.shared_mlp"
    if layer_type.feed_forward == MLP:
        return mappings | _packed_gate_recipes(f"{ours}.mlp", shared, model.ff_hidden_size)
    block = f"{theirs}.block_sparse_moe"
    mappings[f"{ours}.mlp.router.weight"] = WeightMapping((f"{block}.router.layer.weight",))
    for idx in range(model.num_experts):
        mappings |= _packed_gate_recipes(f"{ours}.mlp.experts.{idx}", block, model.moe_ffn_hidden_size, index=idx)
    return mappings | _packed_gate_recipes(
        f"{ours}.mlp.shared_expert", shared, model.moe_shared_expert_intermediate_size
    )


def _packed_gate_recipes(ours: str, theirs: str, size: int, index: int | None = None) -> Recipes:
    return {
        f"{ours}.up.weight": WeightMapping(
            (f"{theirs}.input_linear.weight",), num_blocks=size, num_packed=2, index=index
        ),
        f"{ours}.down.weight": WeightMapping((f"{theirs}.output_linear.weight",), index=index),
    }


def _granite_hybrid_fields(model: ModelConfig) -> dict[str, Any]:
    names = {MAMBA2: "mamba", ATTENTION: "attention"}  # transformers 5 reads these and its new names
    has_rope = model.position_embedding_type == "rope"
    fields: dict[str, Any] = {
        "layer_types": [names[layer_type.mixer] for layer_type in layer_types(model)],
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "attention_bias": False,
        "position_embedding_type": "rope" if has_rope else "nope",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "intermediate_size": model.ff_hidden_size,
        "shared_intermediate_size": model.ff_hidden_size,
        **granite_fields(model),
        **(rotary_fields(model, has_local=False) if has_rope else {}),
    }
    if model.num_experts:
        fields |= {key: getattr(model, name) for key, name in _EXPERT_KEYS.items()}
    if any(layer_type.mixer == MAMBA2 for layer_type in layer_types(model)):
        fields |= {
            "mamba_n_heads": model.mamba_num_heads,
            "mamba_d_head": model.mamba_head_dim,
            "mamba_expand": model.mamba_num_heads * model.mamba_head_dim // model.hidden_size,
            "mamba_n_groups": model.mamba_num_groups,
            "mamba_d_state": model.mamba_state_dim,
            "mamba_d_conv": model.mamba_conv_kernel_dim,
            "mamba_conv_bias": model.mamba_conv_bias,
            "mamba_proj_bias": model.mamba_proj_bias,
            **time_step_fields(model),
        }
    return fields


def _granite_hybrid_values(settings: dict[str, Any]) -> tuple[dict[str, Any], Problems]:
    num_heads, hidden_size = settings["num_attention_heads"], settings["hidden_size"]
    settings["head_dim"] = hidden_size // num_heads
    factors, unsupported = granite_values(settings)
    rotary: dict[str, Any] = {"position_embedding_type": "none"}
    if settings["position_embedding_type"] == "rope":
        rotary, unsupported_rotary = rotary_values(settings, has_local=False, has_windows=False)
        rotary["position_embedding_type"] = "rope"
        unsupported += unsupported_rotary
    unsupported += activation_problems(settings, "hidden_act", ("silu", "swish"))
    num_layers = settings["num_hidden_layers"]
    types = settings.get("layer_types") or settings.get("layers_block_type") or ["mamba"] * num_layers
    letters = [_LETTERS.get(name) for name in types]
    unsupported += [
        f"layer_types with {name!r} (supported: mamba, attention)"
        for name, letter in dict(zip(types, letters, strict=True)).items()
        if letter not in ("M", "*")
    ]
    if len(types) != num_layers:
        unsupported.append(f"layer_types with {len(types)} entries for num_hidden_layers {num_layers}")
    is_mamba = [letter == "M" for letter in letters]
    experts: dict[str, Any] = {}
    if settings["num_local_experts"]:
        experts = {name: settings[key] for key, name in _EXPERT_KEYS.items()}
    mamba: dict[str, Any] = {}
    if any(is_mamba):
        width = settings["mamba_expand"] * hidden_size
        unsupported += _head_size_problems(settings, width)
        mamba = {
            "experimental_attention_variant": "mamba2",
            "linear_attention_freq": "" if all(is_mamba) else f"[{','.join(str(int(mamba)) for mamba in is_mamba)}]",
            "mamba_num_heads": settings["mamba_n_heads"],
            "mamba_head_dim": width // settings["mamba_n_heads"],
            "mamba_state_dim": settings["mamba_d_state"],
            "mamba_num_groups": settings["mamba_n_groups"],
            "mamba_conv_kernel_dim": settings["mamba_d_conv"],
            "mamba_conv_bias": settings["mamba_conv_bias"],
            "mamba_proj_bias": settings["mamba_proj_bias"],
            **time_step_values(settings),
        }
    return {
        "num_attention_heads": num_heads,
        "num_query_groups": settings["num_key_value_heads"] or num_heads,
        "kv_hidden_size": settings["head_dim"],
        "ff_hidden_size": settings["shared_intermediate_size"],
        "max_position_embeddings": settings["max_position_embeddings"],
        **factors,
        **rotary,
        **experts,
        **mamba,
    }, unsupported


def _granite_hybrid_problems(model: ModelConfig) -> Iterator[str]:
    yield from mamba_problems(model)
    feed_forward = EXPERTS if model.num_experts else MLP
    yield from layer_type_problems(
        model,
        lambda layer_type: layer_type.mixer in (MAMBA2, ATTENTION) and layer_type.feed_forward == feed_forward,
        "each layer must have Mamba-2 or attention, then a feed-forward layer (experts in all layers or in none)",
    )
    if model.experimental_attention_variant == NO_VARIANT:
        yield "--experimental-attention-variant must be mamba2, got none"
    if model.activation != "gated-silu":
        yield f"--activation must be gated-silu, got {model.activation}"
    if model.position_embedding_type not in ("rope", "none"):
        yield f"--position-embedding-type must be rope or none, got {model.position_embedding_type}"
    if model.kv_hidden_size * model.num_attention_heads != model.hidden_size:
        yield (
            "--kv-hidden-size must be --hidden-size / --num-attention-heads, got "
            f"{model.kv_hidden_size} and {model.hidden_size} / {model.num_attention_heads}"
        )
    if model.mamba_num_heads * model.mamba_head_dim % model.hidden_size:
        yield (
            "--mamba-num-heads x --mamba-head-dim must be a multiple of --hidden-size, got "
            f"{model.mamba_num_heads} x {model.mamba_head_dim} and {model.hidden_size}"
        )
    if model.num_experts:
        yield from sinkhorn_problems(model)
        for name, required in (
            ("moe_router_score_function", "softmax"), ("moe_router_enable_expert_bias", False),
            ("moe_router_pre_softmax", False), ("moe_shared_expert_gate", False), ("moe_router_num_groups", 0),
            ("moe_router_topk_scaling_factor", 1.0), ("moe_expert_capacity_factor", 0.0),
        ):  # fmt: skip
            if getattr(model, name) != required:
                yield f"--{name.replace('_', '-')} must be {required}, got {getattr(model, name)}"
        if not model.moe_shared_expert_intermediate_size:
            yield "a shared expert is required. Set --moe-shared-expert-intermediate-size"


def _rename_granite(name: str, config: Config) -> str:
    """Return the published name of the tensor ``name``, which may also be a name in the class of transformers 5."""
    for in_class, in_file in (
        ("experts.gate_up_proj", "input_linear.weight"),
        ("experts.down_proj", "output_linear.weight"),
        ("router.weight", "router.layer.weight"),
    ):
        name = name.replace(f"block_sparse_moe.{in_class}", f"block_sparse_moe.{in_file}")
    return name


_EXAMPLE = {"mamba_n_heads": 8, "mamba_d_ssm": None, "num_local_experts": 0, "num_experts_per_tok": 0}
"""Sizes that fit ``EXAMPLE_SIZES``, with which ``--model`` reads the settings of a type."""
MAMBA_TYPES = (
    HybridType(
        model_type="mamba2",
        architecture="Mamba2ForCausalLM",
        prefix="backbone",
        word="embeddings",
        final_norm="norm_f",
        fixed={"position_embedding_type": "none"},
        free=frozenset({"hybrid_layer_pattern"}),
        defaults={
            "num_heads": 128, "head_dim": 64, "state_size": 128, "layer_norm_epsilon": 1e-5, "conv_kernel": 4,
            "n_groups": 8, "use_bias": False, "use_conv_bias": True, "initializer_range": 0.1, "vocab_size": 32768,
            "hidden_size": 4096, "num_hidden_layers": 64, "expand": 2,
        },
        epsilon_key="layer_norm_epsilon",
        layer_recipes=_mamba2_recipes,
        fields=_mamba2_fields,
        values=_mamba2_values,
        problems=_mamba2_problems,
        rename_tensor=_rename_backbone,
    ),
    HybridType(
        model_type="nemotron_h",
        architecture="NemotronHForCausalLM",
        prefix="backbone",
        word="embeddings",
        final_norm="norm_f",
        fixed={"position_embedding_type": "none", "activation": "squared-relu"},
        free=frozenset({"hybrid_layer_pattern", "num_experts"}),
        defaults={
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
            "intermediate_size": 21504, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128,
            "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True, "use_bias": False, "layer_norm_epsilon": 1e-5,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
            "norm_topk_prob": True, "time_step_min": 0.001,
        },
        epsilon_key="layer_norm_epsilon",
        layer_recipes=_nemotron_recipes,
        fields=_nemotron_fields,
        values=_nemotron_values,
        problems=_nemotron_problems,
        rename_tensor=_rename_nemotron,
        only_values={"attention_bias": False, "mlp_bias": False, "moe_latent_size": None, "sliding_window": None},
    ),
    HybridType(
        model_type="falcon_h1",
        architecture="FalconH1ForCausalLM",
        final_norm="final_layernorm",
        fixed={"position_embedding_type": "rope", "experimental_attention_variant": "parallel_mamba2",
               "activation": "gated-silu"},
        free=frozenset({
            "embedding_multiplier", "logit_scale", "dim_model_base", "mup_base_hidden_size", "branch_multipliers",
            "rotary_scaling", "linear_attention_freq",
        }),
        defaults={
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
            "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "projectors_bias": False,
            "mamba_norm_before_gate": True, "mamba_rms_norm": False, "lm_head_multiplier": 1.0,
            "embedding_multiplier": 1.0, "ssm_multipliers": None, "mlp_multipliers": None,
            **dict.fromkeys(_FALCON_MULTIPLIERS.values(), 1.0),
        },
        layer_recipes=_falcon_recipes,
        fields=_falcon_fields,
        values=_falcon_values,
        problems=_falcon_problems,
        only_values={"attention_bias": False, "mlp_bias": False, "mamba_use_mlp": True, "attn_layer_indices": None},
        is_selectable=True,
        example=_EXAMPLE,
    ),
    HybridType(
        model_type="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        fixed={"activation": "gated-silu"},
        free=frozenset({
            "embedding_multiplier", "residual_scale", "softmax_scale", "dim_model_base", "mup_base_hidden_size",
            "logit_scale", "num_experts", "position_embedding_type", "rotary_scaling", "linear_attention_freq",
            "experimental_attention_variant",
        }),
        defaults={
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
            "residual_multiplier": 1.0, "attention_multiplier": 1.0, "num_key_value_heads": None,
            "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
            "position_embedding_type": None, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
            "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
        },
        layer_recipes=_granite_recipes,
        fields=_granite_hybrid_fields,
        values=_granite_hybrid_values,
        problems=_granite_hybrid_problems,
        rename_tensor=_rename_granite,
        only_values={"attention_bias": False, "normalization_function": "rmsnorm"},
        is_selectable=True,
        example=_EXAMPLE,
    ),
)  # fmt: skip
"""The types, in the order in which an export tries them."""
MAMBA_FORMATS = tuple(make_format(mamba_type) for mamba_type in MAMBA_TYPES)
