"""Convert Megatron-LM's arguments, which its checkpoints store, to our settings. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.arguments.flag_values import config_from_values
from megatron.checkpoint.legacy.settings import (
    POSITIONS,
    activation_of,
    decoder_settings,
    get_num_groups,
    reject_unsupported,
)
from megatron.checkpoint.settings_source import SettingsSource, check_family
from megatron.checkpoint.torch_dist.folder import COMMON, TorchDistFolder, read_folder
from megatron.checkpoint.torch_dist.names import WeightNames
from megatron.config import Config
from megatron.config.changed_defaults import saved_settings
from megatron.config.experts import AUX_LOSSES, NO_LOSS, SINKHORN
from megatron.config.option import options_of
from megatron.errors import CheckpointError

FAMILY = "gpt2"
_UNSUPPORTED = {
    "mtp_num_layers": "layers for multi-token prediction",
    "hybrid_layer_pattern": "layers that are not transformer layers",
    "hybrid_override_pattern": "layers that are not transformer layers",
    "attention_output_gate": "gated attention",
    "experimental_attention_variant": "another attention",
    "linear_attention_freq": "linear attention",
    "moe_latent_size": "experts of a smaller hidden size",
    "moe_apply_probs_on_input": "probabilities that multiply the inputs of experts",
    "moe_mlp_glu_interleave_size": "experts with blocks of gates and values",
    "moe_shared_expert_glu_interleave_size": "shared experts with blocks of gates and values",
    "moe_router_topk_limited_devices": "routing to a limited number of devices",
}
"""Argument -> the feature that it switches on."""
_TRAINING_ONLY = {
    "moe_input_jitter_eps": "noise in the inputs of routers",
    "moe_router_force_load_balancing": "random routing",
}
"""Argument -> a feature without effect on the model's outputs, which a continued run does not have."""
_EXPERT_FIELDS = (
    "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate", "moe_z_loss_coeff", "moe_expert_capacity_factor", "moe_token_drop_policy",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
)  # fmt: skip
"""Settings with the same name and meaning in both programs."""
_LOAD_BALANCING = (*AUX_LOSSES, SINKHORN, NO_LOSS)
_OPTIMIZERS = {"adam": "adamw", "sgd": "sgd"}
_DECAY_STYLES = {"WSD": "wsd"}
LR_STEP_OFFSET = -1
"""--lr-step-offset of a run that continues a checkpoint of Megatron-LM."""


def read_torch_dist(path: Path, family: str, model: str = "") -> SettingsSource:
    """Read the checkpoint settings in the folder ``iter_N``.

    Args:
        family: the program's family.
        model: ``--model``; empty without the flag.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, its model is not supported, or is not of ``family``.
    """
    folder = read_folder(path)
    check_family(FAMILY, family, f"{path / COMMON}: a GPT of Megatron-Core", model)
    values = setting_values(folder)
    config = build_config(values)
    optimizer = {name: value for name, value in values.items() if hasattr(config.optimizer, name)}
    retained, missing = saved_settings(config.to_dict()), tuple(missing_features(folder.args))
    return SettingsSource(path / COMMON, config, set(values), retained, optimizer, missing)


def missing_features(args: Mapping[str, Any]) -> Iterator[str]:
    """Yield the features of the saved run's training that a continued run does not have."""
    yield from (f"{text} ({name} {args[name]})" for name, text in _TRAINING_ONLY.items() if args.get(name))
    if args.get("qk_clip") and _has_qk_norm(args):
        yield "clipping of query and key weights, which has no effect on the logits with QK norms (qk_clip)"
    if (args.get("num_experts") or 0) > 1:
        names = _as_list(args.get("moe_router_load_balancing_type"))
        weights = _as_list(args.get("moe_aux_loss_coeff"))
        pairs = zip(names, weights, strict=False)
        lost = [f"{name} {weight}" for name, weight in pairs if name and weight and name not in _LOAD_BALANCING]
        if lost:
            yield f"the load-balancing losses {', '.join(lost)}"


def _has_qk_norm(args: Mapping[str, Any]) -> bool:
    return bool(args.get("qk_layernorm") or args.get("qk_l2_norm"))


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def build_config(values: Mapping[str, Any]) -> Config:
    """Build the configuration of a checkpoint with the settings ``values``.

    Raises:
        CheckpointError: they do not define one of our models.
    """
    try:
        config = config_from_values(values, family=FAMILY)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the arguments in the checkpoint do not describe a supported model: {error}") from error
    section_types: tuple[Any, ...] = (type(config.model), type(config.family_config))
    options = (option for section_type in section_types for option in options_of(section_type) if option.name in values)
    problems = [problem for option in options if (problem := option.problem(values[option.name]))]
    if problems:
        raise CheckpointError(
            f"the arguments in the checkpoint do not describe a supported model: {'; '.join(problems)}"
        )
    return config


