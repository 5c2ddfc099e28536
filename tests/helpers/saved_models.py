"""Checkpoints of small models whose generated text is not degenerate, with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.arguments import config_from_values
from megatron.checkpoint import TensorRecord, named_parameters, save
from megatron.config import Config
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import shard_of
from tests.helpers.checkpoint_samples import world_group
from tests.helpers.harness import run_ranks
from tests.helpers.huggingface_models import build_small_model, make_checkpoint_state
from tests.helpers.model_samples import make_full_weight
from tests.helpers.small_corpora import make_tokenizer

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 48}
LAYERS = {
    "gpt2": {"num_layers": 4},
    "t5": {"num_layers": 4, "dec_layers": 2, "activation": "relu"},
    "llama": {"num_layers": 4, "num_query_groups": 2},
    "mpt": {"num_layers": 4},
}


def save_model(run_dir: Path, family: str, *, num_ranks: int = 1, **overrides: Any) -> Config:
    """Save a model whose word embeddings are far apart, with its tokenizer; return its configuration."""
    run_dir.mkdir(parents=True, exist_ok=True)
    vocab_size = make_tokenizer(run_dir).vocab_size + (100 if family == "t5" else 0)
    settings = {
        **SMALL,
        **LAYERS[family],
        "vocab_size": vocab_size,
        "tokenizer_path": str(run_dir / "t.json"),
        **overrides,
    }
    config = config_from_values(settings, family=family)
    if num_ranks == 1:
        _save_rank(0, run_dir, config, 1)
    else:
        run_ranks(num_ranks, _save_rank, run_dir, config, num_ranks)
    return config


def _save_rank(rank: int, run_dir: Path, config: Config, num_ranks: int) -> None:
    world: Group = SINGLE if num_ranks == 1 else world_group(rank, num_ranks)
    records = []
    for name, parameter in named_parameters(build_small_model(config, world)):
        shard = shard_of(parameter)
        local_weight = parameter.data.new_zeros(parameter.shape)
        shard.unpadded(local_weight).copy_(shard.narrow(make_full_weight(name, shard.global_shape)))
        records.append(TensorRecord(f"weights/{name}", local_weight, shard, shard.is_partitioned or rank == 0))
    save(run_dir / "checkpoints", 7, records, make_checkpoint_state(config, num_ranks), world)
