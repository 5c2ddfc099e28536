"""The layout of an elastic job with fewer ranks than it may have: the same global batch on as many replicas as fit."""

from __future__ import annotations

import pytest

from megatron.arguments.elastic_fit import fit_to_ranks
from megatron.config import elastic, parse
from megatron.config.elastic import Span
from megatron.errors import ConfigError

ENOUGH = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32"


def fitted(flags: str, span: Span, num_ranks: int) -> tuple[int, int, int]:
    """Return (replicas, micro-batches of each, ranks with work), having compared the samples of a step."""
    whole = parse([*ENOUGH.split(), *flags.split()], world_size=span.most)
    config, used = fit_to_ranks(whole, span, num_ranks)
    count = config.parallel.data_parallel_size(used)
    before, now = whole.batch.sizes(whole.parallel.data_parallel_size(span.most)), config.batch.sizes(count)
    assert now == before, "a step takes the same samples"
    assert config.batch.batch_size == whole.batch.batch_size
    assert config.parallel == whole.parallel
    return count, config.batch.gas, used


@pytest.mark.parametrize(
    ("flags", "span", "num_ranks", "wanted"),
    [
        ("--batch-size 2 --gas 3", (1, 4), 4, (4, 3, 4)),
        ("--batch-size 2 --gas 3", (1, 4), 3, (3, 4, 3)),
        ("--batch-size 2 --gas 3", (1, 4), 2, (2, 6, 2)),
        ("--batch-size 2 --gas 2", (1, 4), 3, (3, 3, 3)),
        ("--batch-size 2 --gas 2 --zero-stage 1", (1, 4), 3, (3, 3, 3)),
        ("--batch-size 2 --gas 2 --zero-stage 2", (1, 4), 3, (2, 4, 2)),
        ("--batch-size 2 --gas 1", (1, 5), 4, (4, 2, 4)),
        ("--batch-size 2 --gas 1 --zero-stage 3", (1, 5), 4, (1, 5, 1)),
        ("--model-parallel-size 2 --batch-size 1 --gas 1", (2, 10), 8, (4, 2, 8)),
        ("--model-parallel-size 2 --pipe-parallel-size 2 --batch-size 1 --gas 3", (4, 16), 15, (3, 4, 12)),
        ("--model-parallel-size 2 --pipe-parallel-size 2 --batch-size 1 --gas 3", (4, 16), 7, (1, 12, 4)),
        ("--global-batch-size 24 --batch-size 2", (1, 4), 3, (3, 4, 3)),
        ("--batch-size 2 --gas 4 --rampup-batch-size 16 8 800", (1, 4), 3, (2, 8, 2)),
        ("--batch-size 1 --gas 3 --num-experts 4 --expert-model-parallel-size 2", (2, 4), 3, (2, 6, 2)),
        ("--batch-size 1 --gas 2 --num-experts 4", (1, 4), 3, (2, 4, 2)),
    ],
)
def test_fewer_ranks_take_the_same_samples_by_the_rule(flags, span, num_ranks, wanted) -> None:
    assert fitted(flags, Span(*span), num_ranks) == wanted


def test_ranks_without_work_are_told_of() -> None:
    whole = parse([*ENOUGH.split(), "--batch-size", "2", "--gas", "2", "--zero-stage", "2"], world_size=4)
    config, _ = fit_to_ranks(whole, Span(1, 4), 3)
    assert config.notes[-1] == (
        "elastic: 3 of 4 ranks: 2 of 4 replicas, each with 4 micro-batches of 2 per step, the same 16 samples "
        "as with all ranks; 1 rank on standby"
    )


def test_unequal_replicas_are_told_of_and_take_the_whole_step() -> None:
    config, _ = fit_to_ranks(parse([*ENOUGH.split(), "--batch-size", "2", "--gas", "2"], world_size=4), Span(1, 4), 3)
    assert config.notes[-1].endswith(
        "3 of 4 replicas, each with 2 or 3 micro-batches of 2 per step, the same 16 samples as with all ranks"
    )
    assert [config.batch.share(3, replica)[:2] for replica in range(3)] == [(0, 3), (3, 3), (6, 2)]


def test_fewest_ranks_that_hold_no_replica_are_refused_at_the_first_start() -> None:
    config = parse([*ENOUGH.split(), "--model-parallel-size", "2", "--pipe-parallel-size", "2"], world_size=8)
    with pytest.raises(ConfigError, match="ranks of one replica, got MIN of --nnodes MIN:MAX for 3 of 8 ranks"):
        fit_to_ranks(config, Span(3, 8), 8)


def test_most_ranks_that_are_no_whole_replicas_are_refused() -> None:
    with pytest.raises(ConfigError, match="world size must be a multiple of tensor x pipe, got world_size=6"):
        parse([*ENOUGH.split(), "--model-parallel-size", "2", "--pipe-parallel-size", "2"], world_size=6)


def test_a_layout_that_no_number_of_replicas_fits_says_why() -> None:
    flags = "--batch-size 1 --gas 3 --num-experts 4 --expert-model-parallel-size 4"
    config = parse([*ENOUGH.split(), *flags.split()], world_size=4)
    with pytest.raises(ConfigError, match="with 3 of 4 ranks: .*expert-model-parallel-size"):
        fit_to_ranks(config, Span(3, 4), 3)


@pytest.mark.parametrize(("text", "span"), [("2:8", Span(2, 8)), ("", None), ("2", None), ("a:b", None)])
def test_the_launcher_says_the_span(text: str, span: Span | None) -> None:
    assert elastic.span_of({elastic.VARIABLE: text}) == span
