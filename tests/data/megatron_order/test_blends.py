"""The corpora of a blend in Megatron's order, and the order of a run."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.blend_resume import resumed_order
from megatron.data.blend_schedule import BlendSchedule, Corpus
from megatron.data.megatron_order import blend_choices, order
from megatron.data.megatron_order.blend_choices import blend_choices as make_choices
from megatron.data.megatron_order.epochs import plan_epochs
from megatron.data.megatron_order.order import MegatronOrder, normalized_shares
from megatron.data.megatron_order.resume import check_megatron_resume
from megatron.errors import CheckpointError, SampleError

RECORDED = [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0]
"""Corpora of the first samples of a blend with the weights 0.7 and 0.3 in megatron-core 0.16.1."""


def sequential_choices(shares: tuple[float, ...], num_samples: int) -> tuple[list[int], list[int]]:
    """Select one sample after another, as megatron-core's compiled loop does."""
    counts, corpora, indices = [0] * len(shares), [], []
    for sample in range(num_samples):
        lags = [share * max(float(sample), 1.0) - count for share, count in zip(shares, counts, strict=True)]
        corpus = lags.index(max(lags))
        corpora.append(corpus)
        indices.append(counts[corpus])
        counts[corpus] += 1
    return corpora, indices


def check_choices(shares: tuple[float, ...], num_samples: int) -> None:
    corpora, indices = make_choices(np.array(shares), num_samples)
    assert (corpora.tolist(), indices.tolist()) == sequential_choices(shares, num_samples)


