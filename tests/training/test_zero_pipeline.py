"""Bytes and messages of ZeRO 2 and 3 in pipelines and with distributed experts: counted ones equal the formulas."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pretrain_gpt2
from megatron.checkpoint import named_parameters
from megatron.config import Config, parse
from megatron.costs.memory import BUCKET_BYTES
from megatron.costs.replica_messages import Messages, UnitWeights, bucket_sizes, chunk_weights, messages_per_step
from megatron.data.mock_dataset import MockTokens
from megatron.models import registry
from megatron.mpu.groups import Group
from megatron.optim.zero import stage3
from megatron.optim.zero.partition import VECTOR
from megatron.torch_compat import name_of
from megatron.training import global_vars, initialize
from megatron.training.data import RunData
from megatron.training.estimates import stage_memory
from megatron.training.mock_data import mock_tokenizer
from megatron.training.setup import build_engine, make_streams
from megatron.training.trainer import Trainer
from tds import gradients
from tds.gradients import is_reduced_by_optimizer
from tds.partition import chunks_on
from tests.helpers.harness import run_ranks
from tests.training.test_zero_bytes import count_new_bytes, record_gathered_bytes

VOCAB = 128
MICRO_BATCHES = 4
BASE_FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --batch-size "
    f"1 --gas {MICRO_BATCHES} --vocab-size {VOCAB} --disable-bias-linear --data-path none --device cpu --bf16 "
    "--train-iters 4 --attention-dropout 0 --hidden-dropout 0 --normalization RMSNorm"
)
"""Sizes whose shards are full vectors of 16 elements on 2 replicas, so that the formulas hold to the byte."""
PIPE, CHUNKS = "--pipe-parallel-size 2", "--pipe-parallel-size 2 --pipeline-chunks 2"
UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 64 --expert-model-parallel-size 2 --moe-layer-freq [0,1,1,1] "
    "--moe-router-pre-softmax"
)
QUICK = [(f"{PIPE} --zero-stage 3", 4), (f"{PIPE} {EXPERTS} --zero-stage 2", 4)]
"""Flags, and the number of ranks. On 4 ranks in two stages, no two ranks have the same experts."""
SLOW = [
    *((case, 4) for case in (
        f"{CHUNKS} {UNTIED} --zero-stage 3", f"{CHUNKS} --zero-stage 2",
        f"{PIPE} --pipeline-schedule zb-h1 {UNTIED} --zero-stage 3", f"{PIPE} --pipeline-schedule zb-v --zero-stage 2",
        f"{PIPE} --pipeline-schedule zb-v --zero-stage 3", f"{PIPE} --zero-stage 3 --stage3-prefetch-bucket-size 0",
        f"{PIPE} --mtp-num-layers 2 --zero-stage 3", f"{PIPE} --mtp-num-layers 2 {UNTIED} --zero-stage 3",
        f"{PIPE} --zero-stage 3 --offload-parameters", f"{PIPE} {UNTIED} --zero-stage 1", f"{EXPERTS} --zero-stage 2",
        f"{EXPERTS} --zero-stage 3",
    )),
    *((f"{PIPE} {EXPERTS} --zero-stage {stage}", 8) for stage in (2, 3)),
]  # fmt: skip


class Counted(NamedTuple):
    """Counts of one rank, and the values of the formulas."""

    stored: dict[str, int]
    expected: dict[str, int]
    messages: dict[str, Messages]
    expected_messages: dict[str, Messages]
    planned_messages: Messages


@dataclass
class MessageCounter:
    """Counts the collectives over the replicas while it is active."""

    groups: dict[str, Group]
    is_active: bool = False

    def __post_init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        for name, function in (("all_reduce", self.reduced), (name_of("all_gather_single"), self.gathered)):
            setattr(dist, name, self._counting(getattr(dist, name), function))

    def reduced(self, group: Group, tensor: torch.Tensor) -> tuple[str, float] | None:
        is_gradient = tensor.dtype == torch.float32 and tensor.numel() >= VECTOR
        return ("reduced", 2 * tensor.nbytes * (group.size - 1) / group.size) if is_gradient else None

    def gathered(self, group: Group, full: torch.Tensor) -> tuple[str, float] | None:
        if full.dtype != torch.bfloat16:  # hashes of the order of the gathers
            return None
        return "gathered", full.nbytes * (group.size - 1) / group.size

    def _counting(self, original: Any, classify: Any) -> Any:
        def count(tensor: torch.Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
            for name, replicas in self.groups.items():
                result = classify(replicas, tensor) if self.is_active and group is replicas.handle else None
                if result is not None:
                    operation, num_bytes = result
                    self.counts[f"{name} {operation}"] += 1
                    self.bytes[f"{name} {operation}"] += num_bytes
            return original(tensor, *args, group=group, **options)

        return count

    def messages(self, name: str, note_bytes: float = 0.0) -> Messages:
        """Return the messages over one group, without the notes that gathers carry."""
        operations = [f"{name} {operation}" for operation in ("reduced", "gathered")]
        total_bytes = sum(self.bytes[operation] for operation in operations)
        return Messages(sum(self.counts[operation] for operation in operations), total_bytes - note_bytes)


def count_case(rank: int, case: str, world_size: int) -> Counted:
    """Train two steps; count the bytes that are stored, and the messages of the second step."""
    num_notes: list[int] = []
    stage3.Unit.start = count_notes(stage3.Unit.start, num_notes)  # type: ignore[method-assign]
    config = parse([*BASE_FLAGS.split(), *case.split()], world_size=world_size).with_vocab(VOCAB)
    world = initialize.start(config)
    streams = make_streams(config, world)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, world, streams, pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
    optimizer, grid = engine.optimizer, world.grid
    groups = {"all": grid.data_context}
    if config.model.num_experts and grid.expert_data.size > 1:
        groups["experts"] = grid.expert_data
    counter = MessageCounter(groups)
    gathered_bytes = record_gathered_bytes(optimizer)
    gradient_bytes: list[int] = []
    update = optimizer.update_main_params

    def record_gradients() -> None:
        gradient_bytes.append(count_new_bytes([gradient for _, gradient in optimizer.gradients()], set()))
        update()

    optimizer.update_main_params = record_gradients
    data = MockTokens(VOCAB, 16, seed=7)
    trainer = Trainer(config, world, engine, RunData({"train": data} if world.reads_data else {}, None), Path(), [])
    with trainer.open_batches():
        trainer.train_step()
        num_notes.clear()
        counter.is_active = True
        trainer.train_step()
        counter.is_active = False
    parameters = [parameter for _, parameter in named_parameters(engine.module)]
    seen: set[int] = set()
    weight_bytes = count_new_bytes(map(optimizer.store.persistent_storage, parameters), seen)
    states = [v for state in optimizer.inner.state.values() for key, v in state.items() if key != "step"]
    settings = config.optimizer
    stored = {
        "weights": 0 if settings.offload_parameters else weight_bytes,
        "gradients": gradient_bytes[-1],
        "optimizer": count_new_bytes([*map(optimizer.main_param_of, parameters), *states], seen),
        "gathered": max(gathered_bytes, default=0),
        "host": weight_bytes * settings.offload_parameters,
    }
    bounds = getattr(engine.module, "parts", [0, len(registry.costs_of(config).unit_names)])
    memory = stage_memory(config, grid.topology, bounds, "bf16")[grid.pipe.rank]
    note_bytes = len(num_notes) * VECTOR * 2 * (grid.data_context.size - 1)
    return Counted(
        stored,
        {name: getattr(memory, name) for name in stored},
        {name: counter.messages(name, note_bytes if name == "all" else 0) for name in groups},
        {name: expected_messages(config, engine.module, name, group) for name, group in groups.items()},
        planned_messages(config, engine.module, grid),
    )


def count_notes(original: Any, num_notes: list[int]) -> Any:
    """Wrap ``Unit.start`` to add an item to ``num_notes`` for each note that gathers carry, in addition to weights."""

    def start(unit: Any, note: Any = ()) -> Any:
        num_notes.append(len(note))
        return original(unit, note)

    return start


def expected_messages(config: Config, module: Any, name: str, group: Group) -> Messages:
    """Return the formula's messages for the weights that the ranks of ``group`` replicate."""

    def is_included(parameter: nn.Parameter) -> bool:
        return is_reduced_by_optimizer(parameter) == (name == "experts")

    chunks = []
    for chunk in range(getattr(module, "chunks", 1)):
        units = []
        for layer in unit_modules(module, chunk):
            numels = tuple(p.numel() for p in reversed(list(layer.parameters())) if is_included(p))
            is_first = chunk == 0 and getattr(module, "stage_id", 0) == 0
            is_lookup = hasattr(layer, "word") and (is_first or config.model.untie_embeddings)
            units.append(UnitWeights(numels, 1 if is_lookup else 2))
        chunks.append(units)
    return messages_per_step(
        chunks,
        stage=config.optimizer.zero_stage,
        replicas=group.size,
        num_micro_batches=MICRO_BATCHES,
        width=2,
        scatters=False,
        numels=[p.numel() for p in module.parameters() if is_included(p)],
    )


