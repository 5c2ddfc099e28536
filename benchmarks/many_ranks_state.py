"""What a job of thousands of ranks keeps and reads, counted: checkpoints, the order of documents, a step, the planner.

As in ``many_ranks_start``, a function takes a number of ranks (``order``: of documents) and returns figures. Tensors
are on torch's meta device: they have shapes and no values.
"""

from __future__ import annotations

import copy
import functools
import pickle
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.data_start import SEQ_LENGTH, make_corpus, ours
from benchmarks.many_ranks_counting import cpu_seconds, layout_of, lines_run
from benchmarks.many_ranks_start import SECONDS, Figure, Figures
from megatron.arguments import parse
from megatron.checkpoint import dcp_load, dcp_save, folders, metadata, retention, tensor_record, verify
from megatron.checkpoint.metadata import MANIFEST_NAME, FileFacts, Manifest
from megatron.checkpoint.retention import RetentionPolicy
from megatron.checkpoint.shard_file import shard_file_name
from megatron.checkpoint.tensor_record import TensorRecord
from megatron.checkpoint.verify import SEGMENT_BYTES, Segment
from megatron.mpu.shard import Shard, set_shard
from megatron.mpu.topology import Topology
from megatron.optim.zero.partition import partition_of
from megatron.planner.estimate import Planner
from megatron.planner.machine import device
from megatron.planner.search import Search, search
from megatron.training.callbacks.straggler import slowest
from megatron.training.data_agreement import RankData, disagreement
from tds.engine.data_consistency import NOWHERE, DataConsistency

# Checkpoints of a GPT of 40 layers with ZeRO 1, in which each rank has its part of every moment: the most entries.

LAYERS, HIDDEN = 40, 8192
RNG_BYTES = 5056
KEPT = 3
WEIGHTS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "attention.query_key_value.weight": ((3 * HIDDEN, HIDDEN), 0),
    "attention.query_key_value.bias": ((3 * HIDDEN,), 0),
    "attention.dense.weight": ((HIDDEN, HIDDEN), 1),
    "attention.dense.bias": ((HIDDEN,), None),
    "mlp.up.weight": ((4 * HIDDEN, HIDDEN), 0),
    "mlp.up.bias": ((4 * HIDDEN,), 0),
    "mlp.down.weight": ((HIDDEN, 4 * HIDDEN), 1),
    "mlp.down.bias": ((HIDDEN,), None),
    "input_norm.weight": ((HIDDEN,), None),
    "input_norm.bias": ((HIDDEN,), None),
    "post_norm.weight": ((HIDDEN,), None),
    "post_norm.bias": ((HIDDEN,), None),
}
"""Of a layer: shape of the logical tensor, and along which dimension tensor ranks cut it."""
PREFIXES = ("weights", "optimizer/exp_avg", "optimizer/exp_avg_sq")


