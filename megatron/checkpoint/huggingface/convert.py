"""Export a checkpoint to a Hugging Face folder, verify the export, and import such a folder as a run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron import files
from megatron.checkpoint.folders import CHECKPOINTS
from megatron.checkpoint.huggingface.config import (
    config_from_huggingface,
    config_to_huggingface,
    drops_mtp,
    format_of,
    saved_config,
    without_missing_mtp,
)
from megatron.checkpoint.huggingface.folder import (
    CONFIG,
    check_empty,
    new_folder,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from megatron.checkpoint.huggingface.origin import (
    GENERATION,
    STATE,
    Origin,
    config_text,
    generation_text,
    origin_of,
)
from megatron.checkpoint.huggingface.tokenizer import (
    Vocabulary,
    check_probe,
    copy_files,
    origin_in,
    origin_tokenizer_texts,
    tokenizer_config_fields,
    unknown_ids,
    vocabulary_of,
    write_tokenizer,
)
from megatron.checkpoint.huggingface.weights import (
    build_model,
    weights_from_huggingface,
    weights_to_huggingface,
    without_zero_biases,
)
from megatron.checkpoint.one_process import WEIGHTS, read_weights
from megatron.checkpoint.opened_checkpoint import Checkpoint
from megatron.checkpoint.saving import save
from megatron.checkpoint.tensor_record import TensorRecord
from megatron.config import Config
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.models.common.huggingface import HFFormat
from megatron.models.common.huggingface_mtp import PREFIX
from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard
from megatron.mpu.topology import Topology
from megatron.tokenizer.probe import FILE_NAME as PROBE_FILE
from megatron.tokenizer.probe import PROBE

# Export: one of our checkpoints as a Hugging Face folder.

_MODEL_TYPE, _TOKEN_IDS = "hugging_face_type", "hugging_face_ids"
"""Metadata entries in checkpoints imported by earlier versions; now ``origin`` stores this information."""
CHAT_TEMPLATE = "chat_template"
"""Metadata entry of a run with --sft: the text of the file given by --chat-template."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class ExportResult:
    """Result of an export: tensor file names, number and bytes of the tensors, notes about omissions."""

    files: list[str]
    num_tensors: int
    num_bytes: int
    notes: list[str]


def export(
    checkpoint: Checkpoint,
    output: Path,
    *,
    dtype: str | None = None,
    model_type: str | None = None,
    tokenizer_path: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    weights: dict[str, torch.Tensor] | None = None,
) -> ExportResult:
    """Write ``checkpoint`` to the new folder ``output``. All weights are in memory at the same time.

    Args:
        dtype: a key of ``DTYPES``; None keeps the saved type, so that a round trip is bit-identical.
        model_type: model type of config.json, if several fit the model. None selects the model type of the imported
            folder if it fits, otherwise the first one that fits.
        tokenizer_path: replaces the tokenizer named in the checkpoint.
        weights: the checkpoint's weights, if they have already been read.

    Raises:
        CheckpointError: no Hugging Face format fits the model, or its tensors do not match its settings.
        ConfigError: ``output`` is not empty, or the tokenizer has more tokens than the model.
        DataError: ``tokenizer_path`` cannot be read.
    """
    check_empty(output)
    config, origin = saved_config(checkpoint.metadata), origin_of(checkpoint.metadata)
    vocabulary, notes = _load_vocabulary(
        config, tokenizer_path, checkpoint.metadata.get(CHAT_TEMPLATE), checkpoint.metadata.get(PROBE)
    )
    saved_type = checkpoint.metadata.get(_MODEL_TYPE) if origin is None else origin.model_type
    if model_type is None and saved_type is not None:
        model_type = _usable_model_type(config, saved_type, notes)
    config_to_huggingface(config, "", model_type)  # raises before anything large is read
    if drops_mtp(config, model_type):
        notes.append(
            f"the {config.model.mtp_num_layers} multi-token prediction layers are not exported: folders of the model "
            f"type {format_of(config, model_type).model_types[0]} have no names for them"
        )
    weights = read_weights(checkpoint) if weights is None else weights
    if dtype is not None:
        weights = {name: tensor.to(DTYPES[dtype]) for name, tensor in weights.items()}
    hf_tensors = weights_to_huggingface(weights, config, model_type)
    dtype_name = str(next(iter(hf_tensors.values())).dtype).removeprefix("torch.")
    with new_folder(output) as folder:
        names = write_tensors(folder, hf_tensors, max_shard_bytes)
        if origin is None:
            _write_settings(folder, checkpoint, config, dtype_name, model_type, vocabulary)
        else:
            notes += _write_origin_settings(folder, origin, config, dtype_name, model_type, vocabulary)
        origin_texts = None if vocabulary is None or origin is None else _origin_texts(origin, vocabulary)
        tokenizer_problem = None if vocabulary is None else write_tokenizer(folder, vocabulary, origin_texts)
        if vocabulary is not None and vocabulary.tokenizer.probe is not None:
            files.write_bytes(folder / PROBE_FILE, json.dumps(vocabulary.tokenizer.probe).encode())
    if tokenizer_problem is not None:
        notes.append(f"the exported tokenizer is incomplete: {tokenizer_problem}")
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in hf_tensors.values())
    return ExportResult(names, len(hf_tensors), num_bytes, notes)


