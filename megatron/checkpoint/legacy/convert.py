"""Import a checkpoint from Megatron-LM, CPM-Pretrain or CPM-1 as the first checkpoint in a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.arguments import config_from_values
from megatron.checkpoint.folders import CHECKPOINTS
from megatron.checkpoint.huggingface.convert import save_first
from megatron.checkpoint.huggingface.folder import check_empty, new_folder
from megatron.checkpoint.huggingface.weights import check_weights
from megatron.checkpoint.legacy.files import find_legacy_files
from megatron.checkpoint.legacy.settings import (
    POSITIONS,
    activation_of,
    decoder_settings,
    get_num_groups,
    reject_unsupported,
)
from megatron.checkpoint.legacy.weights import LegacyWeights, read_legacy_weights
from megatron.config import Config
from megatron.errors import CheckpointError

_EPSILON = 1e-5


@dataclass(frozen=True)
class ImportOptions:
    """User overrides for the files' settings; None uses the files or the default of tools/import_checkpoint.py."""

    iteration: str | None = None
    num_heads: int | None = None
    qkv_order: str | None = None
    activation: str | None = None
    vocab_size: int | None = None


def import_checkpoint(source: Path, output: Path, options: ImportOptions) -> tuple[Path, Config, list[str]]:
    """Write the model in ``source`` to the new run folder ``output``; return checkpoint, configuration and notes.

    The checkpoint is of step 0 and has only weights; train from it with ``--load output --finetune``.

    Raises:
        CheckpointError: ``source`` is not a supported program's checkpoint, or its tensors fit neither our decoder
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
    """Build the imported model's configuration; its sizes are derived from tensor shapes."""
    weights, settings = legacy.weights, legacy.settings
    reject_unsupported(settings, weights, is_t5=legacy.is_t5)
    side = "encoder." if legacy.is_t5 else ""
    activation = options.activation or activation_of(settings)
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
        if POSITIONS in weights:
            values["max_position_embeddings"] = weights[POSITIONS].shape[0]
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
        values |= {"num_query_groups": num_groups, **decoder_settings(settings, weights)}
    try:
        return config_from_values(values, family="t5" if legacy.is_t5 else "gpt2")
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the settings in the checkpoint do not describe a supported model: {error}") from error


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
