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

VOCAB = 101  # a prime: padded for every tensor size
COMMON = (
    f"--hidden-size 32 --num-attention-heads 4 --vocab-size {VOCAB} --attention-dropout 0 --hidden-dropout 0 "
    "--data-path none --device cpu --train-iters 20 --lr 1e-3 --batch-size 2 --gas 4 --keep-last 1000"
)
SIZES = {
    pretrain_gpt2: f"--num-layers 4 --max-position-embeddings 16 --hidden-bias --seq-length 16 {COMMON}",
    pretrain_bert: f"--num-layers 4 --seq-length 16 {COMMON}",
    pretrain_llama: f"--num-layers 4 --seq-length 16 {COMMON} --num-attention-heads 8 --num-query-groups 4",
    pretrain_mpt: f"--num-layers 4 --seq-length 16 {COMMON}",
    pretrain_t5: f"--enc-layers 2 --dec-layers 3 --enc-seq-length 24 --vocab-extra-ids 8 {COMMON}",
}
PROGRESS = TrainProgress(step=7, updates=6, samples_consumed=168)

Parts = dict[str, tuple[Shard, torch.Tensor]]
"""What a rank holds of each tensor, without padding."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the grid, and what else may change between a save and a load."""

    tensor: int
    pipe: int
    data: int
    zero: int = 0
    dtype: str = "fp32"
    offload: str = ""
    context: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipe * self.data * self.context

    def flags(self, script: ModuleType) -> list[str]:
        cut = f"--model-parallel-size {self.tensor} --pipe-parallel-size {self.pipe} --zero-stage {self.zero} "
        cut += f"{self.offload} --context-parallel-size {self.context}"
        return f"{SIZES[script]} {cut} --fp32".split()

    def __str__(self) -> str:
        axes = f"{self.tensor}-{self.pipe}-{self.data}-{self.context}"
        return f"{axes}-zero{self.zero}{self.offload.replace(' ', '')}-{self.dtype}"


@dataclass
class Rank:
    """One rank of a layout: its part of the model and of the optimizer's state."""

    config: Config
    here: world.World
    module: torch.nn.Module
    optimizer: MixedPrecisionOptimizer

    @classmethod
    def of(cls, layout: Layout, script: ModuleType) -> Rank:
        """Build what this process is in ``layout``. Collective."""
        family = script.__name__.rpartition("pretrain_")[2]
        argv, defaults = layout.flags(script), getattr(script, "DEFAULTS", None)
        config = parse(argv, world_size=layout.num_ranks, family=family, defaults=defaults).with_vocab(VOCAB)
        here = initialize.start(config)
        # only now: parse refuses fp16 on a CPU, since its arithmetic is slow there; there is none here
        config = replace(config, precision=replace(config.precision, dtype=layout.dtype))
        streams = make_streams(config, here)
        global_vars.set_current(config, mock_tokenizer(config), streams)
        module, optimizer = build_weights(config, here, streams, script.model_provider)
        optimizer.store.shard_weights(module)
        make_moments(optimizer)
        return cls(config, here, module, optimizer)

    def fill(self, seed: int) -> None:
        """Take the state that goes by the name of ``seed``. Collective."""
        for record in records_of(self.module, self.optimizer):
            shard = record.shard
            shard.unpadded(record.tensor).copy_(shard.cut(whole(record.name, shard.global_shape, seed)))
        self.optimizer.copy_main_params_to_parameters()
        set_optimizer_steps(self.optimizer, seed)

    def save(self, folder: Path) -> None:
        """Write a checkpoint as a run does. Collective."""
        save_state(folder, PROGRESS, fingerprint="data", **self._parts())

    def load(self, folder: Path) -> None:
        """Take up the checkpoint in ``folder`` as a run does. Collective."""
        progress = load_state(folder, fingerprint="data", **self._parts())
        assert progress == PROGRESS

    def parts(self) -> Parts:
        """Return copies of masters, moments and, under ``model/``, the parameters that the model computes with."""
        held = parts_of(self.module, self.optimizer)
        for name, parameter in named_parameters(self.module):
            kept = self.optimizer.store.persistent_storage(parameter)
            shard = shard_of(parameter if kept is parameter else self.optimizer.main_param_of(parameter))
            held[f"model/{name}"] = (shard, shard.unpadded(kept.detach()).clone())
        return held

    def _parts(self) -> dict[str, Any]:
        return {"config": self.config, "module": self.module, "optimizer": self.optimizer, "world": self.here}


