"""A state that is known by the names of its tensors, saved in one layout and gathered from another."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import pretrain_gpt2
import pretrain_t5
from examples.bert import pretrain_bert
from examples.llama import pretrain_llama
from examples.mpt import pretrain_mpt
from megatron import device
from megatron.checkpoint import TensorRecord, named_parameters
from megatron.config import Config, parse
from megatron.mpu.shard import Shard, shard_of
from megatron.optim import MixedPrecisionOptimizer
from megatron.training import global_vars, initialize, resume, world
from megatron.training.callbacks import checkpointer
from megatron.training.mock_data import mock_tokenizer
from megatron.training.setup import build_weights, make_streams
from megatron.training.state_records import make_moments, optimizer_records, set_optimizer_steps, weight_records
from megatron.training.train_progress import TrainProgress
from tests.helpers.harness import run_ranks
from tests.helpers.saved_states import load_state, save_state

VOCAB_SIZE = 101  # a prime: padded for every tensor size
COMMON_FLAGS = (
    f"--hidden-size 32 --num-attention-heads 4 --vocab-size {VOCAB_SIZE} --attention-dropout 0 --hidden-dropout 0 "
    "--data-path none --device cpu --train-iters 20 --lr 1e-3 --batch-size 2 --gas 4 --keep-last 1000"
)
MODEL_FLAGS = {
    pretrain_gpt2: f"--num-layers 4 --max-position-embeddings 16 --hidden-bias --seq-length 16 {COMMON_FLAGS}",
    pretrain_bert: f"--num-layers 4 --seq-length 16 {COMMON_FLAGS}",
    pretrain_llama: f"--num-layers 4 --seq-length 16 {COMMON_FLAGS} --num-attention-heads 8 --num-query-groups 4",
    pretrain_mpt: f"--num-layers 4 --seq-length 16 {COMMON_FLAGS}",
    pretrain_t5: f"--enc-layers 2 --dec-layers 3 --enc-seq-length 24 --vocab-extra-ids 8 {COMMON_FLAGS}",
}
PROGRESS = TrainProgress(step=7, updates=6, samples_consumed=168)

ShardedTensors = dict[str, tuple[Shard, torch.Tensor]]
"""What a rank holds of each tensor, without padding."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the grid, and what else may change between a save and a load."""

    tensor: int
    pipe: int
    data: int
    zero_stage: int = 0
    dtype: str = "fp32"
    offload_flag: str = ""
    context: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipe * self.data * self.context

    def make_flags(self, script: ModuleType) -> list[str]:
        layout_flags = (
            f"--model-parallel-size {self.tensor} --pipe-parallel-size {self.pipe} --zero-stage {self.zero_stage} "
        )
        layout_flags += f"{self.offload_flag} --context-parallel-size {self.context}"
        return f"{MODEL_FLAGS[script]} {layout_flags} --fp32".split()

    def __str__(self) -> str:
        axes = f"{self.tensor}-{self.pipe}-{self.data}-{self.context}"
        return f"{axes}-zero{self.zero_stage}{self.offload_flag.replace(' ', '')}-{self.dtype}"


@dataclass
class RankState:
    """One rank of a layout: its part of the model and of the optimizer's state."""

    config: Config
    rank_world: world.World
    module: torch.nn.Module
    optimizer: MixedPrecisionOptimizer

    @classmethod
    def build(cls, layout: Layout, script: ModuleType) -> RankState:
        """Build what this process is in ``layout``. Collective."""
        family = script.__name__.rpartition("pretrain_")[2]
        argv, defaults = layout.make_flags(script), getattr(script, "DEFAULTS", None)
        config = parse(argv, world_size=layout.num_ranks, family=family, defaults=defaults).with_vocab(VOCAB_SIZE)
        rank_world = initialize.start(config)
        # only now: parse refuses fp16 on a CPU, since its arithmetic is slow there; there is none here
        config = replace(config, precision=replace(config.precision, dtype=layout.dtype))
        streams = make_streams(config, rank_world)
        global_vars.set_current(config, mock_tokenizer(config), streams)
        module, optimizer = build_weights(config, rank_world, streams, script.model_provider)
        optimizer.store.shard_weights(module)
        make_moments(optimizer)
        return cls(config, rank_world, module, optimizer)

    def fill(self, seed: int) -> None:
        """Take the state that goes by the name of ``seed``. Collective."""
        for record in iter_records(self.module, self.optimizer):
            shard = record.shard
            shard.unpadded(record.tensor).copy_(shard.narrow(make_full_tensor(record.name, shard.global_shape, seed)))
        self.optimizer.copy_main_params_to_parameters()
        set_optimizer_steps(self.optimizer, seed)

    def save(self, folder: Path) -> None:
        """Write a checkpoint as a run does. Collective."""
        save_state(folder, PROGRESS, fingerprint="data", **self._components())

    def load(self, folder: Path) -> None:
        """Take up the checkpoint in ``folder`` as a run does. Collective."""
        progress = load_state(folder, fingerprint="data", **self._components())
        assert progress == PROGRESS

    def copy_all_shards(self) -> ShardedTensors:
        """Return copies of masters, moments and, under ``model/``, the parameters that the model computes with."""
        shards = copy_shards(self.module, self.optimizer)
        for name, parameter in named_parameters(self.module):
            stored = self.optimizer.store.persistent_storage(parameter)
            shard = shard_of(parameter if stored is parameter else self.optimizer.main_param_of(parameter))
            shards[f"model/{name}"] = (shard, shard.unpadded(stored.detach()).clone())
        return shards

    def _components(self) -> dict[str, Any]:
        return {"config": self.config, "module": self.module, "optimizer": self.optimizer, "world": self.rank_world}


