"""Cases of the simulated device: families, tensor ranks, stages, ZeRO stages and precisions, and further features."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatron.models.registry import FAMILIES
from megatron.mpu.topology import Topology
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


def is_valid_row(row: Row) -> bool:
    """Return True if the combination is supported: pipelines do not support ZeRO 2 and 3."""
    return row[2] == "one" or row[3] in ("0", "1")


def all_rows() -> list[Row]:
    """Return all valid combinations of the axes."""
    return [row for row in itertools.product(*AXES) if is_valid_row(row)]


def all_layouts() -> list[Row]:
    """Return all valid combinations except the precision, which alternates along every other axis."""
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
