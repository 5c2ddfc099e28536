"""A Hugging Face folder as the first checkpoint of a run folder of ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.first import save_first
from megatron.checkpoint.folders import CHECKPOINTS
from megatron.checkpoint.hf import folder as hf_folder
from megatron.checkpoint.hf import settings, tensors, tokens
from megatron.config import Config
from megatron.errors import CheckpointError

TOKENIZER = "tokenizer"  # folder of the tokenizer's files in the run folder
NO_OPTIMIZER = "none (weights of a Hugging Face folder)"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def import_folder(source: Path, output: Path) -> tuple[Path, Config]:
    """Write the model in ``source`` to the new run folder ``output``; return the checkpoint and its configuration.

    The checkpoint is of step 0 and holds weights alone: ``--load output --finetune`` starts from it.

    Raises:
        CheckpointError: ``source`` is no Hugging Face folder of a model that we have, or its tensors are not those that
            its ``config.json`` asks for.
        ConfigError: ``output`` holds something.
    """
    hf_folder.require_free(output)
    if not source.is_dir():
        raise CheckpointError(f"--input must name a Hugging Face folder; {source} is not there, or a file")
    theirs = hf_folder.read_json(source, hf_folder.CONFIG)
    config = settings.to_ours(theirs)
    held = hf_folder.read_tensors(source)
    config = tensors.without_zero_biases(held, config)
    weights = tensors.to_ours(held, config)
    with hf_folder.new_folder(output) as folder:
        if tokens.copy_files(source, folder / TOKENIZER):
            named = tokens.fields_of(folder / TOKENIZER, output.absolute() / TOKENIZER)
            config = replace(config, data=replace(config.data, **named))
        ids = {name: theirs[name] for name in _IDS if isinstance(theirs.get(name), int)}
        saved = save_first(folder / CHECKPOINTS, weights, config, NO_OPTIMIZER, {"hugging_face_ids": ids})
    return output / CHECKPOINTS / saved.name, config