def records_of(module: torch.nn.Module, optimizer: MixedPrecisionOptimizer) -> Iterator[TensorRecord]:
    """Yield masters and moments."""
    yield from weight_records(module, optimizer)
    yield from optimizer_records(module, optimizer)


def parts_of(module: torch.nn.Module, optimizer: MixedPrecisionOptimizer) -> Parts:
    """Return copies of masters and moments."""
    held = records_of(module, optimizer)
    return {record.name: (record.shard, record.shard.unpadded(record.tensor).clone()) for record in held}


def keep_parts(folder: Path) -> Callable[[int], None]:
    """Return a plant: each rank of a run keeps in ``folder`` what it holds at a save and, later, right after a load."""

    def keep(name: str, module: torch.nn.Module, optimizer: MixedPrecisionOptimizer) -> None:
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(pickle.dumps(parts_of(module, optimizer)))

    def plant(rank: int) -> None:
        capture, load = checkpointer.capture, resume.restore

        def capture_and_keep(*args: Any, **given: Any) -> Any:
            keep(f"saved-{rank}", given["module"], given["optimizer"])
            return capture(*args, **given)

        def load_and_keep(*args: Any, **given: Any) -> Any:
            progress = load(*args, **given)
            keep(f"loaded-{rank}", given["module"], given["optimizer"])
            return progress

        checkpointer.capture, resume.restore = capture_and_keep, load_and_keep

    return plant


def kept(folder: Path, what: str) -> dict[str, torch.Tensor]:
    """Return what the ranks of a run kept in ``folder``, gathered; ``what`` is "saved" or "loaded"."""
    return gather([pickle.loads(path.read_bytes()) for path in sorted(folder.glob(f"{what}-*"))])


def whole(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return the whole tensor ``name`` of the state ``seed``, in 32 bits."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed))


def gather(ranks: Sequence[Parts]) -> dict[str, torch.Tensor]:
    """Return the whole tensors, put together from what all ranks hold, copies compared bit for bit.

    Raises:
        AssertionError: two ranks hold different bits of the same part, or nobody holds a part.
    """
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for parts in ranks:
        for name, (shard, part) in parts.items():
            value, is_there = found.setdefault(
                name, (part.new_zeros(shard.global_shape), torch.zeros(shard.global_shape, dtype=torch.bool))
            )
            seen = shard.cut(is_there)
            assert torch.equal(shard.cut(value)[seen], part[seen]), f"copies of {name} differ"
            shard.cut(value).copy_(part)
            seen.fill_(True)
    assert all(is_there.all() for _, is_there in found.values())
    return {name: value for name, (value, _) in found.items()}


def assert_is_state(found: Mapping[str, torch.Tensor], seed: int, dtype: str) -> None:
    """Every tensor is, bit for bit, that of the state ``seed``; parameters are rounded to ``dtype``."""
    for name, value in found.items():
        if name.startswith("model/"):
            wanted = whole(name.replace("model/", "weights/"), value.shape, seed).to(device.DTYPES[dtype])
        else:
            wanted = whole(name, value.shape, seed)
        assert value.dtype == wanted.dtype and torch.equal(value, wanted), name


def _save(rank: int, layout: Layout, script: ModuleType, root: Path, seed: int) -> None:
    own = Rank.of(layout, script)
    own.fill(seed)
    own.save(root / str(layout))


def _load(rank: int, layout: Layout, script: ModuleType, folders: Sequence[Path]) -> list[Parts]:
    own, found = Rank.of(layout, script), []
    for folder in folders:
        own.fill(99)
        own.load(folder)
        found.append(own.parts())
    return found


def save_by(layout: Layout, script: ModuleType, root: Path, seed: int) -> Path:
    """Let the ranks of ``layout`` save the state ``seed``; return the run folder."""
    run_ranks(layout.num_ranks, _save, layout, script, root, seed)
    return root / str(layout)


def load_by(layout: Layout, script: ModuleType, folders: Sequence[Path]) -> list[dict[str, torch.Tensor]]:
    """Let the ranks of ``layout`` load each of ``folders``; return what they then hold, gathered."""
    ranks = run_ranks(layout.num_ranks, _load, layout, script, folders, deadline_s=120.0)
    return [gather([found[place] for found in ranks]) for place in range(len(folders))]