def records_of(topology: Topology, rank: int) -> list[TensorRecord]:
    """Return what ``rank`` holds of the model, the moments, and its random state."""
    place, found = topology.coordinate(rank), []
    for layer in range(place.pipe * LAYERS // topology.pipe, (place.pipe + 1) * LAYERS // topology.pipe):
        for name, (shape, dim) in WEIGHTS.items():
            shard, tensor = _held(shape, dim, topology, place.tensor, place.data)
            is_owner = dim is not None or place.tensor == 0
            found += [TensorRecord(f"{each}/layers.{layer}.{name}", tensor, shard, is_owner) for each in PREFIXES]
    state = torch.empty(RNG_BYTES, dtype=torch.uint8, device="meta")
    return [*found, TensorRecord(f"rng/cpu/{rank:05d}", state, Shard((RNG_BYTES,)))]


@functools.cache
def _held(
    shape: tuple[int, ...], dim: int | None, topology: Topology, tensor: int, replica: int
) -> tuple[Shard, torch.Tensor]:
    whole, cut = _cut(shape, dim, topology, tensor)
    shard = cut.shard(whole, replica)
    return shard, torch.empty(tensor_record.part_shape(shard), device="meta")


@functools.cache
def _cut(shape: tuple[int, ...], dim: int | None, topology: Topology, tensor: int) -> tuple[Shard, Any]:
    local, whole = list(shape), Shard(shape)
    if dim is not None:
        local[dim] //= topology.tensor
        whole = Shard(shape, dim, tensor * local[dim], local[dim])
    return whole, partition_of(set_shard(torch.nn.Parameter(torch.empty(local, device="meta")), whole), topology.data)


def gathered_plans(topology: Topology) -> list[bytes]:
    """Return the plan of each rank as rank 0 receives it."""
    return [
        pickle.dumps(dcp_save.RecordSavePlanner(functools.partial(records_of, topology, rank)).create_local_plan())
        for rank in range(topology.world_size)
    ]


def saving(ranks: int) -> Figures:
    """Return what rank 0 does for a save beside writing its own file."""
    topology = layout_of(ranks)
    plans, out = gathered_plans(topology), {}
    planner = dcp_save.RecordSavePlanner(list)

    def plan() -> None:
        every, index = planner.create_global_plan([ForkingPickler.loads(one) for one in plans])
        out["index"], out["plans"] = index.planner_data, [pickle.dumps(one) for one in every]

    seconds = cpu_seconds(plan)
    facts = {shard_file_name(rank): FileFacts(0, 0) for rank in range(ranks)}
    content = Manifest(1, 1, {}, facts, out["index"])
    writing = cpu_seconds(lambda: out.update(raw=metadata.manifest_to_bytes(content)))
    return {
        "save: plans that come to rank 0": Figure(ranks * max(map(len, plans)), "bytes"),
        "save: plans that go out": Figure(sum(map(len, out["plans"])), "bytes"),
        "save: planning": Figure(seconds, "s", SECONDS),
        "save: manifest": Figure(len(out["raw"]), "bytes"),
        "save: writing the manifest": Figure(writing, "s", SECONDS),
        "save: files": Figure(ranks, "files"),
        **_opened(topology, out["raw"]),
        **_kept(content, ranks),
    }


def _opened(topology: Topology, raw: bytes) -> Figures:
    """Return what opening takes on rank 0, and planning to load with half the tensor ranks."""
    out: dict[str, Any] = {}

    def parse_manifest() -> None:
        out["content"] = metadata.manifest_from_bytes(raw, Path(MANIFEST_NAME))

    def plan() -> None:
        reader = dcp_load.ShardReader(Path("none"), out["content"])
        planner = dcp_load.RecordLoadPlanner(records_of(other, 0), lambda wanted: None)
        planner.set_up_planner({}, reader.read_metadata())
        out["plan"] = planner.create_local_plan()
        out["reads"] = len(planner.finish_plan(out["plan"]).items)

    other = replace(topology, tensor=topology.tensor // 2, data=topology.data * 2)
    parsing = cpu_seconds(parse_manifest)
    planning = cpu_seconds(plan)
    facts = {shard_file_name(rank): FileFacts(SEGMENT_BYTES, 0) for rank in range(topology.world_size)}
    content = Manifest(1, 1, {}, facts, {})
    shares = [verify._Share({Segment(name, 0, SEGMENT_BYTES): 0}, {}) for name in facts]
    judging = cpu_seconds(lambda: verify._judge(Path("none"), content, shares))
    return {
        "load: reading the manifest": Figure(parsing, "s", SECONDS),
        "load: plans that come to rank 0": Figure(topology.world_size * len(pickle.dumps(out["plan"])), "bytes"),
        "load: planning for another layout": Figure(planning, "s", SECONDS),
        "load: checksums that come to rank 0": Figure(len(shares) * len(pickle.dumps(shares[0])), "bytes"),
        "load: comparing checksums": Figure(judging, "s", SECONDS),
    }


def _kept(content: Manifest, ranks: int) -> Figures:
    """Return what rank 0 does to find the newest of a few checkpoints, and to delete the oldest."""
    index = {name: content.index[name] for name in list(content.index)[:10]}  # the rest is in the row of the manifest
    with tempfile.TemporaryDirectory(prefix="many-ranks-") as name:
        root = Path(name)
        for step in range(KEPT + 1):
            folder = root / f"step-{step:08d}"
            folder.mkdir()
            for file in content.files:
                (folder / file).touch()
            raw = metadata.manifest_to_bytes(replace(content, sequence=step + 1, step=step, index=index))
            (folder / MANIFEST_NAME).write_bytes(raw)
        finding = cpu_seconds(lambda: folders.in_turn(folders.list_checkpoints(root)))
        stats = mock.Mock(side_effect=Path.stat)
        with mock.patch.object(Path, "stat", lambda path, **how: stats(path, **how)):
            pruning = cpu_seconds(lambda: retention.remove_old(folders.list_checkpoints(root), RetentionPolicy(KEPT)))
        assert len(folders.list_checkpoints(root)) == KEPT
    return {
        "finding the newest of four checkpoints": Figure(finding, "s", SECONDS),
        "files looked at to keep three": Figure(stats.call_count, "stats"),
        "pruning to three": Figure(pruning, "s", SECONDS),
    }


# What ranks tell each other of their data, and in a step.


def stepping(ranks: int, micro_batches: int = 8) -> Figures:
    """Return what rank 0 hears and does for a step of a pipeline, a line of the log, and to open the data."""
    topology, chance = layout_of(ranks), random.Random(0)
    own_s = [1 + chance.random() / 10 for _ in range(ranks)]
    row = [NOWHERE, 0, *range(micro_batches)]
    numbers = torch.tensor(row).repeat(ranks, 1)
    numbers[:, 1] = torch.tensor([topology.coordinate(rank).data for rank in range(ranks)])

    def all_gather(whole: torch.Tensor, own: torch.Tensor, group: Any = None) -> None:
        whole.copy_(numbers.view(-1))

    data = DataConsistency(None, stage=0, replica=0, device=torch.device("cpu"), name_of=str, compares=True)
    with (
        mock.patch("torch.distributed.all_gather_into_tensor", all_gather),
        mock.patch("torch.distributed.get_world_size", lambda group=None: ranks),
    ):
        agreeing = cpu_seconds(lambda: data.end(None, list(range(micro_batches)), micro_batches), 3)
        lines = lines_run(lambda: data.end(None, list(range(micro_batches)), micro_batches)) if ranks <= 512 else None
    known = RankData(None, True, "fingerprint", None, {}, {"train": f"fingerprint {'0' * 64} and order 00000000"})
    opened = [copy.deepcopy(known) for _ in range(ranks)]
    found = {
        "step: data of all ranks that come to rank 0": Figure(numbers.numel() * 8, "bytes"),
        "step: comparing them": Figure(agreeing, "s", SECONDS),
        "log line: metrics of all ranks": Figure(4 * 4 * ranks, "bytes"),
        "log line: finding a straggler": Figure(cpu_seconds(lambda: slowest(own_s, own_s, topology), 3), "s", SECONDS),
        "opening data: what ranks tell": Figure(ranks * len(pickle.dumps(known)), "bytes"),
        "opening data: comparing": Figure(cpu_seconds(lambda: disagreement(opened), 3), "s", SECONDS),
    }
    return found | ({"step: lines of Python": Figure(lines, "lines")} if lines is not None else {})


# The planner.


def planning(ranks: int) -> Figures:
    """Return the seconds in which tools/plan.py ranks the layouts of a GPT of 40 layers."""
    words = f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 64 --vocab-size 51200 "
    words += "--seq-length 2048 --max-position-embeddings 2048 --batch-size 1 --data-path none --bf16"
    config = parse(words.split(), world_size=1, env={})
    config = config.with_vocab(config.model.vocab_size or 0)
    found: list[Any] = []

    def ask() -> None:
        planner = Planner(config, device("h100-80g"))
        found.append(search(planner, Search(world_size=ranks, global_batch_size=8 * ranks)))

    seconds = cpu_seconds(ask)
    return {
        "planner: layouts": Figure(found[0].num_candidates, "layouts"),
        "planner: reckoned through": Figure(found[0].num_estimates, "layouts"),
        "planner: search": Figure(seconds, "s", SECONDS),
    }


PARTS: dict[str, Callable[[int], Figures]] = {"saving": saving, "stepping": stepping, "planning": planning}


# The order of documents, which no number of ranks changes: each host has it once, and its ranks share it.


def order(documents: int, folder: Path) -> Figures:
    """Return what the first rank of a host does for the first samples of so many documents, and a later one."""
    prefix, cache = folder / f"corpus-{documents}", folder / f"cache-{documents}"
    make_corpus(prefix, documents)
    first, second = _opened_corpus(prefix, cache), _opened_corpus(prefix, cache)
    on_disk = sum(each.stat().st_size for each in cache.rglob("*") if each.is_file()) if cache.exists() else 0
    titles = {"opening": "opening the index", "samples": "order and first 32 samples"}
    found = {f"{title}": Figure(first[name], "s", SECONDS) for name, title in titles.items()}
    found |= {f"{title}, next rank": Figure(second[name], "s", SECONDS) for name, title in titles.items()}
    return found | {
        "wall clock, first rank": Figure(first["wall"], "s", "wall clock"),
        "memory of a rank's own": Figure(first["memory"], "bytes"),
        "files of the host's cache": Figure(on_disk, "bytes"),
    }


def _opened_corpus(prefix: Path, cache: Path) -> dict[str, float]:
    before, began, wall = _own_memory(), time.process_time(), time.perf_counter()
    read = ours(prefix, cache, 0)
    opened = time.process_time()
    for index in range(32):
        assert len(read(index)) == SEQ_LENGTH + 1
    ended = time.process_time()
    return {
        "opening": opened - began, "samples": ended - opened, "memory": max(0, _own_memory() - before),
        "wall": time.perf_counter() - wall,
    }  # fmt: skip


def _own_memory() -> int:
    rows: Iterator[list[str]] = map(str.split, Path("/proc/self/smaps_rollup").read_text().splitlines())
    return next(int(row[1]) * 1024 for row in rows if row[0] == "Anonymous:")
