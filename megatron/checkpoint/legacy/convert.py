"""Import a checkpoint of Megatron-LM, CPM-Pretrain or CPM-1 as the first checkpoint of a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.arguments import config_from_values
from megatron.checkpoint.folders import CHECKPOINTS
from megatron.checkpoint.huggingface.convert import save_first
from megatron.checkpoint.huggingface.folder import check_empty, new_folder
from megatron.checkpoint.huggingface.weights import check_weights
from megatron.checkpoint.legacy.files import find_legacy_files
from megatron.checkpoint.legacy.weights import LegacyWeights, get_num_groups, read_legacy_weights
from megatron.config import Config
from megatron.errors import CheckpointError

_EPSILON = 1e-5
_LEARNED = "learned_absolute"
_POSITIONS = "embedding.position.weight"
_ACTIVATIONS = {"swiglu": "gated-silu", "squared_relu": "squared-relu"}
"""Boolean setting of Megatron-LM -> our activation."""
_UNSUPPORTED = {
    "quick_geglu": "a gated quick GELU",
    "multi_latent_attention": "latent attention",
}
_UNSUPPORTED_IN_T5 = {
    "swiglu": "a gated activation",
    "squared_relu": "a squared ReLU",
    "apply_layernorm_1p": "norms whose weights are stored minus 1 (--apply-layernorm-1p)",
}
_ROPE_SCALING = {"rotary_scaling": "llama3", "rotary_low_frequency_factor": 1.0, "rotary_high_frequency_factor": 4.0,
                 "rotary_original_positions": 8192}  # fmt: skip
"""Our settings for --use-rope-scaling of Megatron-LM."""


@dataclass(frozen=True)
class ImportOptions:
    """The user's overrides of the files' settings; None uses the files or the default of tools/import_checkpoint.py."""

    iteration: str | None = None
    num_heads: int | None = None
    qkv_order: str | None = None
    activation: str | None = None
    vocab_size: int | None = None


def import_checkpoint(source: Path, output: Path, options: ImportOptions) -> tuple[Path, Config, list[str]]:
    """Write the model in ``source`` to the new run folder ``output``; return checkpoint, configuration and notes.

    The checkpoint is of step 0 and has only weights; train from it with ``--load output --finetune``.

    Raises:
        CheckpointError: ``source`` is not a checkpoint of a supported program, or its tensors fit neither our decoder
            nor our T5.
        ConfigError: ``output`` is not empty.
    """
    check_empty(output)
    files = find_legacy_files(source, options.iteration)
    is_gated = None if options.activation is None else options.activation.startswith("gated-")
    legacy = read_legacy_weights(files, num_heads=options.num_heads, order=options.qkv_order, is_gated=is_gated)
    config = _build_config(legacy, options)
    _drop_padding_rows(legacy, config.model.vocab_size or 0)
    check_weights(str(files.folder), legacy.weights, config)
    notes = [
        f"rows of query, key and value: {legacy.order}; activation: {config.model.activation}; "
        f"vocabulary: {config.model.vocab_size}",
        *legacy.notes,
    ]
    with new_folder(output) as folder:
        saved = save_first(folder / CHECKPOINTS, legacy.weights, config, "none (weights of another program)", {})
    return output / CHECKPOINTS / saved.name, config, notes


def _build_config(legacy: LegacyWeights, options: ImportOptions) -> Config:
    """Return the configuration of the imported model; its sizes are derived from the shapes of the tensors."""
    weights, settings = legacy.weights, legacy.settings
    _reject_unsupported(legacy)
    side = "encoder." if legacy.is_t5 else ""
    activation = options.activation or _activation(settings)
    try:
        num_rows, hidden_size = weights["embedding.word.weight"].shape
        num_heads = options.num_heads or int(settings["num_attention_heads"])
        num_groups = get_num_groups(settings, num_heads)
        num_qkv_rows = weights[f"{side}layers.0.attention.query_key_value.weight"].shape[0]
        num_up_rows = weights[f"{side}layers.0.mlp.up.weight"].shape[0]
        values: dict[str, Any] = {
            "num_layers": _num_layers(legacy, side),
            "hidden_size": hidden_size,
            "num_attention_heads": num_heads,
            "kv_hidden_size": num_qkv_rows // (num_heads + 2 * num_groups),
            "ff_hidden_size": num_up_rows // 2 if activation.startswith("gated-") else num_up_rows,
        }
        if _POSITIONS in weights:
            values["max_position_embeddings"] = weights[_POSITIONS].shape[0]
        else:
            values["max_position_embeddings"] = int(settings["max_position_embeddings"])
    except KeyError as error:
        raise CheckpointError(f"the checkpoint lacks {error}") from error
    values |= {
        "hidden_bias": f"{side}layers.0.mlp.up.bias" in weights,
        "untie_embeddings": "head.weight" in weights,
        "layernorm_epsilon": settings.get("norm_epsilon", settings.get("layernorm_epsilon", _EPSILON)),
        "activation": activation,
        "apply_residual_connection_post_layernorm": bool(settings.get("apply_residual_connection_post_layernorm")),
        "vocab_size": options.vocab_size or num_rows,
        "hidden_dropout": settings.get("hidden_dropout", 0.1),
        "attention_dropout": settings.get("attention_dropout", 0.1),
    }
    if legacy.is_t5:
        sides = {"enc_layers": values["num_layers"], "dec_layers": _num_layers(legacy, "decoder.")}
        values |= {**sides, "position_embedding_type": "learned"}
    else:
        values |= {"num_query_groups": num_groups, **_decoder_settings(legacy)}
    try:
        return config_from_values(values, family="t5" if legacy.is_t5 else "gpt2")
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the settings in the checkpoint do not describe a supported model: {error}") from error


def _position_type(settings: Mapping[str, Any]) -> str:
    if settings.get("use_rotary_position_embeddings"):
        return "rope"
    return str(settings.get("position_embedding_type") or _LEARNED)


def _normalization(settings: Mapping[str, Any]) -> str:
    """Return the type of the norms, which is in lower case in Megatron-DeepSpeed's settings."""
    norm = str(settings.get("normalization") or "LayerNorm")
    return {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}.get(norm.lower(), norm)