def _usable_model_type(config: Config, model_type: str, notes: list[str]) -> str | None:
    """Return the imported folder's ``model_type`` if it fits the run's settings; otherwise add a note and return None.

    Raises:
        CheckpointError: no model type fits the settings.
    """
    try:
        format_of(config, model_type)
    except CheckpointError:
        other = format_of(config).model_types[0]
        notes.append(
            f"the settings of the run no longer fit the model type {model_type}: the export is a {other}, and "
            "only the ids of control tokens are copied from the imported config.json"
        )
        return None
    return model_type


def _write_settings(
    folder: Path, checkpoint: Checkpoint, config: Config, dtype: str, model_type: str | None,
    vocabulary: Vocabulary | None,
) -> None:  # fmt: skip
    """Write config.json and generation_config.json for a run that did not start from a Hugging Face folder."""
    ids = unknown_ids(config) if vocabulary is None else vocabulary.ids()
    ids.update(checkpoint.metadata.get(_TOKEN_IDS) or {} if vocabulary is None else {})
    write_json(folder / CONFIG, {**config_to_huggingface(config, dtype, model_type), **ids})
    generation = ids if vocabulary is None else vocabulary.generation_ids()
    write_json(folder / GENERATION, {"_from_model_config": generation == ids, **generation})


def _write_origin_settings(
    folder: Path, origin: Origin, config: Config, dtype: str, model_type: str | None, vocabulary: Vocabulary | None
) -> list[str]:
    """Write config.json and generation_config.json for a run that started from a Hugging Face folder; return notes."""
    notes: list[str] = []
    ids: dict[str, Any] | None = None
    generation_ids: dict[str, Any] | None = None
    if not _has_same_tokens(origin, config, vocabulary):
        ids = {**(unknown_ids(config) if vocabulary is None else vocabulary.ids())}
        generation_ids = ids if vocabulary is None else vocabulary.generation_ids()
        notes.append(
            "the vocabulary differs from the imported folder's, so the export has the run's ids of control tokens and "
            "omits the folder's tokenizer settings and chat templates"
        )
    files.write_bytes(folder / CONFIG, config_text(origin, config, dtype, ids, model_type).encode())
    stop_id = None if vocabulary is None else vocabulary.stop_id
    generation = generation_text(origin, stop_id, generation_ids)
    if generation is not None:
        files.write_bytes(folder / GENERATION, generation.encode())
    return notes


def _has_same_tokens(origin: Origin, config: Config, vocabulary: Vocabulary | None) -> bool:
    if vocabulary is None:
        return origin.has_same_tokens(None, config.model.vocab_size or 0)
    return origin.has_same_tokens(vocabulary.tokenizer.piece, vocabulary.tokenizer.vocab_size)


