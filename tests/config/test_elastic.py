"""The layout of an elastic job with fewer ranks than it may have: the same global batch on as many replicas as fit."""

from __future__ import annotations

import pytest

from megatron.arguments.elastic_fit import fit_to_ranks
from megatron.config import elastic, parse
from megatron.config.elastic import RankRange
from megatron.errors import ConfigError

MODEL_FLAGS = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32"


def fit_layout(flags: str, span: RankRange, num_ranks: int) -> tuple[int, int, int]:
    """Return (replicas, micro-batches of each, ranks with work), having compared the samples of a step."""
    full_config = parse([*MODEL_FLAGS.split(), *flags.split()], world_size=span.max_ranks)
    config, num_used_ranks = fit_to_ranks(full_config, span, num_ranks)
    num_replicas = config.parallel.data_parallel_size(num_used_ranks)
    full_sizes, fitted_sizes = (
        full_config.batch.batch_sizes(full_config.parallel.data_parallel_size(span.max_ranks)),
        config.batch.batch_sizes(num_replicas),
    )
    assert fitted_sizes == full_sizes, "a step takes the same samples"
    assert config.batch.batch_size == full_config.batch.batch_size
    assert config.parallel == full_config.parallel
    return num_replicas, config.batch.gas, num_used_ranks


@pytest.mark.parametrize(
    ("flags", "span", "num_ranks", "expected"),
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
def test_fewer_ranks_preserve_samples_per_step(flags, span, num_ranks, expected) -> None:
    assert fit_layout(flags, RankRange(*span), num_ranks) == expected


def test_standby_ranks_are_noted() -> None:
    full_config = parse([*MODEL_FLAGS.split(), "--batch-size", "2", "--gas", "2", "--zero-stage", "2"], world_size=4)
    config, _ = fit_to_ranks(full_config, RankRange(1, 4), 3)
    assert config.notes[-1] == (
        "elastic: 3 of 4 ranks: 2 of 4 replicas, each with 4 micro-batches of 2 per step, the same 16 samples "
        "as with all ranks; 1 rank on standby"
    )


def test_unequal_replicas_are_noted_and_cover_full_step() -> None:
    config, _ = fit_to_ranks(
        parse([*MODEL_FLAGS.split(), "--batch-size", "2", "--gas", "2"], world_size=4), RankRange(1, 4), 3
    )
    assert config.notes[-1].endswith(
        "3 of 4 replicas, each with 2 or 3 micro-batches of 2 per step, the same 16 samples as with all ranks"
    )
    assert [config.batch.share(3, replica)[:2] for replica in range(3)] == [(0, 3), (3, 3), (6, 2)]


def test_min_ranks_below_one_replica_raise() -> None:
    config = parse([*MODEL_FLAGS.split(), "--model-parallel-size", "2", "--pipe-parallel-size", "2"], world_size=8)
    with pytest.raises(ConfigError, match="ranks of one replica, got MIN of --nnodes MIN:MAX for 3 of 8 ranks"):
        fit_to_ranks(config, RankRange(3, 8), 8)


def test_max_ranks_not_multiple_of_replica_raise() -> None:
    with pytest.raises(ConfigError, match="world size must be a multiple of tensor x pipe, got world_size=6"):
        parse([*MODEL_FLAGS.split(), "--model-parallel-size", "2", "--pipe-parallel-size", "2"], world_size=6)


def test_layout_without_valid_replica_count_raises() -> None:
    flags = "--batch-size 1 --gas 3 --num-experts 4 --expert-model-parallel-size 4"
    config = parse([*MODEL_FLAGS.split(), *flags.split()], world_size=4)
    with pytest.raises(ConfigError, match="with 3 of 4 ranks: .*expert-model-parallel-size"):
        fit_to_ranks(config, RankRange(3, 4), 3)


@pytest.mark.parametrize(("text", "span"), [("2:8", RankRange(2, 8)), ("", None), ("2", None), ("a:b", None)])
def test_span_is_parsed_from_launcher_variable(text: str, span: RankRange | None) -> None:
    assert elastic.parse_rank_range({elastic.VARIABLE: text}) == span
