"""Checkpoints of small models whose generated text is not degenerate, with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.arguments import config_from_values
from megatron.checkpoint import TensorRecord, named_parameters, save
from megatron.config import Config
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import shard_of
from tests.helpers.checkpoint_samples import world_of
from tests.helpers.harness import run_ranks
from tests.helpers.huggingface_models import build, state_of
from tests.helpers.model_samples import whole_weight
from tests.helpers.small_corpora import make_tokenizer

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 48}
LAYERS = {
    "gpt2": {"num_layers": 4},
    "t5": {"num_layers": 4, "dec_layers": 2, "activation": "relu"},
    "llama": {"num_layers": 4, "num_query_groups": 2},
    "mpt": {"num_layers": 4},
}


def save_model(run: Path, family: str, *, ranks: int = 1, **values: Any) -> Config:
    """Save a model whose word embeddings are far apart, with its tokenizer; return its configuration."""
    run.mkdir(parents=True, exist_ok=True)
    size = make_tokenizer(run).vocab_size + (100 if family == "t5" else 0)
    settings = {**SMALL, **LAYERS[family], "vocab_size": size, "tokenizer_path": str(run / "t.json"), **values}
    config = config_from_values(settings, family=family)
    if ranks == 1:
        _save(0, run, config, 1)
    else:
        run_ranks(ranks, _save, run, config, ranks)
    return config


def _save(rank: int, run: Path, config: Config, ranks: int) -> None:
    world: Group = SINGLE if ranks == 1 else world_of(rank, ranks)
    records = []
    for name, parameter in named_parameters(build(config, world)):
        shard = shard_of(parameter)
        local = parameter.data.new_zeros(parameter.shape)
        shard.unpadded(local).copy_(shard.cut(whole_weight(name, shard.global_shape)))
        records.append(TensorRecord(f"weights/{name}", local, shard, shard.is_partitioned or rank == 0))
    save(run / "checkpoints", 7, records, state_of(config, ranks), world)
