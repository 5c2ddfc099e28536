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
from tests.helpers.alive import Alive
from tests.helpers.harness import run_ranks
from tests.helpers.saved_states import save_state

VOCAB, H = 2048, 64
LINE = (
    f"--num-layers 8 --hidden-size {H} --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    f"--batch-size 1 --gas 1 --vocab-size {VOCAB} --hidden-bias --data-path none --device cpu"
)
AWAY = "--zero-stage 3 --offload-optimizer --offload-parameters"
CASES = ("--fp32 --zero-stage 3", f"--bf16 {AWAY}", "--fp32 --zero-stage 2")
ROWS = 128
BLOCKS = 2 * ROWS * H * 4
"""Bytes of the rows that are drawn at a time, and of the same times their deviation."""


def started(case: str) -> tuple[Any, Any, Any]:
    """Return configuration, world and streams of this rank. Collective."""
    config = parse([*LINE.split(), *case.split()], world_size=2).with_vocab(VOCAB)
    here = initialize.start(config)
    streams = make_streams(config, here)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    return config, here, streams


def build_and_load(rank: int, folder: str) -> list[dict[str, int]]:
    """Return, for each case, the most bytes while the engine was built, those of a load, and what they may be."""
    parameters.ROWS_PER_BLOCK = ROWS
    found = []
    for case in CASES:
        config, here, streams = started(case)
        with Alive("cpu") as alive:
            engine = build_engine(config, here, streams, pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
            counted = {"built": alive.peak, "kept": alive.now()}
        module, optimizer = engine.module, engine.optimizer
        state = {"config": config, "module": module, "optimizer": optimizer, "world": here}
        if not found:
            save_state(folder, TrainProgress(), fingerprint=None, **state)
        checkpoint = open_source(folder, here)
        with Alive("cpu") as alive:
            restore(checkpoint, **state, options=RestoreOptions(False, False, False, False))
            counted["loaded"] = alive.peak
        weights = [parameter for _, parameter in named_parameters(module)]
        held = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for p in weights
            for t in (optimizer.store.persistent_storage(p), optimizer.main_param_of(p))
        }
        units = optimizer.store.units.units if optimizer.store.gathers_weights else []
        counted |= {
            "parts": sum(held.values()),
            "whole": 4 * sum(p.numel() for p in weights),
            "unit": 4 * max((sum(p.numel() for p in unit.parameters) for unit in units), default=0),
        }
        found.append(counted)
    return found


def test_no_rank_ever_holds_more_than_its_parts_and_the_largest_unit(tmp_path: Any) -> None:
    for cases in run_ranks(2, build_and_load, tmp_path):
        *cut, whole = cases
        for case, found in zip(CASES, cut, strict=False):
            assert found["built"] <= found["parts"] + found["unit"] + BLOCKS, case
            assert found["built"] < 0.6 * (found["parts"] + found["whole"]), "of cutting the whole model at its end"
            assert found["kept"] <= found["parts"] + 2**16 and found["loaded"] <= found["parts"] + found["unit"], case
        assert whole["built"] >= whole["whole"], "the other stages hold it: so it is counted"


class Own(nn.Module):
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


def own_weights(rank: int, case: str) -> dict[str, torch.Tensor]:
    """Return each weight of the user's model as this replica's passes would have it. Collective."""
    config, here, streams = started(case)
    module, optimizer = build_weights(config, here, streams, lambda: Own(rank))
    with zero3_init.not_sent(module, arrives=zero3_init.is_asked_for(config, here)):
        for parameter in module.parameters():
            if not hasattr(parameter, "ds_optim_param"):
                torch.distributed.broadcast(parameter.data, 0)  # as DeepSpeed does
    assert not any(hasattr(parameter, "ds_optim_param") for parameter in module.parameters())
    optimizer.store.shard_weights(module)
    for unit in optimizer.store.units.units if optimizer.store.gathers_weights else ():
        unit.gather()
    assert module.named.weight is module.again.weight
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("size", [3, pytest.param(2**20, marks=pytest.mark.slow)])
def test_every_weight_is_that_of_the_other_stages(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero3_init, "CHUNK_BYTES", size)
    plain, cut = (run_ranks(2, own_weights, f"--fp32 --zero-stage {stage}") for stage in (0, 3))
    for wanted, found in zip(plain, cut, strict=True):
        assert wanted.keys() == found.keys()
        assert [name for name, tensor in wanted.items() if not found[name].equal(tensor)] == []
    assert plain[0]["drawn"].equal(plain[1]["drawn"]) and plain[0]["frozen.weight"].abs().max() > 0


def test_an_unset_weight_has_no_memory_until_it_is_filled() -> None:
    with init_empty_weights():
        layer = ColumnParallelLinear(24, 16)
    assert is_uninitialized(layer.weight) and layer.weight.untyped_storage().nbytes() == 4
    assert layer.weight.shape == (16, 24) and not layer.weight.any() and layer.bias.untyped_storage().nbytes() == 64
    materialize(layer.weight)
    filled = layer.weight.data_ptr()
    materialize(layer.weight)
    assert layer.weight.data_ptr() == filled and layer.weight.untyped_storage().nbytes() == 4 * 16 * 24
    assert ColumnParallelLinear(24, 16).weight.untyped_storage().nbytes() == 4 * 16 * 24, "outside of it all is as ever"


def test_writing_to_a_weight_that_is_filled_later_is_refused() -> None:
    def provider() -> nn.Module:
        layer = ColumnParallelLinear(24, 16)
        nn.init.normal_(layer.weight)
        return layer

    with pytest.raises(ConfigError, match="--zero-stage 3 .* model_provider that writes to one.*of your own"):
        zero3_init.build(provider, arrives=True)
    zero3_init.build(provider, arrives=False)
    with pytest.raises(RuntimeError, match="planted"):
        zero3_init.build(lambda: (_ for _ in ()).throw(RuntimeError("planted")), arrives=True)
