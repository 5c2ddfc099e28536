"""Cases of the simulated device: families, tensor ranks, stages, ZeRO stages and precisions, and further features."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from megatron.models.registry import FAMILIES
from megatron.mpu.topology import Coordinate, Topology
from tests.cuda.worker import Case

SIZES = (
    "--device cuda --hidden-size 64 --num-attention-heads 4 --batch-size 2 --gas 2 --vocab-size 211 --train-iters 10 "
    "--lr 1e-3 --clip-grad 1 --data-path none"
)
T5 = "--enc-seq-length 64 --dec-seq-length 32 --vocab-extra-ids 8"
TENSOR = {"one": "", "tensor": "--model-parallel-size 2", "sequence": "--model-parallel-size 2 --sequence-parallel"}
PIPE = {"one": "", "stages": "--pipe-parallel-size 2", "chunks": "--pipe-parallel-size 2 --pipeline-chunks 2"}
ZERO = ("0", "1", "2", "3")
PRECISION = ("bf16", "fp16")
AXES: tuple[tuple[str, ...], ...] = (tuple(FAMILIES), tuple(TENSOR), tuple(PIPE), ZERO, PRECISION)

Row = tuple[str, ...]


def flags(family: str, extra: str = "", layers: int = 1) -> tuple[str, ...]:
    """Return the command line of a small model. If a flag is repeated, the last value is used.

    Args:
        extra: further flags.
        layers: number of layers; for T5 of the encoder and of the decoder each.
    """
    family_flags = (
        f"{T5} --enc-layers {layers} --dec-layers {layers}"
        if family == "t5"
        else f"--seq-length 64 --num-layers {layers}"
    )
    return tuple(f"{SIZES} {family_flags} {extra}".split())


def all_rows() -> list[Row]:
    """Return all combinations of the axes."""
    return list(itertools.product(*AXES))


def all_layouts() -> list[Row]:
    """Return all combinations except the precision, which alternates along every other axis."""
    return [row for row in all_rows() if sum(axis.index(value) for axis, value in zip(AXES, row, strict=True)) % 2]


def pairs_of(row: Row) -> set[tuple[int, str, int, str]]:
    """Return all pairs of values of a row as (axis, value, axis, value)."""
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def values_of(row: Row) -> set[tuple[int, str]]:
    """Return the values of a row as (axis, value)."""
    return set(enumerate(row))


def covering_subset(rows: list[Row], items: Callable[[Row], set[Any]]) -> list[Row]:
    """Return a small deterministic subset of ``rows`` that has every item of all rows."""
    missing = {item for row in rows for item in items(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(items(row) & missing))
        chosen.append(best)
        missing -= items(best)
    return chosen


@functools.cache
def all_pairs() -> list[Row]:
    """Return a small subset of ``all_rows`` with every pair of values."""
    return covering_subset(all_rows(), pairs_of)


@functools.cache
def short_rows() -> list[Row]:
    """Return a small subset of ``all_pairs`` with every value of every axis."""
    return covering_subset(all_pairs(), values_of)


def make_case(row: Row, idx: int) -> Case:
    """Return the run of a row with two replicas. One rank per stage runs as a process; ``idx`` selects which one."""
    family, tensor, pipe, zero, precision = row
    parallel_sizes = 1 + (tensor != "one"), 1 + (pipe != "one"), 2
    topology = Topology.from_world_size(
        parallel_sizes[0] * parallel_sizes[1] * parallel_sizes[2], parallel_sizes[0], parallel_sizes[1]
    )
    selected = idx % parallel_sizes[0], idx // 2 % 2
    ranks = [
        rank
        for rank in range(topology.world_size)
        if (topology.coordinate(rank).tensor, topology.coordinate(rank).data) == selected
    ]
    extra = f"{TENSOR[tensor]} {PIPE[pipe]} --zero-stage {zero} --{precision}"
    layers = {"one": 1, "stages": 2, "chunks": 4}[pipe] // (2 if family == "t5" and pipe != "one" else 1)
    return Case(family, flags(family, extra, layers), topology.world_size, tuple(ranks))


def named_cases(rows: Iterable[Row]) -> Iterator[tuple[str, Case]]:
    """Yield the name and the case of each row."""
    for idx, row in enumerate(rows):
        yield "-".join(row), make_case(row, idx)


# Features beyond the axes above, one or several per case.


class Feature(NamedTuple):
    """Run with two replicas of ``tensor * pipe * context`` ranks each.

    Args:
        extra: flags in addition to sizes and axes; the precision is bf16 without ``--fp16`` and ``--fp32``.
        is_short: run the case in the short run; otherwise the test is slow.
        has_mask: attention has a mask.
    """

    family: str
    extra: str
    tensor: int = 1
    pipe: int = 1
    context: int = 1
    is_short: bool = False
    has_mask: bool = False


EXPERTS = "--num-experts 4 --moe-router-topk 2"
FULL, SELECTIVE = "--checkpoint-activations", "--recompute-granularity selective"
FUSION = "--gradient-accumulation-fusion"
NORMUON = "--optimizer adaptive_muon --adaptive-muon-moment2-method normuon"
FP8 = "--fp8-format e4m3 --ff-hidden-size 128"
FEATURES = {
    "experts ep 1, selective recompute, fusion": Feature(
        "llama", f"{EXPERTS} --moe-expert-capacity-factor 1.25 --zero-stage 0 {SELECTIVE} {FUSION}", is_short=True
    ),
    "experts ep 2, sequence parallel, recompute on the host": Feature(
        "llama", f"{EXPERTS} --expert-model-parallel-size 2 --zero-stage 1 {FULL} --checkpoint-in-cpu", tensor=2,
        is_short=True,
    ),
    "context, Muon": Feature("llama", "--optimizer muon --zero-stage 1", context=2, is_short=True),
    "offloaded optimizer, full recompute": Feature(
        "gpt2", f"--offload-optimizer --zero-stage 1 {FULL}", is_short=True
    ),
    "experts ep 1": Feature("llama", f"{EXPERTS} --zero-stage 1"),
    "experts ep 1, ZeRO 3": Feature("llama", f"{EXPERTS} --zero-stage 3"),
    "experts ep 1, fp16, capacity": Feature(
        "llama", f"{EXPERTS} --fp16 --moe-expert-capacity-factor 1.25 --zero-stage 1"
    ),
    "experts ep 2, ZeRO 0, shared expert": Feature(
        "llama", f"{EXPERTS} --expert-model-parallel-size 2 --zero-stage 0 --moe-shared-expert-intermediate-size 64"
    ),
    "experts ep 2, stages": Feature("llama", f"{EXPERTS} --expert-model-parallel-size 2 --zero-stage 1", pipe=2),
    "experts ep 2, stages, split backward, fusion": Feature(
        "llama", f"{EXPERTS} --expert-model-parallel-size 2 --zero-stage 1 --pipeline-schedule zb-h1 {FUSION}", pipe=2
    ),
    "experts ep 2, ZeRO 3": Feature(
        "llama", f"{EXPERTS} --expert-model-parallel-size 2 --zero-stage 3", context=2
    ),
    "experts ep 2, stages, ZeRO 2": Feature(
        "llama", f"{EXPERTS} --expert-model-parallel-size 2 --zero-stage 2 --fp16", pipe=2, context=2
    ),
    "stages, split backward, ZeRO 3": Feature(
        "llama", f"--zero-stage 3 --pipeline-schedule zb-h1 {FULL} --loss-chunk-tokens 32", pipe=2
    ),
    "stages in a V, ZeRO 3, prediction of several tokens": Feature(
        "gpt2", "--zero-stage 3 --pipeline-schedule zb-v --mtp-num-layers 1 --num-layers 4", pipe=2
    ),
    "experts ep 4, context": Feature(
        "llama", f"{EXPERTS} --expert-model-parallel-size 4 --zero-stage 1", context=2
    ),
    "experts ep 2, Muon": Feature(
        "llama", f"{EXPERTS} --expert-model-parallel-size 2 --zero-stage 0 --optimizer muon"
    ),
    "experts ep 2, NorMuon": Feature(
        "llama", f"{EXPERTS} --expert-model-parallel-size 2 --zero-stage 1 {NORMUON}"
    ),
    "context": Feature("gpt2", "--zero-stage 1 --attention-dropout 0", context=2),
    "context, attention dropout": Feature("gpt2", "--zero-stage 1 --attention-dropout 0.1", context=2),
    "context, attention dropout, selective recompute": Feature(
        "llama", f"--zero-stage 0 --attention-dropout 0.1 {SELECTIVE}", tensor=2, context=2
    ),
    "context, layout-independent dropout": Feature(
        "gpt2", "--zero-stage 1 --attention-dropout 0.1 --layout-independent-dropout", context=2
    ),
    "context, fp16, ALiBi": Feature("mpt", "--fp16 --zero-stage 0", context=2),
    "context, all-to-all": Feature("llama", "--zero-stage 2 --cp-comm-type a2a", context=2),
    "context, tensor, stages": Feature("llama", "--zero-stage 1 --sequence-parallel", 2, 2, 2),
    "context, documents": Feature("llama", "--zero-stage 1 --reset-attention-mask", context=2),
    "context, selective recompute": Feature("llama", f"--zero-stage 3 {SELECTIVE}", context=2),
    "Muon": Feature("gpt2", "--optimizer muon --zero-stage 0"),
    "AdaMuon": Feature("gpt2", "--optimizer adaptive_muon --muon-coefficient-type polar_express --zero-stage 1"),
    "Muon, tensor": Feature("llama", "--optimizer muon --zero-stage 2", tensor=2),
    "Muon, stages, fp16": Feature("gpt2", "--fp16 --optimizer muon --zero-stage 1", pipe=2),
    "fusion": Feature("llama", f"--zero-stage 0 {FUSION}"),
    "fusion, fp16, biases": Feature("gpt2", f"--fp16 --zero-stage 1 --hidden-bias {FUSION}", tensor=2),
    "fusion, stages, split backward": Feature(
        "llama", f"--zero-stage 1 --pipeline-schedule zb-h1 {FUSION}", pipe=2
    ),
    "QK-clip, context, full recompute": Feature(
        "llama", f"--zero-stage 1 --qk-clip --qk-clip-threshold 1e-3 {FULL}", context=2
    ),
    "QK-clip, tensor, stages, documents": Feature(
        "llama", "--zero-stage 1 --qk-clip --qk-clip-threshold 1e-3 --reset-attention-mask", 2, 2
    ),
    "QK-clip by a bound, all-to-all, fp16": Feature(
        "llama", "--fp16 --zero-stage 2 --qk-clip --qk-clip-bound --cp-comm-type a2a", context=2
    ),
    "QK-clip, latents, ZeRO 3": Feature(
        "llama", "--zero-stage 3 --qk-clip --qk-clip-threshold 1e-3 --multi-latent-attention --v-head-dim 16 "
        "--qk-head-dim 8 --qk-pos-emb-head-dim 8"
    ),
    "QK-clip, Muon": Feature("gpt2", "--zero-stage 0 --optimizer muon --qk-clip --qk-clip-threshold 1e-3"),
    "full recompute": Feature("llama", f"--zero-stage 1 {FULL}", tensor=2),
    "full recompute, stages": Feature("gpt2", f"--zero-stage 1 {FULL}", pipe=2),
    "full recompute, ZeRO 3": Feature("llama", f"--zero-stage 3 {FULL}"),
    "selective recompute": Feature("gpt2", f"--zero-stage 1 --attention-dropout 0.1 {SELECTIVE}"),
    "selective recompute, stages": Feature("llama", f"--fp16 --zero-stage 1 {SELECTIVE}", pipe=2),
    "recompute on the host": Feature("llama", f"--zero-stage 1 {FULL} --checkpoint-in-cpu"),
    "recompute on the host, stages": Feature("gpt2", f"--zero-stage 1 {FULL} --checkpoint-in-cpu", pipe=2),
    "partitioned recompute": Feature(
        "llama", f"--zero-stage 1 {FULL} --partition-activations --checkpoint-in-cpu", tensor=2
    ),
    "offloaded optimizer": Feature("llama", "--offload-optimizer --zero-stage 2"),
    "offloaded optimizer, fp16": Feature("gpt2", "--fp16 --offload-optimizer --zero-stage 1", tensor=2),
    "offloaded parameters": Feature("llama", "--offload-optimizer --offload-parameters --zero-stage 3"),
    "T5, full recompute": Feature("t5", f"--zero-stage 1 {FULL}", tensor=2, has_mask=True),
    "T5, Muon": Feature("t5", "--zero-stage 1 --optimizer muon", has_mask=True),
    "BERT, selective recompute": Feature("bert", f"--zero-stage 1 {SELECTIVE}", has_mask=True),
    "FP8, sequence parallel, fusion": Feature(
        "llama", f"{FP8} --zero-stage 1 --sequence-parallel {FUSION}", tensor=2, is_short=True
    ),
    "FP8, experts, stages, split backward": Feature(
        "llama", f"{FP8} {EXPERTS} --zero-stage 1 --pipeline-schedule zb-h1", pipe=2
    ),
    "FP8, experts ep 2, ZeRO 3, full recompute": Feature(
        "llama", f"{FP8} {EXPERTS} --expert-model-parallel-size 2 --zero-stage 3 {FULL}"
    ),
    "FP8 blocks": Feature("gpt2", "--fp8-format e4m3 --fp8-recipe blockwise --zero-stage 1"),
    "fp32": Feature("llama", "--fp32 --zero-stage 1", tensor=2),
    "fp32, T5": Feature("t5", "--fp32 --zero-stage 0", has_mask=True),
    "loss in chunks": Feature("llama", "--zero-stage 1 --loss-chunk-tokens 32"),
    "loss in chunks, stages, soft-cap, z-loss": Feature(
        "gpt2", "--fp16 --zero-stage 1 --loss-chunk-tokens 32 --final-logit-softcapping 30 --z-loss 1e-4", 2, 2
    ),
    "torch's operators": Feature("gpt2", "--zero-stage 1 --fused-kernels torch"),
    "layout-independent dropout": Feature("gpt2", "--zero-stage 1 --layout-independent-dropout", tensor=2),
}  # fmt: skip


def make_feature_case(feature: Feature) -> Case:
    """Return the run of ``feature``; the first rank of each stage runs as a process."""
    family, extra, tensor, pipe, context, *_ = feature
    size = 2 * tensor * pipe * context
    topology = Topology.from_world_size(size, tensor, pipe, context)
    ranks = tuple(
        rank for rank in range(size)
        if topology.coordinate(rank) == Coordinate(topology.coordinate(rank).pipe, data=0, tensor=0, context=0)
    )  # fmt: skip
    axes = f"--model-parallel-size {tensor} --pipe-parallel-size {pipe} --context-parallel-size {context}"
    precision = "" if "--fp16" in extra or "--fp32" in extra else "--bf16"
    return Case(family, flags(family, f"{axes} {precision} {extra}", layers=2), size, ranks)