def planned_messages(config: Config, module: Any, grid: Any) -> Messages:
    """Return the messages over all replicas that the planner derives from the sizes of the model, without experts."""
    costs, stages = registry.costs_of(config), grid.pipe.size
    bounds = getattr(module, "parts", [0, costs.num_units])
    ranges = chunks_on(bounds, stages, grid.pipe.rank, config.parallel.placement)
    return messages_per_step(
        [chunk_weights(costs, start, stop, has_pipeline=stages > 1, stage_ranges=ranges) for start, stop in ranges],
        stage=config.optimizer.zero_stage,
        replicas=grid.data_context.size,
        num_micro_batches=MICRO_BATCHES,
        width=2,
        scatters=False,
    )


def unit_modules(module: Any, chunk: int) -> list[nn.Module]:
    """List the modules whose weights are gathered together, last layer first."""
    if not hasattr(module, "layers_of"):
        return [module]
    functions = [(layer, *getattr(layer, "args", ())) for layer in reversed(module.layers_of(chunk))]
    return list(dict.fromkeys(value for values in functions for value in values if isinstance(value, nn.Module)))


def check_case(case: str, world_size: int) -> None:
    for rank, counted in enumerate(run_ranks(world_size, count_case, case, world_size, deadline_s=100.0)):
        assert counted.stored == counted.expected, (rank, case)
        if "--pipe" in case:
            assert counted.messages == counted.expected_messages, (rank, case)
            assert counted.messages["all"] == counted.planned_messages, (rank, case)


@pytest.mark.parametrize(
    ("case", "world_size"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_counted_bytes_and_messages_equal_formulas(case: str, world_size: int) -> None:
    check_case(case, world_size)


def test_buckets_equal_those_of_gradients() -> None:
    assert BUCKET_BYTES == gradients.BUCKET_BYTES
    numels = [5, 3, 9, 0, 12, 1, 1, 4]
    tensors = [torch.empty(numel) for numel in numels]
    for limit in (1, 4, 10, 100):
        buckets = gradients.make_buckets(tensors, torch.Tensor.numel, limit=limit)
        assert bucket_sizes(numels, 4, limit) == [sum(t.numel() for t in bucket) for bucket in buckets]