def iter_records(module: torch.nn.Module, optimizer: MixedPrecisionOptimizer) -> Iterator[TensorRecord]:
    """Yield masters and moments."""
    yield from weight_records(module, optimizer)
    yield from optimizer_records(module, optimizer)


def copy_shards(module: torch.nn.Module, optimizer: MixedPrecisionOptimizer) -> ShardedTensors:
    """Return copies of masters and moments."""
    records = iter_records(module, optimizer)
    return {record.name: (record.shard, record.shard.unpadded(record.tensor).clone()) for record in records}


def make_shard_recorder(folder: Path) -> Callable[[int], None]:
    """Return a plant: each rank of a run keeps in ``folder`` what it holds at a save and, later, right after a load."""

    def write_shards(name: str, module: torch.nn.Module, optimizer: MixedPrecisionOptimizer) -> None:
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(pickle.dumps(copy_shards(module, optimizer)))

    def install(rank: int) -> None:
        original_capture, original_restore = checkpointer.capture, resume.restore

        def capture_and_record(*args: Any, **kwargs: Any) -> Any:
            write_shards(f"saved-{rank}", kwargs["module"], kwargs["optimizer"])
            return original_capture(*args, **kwargs)

        def restore_and_record(*args: Any, **kwargs: Any) -> Any:
            progress = original_restore(*args, **kwargs)
            write_shards(f"loaded-{rank}", kwargs["module"], kwargs["optimizer"])
            return progress

        checkpointer.capture, resume.restore = capture_and_record, restore_and_record

    return install


def gather_recorded(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Return what the ranks of a run kept in ``folder``, gathered; ``prefix`` is "saved" or "loaded"."""
    return gather([pickle.loads(path.read_bytes()) for path in sorted(folder.glob(f"{prefix}-*"))])


def make_full_tensor(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return the whole tensor ``name`` of the state ``seed``, in 32 bits."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed))


def gather(rank_shards: Sequence[ShardedTensors]) -> dict[str, torch.Tensor]:
    """Return the whole tensors, put together from what all ranks hold, copies compared bit for bit.

    Raises:
        AssertionError: two ranks hold different bits of the same part, or nobody holds a part.
    """
    full_tensors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for shards in rank_shards:
        for name, (shard, local_value) in shards.items():
            value, filled_mask = full_tensors.setdefault(
                name, (local_value.new_zeros(shard.global_shape), torch.zeros(shard.global_shape, dtype=torch.bool))
            )
            shard_mask = shard.narrow(filled_mask)
            assert torch.equal(shard.narrow(value)[shard_mask], local_value[shard_mask]), f"copies of {name} differ"
            shard.narrow(value).copy_(local_value)
            shard_mask.fill_(True)
    assert all(filled_mask.all() for _, filled_mask in full_tensors.values())
    return {name: value for name, (value, _) in full_tensors.items()}


def assert_equals_state(tensors: Mapping[str, torch.Tensor], seed: int, dtype: str) -> None:
    """Every tensor is, bit for bit, that of the state ``seed``; parameters are rounded to ``dtype``."""
    for name, value in tensors.items():
        if name.startswith("model/"):
            expected = make_full_tensor(name.replace("model/", "weights/"), value.shape, seed).to(device.DTYPES[dtype])
        else:
            expected = make_full_tensor(name, value.shape, seed)
        assert value.dtype == expected.dtype and torch.equal(value, expected), name


def _save_rank(rank: int, layout: Layout, script: ModuleType, root: Path, seed: int) -> None:
    rank_state = RankState.build(layout, script)
    rank_state.fill(seed)
    rank_state.save(root / str(layout))


def _load_rank(rank: int, layout: Layout, script: ModuleType, folders: Sequence[Path]) -> list[ShardedTensors]:
    rank_state, loaded = RankState.build(layout, script), []
    for folder in folders:
        rank_state.fill(99)
        rank_state.load(folder)
        loaded.append(rank_state.copy_all_shards())
    return loaded


def save_in_layout(layout: Layout, script: ModuleType, root: Path, seed: int) -> Path:
    """Let the ranks of ``layout`` save the state ``seed``; return the run folder."""
    run_ranks(layout.num_ranks, _save_rank, layout, script, root, seed)
    return root / str(layout)


def load_in_layout(layout: Layout, script: ModuleType, folders: Sequence[Path]) -> list[dict[str, torch.Tensor]]:
    """Let the ranks of ``layout`` load each of ``folders``; return what they then hold, gathered."""
    loaded_by_rank = run_ranks(layout.num_ranks, _load_rank, layout, script, folders, deadline_s=120.0)
    return [gather([loaded[folder_idx] for loaded in loaded_by_rank]) for folder_idx in range(len(folders))]