def test_choices_equal_recorded_choices_of_megatron_core() -> None:
    assert make_choices(np.array(normalized_shares([0.7, 0.3])), 20)[0].tolist() == RECORDED


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.one_of(st.integers(1, 5), st.floats(1e-4, 1)), min_size=1, max_size=7),
    st.integers(1, 900),
    st.sampled_from([0, 5, 64]),
)
def test_parallel_lanes_equal_sequential_selection(weights: list[float], num_samples: int, warm_up: int) -> None:
    """Without a warm-up, many lanes start from wrong counts and are repeated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend_choices, "_MAX_LANES", 50)
        patch.setattr(blend_choices, "_MIN_LANE_LENGTH", 5)
        patch.setattr(blend_choices, "_WARM_UP", warm_up)
        check_choices(normalized_shares(normalized_shares(weights)), num_samples)


def make_order(
    weights: tuple[float, ...] = (0.7, 0.3), num_samples: int = 300, seed: int = 1, names: str = "abc"
) -> MegatronOrder:
    names = names[: len(weights)]
    plans = tuple(plan_epochs(100 + 7 * idx, 4, num_samples) for idx, _ in enumerate(names))
    corpora = tuple(
        Corpus(name, f"tokens{name}.t.{name}{seed}{tuple(plan)}", 24) for name, plan in zip(names, plans, strict=True)
    )
    shares = normalized_shares(weights) if len(weights) > 1 else None
    return MegatronOrder(corpora, plans, shares, num_samples if shares else plans[0].num_samples, num_samples)


def json_state(saved: Any, num_samples: int) -> dict[str, Any]:
    return json.loads(json.dumps(saved.state(num_samples), sort_keys=True))


@pytest.mark.parametrize("weights", [(1.0,), (0.7, 0.3), (0.2, 0.5, 0.3)])
def test_cursors_count_the_samples_before_each_sample(
    weights: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "_BLOCK", 16)
    samples = make_order(weights)
    counts = dict.fromkeys((corpus.name for corpus in samples.corpora), 0)
    for index in range(300):
        assert samples.cursors(index) == counts
        corpus, sample_idx = samples.locate(index)
        assert sample_idx == counts[samples.corpora[corpus].name]
        counts[samples.corpora[corpus].name] += 1
    assert samples.epochs(300)["a"] == pytest.approx(counts["a"] * 4 / 100, rel=0.01)
    assert sum(samples.weights(0).values()) == pytest.approx(1)


def test_order_is_pickled_without_its_arrays() -> None:
    """All ranks exchange the order at the start of a run."""
    samples = make_order(num_samples=100_000)
    samples.cursors(10)
    data = pickle.dumps(samples)
    assert len(data) < 2_000
    copy = pickle.loads(data)
    assert copy == samples and copy.locate(99_999) == samples.locate(99_999)


def test_blend_of_a_long_run_is_read_from_the_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make_order(num_samples=999)
    monkeypatch.setattr(order, "_CACHED_FROM_SAMPLES", 0)
    for _ in range(2):
        cached = MegatronOrder(expected.corpora, expected.plans, expected.shares, 999, 999, cache_path=str(tmp_path))
        assert [cached.locate(index) for index in range(999)] == [expected.locate(index) for index in range(999)]
        monkeypatch.setattr(order, "blend_choices", None)  # the second order must not compute it


def test_sample_after_the_end_is_an_error_that_names_the_flag() -> None:
    with pytest.raises(SampleError, match="--train-samples 300"):
        make_order().locate(300)


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_resume_in_the_same_order_changes_nothing(names: str) -> None:
    assert check_megatron_resume(make_order(names=names), json_state(make_order(names=names), 40), 40) == []
    renamed = make_order(names=names.replace("a", "c"))
    renamed = replace(renamed, corpora=tuple(
        replace(corpus, fingerprint=corpus.fingerprint.replace("c", "a")) for corpus in renamed.corpora
    ))  # fmt: skip
    assert check_megatron_resume(renamed, json_state(make_order(names=names), 40), 40) == []


@pytest.mark.parametrize(
    ("samples", "settings", "message"),
    [
        (make_order(seed=2), {"samples": ["--seed was 1, now 2"]}, "--seed was 1, now 2"),
        (
            make_order(num_samples=900), {},
            "had 300 samples, now 900.*--train-samples 300 restores it.*a had 13 epochs, the last shuffled sep.*now 37",
        ),
        (make_order((0.6, 0.4)), {}, "the weights were"),
        (make_order((0.7, 0.2, 0.1)), {}, "the corpora were a, b, now a, b, c"),
        (make_order(names="ba"), {}, "the files, the tokenizer, the sequence in the list or a setting"),
        (make_order(seed=2), {}, "the files, the tokenizer, the sequence in the list or a setting"),
    ],
)  # fmt: skip
def test_another_order_is_rejected_unless_change_is_allowed(
    samples: MegatronOrder, settings: dict[str, list[str]], message: str
) -> None:
    state = json_state(make_order(), 40)
    with pytest.raises(CheckpointError, match=rf"(?s){message}.*--allow-data-change to continue at sample 40"):
        check_megatron_resume(samples, state, 40, settings=settings)
    lines = check_megatron_resume(samples, state, 40, settings=settings, allow_change=True)
    assert lines[-1] == "data: continuing at sample 40 of the new order"


def test_checkpoint_of_the_other_order_is_rejected_in_both_directions() -> None:
    megatron = make_order()
    native = BlendSchedule([Corpus("a", "x.t.a", 9), Corpus("b", "y.t.b", 9)], [(0, (0.7, 0.3))])
    with pytest.raises(CheckpointError, match="--data-order was native, now megatron"):
        check_megatron_resume(megatron, json_state(native, 40), 40)
    with pytest.raises(CheckpointError, match="--data-order was native, now megatron"):
        check_megatron_resume(megatron, "a fingerprint", 40)
    changed = {"samples": ["--data-order was megatron, now native"]}
    with pytest.raises(CheckpointError, match="--data-order was megatron, now native"):
        resumed_order(native, json_state(megatron, 40), 40, settings=changed)
    resumed, _ = resumed_order(native, json_state(megatron, 40), 40, settings=changed, allow_change=True)
    assert resumed.locate(40)[1] == 0
