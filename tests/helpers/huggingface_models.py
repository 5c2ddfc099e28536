"""Small models and their checkpoints, saved by one rank or by two tensor ranks, for the tests of conversion."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron.arguments import config_from_values
from megatron.checkpoint import TensorRecord, named_parameters, save
from megatron.config import Config
from megatron.models import ParallelContext, registry
from megatron.mpu.groups import Group
from megatron.mpu.shard import shard_of
from megatron.mpu.topology import Topology
from tests.helpers.checkpoint_samples import world_group
from tests.helpers.harness import run_ranks

SMALL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 29, "max_position_embeddings": 12}


def make_family_config(family: str, **values: Any) -> Config:
    return config_from_values({**SMALL, **values}, family=family)


def build_small_model(config: Config, group: Group) -> torch.nn.Module:
    model: torch.nn.Module = registry.build_model(config, ParallelContext(group))
    return model


def random_values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random values that depend only on the name and the number of dimensions, not on the layout."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode()) * 31 + len(shape)))


def make_checkpoint_state(config: Config, tensor: int = 1) -> dict[str, Any]:
    """Return the state in the checkpoint of a run after seven steps of two samples each."""
    return {
        "progress": {"step": 7, "updates": 6, "samples_consumed": 14},
        "scaler": {"scale": 1.0},
        "optimizer": "adam",
        "optimizer_steps": 6,
        "model": config.identity(),
        "config": config.to_dict(),
        "layout": asdict(Topology(pipe=1, data=1, tensor=tensor)),
        "data_fingerprint": "f00",
        "data_order": {"cursors": {"a": 5, "b": 9}},
        "torch": torch.__version__,
    }


def save_model(run_dir: Path, config: Config, *, num_ranks: int = 1, has_moments: bool = False) -> Path:
    """Save the model of ``config`` from ``num_ranks`` tensor ranks; return the checkpoint."""
    if num_ranks == 1:
        return Path(_save_rank(0, run_dir, config, 1, has_moments))
    return Path(run_ranks(num_ranks, _save_rank, run_dir, config, num_ranks, has_moments)[0])


def _save_rank(rank: int, run_dir: Path, config: Config, num_ranks: int, has_moments: bool) -> str:
    world = world_group(rank, num_ranks)
    records = []
    for name, parameter in named_parameters(build_small_model(config, world)):
        shard = shard_of(parameter)
        full_weight = random_values(name, tuple(shard.global_shape))
        parameter.data.fill_(torch.nan)  # padding, which must not be visible to any reader
        shard.unpadded(parameter.data).copy_(shard.narrow(full_weight))
        is_owner = shard.is_partitioned or rank == 0
        for record_prefix in ("weights", "optimizer/exp_avg") if has_moments else ("weights",):
            records.append(TensorRecord(f"{record_prefix}/{name}", parameter.data, shard, is_owner))
    return str(save(run_dir / "checkpoints", 7, records, make_checkpoint_state(config, num_ranks), world))


def save_small_qwen3(folder: Path, vocab_size: int) -> None:
    """Write a Qwen 3 with two layers and random bf16 weights into ``folder``."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
