"""ZeRO 3 from the first weight on: nobody holds the whole model, and every weight is the one of the other stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pretrain_gpt2
from megatron.checkpoint import named_parameters
from megatron.config import parse
from megatron.errors import ConfigError
from megatron.models.common import parameters
from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.shard import init_empty_weights, is_uninitialized, materialize
from megatron.training import global_vars, initialize, zero3_init
from megatron.training.mock_data import mock_tokenizer
from megatron.training.restore_options import RestoreOptions
from megatron.training.resume import open_source, restore
from megatron.training.setup import build_engine, build_weights, make_streams
from megatron.training.train_progress import TrainProgress
from tests.helpers.alive import LiveMemoryTracker
from tests.helpers.harness import run_ranks
from tests.helpers.saved_states import save_state

VOCAB, H = 2048, 64
BASE_ARGS = (
    f"--num-layers 8 --hidden-size {H} --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    f"--batch-size 1 --gas 1 --vocab-size {VOCAB} --hidden-bias --data-path none --device cpu"
)
OFFLOAD_FLAGS = "--zero-stage 3 --offload-optimizer --offload-parameters"
CASES = ("--fp32 --zero-stage 3", f"--bf16 {OFFLOAD_FLAGS}", "--fp32 --zero-stage 2")
BLOCK_ROWS = 128
INIT_BLOCK_BYTES = 2 * BLOCK_ROWS * H * 4
"""Bytes of the rows that are drawn at a time, and of the same times their deviation."""


def start_case(case: str) -> tuple[Any, Any, Any]:
    """Return configuration, world and streams of this rank. Collective."""
    config = parse([*BASE_ARGS.split(), *case.split()], world_size=2).with_vocab(VOCAB)
    world = initialize.start(config)
    streams = make_streams(config, world)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    return config, world, streams


def build_and_load(rank: int, folder: str) -> list[dict[str, int]]:
    """Return, for each case, the most bytes while the engine was built, those of a load, and what they may be."""
    parameters.ROWS_PER_BLOCK = BLOCK_ROWS
    byte_counts = []
    for case in CASES:
        config, world, streams = start_case(case)
        with LiveMemoryTracker("cpu") as tracker:
            engine = build_engine(config, world, streams, pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
            counts = {"built": tracker.peak_bytes, "kept": tracker.live_bytes()}
        module, optimizer = engine.module, engine.optimizer
        state = {"config": config, "module": module, "optimizer": optimizer, "world": world}
        if not byte_counts:
            save_state(folder, TrainProgress(), fingerprint=None, **state)
        checkpoint = open_source(folder, world)
        with LiveMemoryTracker("cpu") as tracker:
            restore(checkpoint, **state, options=RestoreOptions(False, False, False, False))
            counts["loaded"] = tracker.peak_bytes
        weights = [parameter for _, parameter in named_parameters(module)]
        storage_bytes = {
            storage.untyped_storage().data_ptr(): storage.untyped_storage().nbytes()
            for p in weights
            for storage in (optimizer.store.persistent_storage(p), optimizer.main_param_of(p))
        }
        units = optimizer.store.units.units if optimizer.store.gathers_weights else []
        counts |= {
            "parts": sum(storage_bytes.values()),
            "whole": 4 * sum(p.numel() for p in weights),
            "unit": 4 * max((sum(p.numel() for p in unit.parameters) for unit in units), default=0),
        }
        byte_counts.append(counts)
    return byte_counts


def test_zero3_peak_memory_is_bounded_by_shards_and_largest_unit(tmp_path: Any) -> None:
    for counts_per_case in run_ranks(2, build_and_load, tmp_path):
        *zero3_counts, zero2_counts = counts_per_case
        for case, counts in zip(CASES, zero3_counts, strict=False):
            assert counts["built"] <= counts["parts"] + counts["unit"] + INIT_BLOCK_BYTES, case
            assert counts["built"] < 0.6 * (counts["parts"] + counts["whole"]), "of cutting the whole model at its end"
            assert counts["kept"] <= counts["parts"] + 2**16 and counts["loaded"] <= counts["parts"] + counts["unit"], (
                case
            )
        assert zero2_counts["built"] >= zero2_counts["whole"], "the other stages hold it: so it is counted"


class UserModel(nn.Module):
    """A user's model: what its replicas draw differs, one weight is frozen, one is a single number."""

    def __init__(self, replica: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(replica)
        self.drawn = nn.Parameter(torch.randn(40, 24, generator=generator))
        self.number = nn.Parameter(torch.randn((), generator=generator))
        self.frozen = ColumnParallelLinear(24, 16, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.named = ColumnParallelLinear(24, 16)
        self.again = nn.Linear(24, 16)
        self.again.weight = self.named.weight
        self.register_buffer("table", torch.arange(3.0))


def build_user_weights(rank: int, case: str) -> dict[str, torch.Tensor]:
    """Return each weight of the user's model as this replica's passes would have it. Collective."""
    config, world, streams = start_case(case)
    module, optimizer = build_weights(config, world, streams, lambda: UserModel(rank))
    with zero3_init.without_deepspeed_broadcast(module, is_deferred=zero3_init.is_weight_sharded(config, world)):
        for parameter in module.parameters():
            if not hasattr(parameter, "ds_optim_param"):
                torch.distributed.broadcast(parameter.data, 0)  # as DeepSpeed does
    assert not any(hasattr(parameter, "ds_optim_param") for parameter in module.parameters())
    optimizer.store.shard_weights(module)
    for unit in optimizer.store.units.units if optimizer.store.gathers_weights else ():
        unit.gather()
    assert module.named.weight is module.again.weight
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("chunk_bytes", [3, pytest.param(2**20, marks=pytest.mark.slow)])
def test_zero3_weights_equal_zero0_weights(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero3_init, "CHUNK_BYTES", chunk_bytes)
    zero0_weights, zero3_weights = (
        run_ranks(2, build_user_weights, f"--fp32 --zero-stage {stage}") for stage in (0, 3)
    )
    for expected, actual in zip(zero0_weights, zero3_weights, strict=True):
        assert expected.keys() == actual.keys()
        assert [name for name, tensor in expected.items() if not actual[name].equal(tensor)] == []
    assert (
        zero0_weights[0]["drawn"].equal(zero0_weights[1]["drawn"]) and zero0_weights[0]["frozen.weight"].abs().max() > 0
    )


def test_empty_weight_allocates_memory_when_materialized() -> None:
    with init_empty_weights():
        layer = ColumnParallelLinear(24, 16)
    assert is_uninitialized(layer.weight) and layer.weight.untyped_storage().nbytes() == 4
    assert layer.weight.shape == (16, 24) and not layer.weight.any() and layer.bias.untyped_storage().nbytes() == 64
    materialize(layer.weight)
    first_data_ptr = layer.weight.data_ptr()
    materialize(layer.weight)
    assert layer.weight.data_ptr() == first_data_ptr and layer.weight.untyped_storage().nbytes() == 4 * 16 * 24
    assert ColumnParallelLinear(24, 16).weight.untyped_storage().nbytes() == 4 * 16 * 24, "outside of it all is as ever"


def test_model_provider_writing_to_empty_weight_is_rejected() -> None:
    def provider() -> nn.Module:
        layer = ColumnParallelLinear(24, 16)
        nn.init.normal_(layer.weight)
        return layer

    with pytest.raises(ConfigError, match="--zero-stage 3 .* model_provider that writes to one.*your own"):
        zero3_init.build_module(provider, is_deferred=True)
    zero3_init.build_module(provider, is_deferred=False)
    with pytest.raises(RuntimeError, match="planted"):
        zero3_init.build_module(lambda: (_ for _ in ()).throw(RuntimeError("planted")), is_deferred=True)
