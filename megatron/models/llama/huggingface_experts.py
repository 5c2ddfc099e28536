"""Experts of Mixtral, Qwen 2 and 3 MoE, GLM 4 MoE and others in Hugging Face files: weight names and settings.

| ours | Qwen 3 MoE, Qwen 2 MoE, GLM 4 MoE | Mixtral |
|---|---|---|
| mlp.router | mlp.gate | block_sparse_moe.gate |
| mlp.router.expert_bias | mlp.gate.e_score_correction_bias | |
| mlp.experts.N.up, .down | mlp.experts.N.gate_proj, .up_proj; .down_proj | block_sparse_moe.experts.N.w1, .w3; .w2 |
| mlp.shared_expert | mlp.shared_expert; GLM 4: mlp.shared_experts | |
| mlp.shared_expert_gate | mlp.shared_expert_gate | |

As in our models, files have one tensor per expert; the classes of transformers 5 merge them when loading. Settings that
only affect training (coefficients of losses, update rate of the bias) are neither read nor written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.config.experts import SIGMOID, SOFTMAX, expert_layers
from megatron.config.model import ModelConfig
from megatron.models.common.huggingface import WeightMapping

_MIXTRAL_SETTINGS = {
    "moe_router_score_function": SOFTMAX, "moe_router_topk_scaling_factor": 1.0, "moe_router_num_groups": 0,
    "moe_router_group_topk": 0, "moe_router_enable_expert_bias": False, "moe_expert_capacity_factor": 0.0,
    "moe_eval_capacity_factor": 0.0, "moe_min_capacity": 0, "moe_token_drop_policy": "probs",
    "moe_router_pre_softmax": False, "moe_shared_expert_intermediate_size": 0, "moe_shared_expert_gate": False,
}  # fmt: skip
"""Settings of Mixtral."""
_SIZES = ("moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq")
"""Settings that config.json of every type has; settings that only affect training are excluded."""
_INTERVAL_KEYS = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
"""Keys of the layers with experts of ERNIE: the first, the last (-1: the last layer) and the interval."""
_SPARSE, _DENSE = "sparse", "dense"
"""Entries of ``mlp_layer_types``: a layer with experts, and one without."""
_ROUTER_KEYS: dict[str, dict[str, tuple[str, ...]]] = {
    SIGMOID: {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)},  # dots.llm1 has noaux_tc in both
    SOFTMAX: {"scoring_func": ("softmax",)},
}
"""Keys of the code that DeepSeek published, which transformers ignores -> the values with the results of our router."""


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Names and settings of the experts of one ``model_type``.

    Args:
        block: name of the module in each layer that contains the experts.
        projections: names of an expert's gate, up and down projections.
        num_experts_key: config.json key of the number of experts.
        ffn_size_key: config.json key of an expert's feed-forward size.
        fixed: our settings that all models of the type share and that differ from Mixtral's.
        free: our settings that config.json can express.
        shared_expert: module name of the shared expert.
        dense_layers: how config.json expresses which layers are dense: "" (none), "sparse" (``decoder_sparse_step``) or
            "first".
        defaults: defaults of the Hugging Face class for missing keys.
        router: name of the router within the block.
        expert_bias: name of the bias of the router's choices within the block, a tensor [1, E] if
            ``is_expert_bias_2d``.
        has_deepseek_keys: config.json has the keys of DeepSeek-V3: ``n_shared_experts``, ``routed_scaling_factor``,
            ``n_group``, ``topk_group``, ``norm_topk_prob``.
        group_scores: number of a group's best scores whose sum selects the group.
        num_shared_key: config.json key of the number of shared experts.
        has_norm_key: config.json has ``norm_topk_prob`` for a softmax router; always the case if ``dense_layers`` is
            "sparse".
        shared_size_key: config.json key of the size of the shared expert, which all models of the type have.
        shared_projections: names of the shared expert's projections; empty: ``projections``.
    """

    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    num_experts_key: str = "num_experts"
    ffn_size_key: str = "moe_intermediate_size"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    free: frozenset[str] = frozenset()
    shared_expert: str = ""
    dense_layers: str = "sparse"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    router: str = "gate"
    expert_bias: str = "gate.e_score_correction_bias"
    is_expert_bias_2d: bool = False
    has_deepseek_keys: bool = False
    group_scores: int = 2
    num_shared_key: str = ""
    has_norm_key: bool = False
    shared_size_key: str = ""
    shared_projections: tuple[str, ...] = ()