def setting_values(folder: TorchDistFolder) -> dict[str, Any]:
    """Convert the checkpoint's arguments to field -> value.

    Raises:
        CheckpointError: an argument is missing, or the model has modules that ours lack.
    """
    args = folder.args
    try:
        return {**_model_values(folder), **_schedule_values(args), **_training_values(args)}
    except KeyError as error:
        raise CheckpointError(f"{folder.path}: the arguments in the checkpoint lack {error}") from error
    except (TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{folder.path}: an argument in the checkpoint has an invalid value: {error}") from error


def _model_values(folder: TorchDistFolder) -> dict[str, Any]:
    args, tensors = folder.args, folder.index.tensors
    names = WeightNames(tensors)
    unsupported = sorted({text for name, text in _UNSUPPORTED.items() if args.get(name)})
    if unsupported:
        raise CheckpointError(f"{folder.path}: the model has unsupported features: {', '.join(unsupported)}")
    reject_unsupported(args, names, has_experts=True)
    num_rows, hidden_size = tensors["embedding.word_embeddings.weight"].shape
    num_heads = int(args["num_attention_heads"])
    activation = activation_of(args)
    values: dict[str, Any] = {
        "num_layers": int(args["num_layers"]),
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_query_groups": get_num_groups(args, num_heads),
        "kv_hidden_size": int(args.get("kv_channels") or hidden_size // num_heads),
        "ff_hidden_size": int(args.get("ffn_hidden_size") or 4 * hidden_size),
        "max_position_embeddings": int(args["max_position_embeddings"]),
        "hidden_bias": "layers.0.attention.dense.bias" in names,
        "untie_embeddings": "head.weight" in names,
        "layernorm_epsilon": float(args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5),
        "activation": activation,
        "apply_residual_connection_post_layernorm": bool(args.get("apply_residual_connection_post_layernorm")),
        "vocab_size": num_rows,
        "hidden_dropout": float(args.get("hidden_dropout", 0.1)),
        "attention_dropout": float(args.get("attention_dropout", 0.1)),
        **decoder_settings(args, names),
    }
    values["add_qkv_bias"] = "layers.0.attention.query_key_value.bias" in names and not values["hidden_bias"]
    if args.get("rotary_interleaved"):
        values["rotary_interleaved"] = True
    if POSITIONS in names:
        values["max_position_embeddings"] = tensors["embedding.position_embeddings.weight"].shape[0]
    if (num_experts := args.get("num_experts") or 0) > 1:
        values |= {"num_experts": num_experts, **_expert_values(args)}
    return values


def _expert_values(args: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: args[name] for name in _EXPERT_FIELDS if args.get(name) is not None}
    frequency = args.get("moe_layer_freq", 1)
    values["moe_layer_freq"] = str(frequency).replace(" ", "")
    balancing, coefficient = args.get("moe_router_load_balancing_type", "aux_loss"), args.get("moe_aux_loss_coeff", 0.0)
    pairs = [
        (name, float(weight or 0.0))
        for name, weight in zip(_as_list(balancing), _as_list(coefficient), strict=False)
        if name in _LOAD_BALANCING
    ]
    if len(pairs) == 1:
        values["moe_router_load_balancing_type"], values["moe_aux_loss_coeff"] = pairs[0]
    elif pairs:
        values["moe_router_load_balancing_type"] = " ".join(name for name, _ in pairs)
        values["moe_aux_loss_coeff"] = " ".join(str(weight) for _, weight in pairs)
    return values


def _schedule_values(args: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the learning-rate schedule: in samples if the run length is in samples, otherwise in steps."""
    values: dict[str, Any] = {"lr_step_offset": LR_STEP_OFFSET, "lr_warmup_rounding": "none"}
    numbers = ["lr", "min_lr", "weight_decay", "lr_warmup_init"]
    if args.get("weight_decay_incr_style") in ("linear", "cosine"):
        values["weight_decay_incr_style"] = args["weight_decay_incr_style"]
        numbers += ["start_weight_decay", "end_weight_decay"]
    for name in numbers:
        if args.get(name) is not None:
            values[name] = float(args[name])
    style = args.get("lr_decay_style")
    if style is not None:
        values["lr_decay_style"] = _DECAY_STYLES.get(style, style)
    if args.get("lr_warmup_fraction") is not None:
        values["warmup"] = float(args["lr_warmup_fraction"])
    if args.get("train_samples"):
        values["lr_decay_samples"] = int(args["train_samples"])
        names = ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
    else:
        if args.get("train_iters"):
            values["train_iters"] = values["lr_decay_iters"] = int(args["train_iters"])
        names = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
    for name in names:
        if args.get(name) and not (args.get("lr_warmup_fraction") is not None and "warmup" in name):
            values[name] = int(args[name])
    if "lr_warmup_iters" not in values and "lr_warmup_samples" not in values:
        values.setdefault("warmup", 0.0)
    if values.get("lr_decay_style") == "wsd" and args.get("lr_wsd_decay_style"):
        values["lr_wsd_decay_style"] = args["lr_wsd_decay_style"]
    return values


def _training_values(args: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the remaining training settings that both programs have."""
    values: dict[str, Any] = {
        "loss_average": "token" if args.get("calculate_per_token_loss") else "micro-batch",
        "dtype": "bf16" if args.get("bf16") else "fp16" if args.get("fp16") else "fp32",
        "optimizer": _OPTIMIZERS.get(str(args.get("optimizer", "adam")), str(args.get("optimizer"))),
    }
    if args.get("qk_clip") and not _has_qk_norm(args):
        values["qk_clip"] = True
        values |= {name: float(args[name]) for name in ("qk_clip_threshold", "qk_clip_alpha") if args.get(name)}
    renamed = {
        "adam_beta1": "adam_beta1", "adam_beta2": "adam_beta2", "adam_eps": "adam_eps", "clip_grad": "clip_grad",
        "sgd_momentum": "sgd_momentum", "seq_length": "seq_length", "micro_batch_size": "batch_size",
        "global_batch_size": "requested_global_batch_size", "seed": "seed",
    }  # fmt: skip
    return values | {ours: args[theirs] for theirs, ours in renamed.items() if args.get(theirs) is not None}
