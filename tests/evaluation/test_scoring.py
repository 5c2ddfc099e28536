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
from megatron.evaluation.scoring import Row, Score, batches_by_length, longest_row, rolling_rows, row_of, score_rows
from megatron.generate import load
from megatron.generate.load_model import _sizes, build
from megatron.models import registry
from megatron.models.common.generation import ModelStage
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.groups import SINGLE, Group, build_grid
from megatron.mpu.shard import shard_of
from megatron.mpu.topology import Topology
from tests.helpers.harness import run_ranks
from tests.helpers.saved_models import save_model

LENGTH = 40
Place = Callable[[str], Path]
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"activation": "gelu-tanh"}, "llama": {"untie_embeddings": True}, "mpt": {},
}  # fmt: skip
ROWS = [
    Row(tuple((7 * row + 3 * place) % 61 for place in range(length)), scored)
    for row, (length, scored) in enumerate([(5, 1), (21, 20), (2, 1), (40, 7), (9, 3), (9, 8), (30, 2)])
]
ROWS += [Row((*ROWS[0].tokens[:-1], token), 1) for token in (8, 9)]  # further choices of the first
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
QUICK = {("gpt2", (2, 1, 1)), ("llama", (1, 2, 1)), ("gpt2", (1, 1, 2)), ("mpt", (2, 2, 1))}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Place:
    @functools.cache
    def run_of(family: str) -> Path:
        run = tmp_path_factory.mktemp(family)
        save_model(run, family, **FAMILIES[family])
        return run

    return run_of


def part_of(run: Path, tensor: Group = SINGLE, pipe: Group = SINGLE) -> ModelStage:
    checkpoint = open_folder(run)
    return load(checkpoint, saved_config(checkpoint.metadata), tensor=tensor, pipe=pipe, dtype=torch.float64)


@functools.cache
def by_hand(run: Path) -> list[Score]:
    """Return the scores of ``ROWS``: the model of a training run, one token more of one row at a time."""
    checkpoint = open_folder(run)
    config = saved_config(checkpoint.metadata)
    model: Any = registry.build_model(config, ParallelContext()).double().eval()
    checkpoint.load([TensorRecord(WEIGHTS + name, own, shard_of(own)) for name, own in named_parameters(model)])
    scores = []
    for row in ROWS:
        logprob, is_greedy = 0.0, True
        for place in range(len(row.tokens) - row.num_scored, len(row.tokens)):
            with torch.no_grad():
                logits = model(torch.tensor([row.tokens[:place]]))[-1, 0, : config.model.vocab_size]
            logprob += float(logits.log_softmax(0)[row.tokens[place]])
            is_greedy &= int(logits.argmax()) == row.tokens[place]
        scores.append(Score(logprob, is_greedy))
    return scores


def check(found: Sequence[Score], wanted: Sequence[Score]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert abs(one.logprob - other.logprob) <= 1e-12 * max(1.0, abs(other.logprob))
        assert one.is_greedy == other.is_greedy


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_one_token_at_a_time(family: str, run_of: Place) -> None:
    for max_tokens in (1, 50, 10_000):
        check(score_rows(part_of(run_of(family)), ROWS, max_tokens=max_tokens), by_hand(run_of(family)))


def test_a_likeliest_continuation_is_said_to_be_one(run_of: Place) -> None:
    part = part_of(run_of("gpt2"))
    alone = [score_rows(part, [Row((5, 6, token), 1)])[0] for token in range(part.sizes.vocab_size)]
    assert [one.is_greedy for one in alone].count(True) == 1
    best = max(range(len(alone)), key=lambda token: alone[token].logprob)
    assert alone[best].is_greedy
    assert not score_rows(part, [Row((5, 6, best, (best + 1) % 50, best), 3)])[0].is_greedy
    assert abs(math.fsum(math.exp(one.logprob) for one in alone) - 1) < 1e-12, "padded columns have no probability"


def test_logits_are_made_of_a_chunk_at_a_time(run_of: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_LOGITS_AT_ONCE", 3000)
    check(score_rows(part_of(run_of("gpt2")), ROWS), by_hand(run_of("gpt2")))


def of_ranks(rank: int, run: Path, layout: tuple[int, int, int]) -> tuple[list[Score], int]:
    tensor, pipe, data = layout
    grid = build_grid(Topology(pipe=pipe, data=data, tensor=tensor), rank)
    counted: list[int] = []
    part = part_of(run, grid.tensor, grid.pipe)
    scores = score_rows(part, ROWS, data=grid.data, max_tokens=45, on_rows=counted.append)
    return scores, sum(counted)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if (family, layout) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for layout in LAYOUTS
        if (family, layout[0]) != ("llama", 4)
    ],
)
def test_every_layout_has_the_scores_of_one_process(family: str, layout: tuple[int, int, int], run_of: Place) -> None:
    tensor, pipe, data = layout
    found = run_ranks(tensor * pipe * data, of_ranks, run_of(family), layout)
    for scores, _ in found:
        check(scores, by_hand(run_of(family)))
    assert sum(count for _, count in found) == len(ROWS) * tensor * pipe, "replicas share the rows"