def _reject_unsupported(legacy: LegacyWeights) -> None:
    """Reject settings that our models do not support.

    Raises:
        CheckpointError: lists the settings; or the checkpoint has no learned positions although its settings need them.
    """
    settings, positions = legacy.settings, _position_type(legacy.settings)
    supported_positions = (_LEARNED,) if legacy.is_t5 else (_LEARNED, "rope", "none")
    unsupported = [
        name
        for key, name in {**_UNSUPPORTED, **(_UNSUPPORTED_IN_T5 if legacy.is_t5 else {})}.items()
        if settings.get(key)
    ]
    norm = _normalization(settings)
    if norm not in (("LayerNorm",) if legacy.is_t5 else ("LayerNorm", "RMSNorm")):
        unsupported.append(f"{norm} instead of LayerNorm")
    if settings.get("num_experts") not in (None, 0, 1, [1]):  # Megatron-DeepSpeed writes [1] for models without experts
        unsupported.append("experts")
    if positions not in supported_positions:
        unsupported.append(f"positions of type {positions}")
    if (settings.get("softmax_type") or "vanilla") != "vanilla":
        unsupported.append(f"a softmax of type {settings['softmax_type']}")
    if unsupported:
        raise CheckpointError(f"the settings in the checkpoint require unsupported features: {', '.join(unsupported)}")
    if positions == _LEARNED and _POSITIONS not in legacy.weights:
        raise CheckpointError(
            f"the checkpoint lacks learned positions ({_POSITIONS}), and its settings name no other type of positions "
            "(position_embedding_type)"
        )


def _decoder_settings(legacy: LegacyWeights) -> dict[str, Any]:
    """Return the decoder settings for which Megatron-LM has other names."""
    weights, settings, positions = legacy.weights, legacy.settings, _position_type(legacy.settings)
    has_bias = "layers.0.attention.query_key_value.bias" in weights
    values: dict[str, Any] = {
        "position_embedding_type": positions,
        "normalization": _normalization(settings),
        "layernorm_1p": bool(settings.get("apply_layernorm_1p")),
        "add_qkv_bias": has_bias and "layers.0.mlp.up.bias" not in weights,
        "qk_norm": "head" if settings.get("qk_layernorm") else "none",
        **_window(settings),
    }
    if settings.get("softmax_scale"):
        values["softmax_scale"] = float(settings["softmax_scale"])
    if positions != "rope":
        return values
    base = settings.get("rotary_base") or settings.get("rotary_position_embeddings_theta") or 10000.0
    values["rotary_base"] = float(base)
    values["rotary_percent"] = float(settings.get("rotary_percent") or 1.0)
    values["no_rope_freq"] = str(settings.get("no_rope_freq") or "").replace(" ", "")  # a number, or a list by layer
    if settings.get("use_rope_scaling"):
        values |= {**_ROPE_SCALING, "rotary_scaling_factor": float(settings.get("rope_scaling_factor") or 8.0)}
    elif settings.get("rotary_seq_len_interpolation_factor"):
        factor = float(settings["rotary_seq_len_interpolation_factor"])
        values |= {"rotary_scaling": "linear", "rotary_scaling_factor": factor}
    return values


def _window(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the attention window.

    Megatron-LM's window is (tokens before, tokens after), where -1 means no limit.

    Raises:
        CheckpointError: the window includes tokens after the current one.
    """
    window = settings.get("window_size")
    if window is None:
        return {}
    before, after = (int(size) for size in window)
    if after not in (0, -1) or (after == -1 and before != -1):
        raise CheckpointError(
            f"the attention window of a decoder must end at the current token, got window_size {tuple(window)}"
        )
    every = settings.get("window_attn_skip_freq")
    if before == -1:
        return {}
    return {"window_size": before, "window_attn_skip_freq": "" if every is None else str(every).replace(" ", "")}


def _activation(settings: Mapping[str, Any]) -> str:
    """Return the activation. GELU means the tanh form, unless the settings show that the exact form was used."""
    for setting, activation in _ACTIVATIONS.items():
        if settings.get(setting):
            return activation
    is_exact = bool(settings) and not (settings.get("openai_gelu") or settings.get("bias_gelu_fusion", True))
    return "gelu" if is_exact else "gelu-tanh"


def _num_layers(legacy: LegacyWeights, side: str) -> int:
    prefix = f"{side}layers."
    return 1 + max(int(name.removeprefix(prefix).split(".")[0]) for name in legacy.weights if name.startswith(prefix))


def _drop_padding_rows(legacy: LegacyWeights, vocab_size: int) -> None:
    """Drop padding rows at the end of the vocabulary.

    Raises:
        CheckpointError: the tables have fewer rows than the vocabulary.
    """
    for name in ("embedding.word.weight", "head.weight"):
        if name in legacy.weights:
            num_rows = legacy.weights[name].shape[0]
            if num_rows < vocab_size:
                raise CheckpointError(f"--vocab-size must be at most the {num_rows} rows of {name}, got {vocab_size}")
            legacy.weights[name] = legacy.weights[name][:vocab_size].clone()