MIXTRAL = ExpertNames(
    block="block_sparse_moe",
    projections=("w1", "w3", "w2"),
    num_experts_key="num_local_experts",
    ffn_size_key="intermediate_size",
    dense_layers="",
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
)
QWEN3 = ExpertNames(
    free=frozenset({"moe_router_pre_softmax"}),
    defaults={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False},
)
QWEN2 = ExpertNames(
    free=frozenset({"moe_router_pre_softmax", "moe_shared_expert_intermediate_size"}),
    fixed={"moe_shared_expert_gate": True},
    shared_expert="shared_expert",
    shared_size_key="shared_expert_intermediate_size",
    defaults={
        "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "norm_topk_prob": False,
        "shared_expert_intermediate_size": 5632,
    },
)  # fmt: skip
QWEN3_NEXT = replace(
    QWEN2,
    defaults={
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512,
    },
)  # fmt: skip
QWEN3_5 = replace(
    QWEN2,
    free=frozenset({"moe_shared_expert_intermediate_size"}),
    dense_layers="",
    defaults={
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
)  # fmt: skip
GLM4 = ExpertNames(
    num_experts_key="n_routed_experts",
    free=frozenset({
        "moe_shared_expert_intermediate_size", "moe_router_topk_scaling_factor", "moe_router_num_groups",
        "moe_router_group_topk",
    }),
    fixed={"moe_router_score_function": SIGMOID, "moe_router_enable_expert_bias": True},
    shared_expert="shared_experts",
    dense_layers="first",
    defaults={
        "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
    },
    has_deepseek_keys=True,
    num_shared_key="n_shared_experts",
)  # fmt: skip
AFMOE_EXPERTS = ExpertNames(
    free=frozenset({"moe_shared_expert_intermediate_size", "moe_router_topk_scaling_factor"}),
    fixed={"moe_router_score_function": SIGMOID, "moe_router_enable_expert_bias": True},
    shared_expert="shared_experts",
    dense_layers="first",
    defaults={
        "num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
    },
    router="router.gate",
    expert_bias="expert_bias",
    has_deepseek_keys=True,
    num_shared_key="n_shared_experts",
)  # fmt: skip
GPT_OSS_EXPERTS = ExpertNames(
    num_experts_key="num_local_experts",
    ffn_size_key="intermediate_size",
    dense_layers="",
    defaults={"num_local_experts": 128, "num_experts_per_tok": 4},
)
DEEPSEEK3 = replace(
    GLM4,
    defaults={
        **GLM4.defaults, "n_routed_experts": 256, "moe_intermediate_size": 2048, "routed_scaling_factor": 2.5,
        "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
    },
)  # fmt: skip
DEEPSEEK2 = replace(
    GLM4,
    free=GLM4.free | {"moe_router_group_score_topk"},
    fixed={"moe_router_pre_softmax": True},
    defaults={
        **GLM4.defaults, "n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2,
        "first_k_dense_replace": 0, "norm_topk_prob": False, "topk_method": "greedy",
    },
    group_scores=1,
)  # fmt: skip
GLM4_LITE = replace(
    GLM4,
    dense_layers="types",
    defaults={
        **GLM4.defaults, "n_routed_experts": 64, "moe_intermediate_size": 1536, "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
    },
)  # fmt: skip
MIMO_EXPERTS = replace(
    GLM4,
    free=GLM4.free - {"moe_shared_expert_intermediate_size"},
    shared_expert="",
    num_shared_key="",
    dense_layers="types",
    defaults={
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    },
)  # fmt: skip
KIMI_LINEAR = replace(
    GLM4,
    block="block_sparse_moe",
    projections=("w1", "w3", "w2"),
    shared_projections=("gate_proj", "up_proj", "down_proj"),
    num_experts_key="num_experts",
    dense_layers="types",
    defaults={
        **GLM4.defaults,
        "num_experts": 256,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
    },
)
LING = replace(
    KIMI_LINEAR,
    block="mlp",
    projections=("gate_proj", "up_proj", "down_proj"),
    expert_bias="gate.expert_bias",
    defaults={
        **KIMI_LINEAR.defaults, "num_experts": 512, "moe_intermediate_size": 768, "routed_scaling_factor": 2.5,
        "n_group": 8, "topk_group": 4,
    },
)  # fmt: skip
DOTS1 = replace(GLM4, defaults={**GLM4.defaults, "first_k_dense_replace": 0, "norm_topk_prob": False})
ERNIE = ExpertNames(
    num_experts_key="moe_num_experts",
    free=frozenset({"moe_shared_expert_intermediate_size"}),
    fixed={"moe_router_enable_expert_bias": True},
    shared_expert="shared_experts",
    dense_layers="interval",
    defaults={
        "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
    },
    expert_bias="moe_statics.e_score_correction_bias",
    is_expert_bias_2d=True,
    num_shared_key="moe_num_shared_experts",
)  # fmt: skip
MINIMAX = replace(
    MIXTRAL,
    fixed={"moe_router_score_function": SIGMOID, "moe_router_enable_expert_bias": True},
    defaults={"num_local_experts": 256, "num_experts_per_tok": 8},
    expert_bias="e_score_correction_bias",
)
OLMOE = ExpertNames(
    ffn_size_key="intermediate_size",
    free=frozenset({"moe_router_pre_softmax"}),
    dense_layers="",
    defaults={"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    has_norm_key=True,
)


# Weights.


def expert_recipes(names: ExpertNames, model: ModelConfig, our_layer: str, hf_layer: str) -> dict[str, WeightMapping]:
    """Return the mappings of the expert weights of a layer.

    Args:
        our_layer: name of our layer, such as "layers.2".
        hf_layer: name of the Hugging Face layer, such as "model.layers.2".
    """
    hf_block, hf_shared_expert = f"{hf_layer}.{names.block}", f"{hf_layer}.{names.block}.{names.shared_expert}"
    mappings = {f"{our_layer}.mlp.router.weight": WeightMapping((f"{hf_block}.{names.router}.weight",))}
    if model.moe_router_enable_expert_bias:
        mappings[f"{our_layer}.mlp.router.expert_bias"] = WeightMapping(
            (f"{hf_block}.{names.expert_bias}",), unit_dims=(0,) if names.is_expert_bias_2d else ()
        )
    for idx in range(model.num_experts):
        our_expert, ffn_size = f"{our_layer}.mlp.experts.{idx}", model.moe_ffn_hidden_size
        mappings |= _expert_mappings(our_expert, f"{hf_block}.experts.{idx}", names.projections, ffn_size)
    if model.moe_shared_expert_intermediate_size:
        mappings |= _expert_mappings(
            f"{our_layer}.mlp.shared_expert",
            hf_shared_expert,
            names.shared_projections or names.projections,
            model.moe_shared_expert_intermediate_size,
        )
    if model.moe_shared_expert_gate:
        mappings[f"{our_layer}.mlp.shared_expert_gate.weight"] = WeightMapping((f"{hf_shared_expert}_gate.weight",))
    return mappings


def _expert_mappings(
    our_expert: str, hf_expert: str, projections: tuple[str, ...], ffn_size: int
) -> dict[str, WeightMapping]:
    gate, up, down = (f"{hf_expert}.{projection}.weight" for projection in projections)
    return {
        f"{our_expert}.up.weight": WeightMapping((gate, up), num_blocks=ffn_size),
        f"{our_expert}.down.weight": WeightMapping((down,)),
    }


# Settings.


def sinkhorn_problems(model: ModelConfig) -> Iterator[str]:
    """Yield a message if experts are weighted as after sinkhorn, which no type does."""
    if model.has_sinkhorn:
        yield "--moe-router-load-balancing-type must not be sinkhorn: no type computes its weights of experts"


def expert_problems(names: ExpertNames, model: ModelConfig) -> Iterator[str]:
    """Yield a message for each expert setting of ``model`` that the type cannot express."""
    if not model.num_experts:
        yield "--num-experts must be at least 2, got a dense model"
        return
    for name, required in {**_MIXTRAL_SETTINGS, **names.fixed}.items():
        value = getattr(model, name)
        if name not in names.free and value != required:
            yield f"--{name.replace('_', '-')} must be {required}, got {value}"
    yield from sinkhorn_problems(model)
    has_experts = expert_layers(model.moe_layer_freq, model.num_layers)
    if names.dense_layers == "first" and sorted(has_experts) != list(has_experts):
        yield f"only the first layers can be dense, got --moe-layer-freq {model.moe_layer_freq}"
    if names.dense_layers == "interval" and _interval_of(has_experts) is None:
        yield (
            "the layers with experts must have a constant distance that divides their numbers, counted from 1, got "
            f"--moe-layer-freq {model.moe_layer_freq}"
        )
    if not names.dense_layers and not all(has_experts):
        yield f"all layers must have experts, got --moe-layer-freq {model.moe_layer_freq}"
    if names.shared_size_key and not model.moe_shared_expert_intermediate_size:
        yield "a shared expert is required. Set --moe-shared-expert-intermediate-size"
    if names.num_shared_key and model.moe_shared_expert_intermediate_size % model.moe_ffn_hidden_size:
        yield (
            "--moe-shared-expert-intermediate-size must be a multiple of --moe-ffn-hidden-size, got "
            f"{model.moe_shared_expert_intermediate_size} and {model.moe_ffn_hidden_size}"
        )
    if model.moe_router_num_groups and model.num_group_scores != names.group_scores:
        yield (
            f"--moe-router-group-score-topk must be {names.group_scores}, by default --moe-router-topk / "
            f"--moe-router-group-topk, got {model.num_group_scores} with --moe-router-topk {model.moe_router_topk} and "
            f"--moe-router-group-topk {model.moe_router_group_topk}"
        )


def _interval_of(has_experts: Sequence[bool]) -> tuple[int, int, int] | None:
    """Return the first and the last layer with experts, counted from 0, and the interval between such layers.

    Returns:
        None if config.json with these three numbers cannot describe the layers.
    """
    sparse = [layer for layer, is_sparse in enumerate(has_experts) if is_sparse]
    interval = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    if not sparse or sparse != list(range(sparse[0], sparse[-1] + 1, interval)) or (sparse[0] + 1) % interval:
        return None
    return sparse[0], sparse[-1], interval


def expert_fields(names: ExpertNames, model: ModelConfig) -> dict[str, Any]:
    """Return the expert fields of config.json."""
    has_experts = expert_layers(model.moe_layer_freq, model.num_layers)
    fields: dict[str, Any] = {
        names.num_experts_key: model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        names.ffn_size_key: model.moe_ffn_hidden_size,
    }
    if names.dense_layers == "sparse":
        dense = [layer for layer, is_sparse in enumerate(has_experts) if not is_sparse]
        fields |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
            "norm_topk_prob": not model.moe_router_pre_softmax,
        }
    if names.shared_size_key:
        fields[names.shared_size_key] = model.moe_shared_expert_intermediate_size
    if names.has_norm_key:
        fields["norm_topk_prob"] = not model.moe_router_pre_softmax
    if names is ERNIE:
        del fields["num_experts_per_tok"]
        fields |= {
            "moe_k": model.moe_router_topk,
            "moe_num_shared_experts": model.moe_shared_expert_intermediate_size // model.moe_ffn_hidden_size,
            **dict(zip(_INTERVAL_KEYS, _interval_of(has_experts) or (), strict=True)),
        }
    if names.dense_layers == "types":
        fields["mlp_layer_types"] = [_SPARSE if is_sparse else _DENSE for is_sparse in has_experts]
    if names.has_deepseek_keys:
        if names.num_shared_key:
            fields |= {
                "first_k_dense_replace": list(has_experts).index(True),
                "n_shared_experts": model.moe_shared_expert_intermediate_size // model.moe_ffn_hidden_size,
            }
        fields |= {
            "routed_scaling_factor": model.moe_router_topk_scaling_factor,
            "n_group": model.moe_router_num_groups or 1,
            "topk_group": model.moe_router_group_topk or 1,
            "norm_topk_prob": True,
        }
    if names is DEEPSEEK2:
        fields |= {
            "norm_topk_prob": False,
            "topk_method": "group_limited_greedy" if model.moe_router_num_groups else "greedy",
        }
    return fields


def expert_values(names: ExpertNames, hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return our fields for a config.json, and its settings that we do not support."""
    settings: dict[str, Any] = {**names.defaults, **hf_config}
    unsupported: list[str] = []
    # transformers 5 saves num_local_experts for every type
    num_experts = settings.get("num_local_experts") or settings[names.num_experts_key]
    has_experts = _layers_with_experts(names, settings)
    fields = {
        **_MIXTRAL_SETTINGS,
        **names.fixed,
        "num_experts": num_experts,
        "moe_router_topk": settings["moe_k"] if names is ERNIE else settings["num_experts_per_tok"],
        "moe_ffn_hidden_size": settings[names.ffn_size_key],
        "moe_layer_freq": "1"
        if all(has_experts)
        else f"[{','.join(str(int(is_sparse)) for is_sparse in has_experts)}]",
    }
    unsupported += _unknown_mechanisms(names, settings)
    if settings.get("router_jitter_noise"):
        unsupported.append(f"router_jitter_noise {settings['router_jitter_noise']!r} (supported: 0.0)")
    if names.dense_layers == "sparse" or names.has_norm_key:
        fields["moe_router_pre_softmax"] = not settings["norm_topk_prob"]
    if names.shared_size_key:
        fields["moe_shared_expert_intermediate_size"] = settings[names.shared_size_key]
        if not settings.get("qkv_bias", True):
            unsupported.append("qkv_bias False (supported: True)")
    if names.num_shared_key:
        num_shared = settings[names.num_shared_key] or 0
        fields["moe_shared_expert_intermediate_size"] = num_shared * settings[names.ffn_size_key]
    if names.has_deepseek_keys:
        fields["moe_router_topk_scaling_factor"] = settings["routed_scaling_factor"] or 1.0  # MiMo's file has null
        fields |= _group_values(names, settings, unsupported)
    if not any(has_experts):
        unsupported.append(f"{names.num_experts_key} {num_experts} in no layer (supported: in at least one layer)")
    return fields, unsupported


def _unknown_mechanisms(names: ExpertNames, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each setting of the router and of the layers with experts that the type does not have."""
    layer_types = settings.get("mlp_layer_types") if names.dense_layers == "types" else None
    if layer_types is not None and (unknown := sorted({str(entry) for entry in layer_types} - {_SPARSE, _DENSE})):
        yield f"mlp_layer_types with {', '.join(unknown)} (supported: {_SPARSE}, {_DENSE})"
    if layer_types is not None and len(layer_types) != settings["num_hidden_layers"]:
        yield f"mlp_layer_types with {len(layer_types)} entries for num_hidden_layers {settings['num_hidden_layers']}"
    if not names.has_deepseek_keys:
        return
    score_function = names.fixed.get("moe_router_score_function", SOFTMAX)
    for key, accepted in _ROUTER_KEYS[score_function].items():
        if settings.get(key) not in (None, *accepted):
            yield f"{key} {settings[key]!r} (supported: {', '.join(accepted)})"
    frequency = settings.get("moe_layer_freq")
    if names.dense_layers == "first" and frequency not in (None, 1):
        yield f"moe_layer_freq {frequency!r} (supported: 1)"


def _group_values(names: ExpertNames, settings: Mapping[str, Any], unsupported: list[str]) -> dict[str, Any]:
    """Return our fields for the groups of a router with DeepSeek's keys; add unsupported settings to the list."""
    num_groups, group_topk = settings["n_group"] or 1, settings["topk_group"] or 1
    is_normalized = names is not DEEPSEEK2
    if bool(settings["norm_topk_prob"]) != is_normalized:
        unsupported.append(f"norm_topk_prob {not is_normalized} (supported: {is_normalized})")
    if names is DEEPSEEK2:
        methods = ("greedy", "group_limited_greedy")
        if settings["topk_method"] not in methods:
            unsupported.append(f"topk_method {settings['topk_method']!r} (supported: {', '.join(methods)})")
        if settings["topk_method"] == "greedy":
            return {}
    if num_groups == 1 or num_groups == group_topk:
        return {}
    fields = {"moe_router_num_groups": num_groups, "moe_router_group_topk": group_topk}
    if settings["num_experts_per_tok"] != names.group_scores * group_topk:
        fields["moe_router_group_score_topk"] = names.group_scores
    return fields


def _layers_with_experts(names: ExpertNames, settings: Mapping[str, Any]) -> list[bool]:
    layers = range(settings["num_hidden_layers"])
    if names.dense_layers == "first":
        return [layer >= settings["first_k_dense_replace"] for layer in layers]
    if names.dense_layers == "types":
        layer_types = settings.get("mlp_layer_types")
        if layer_types is None:
            return [layer > 0 for layer in layers]
        return [layer_type == _SPARSE for layer_type in layer_types]
    if names.dense_layers == "interval":
        start, stop, interval = (settings[key] for key in _INTERVAL_KEYS)
        stop = settings["num_hidden_layers"] - 1 if stop == -1 else stop
        return [start <= layer <= stop and (layer + 1) % interval == 0 for layer in layers]
    if not names.dense_layers:
        return [True for _ in layers]
    sparse_step, dense_layers = settings.get("decoder_sparse_step") or 1, settings.get("mlp_only_layers") or ()
    return [layer not in dense_layers and (layer + 1) % sparse_step == 0 for layer in layers]