def of_cut_sequences(rank: int, run: Path) -> list[Score]:
    group = build_grid(Topology(pipe=1, data=1, tensor=2), rank).tensor
    checkpoint = open_folder(run)
    sizes = _sizes(saved_config(checkpoint.metadata))
    place = ParallelContext(group, sequence_parallel=True)
    part = build(sizes, place, SINGLE, dtype=torch.float64, device=torch.device("cpu"))
    parameters = named_parameters(part.module)
    checkpoint.load([TensorRecord(WEIGHTS + name, own, shard_of(own)) for name, own in parameters])
    return score_rows(part, ROWS, max_tokens=70)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("mpt", marks=pytest.mark.slow)])
def test_with_sequence_parallel_scores_are_those_of_one_process(family: str, run_of: Place) -> None:
    for scores in run_ranks(2, of_cut_sequences, run_of(family)):
        check(scores, by_hand(run_of(family)))


def test_what_cannot_be_scored_is_refused(run_of: Place) -> None:
    part = part_of(run_of("gpt2"))
    with pytest.raises(DataError, match=rf"tokens must be from 0 to {part.sizes.vocab_size - 1}, got 9999"):
        score_rows(part, [Row((1, 9999), 1)])
    for tokens, scored in (((1,), 1), ((1, 2), 2), ((1, 2), 0)):
        with pytest.raises(ValueError, match="tokens"):
            Row(tokens, scored)
    with pytest.raises(DataError, match="a continuation must have at most 3 tokens, .* got 4"):
        row_of([1], [1, 2, 3, 4], 3)
    next(part.module.parameters()).data.fill_(float("nan"))
    with pytest.raises(NumericsError, match="logits must be finite, got NaN"):
        score_rows(part, [Row((1, 2), 1)])


def test_a_context_that_is_too_long_loses_its_beginning() -> None:
    assert row_of([1, 2, 3], [4, 5], 10) == Row((1, 2, 3, 4, 5), 2)
    assert row_of([1, 2, 3], [4, 5], 3) == Row((2, 3, 4, 5), 2), "three tokens are read, the last one is not"
    assert row_of([1, 2, 3], [4, 5], 2) == Row((3, 4, 5), 2)


def test_rolling_rows_read_as_much_as_they_may() -> None:
    rows = rolling_rows(list(range(10)), 99, 4)
    assert rows == [Row((99, 0, 1, 2, 3), 4), Row((3, 4, 5, 6, 7), 4), Row((5, 6, 7, 8, 9), 2)]
    assert rolling_rows([], 99, 4) == []


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_each_token_of_a_text_is_scored_once(number: int, length: int) -> None:
    tokens = list(range(number))
    rows = rolling_rows(tokens, 99, length)
    assert [token for row in rows for token in row.tokens[-row.num_scored :]] == tokens
    assert all(len(row.tokens) - 1 <= length for row in rows)
    assert all(len(row.tokens) - 1 == min(length, number) for row in rows), "with all the context that fits"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 80))
def test_batches_are_full_and_the_longest_row_is_in_the_first(lengths: list[int], most: int) -> None:
    batches = list(batches_by_length(lengths, most))
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    assert [lengths[place] for batch in batches for place in batch] == sorted(lengths, reverse=True)
    for batch, after in zip(batches, [*batches[1:], None], strict=True):
        assert len(batch) == 1 or len(batch) * lengths[batch[0]] <= most
        assert after is None or (len(batch) + 1) * lengths[batch[0]] > most


def test_a_row_is_as_long_as_positions_and_cuts_let_it(run_of: Place) -> None:
    learned, endless = part_of(run_of("gpt2")), part_of(run_of("mpt"))
    assert longest_row(learned, 100) == 48 and longest_row(endless, 100) == 100 and longest_row(learned, 7) == 7
    place = ParallelContext(Group((0, 1), 0), sequence_parallel=True)
    cut = ModelStage(learned.module, learned.sizes, place, {}, [])
    assert longest_row(cut, 7) == 6
