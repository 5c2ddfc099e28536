"""A Hugging Face folder as the first checkpoint of a run folder of ours."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.folders import CHECKPOINTS
from megatron.checkpoint.hf import folder as hf_folder
from megatron.checkpoint.hf import settings, tensors, tokens
from megatron.checkpoint.records import TensorRecord
from megatron.checkpoint.saving import save
from megatron.checkpoint.whole import WEIGHTS
from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard
from megatron.mpu.topology import Topology

TOKENIZER = "tokenizer"  # folder of the tokenizer's files in the run folder
NO_OPTIMIZER = "none (weights of a Hugging Face folder)"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def import_folder(source: Path, output: Path) -> tuple[Path, Config]:
    """Write the model in ``source`` to the new run folder ``output``; return the checkpoint and its configuration.

    The checkpoint is of step 0 and holds weights alone: ``--load output --finetune`` starts from it.

    Raises:
        CheckpointError: ``source`` is no Hugging Face folder of GPT-2 or T5, or its tensors are not those that its
            ``config.json`` asks for.
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


def save_first(root: Path, weights: dict[str, torch.Tensor], config: Config, origin: str, more: dict[str, Any]) -> Path:
    """Write the checkpoint of step 0 of a model whose weights come from elsewhere; return its path.

    Args:
        origin: stands where a run names its optimizer.
        more: further entries of the state.
    """
    records = [TensorRecord(WEIGHTS + name, tensor, Shard(tuple(tensor.shape))) for name, tensor in weights.items()]
    return save(root, 0, records, {**_state(config, origin), **more}, SINGLE)


def _state(config: Config, origin: str) -> dict[str, Any]:
    """Return what ``megatron.training.state`` saves, of a run that has not taken a step."""
    return {
        "progress": {"step": 0, "updates": 0, "samples_consumed": 0},
        "scaler": {},
        "optimizer": origin,
        "optimizer_steps": 0,
        "model": config.identity(),
        "config": config.to_dict(),
        "layout": asdict(Topology(pipe=1, data=1, tensor=1)),
        "data_fingerprint": None,
        "data_order": None,
        "torch": torch.__version__,
    }
