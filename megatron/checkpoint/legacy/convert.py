"""A checkpoint of Megatron-LM, CPM-Pretrain or CPM-1 as the first checkpoint of a run folder of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.arguments import config_from_values
from megatron.checkpoint.folders import CHECKPOINTS
from megatron.checkpoint.huggingface.convert import save_first
from megatron.checkpoint.huggingface.folder import new_folder, require_free
from megatron.checkpoint.huggingface.weights import require_own
from megatron.checkpoint.legacy.files import find_legacy_files
from megatron.checkpoint.legacy.weights import LegacyWeights, read_legacy_weights
from megatron.config import Config
from megatron.errors import CheckpointError

_EPSILON = 1e-5
_ROTARY = "rotary positions"
_LEARNED = "learned_absolute"
_POSITIONS = "embedding.position.weight"
_UNKNOWN_HERE = {
    "swiglu": "a gated activation",
    "quick_geglu": "a gated activation",
    "squared_relu": "a squared ReLU",
    "use_rotary_position_embeddings": _ROTARY,
    "apply_layernorm_1p": "norms with weights less 1 (--apply-layernorm-1p)",
}


@dataclass(frozen=True)
class Wishes:
    """What the user says of a checkpoint; None: as the files say, or as its docstring in the tool."""

    iteration: str | None = None
    num_heads: int | None = None
    qkv_order: str | None = None
    activation: str | None = None
    vocab_size: int | None = None


def import_checkpoint(source: Path, output: Path, wishes: Wishes) -> tuple[Path, Config, list[str]]:
    """Write the model in ``source`` to the new run folder ``output``; return checkpoint, configuration and notes.

    The checkpoint is of step 0 and holds weights alone: ``--load output --finetune`` starts from it.

    Raises:
        CheckpointError: no checkpoint of these families, or its tensors are not those of a GPT-2 or T5 of ours.
        ConfigError: ``output`` holds something.
    """
    require_free(output)
    files = find_legacy_files(source, wishes.iteration)
    found = read_legacy_weights(files, num_heads=wishes.num_heads, order=wishes.qkv_order)
    config = _config(found, wishes)
    _cut_vocabulary(found, config.model.vocab_size or 0)
    require_own(str(files.folder), found.weights, config)
    notes = [
        f"rows of query, key and value: {found.order}; activation: {config.model.activation}; "
        f"vocabulary: {config.model.vocab_size}",
        *found.notes,
    ]
    with new_folder(output) as folder:
        saved = save_first(folder / CHECKPOINTS, found.weights, config, "none (weights of another program)", {})
    return output / CHECKPOINTS / saved.name, config, notes


def _config(found: LegacyWeights, wishes: Wishes) -> Config:
    """Return the configuration of the model whose weights were found: sizes are read off the tensors."""
    strange = [explanation for key, explanation in _UNKNOWN_HERE.items() if found.settings.get(key)]
    norm = found.settings.get("normalization") or "LayerNorm"
    strange += [f"{norm} for LayerNorm"] * (norm != "LayerNorm")
    positions = found.settings.get("position_embedding_type") or _LEARNED
    if positions != _LEARNED and _ROTARY not in strange:
        strange.append(_ROTARY if positions == "rope" else f"positions of type {positions}")
    if strange:
        raise CheckpointError(f"our GPT-2 and T5 are without what the files' settings name: {', '.join(strange)}")
    if _POSITIONS not in found.weights:
        raise CheckpointError(
            f"the checkpoint must hold learned positions ({_POSITIONS}), and does not: a model with rotary or relative "
            "positions is no GPT-2 or T5 of ours"
        )
    weights, settings = found.weights, found.settings
    side = "encoder." if found.is_t5 else ""
    try:
        rows, hidden = weights["embedding.word.weight"].shape
        heads = wishes.num_heads or int(settings["num_attention_heads"])
        qkv = weights[f"{side}layers.0.attention.query_key_value.weight"].shape[0]
        values: dict[str, Any] = {
            "num_layers": _height(found, "encoder." if found.is_t5 else ""),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "kv_hidden_size": qkv // (3 * heads),
            "ff_hidden_size": weights[f"{side}layers.0.mlp.up.weight"].shape[0],
            "max_position_embeddings": weights[_POSITIONS].shape[0],
        }
    except KeyError as error:
        raise CheckpointError(f"the checkpoint must hold {error}, and does not") from error
    values |= {
        "hidden_bias": f"{side}layers.0.mlp.up.bias" in weights,
        "untie_embeddings": "head.weight" in weights,
        "layernorm_epsilon": settings.get("norm_epsilon", settings.get("layernorm_epsilon", _EPSILON)),
        "activation": wishes.activation or _activation(settings),
        "apply_residual_connection_post_layernorm": bool(settings.get("apply_residual_connection_post_layernorm")),
        "vocab_size": wishes.vocab_size or rows,
        "hidden_dropout": settings.get("hidden_dropout", 0.1),
        "attention_dropout": settings.get("attention_dropout", 0.1),
    }
    if found.is_t5:
        sides = {"enc_layers": values["num_layers"], "dec_layers": _height(found, "decoder.")}
        values |= {**sides, "position_embedding_type": "learned"}
    try:
        return config_from_values(values, family="t5" if found.is_t5 else "gpt2")
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the settings in the checkpoint describe no model of ours: {error}") from error


def _activation(settings: Mapping[str, Any]) -> str:
    """Return the activation: the tanh form, unless the run's settings say that its exact form was computed."""
    is_exact = bool(settings) and not (settings.get("openai_gelu") or settings.get("bias_gelu_fusion", True))
    return "gelu" if is_exact else "gelu-tanh"


def _height(found: LegacyWeights, side: str) -> int:
    prefix = f"{side}layers."
    return 1 + max(int(name.removeprefix(prefix).split(".")[0]) for name in found.weights if name.startswith(prefix))


def _cut_vocabulary(found: LegacyWeights, vocab_size: int) -> None:
    """Drop rows of padding behind the vocabulary.

    Raises:
        CheckpointError: there are fewer rows than the vocabulary has.
    """
    for name in ("embedding.word.weight", "head.weight"):
        if name in found.weights:
            rows = found.weights[name].shape[0]
            if rows < vocab_size:
                raise CheckpointError(f"--vocab-size must be at most the {rows} rows of {name}, got {vocab_size}")
            found.weights[name] = found.weights[name][:vocab_size].clone()