def _origin_texts(origin: Origin, vocabulary: Vocabulary) -> dict[str, str] | None:
    """Select the imported folder's small tokenizer files; None if the run has another vocabulary."""
    is_same = origin.has_same_tokens(vocabulary.tokenizer.piece, vocabulary.tokenizer.vocab_size)
    return origin_tokenizer_texts(origin, vocabulary) if is_same else None


def _load_vocabulary(
    config: Config, tokenizer_path: Path | None, template: str | None, saved_probe: Mapping[str, Any] | None
) -> tuple[Vocabulary | None, list[str]]:
    """Load the tokenizer, with notes. An unreadable tokenizer is an error only if it is ``tokenizer_path``."""
    try:
        vocabulary = vocabulary_of(
            config, tokenizer_path, template, may_be_larger=tokenizer_path is None, saved_probe=saved_probe
        )
    except DataError as error:
        if tokenizer_path is not None:
            raise
        return None, [f"no tokenizer is exported ({error}). Set --tokenizer-path"]
    if vocabulary is None:
        return None, ["no tokenizer is exported, because the checkpoint names none. Set --tokenizer-path"]
    num_ids, num_rows = vocabulary.tokenizer.vocab_size, config.model.vocab_size or 0
    return vocabulary, [f"the tokenizer has {num_ids} ids, but the model {num_rows} rows"] if num_ids > num_rows else []


# Verification: compare the logits of our model and Hugging Face's on the same tokens.
#
# Both models compute in fp64 without dropout. For GPT-2 and BERT, logits agree to about 1e-13 of the largest logit. For
# T5, LLaMA and MPT, they agree to about 1e-7, because Hugging Face's models run some operations in fp32 (norms of T5
# and LLaMA, LLaMA's angles, MPT's softmax). The tolerance of a family is ``HFFormat.logit_tolerance``.

_ROWS, _LENGTH = 2, 24


