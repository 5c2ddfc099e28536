"""Log-likelihoods: those of a whole model in fp64, one token after another, in every layout and batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint import TensorRecord, named_parameters
from megatron.checkpoint.huggingface.config import saved_config
from megatron.checkpoint.one_process import WEIGHTS, open_folder
from megatron.errors import DataError, NumericsError
from megatron.evaluation import scoring
from megatron.evaluation.scoring import (
    Row,
    Score,
    batches_by_length,
    make_row,
    max_row_length,
    rolling_rows,
    score_rows,
)
from megatron.generate import load
from megatron.generate.load_model import _model_args, build_stage
from megatron.models import registry
from megatron.models.common.generation import ModelStage
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.groups import SINGLE, Group, build_grid
from megatron.mpu.shard import shard_of
from megatron.mpu.topology import Topology
from tests.helpers.harness import run_ranks
from tests.helpers.saved_models import save_model

LENGTH = 40
RunDirOf = Callable[[str], Path]
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"activation": "gelu-tanh"}, "llama": {"untie_embeddings": True}, "mpt": {},
}  # fmt: skip
ROWS = [
    Row(tuple((7 * row + 3 * position) % 61 for position in range(length)), scored)
    for row, (length, scored) in enumerate([(5, 1), (21, 20), (2, 1), (40, 7), (9, 3), (9, 8), (30, 2)])
]
ROWS += [Row((*ROWS[0].tokens[:-1], token), 1) for token in (8, 9)]  # further choices of the first
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
QUICK = {("gpt2", (2, 1, 1)), ("llama", (1, 2, 1)), ("gpt2", (1, 1, 2)), ("mpt", (2, 2, 1))}


@pytest.fixture(scope="module")
def run_dir_of(tmp_path_factory: pytest.TempPathFactory) -> RunDirOf:
    @functools.cache
    def make_run(family: str) -> Path:
        run_dir = tmp_path_factory.mktemp(family)
        save_model(run_dir, family, **FAMILIES[family])
        return run_dir

    return make_run


def load_stage(run_dir: Path, tensor: Group = SINGLE, pipe: Group = SINGLE) -> ModelStage:
    checkpoint = open_folder(run_dir)
    return load(checkpoint, saved_config(checkpoint.metadata), tensor=tensor, pipe=pipe, dtype=torch.float64)


@functools.cache
def reference_scores(run_dir: Path) -> list[Score]:
    """Return the scores of ``ROWS``: the model of a training run, one token more of one row at a time."""
    checkpoint = open_folder(run_dir)
    config = saved_config(checkpoint.metadata)
    model: Any = registry.build_model(config, ParallelContext()).double().eval()
    checkpoint.load(
        [TensorRecord(WEIGHTS + name, parameter, shard_of(parameter)) for name, parameter in named_parameters(model)]
    )
    scores = []
    for row in ROWS:
        logprob, is_greedy = 0.0, True
        for position in range(len(row.tokens) - row.num_scored, len(row.tokens)):
            with torch.no_grad():
                logits = model(torch.tensor([row.tokens[:position]]))[-1, 0, : config.model.vocab_size]
            logprob += float(logits.log_softmax(0)[row.tokens[position]])
            is_greedy &= int(logits.argmax()) == row.tokens[position]
        scores.append(Score(logprob, is_greedy))
    return scores


def assert_scores_close(scores: Sequence[Score], expected_scores: Sequence[Score]) -> None:
    for score, expected in zip(scores, expected_scores, strict=True):
        assert abs(score.logprob - expected.logprob) <= 1e-12 * max(1.0, abs(expected.logprob))
        assert score.is_greedy == expected.is_greedy


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_token_by_token_reference(family: str, run_dir_of: RunDirOf) -> None:
    for max_tokens in (1, 50, 10_000):
        assert_scores_close(
            score_rows(load_stage(run_dir_of(family)), ROWS, max_tokens=max_tokens),
            reference_scores(run_dir_of(family)),
        )


def test_greedy_continuation_is_reported_as_greedy(run_dir_of: RunDirOf) -> None:
    stage = load_stage(run_dir_of("gpt2"))
    token_scores = [score_rows(stage, [Row((5, 6, token), 1)])[0] for token in range(stage.args.vocab_size)]
    assert [score.is_greedy for score in token_scores].count(True) == 1
    best_token = max(range(len(token_scores)), key=lambda token: token_scores[token].logprob)
    assert token_scores[best_token].is_greedy
    assert not score_rows(stage, [Row((5, 6, best_token, (best_token + 1) % 50, best_token), 3)])[0].is_greedy
    assert abs(math.fsum(math.exp(score.logprob) for score in token_scores) - 1) < 1e-12, (
        "padded columns have no probability"
    )


def test_chunked_logits_do_not_change_scores(run_dir_of: RunDirOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_LOGITS_PER_CHUNK", 3000)
    assert_scores_close(score_rows(load_stage(run_dir_of("gpt2")), ROWS), reference_scores(run_dir_of("gpt2")))


def score_on_rank(rank: int, run_dir: Path, layout: tuple[int, int, int]) -> tuple[list[Score], int]:
    tensor, pipe, data = layout
    grid = build_grid(Topology(pipe=pipe, data=data, tensor=tensor), rank)
    num_rows: list[int] = []
    stage = load_stage(run_dir, grid.tensor, grid.pipe)
    scores = score_rows(stage, ROWS, data=grid.data, max_tokens=45, on_rows=num_rows.append)
    return scores, sum(num_rows)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if (family, layout) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for layout in LAYOUTS
        if (family, layout[0]) != ("llama", 4)
    ],
)
def test_every_layout_equals_single_process_scores(
    family: str, layout: tuple[int, int, int], run_dir_of: RunDirOf
) -> None:
    tensor, pipe, data = layout
    results = run_ranks(tensor * pipe * data, score_on_rank, run_dir_of(family), layout)
    for scores, _ in results:
        assert_scores_close(scores, reference_scores(run_dir_of(family)))
    assert sum(num_rows for _, num_rows in results) == len(ROWS) * tensor * pipe, "replicas share the rows"


def score_with_sequence_parallel(rank: int, run_dir: Path) -> list[Score]:
    group = build_grid(Topology(pipe=1, data=1, tensor=2), rank).tensor
    checkpoint = open_folder(run_dir)
    args = _model_args(saved_config(checkpoint.metadata))
    parallel = ParallelContext(group, sequence_parallel=True)
    stage = build_stage(args, parallel, SINGLE, dtype=torch.float64, device=torch.device("cpu"))
    parameters = named_parameters(stage.module)
    checkpoint.load([TensorRecord(WEIGHTS + name, parameter, shard_of(parameter)) for name, parameter in parameters])
    return score_rows(stage, ROWS, max_tokens=70)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("mpt", marks=pytest.mark.slow)])
def test_sequence_parallel_scores_equal_single_process(family: str, run_dir_of: RunDirOf) -> None:
    for scores in run_ranks(2, score_with_sequence_parallel, run_dir_of(family)):
        assert_scores_close(scores, reference_scores(run_dir_of(family)))


def test_invalid_rows_and_weights_are_rejected(run_dir_of: RunDirOf) -> None:
    stage = load_stage(run_dir_of("gpt2"))
    with pytest.raises(DataError, match=rf"tokens must be from 0 to {stage.args.vocab_size - 1}, got 9999"):
        score_rows(stage, [Row((1, 9999), 1)])
    for tokens, num_scored in (((1,), 1), ((1, 2), 2), ((1, 2), 0)):
        with pytest.raises(ValueError, match="tokens"):
            Row(tokens, num_scored)
    with pytest.raises(DataError, match="a continuation must have at most 3 tokens, .* got 4"):
        make_row([1], [1, 2, 3, 4], 3)
    next(stage.module.parameters()).data.fill_(float("nan"))
    with pytest.raises(NumericsError, match="logits must be finite, got NaN"):
        score_rows(stage, [Row((1, 2), 1)])


def test_long_context_is_truncated_from_left() -> None:
    assert make_row([1, 2, 3], [4, 5], 10) == Row((1, 2, 3, 4, 5), 2)
    assert make_row([1, 2, 3], [4, 5], 3) == Row((2, 3, 4, 5), 2), "three tokens are read, the last one is not"
    assert make_row([1, 2, 3], [4, 5], 2) == Row((3, 4, 5), 2)


def test_rolling_rows_use_maximum_context() -> None:
    rows = rolling_rows(list(range(10)), 99, 4)
    assert rows == [Row((99, 0, 1, 2, 3), 4), Row((3, 4, 5, 6, 7), 4), Row((5, 6, 7, 8, 9), 2)]
    assert rolling_rows([], 99, 4) == []


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_rolling_rows_score_each_token_once(num_tokens: int, length: int) -> None:
    tokens = list(range(num_tokens))
    rows = rolling_rows(tokens, 99, length)
    assert [token for row in rows for token in row.tokens[-row.num_scored :]] == tokens
    assert all(len(row.tokens) - 1 <= length for row in rows)
    assert all(len(row.tokens) - 1 == min(length, num_tokens) for row in rows), "with all the context that fits"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 80))
def test_batches_are_full_and_longest_row_is_first(lengths: list[int], max_tokens: int) -> None:
    batches = list(batches_by_length(lengths, max_tokens))
    assert sorted(row_idx for batch in batches for row_idx in batch) == list(range(len(lengths)))
    assert [lengths[row_idx] for batch in batches for row_idx in batch] == sorted(lengths, reverse=True)
    for batch, next_batch in zip(batches, [*batches[1:], None], strict=True):
        assert len(batch) == 1 or len(batch) * lengths[batch[0]] <= max_tokens
        assert next_batch is None or (len(batch) + 1) * lengths[batch[0]] > max_tokens


def test_longest_row_respects_positions_and_sequence_shards(run_dir_of: RunDirOf) -> None:
    learned_stage, unbounded_stage = load_stage(run_dir_of("gpt2")), load_stage(run_dir_of("mpt"))
    assert (
        max_row_length(learned_stage, 100) == 48
        and max_row_length(unbounded_stage, 100) == 100
        and max_row_length(learned_stage, 7) == 7
    )
    parallel = ParallelContext(Group((0, 1), 0), sequence_parallel=True)
    sharded_stage = ModelStage(learned_stage.module, learned_stage.args, parallel, {}, [])
    assert max_row_length(sharded_stage, 7) == 6
