"""A checkpoint of ours as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint.hf import folder as hf_folder
from megatron.checkpoint.hf import settings, tensors, tokens
from megatron.checkpoint.loading import Checkpoint
from megatron.checkpoint.whole import read_weights
from megatron.errors import DataError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Exported:
    """What was written: names of the files with tensors, their number and bytes, and what there is less than whole."""

    files: list[str]
    num_tensors: int
    num_bytes: int
    notes: list[str]


def export(
    checkpoint: Checkpoint,
    output: Path,
    *,
    dtype: str | None = None,
    tokenizer_path: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Exported:
    """Write ``checkpoint`` to the new folder ``output``. All weights are in memory at once.

    Args:
        dtype: a name of ``DTYPES``; None: as saved, which round trips bit for bit.
        tokenizer_path: in place of the tokenizer that the checkpoint names.

    Raises:
        CheckpointError: the model has no Hugging Face form, or its tensors are not those that its sizes ask for.
        ConfigError: ``output`` holds something, or the tokenizer has more tokens than the model.
        DataError: ``tokenizer_path`` cannot be read.
    """
    hf_folder.require_free(output)
    config = settings.saved_config(checkpoint.state)
    settings.to_theirs(config, "")  # refuses before anything large is read
    vocabulary, notes = _vocabulary(config, tokenizer_path)
    weights = read_weights(checkpoint)
    if dtype is not None:
        weights = {name: tensor.to(DTYPES[dtype]) for name, tensor in weights.items()}
    theirs = tensors.to_theirs(weights, config)
    kind = str(next(iter(theirs.values())).dtype).removeprefix("torch.")
    ids = tokens.unknown_ids(config) if vocabulary is None else vocabulary.ids()
    ids.update(checkpoint.state.get("hugging_face_ids") or {} if vocabulary is None else {})
    with hf_folder.new_folder(output) as folder:
        names = hf_folder.write_tensors(folder, theirs, max_shard_bytes)
        hf_folder.write_json(folder / hf_folder.CONFIG, {**settings.to_theirs(config, kind), **ids})
        hf_folder.write_json(folder / hf_folder.GENERATION, {"_from_model_config": True, **ids})
        lacking = None if vocabulary is None else tokens.write(folder, vocabulary)
    if lacking is not None:
        notes.append(f"the tokenizer is not whole: {lacking}")
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in theirs.values())
    return Exported(names, len(theirs), num_bytes, notes)


def _vocabulary(config: settings.Config, tokenizer_path: Path | None) -> tuple[tokens.Vocabulary | None, list[str]]:
    """Return the tokenizer, and why there is none; only the one that the user names must be there."""
    try:
        found = tokens.vocabulary_of(config, tokenizer_path)
    except DataError as error:
        if tokenizer_path is not None:
            raise
        return None, [f"no tokenizer is written ({error}); name it with --tokenizer-path"]
    return found, [] if found else ["the checkpoint names no tokenizer; name one with --tokenizer-path"]