def require_transformers() -> None:
    """Check that ``transformers`` is installed.

    Raises:
        ConfigError: ``transformers`` is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError('--verify needs the transformers library. Run: pip install -e ".[hf]"')


def verify(checkpoint: Checkpoint, folder: Path, *, dtype: str | None = None, seed: int = 0) -> float:
    """Compute the largest difference between the two models' logits, relative to the largest logit.

    Args:
        checkpoint, folder: a checkpoint and its export.
        dtype: round our weights to this type first, as in the export; None does not round.

    Raises:
        CheckpointError: the difference exceeds the rounding error.
        ConfigError: ``transformers`` is not installed.
    """
    require_transformers()
    config = saved_config(checkpoint.metadata)
    hf_format = format_of(config, read_json(folder, CONFIG)["model_type"])
    tokens = _random_tokens(config, seed)
    with torch.no_grad():
        our_logits = _our_logits(checkpoint, config, dtype, tokens)
        hf_logits = _hf_logits(folder, config, hf_format, tokens)
    difference = float((our_logits - hf_logits).abs().max() / hf_logits.abs().max())
    tolerance = hf_format.logit_tolerance
    if not difference <= tolerance:  # also true for NaN
        raise CheckpointError(
            f"the logits of our model and of {folder} must agree to {tolerance:.0e} of the largest logit, but differ "
            f"by {difference:.1e}. Do not use the folder, and report the command"
        )
    return difference


def _random_tokens(config: Config, seed: int) -> torch.Tensor:
    """Draw random tokens [b, s] that are valid for both models."""
    rng = torch.Generator().manual_seed(seed)
    length = min(_LENGTH, config.model.max_position_embeddings or _LENGTH)
    return torch.randint(0, config.model.vocab_size or 0, (_ROWS, length), generator=rng)


def _our_logits(checkpoint: Checkpoint, config: Config, dtype: str | None, tokens: torch.Tensor) -> torch.Tensor:
    weights = {name: t if dtype is None else t.to(DTYPES[dtype]) for name, t in read_weights(checkpoint).items()}
    with torch.device("meta"):
        model = build_model(config)
    model.to_empty(device="cpu")
    model.double().eval().load_state_dict({name: tensor.double() for name, tensor in weights.items()}, strict=False)
    return format_of(config).model_logits(model, tokens)  # [b, s, v]


def _hf_logits(folder: Path, config: Config, hf_format: HFFormat, tokens: torch.Tensor) -> torch.Tensor:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    model_class = getattr(
        transformers, hf_format.auto_class if isinstance(hf_format.auto_class, str) else hf_format.auto_class(config)
    )
    loaded: Any = model_class.from_pretrained(
        folder, dtype=torch.float64, local_files_only=True, output_loading_info=True
    )
    model, loading_info = loaded
    recipes = hf_format.recipes(config)
    mtp_names = {hf_name for name in recipes if name.startswith(PREFIX) for hf_name in recipes[name].hf_names}
    loading_info["unexpected_keys"] = {*loading_info["unexpected_keys"]} - mtp_names - {*hf_format.copies(config)}
    mismatches = {
        key: sorted(loading_info[key])
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if loading_info[key]
    }
    if mismatches:
        raise CheckpointError(f"the tensors in {folder} do not match the model of transformers: {mismatches}")
    model.eval()
    model.config.use_cache = False  # transformers 5 raises ValueError for a cache without attention layers
    hf_format.patch_hf_model(model, config)
    return hf_format.hf_logits(model(**hf_format.hf_inputs(tokens)))


# The first checkpoint of a run whose weights come from another program.


def save_first(
    root: Path, weights: dict[str, torch.Tensor], config: Config, origin: str, extra_metadata: dict[str, Any]
) -> Path:
    """Write a checkpoint of step 0 with imported weights; return its path.

    Args:
        origin: description of the weights' origin, stored in the metadata entry "optimizer".
        extra_metadata: additional metadata entries.
    """
    records = [TensorRecord(WEIGHTS + name, tensor, Shard(tuple(tensor.shape))) for name, tensor in weights.items()]
    return save(root, 0, records, {**_initial_metadata(config, origin), **extra_metadata}, SINGLE)


def _initial_metadata(config: Config, origin: str) -> dict[str, Any]:
    """Build the metadata that ``megatron.training.capture`` stores, for a run that has not taken a step."""
    return {
        "progress": {"step": 0, "updates": 0, "samples_consumed": 0, "tokens_consumed": 0},
        "scaler": {},
        "optimizer": origin,
        "optimizer_steps": 0,
        "model": config.identity(),
        "config": config.to_dict(),
        "layout": Topology(pipe=1, data=1, tensor=1).axis_sizes(),
        "data_fingerprint": None,
        "data_order": None,
        "torch": torch.__version__,
    }


# Import: a Hugging Face folder as the first checkpoint of a run folder.

TOKENIZER = "tokenizer"  # tokenizer folder in the run folder
NO_OPTIMIZER = "none (weights of a Hugging Face folder)"


def import_folder(source: Path, output: Path) -> tuple[Path, Config]:
    """Write the model in ``source`` to the new run folder ``output``; return the checkpoint and its configuration.

    The checkpoint is of step 0 and has only weights; train from it with ``--load output --finetune``.

    Raises:
        CheckpointError: ``source`` is not a Hugging Face folder of a supported model, or its tensors do not match its
            ``config.json``.
        ConfigError: ``output`` is not empty.
    """
    check_empty(output)
    if not source.is_dir():
        raise CheckpointError(f"--input must be a Hugging Face folder, but {source} does not exist or is a file")
    hf_config = read_json(source, CONFIG)
    config = config_from_huggingface(hf_config)
    tensors = read_tensors(source)
    model_type = hf_config["model_type"]
    config = without_zero_biases(tensors, without_missing_mtp(tensors, config, model_type), model_type)
    weights = weights_from_huggingface(tensors, config, model_type)
    with new_folder(output) as folder:
        check_probe(source)
        if copy_files(source, folder / TOKENIZER):
            tokenizer_fields = tokenizer_config_fields(folder / TOKENIZER, output.absolute() / TOKENIZER)
            config = replace(config, data=replace(config.data, **tokenizer_fields))
        state_entries = {STATE: origin_in(source).state()}
        saved = save_first(folder / CHECKPOINTS, weights, config, NO_OPTIMIZER, state_entries)
    return output / CHECKPOINTS / saved.name, config
