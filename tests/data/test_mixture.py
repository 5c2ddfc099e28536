"""The order of the samples of several corpora: through phases, and before and after a checkpoint."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron import log
from megatron.data.blend_resume import resumed_order
from megatron.data.blend_schedule import BlendSchedule, Corpus, integer_weights
from megatron.errors import CheckpointError, DataError

NAMES = "abcde"
Schedule = list[tuple[int, list[float]]]


def corpora(names: str = "ab") -> list[Corpus]:
    """Fingerprints fall in another order than names."""
    return [Corpus(name, f"t{9 - NAMES.index(name)}.v.s{name}", 10 * (NAMES.index(name) + 1)) for name in names]


def make_schedule(names: str, *steps: tuple[int, list[float]]) -> BlendSchedule:
    return BlendSchedule(corpora(names), list(steps))


def sample_stream(order: BlendSchedule, start: int, stop: int) -> list[tuple[str, int]]:
    return [
        (order.corpora[corpus_idx].name, sample_idx) for corpus_idx, sample_idx in map(order.locate, range(start, stop))
    ]


def json_state(order: BlendSchedule, num_samples: int) -> dict[str, Any]:
    return json.loads(json.dumps(order.state(num_samples), sort_keys=True))


@st.composite
def schedules(draw: Any, num_corpora: int) -> Schedule:
    weights = st.lists(st.integers(0, 9), min_size=num_corpora, max_size=num_corpora).filter(any)
    starts = sorted(draw(st.sets(st.integers(1, 60), max_size=3)))
    return [(start, draw(weights)) for start in [0, *starts]]


@settings(max_examples=60)
@given(st.data())
def test_no_sample_is_skipped_or_repeated_across_changes(data: Any) -> None:
    """A run is stopped again and again and resumed with other weights, corpora in addition and in another order."""
    names = data.draw(st.sampled_from(["a", "ab", "cba"]))
    order = make_schedule(names, *data.draw(schedules(len(names))))
    num_read: dict[str, int] = {}
    num_samples = 0
    for _ in range(3):
        stop = num_samples + data.draw(st.integers(0, 40))
        for name, sample_idx in sample_stream(order, num_samples, stop):
            assert sample_idx == num_read.get(name, 0)
            num_read[name] = sample_idx + 1
        num_samples = stop
        assert {
            name: num_consumed for name, num_consumed in order.cursors(num_samples).items() if num_consumed
        } == num_read
        new_names = data.draw(st.sampled_from(["", NAMES[len(names) : len(names) + 1]]))
        names = "".join(data.draw(st.permutations(names + new_names)))
        new_schedule = make_schedule(names, *data.draw(schedules(len(names))))
        order, _ = resumed_order(new_schedule, json_state(order, num_samples), num_samples)
    assert sum(num_read.values()) == num_samples


@settings(max_examples=60)
@given(st.data())
def test_resumed_run_equals_uninterrupted_run(data: Any) -> None:
    names = data.draw(st.sampled_from(["a", "ab", "abc", "edcba"]))
    steps = data.draw(schedules(len(names)))
    uninterrupted, num_samples = make_schedule(names, *steps), 0
    order = uninterrupted
    for _ in range(3):
        num_samples += data.draw(st.integers(0, 35))
        permuted_names = "".join(data.draw(st.permutations(names)))
        permuted_steps = [(start, [weights[names.index(name)] for name in permuted_names]) for start, weights in steps]
        order, lines = resumed_order(
            make_schedule(permuted_names, *permuted_steps), json_state(order, num_samples), num_samples
        )
        assert sample_stream(order, 0, 130) == sample_stream(uninterrupted, 0, 130)
        assert order.cursors(num_samples) == {name: uninterrupted.cursors(num_samples)[name] for name in permuted_names}
        assert not [
            line for line in lines if "new weights" in line and num_samples not in [start for start, _ in steps]
        ]


def test_phase_starts_at_scheduled_sample_with_current_cursors() -> None:
    order = make_schedule("ab", (0, [3, 1]), (8, [0, 1]), (10, [1, 1]))
    assert sample_stream(order, 8, 14) == [("b", 2), ("b", 3), ("b", 4), ("a", 6), ("b", 5), ("a", 7)]
    assert order.cursors(0) == {"a": 0, "b": 0} and order.cursors(10) == {"a": 6, "b": 4}
    assert order.weights(0) == {"a": 0.75, "b": 0.25} and order.weights(8) == {"a": 0.0, "b": 1.0}
    assert order.epochs(10) == {"a": 0.6, "b": 0.2}


def test_sample_counts_are_exact_at_large_offsets() -> None:
    order = make_schedule("abc", (0, [0.5, 0.3, 0.2]), (2**40, [0.1, 0.1, 0.8]))
    first_cursors, last_cursors = order.cursors(2**40), order.cursors(2**40 + 10**9)
    assert sum(first_cursors.values()) == 2**40 and [
        last_cursors[corpus_name] - first_cursors[corpus_name] for corpus_name in "abc"
    ] == [10**8, 10**8, 8 * 10**8]
    assert all(abs(first_cursors[name] * 10 - 2**40 * share) < 10 for name, share in zip("abc", (5, 3, 2), strict=True))
    resumed, _ = resumed_order(order, json_state(order, 2**40 + 12345), 2**40 + 12345)
    assert sample_stream(resumed, 2**40 + 12345, 2**40 + 12400) == sample_stream(order, 2**40 + 12345, 2**40 + 12400)


def test_schedule_can_be_pickled() -> None:
    order = make_schedule("ab", (0, [0.7, 0.3]), (5, [1, 1]))
    assert sample_stream(pickle.loads(pickle.dumps(order)), 0, 30) == sample_stream(order, 0, 30)


def test_changed_weights_and_new_corpora_are_reported() -> None:
    saved = make_schedule("ab", (0, [7, 3]))
    order, lines = resumed_order(make_schedule("abc", (0, [1, 1, 2])), json_state(saved, 10), 10)
    assert lines == [
        "data: c is new and starts at its first sample",
        "data: new weights from sample 10 on: 0.25 a from its sample 7, 0.25 b from its sample 3, "
        "0.5 c from its sample 0",
    ]
    assert sample_stream(order, 0, 10) == sample_stream(saved, 0, 10)
    assert resumed_order(order, json_state(order, 12), 12)[1] == []
    assert resumed_order(make_schedule("abc", (0, [0.7, 0.3, 0])), json_state(saved, 10), 10)[1] == lines[:1], (
        "0 changes no weight"
    )


def test_changed_setting_is_named_without_hashes() -> None:
    (corpus,) = corpora("a")
    saved, current = (
        BlendSchedule([corpus], [(0, [1])]),
        BlendSchedule([replace_fields(corpus, fingerprint="t7.v.s9")], [(0, [1])]),
    )
    setting_changes = {"samples": ["--split was 900,50,50, now 949,50,1"], "content": ["--data-path was a, now b"]}
    with pytest.raises(CheckpointError, match="--split was 900,50,50, now 949,50,1. Samples would") as raised:
        same_files = BlendSchedule([replace_fields(corpus, fingerprint="t9.v.s9")], [(0, [1])])
        resumed_order(same_files, json_state(saved, 4), 4, settings=setting_changes)
    assert "--data-path" not in str(raised.value), "the files are the same, wherever they are"
    with pytest.raises(
        CheckpointError, match="--split was .*; --data-path was a, now b; corpus a .* has different documents now"
    ):
        resumed_order(current, json_state(saved, 4), 4, settings=setting_changes)
    assert resumed_order(saved, json_state(saved, 4), 4, settings=setting_changes)[1] == [], (
        "another spelling of the same samples"
    )


def test_changed_document_and_token_counts_are_named_with_corpus() -> None:
    first, second = corpora("ab")
    saved_corpus = replace_fields(second, num_documents=10_786, num_tokens=2_000_000)
    saved = BlendSchedule([replace_fields(first, num_documents=3, num_tokens=30), saved_corpus], [(0, [7, 3])])
    changed_corpus = replace_fields(saved_corpus, num_documents=10_787, num_tokens=2_000_123, fingerprint="t1.v.s1")
    current = BlendSchedule([saved.corpora[0], changed_corpus], [(0, [7, 3])])
    message = r"corpus b \(3 samples read\) had 10,786 documents, now 10,787 and 2,000,000 tokens, now 2,000,123"
    with pytest.raises(CheckpointError, match=message):
        resumed_order(current, json_state(saved, 10), 10)
    same_counts = BlendSchedule([saved.corpora[0], replace_fields(saved_corpus, fingerprint="t1.v.s1")], [(0, [7, 3])])
    with pytest.raises(CheckpointError, match="corpus b .* has different documents now"):
        resumed_order(same_counts, json_state(saved, 10), 10)
    assert resumed_order(saved, json_state(saved, 10), 10)[1] == []


def test_corpus_count_change_affecting_random_spans_is_reported() -> None:
    """Spans of a corpus that is alone are keyed otherwise than those of one of several."""
    first, second = (replace_fields(corpus, has_random_draws=True) for corpus in corpora("ab"))
    single, both = BlendSchedule([first], [(0, [1])]), BlendSchedule([first, second], [(0, [1, 0])])
    message = (
        "data: a is {}, so the random spans or fill-in-the-middle splits of its samples change from this step on".format
    )
    assert resumed_order(both, json_state(single, 5), 5)[1][1:] == [message("one of several corpora now")]
    assert resumed_order(both, "sa", 5)[1][1:] == [message("one of several corpora now")]
    assert message("the only corpus now") in resumed_order(single, json_state(both, 5), 5, allow_change=True)[1]
    assert resumed_order(both, json_state(single, 0), 0)[1] == resumed_order(both, json_state(both, 5), 5)[1] == []


def replace_fields(corpus: Corpus, **fields: Any) -> Corpus:
    return Corpus(**{**corpus.__dict__, **fields})


@pytest.mark.parametrize(
    ("fingerprint", "problem"),
    [
        ("t1.v.s1", r"corpus b \(3 samples read\) has different documents now"),
        ("t8.w.sb", r"corpus b \(3 samples read\) was built with a different tokenizer"),
        ("t8.v.s1", r"the split, seed, length or another setting of samples has changed for corpus b \(3 samples"),
        ("t1.w.s1", r"corpus b \(3 samples read\) has different documents now; corpus b .* different tokenizer"),
    ],
)
def test_changed_fingerprint_raises_and_names_changes(
    fingerprint: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = corpora("ab")
    saved = BlendSchedule([first, second], [(0, [7, 3])])
    current = BlendSchedule([first, replace_fields(second, fingerprint=fingerprint)], [(0, [7, 3])])
    details: list[str] = []
    monkeypatch.setattr(log, "debug", details.append)
    with pytest.raises(CheckpointError, match=f"of the checkpoint: {problem}") as raised:
        resumed_order(current, json_state(saved, 10), 10)
    assert "t8.v.sb" not in str(raised.value) and "t8.v.sb" in details[0] and fingerprint in details[0]
    order, lines = resumed_order(current, json_state(saved, 10), 10, allow_change=True)
    assert order.cursors(10) == {"a": 7, "b": 0} and "corpus b" in lines[0]
    assert "new weights from sample 10 on: 0.7 a from its sample 7, 0.3 b from its sample 0" in lines[-1]
    assert sample_stream(order, 10, 13) == [("a", 7), ("b", 0), ("a", 8)]
    resumed, lines = resumed_order(current, json_state(order, 13), 13)
    assert sample_stream(resumed, 10, 40) == sample_stream(order, 10, 40) and lines == []
    with pytest.raises(IndexError, match="start at 10, got 9"):
        resumed.locate(9)


def test_missing_corpus_raises_and_zero_weight_retains_it() -> None:
    saved = make_schedule("abc", (0, [1, 1, 1]))
    with pytest.raises(CheckpointError, match=r"corpus c \(3 samples read\) is missing; this run has: a, b"):
        resumed_order(make_schedule("ab", (0, [1, 1])), json_state(saved, 9), 9)
    order, lines = resumed_order(make_schedule("ab", (0, [1, 1])), json_state(saved, 9), 9, allow_change=True)
    assert order.cursors(9) == {"a": 3, "b": 3} and len(lines) == 2
    resumed, _ = resumed_order(make_schedule("abc", (0, [1, 1, 0])), json_state(saved, 9), 9)
    assert resumed.cursors(13) == {"a": 5, "b": 5, "c": 3}


def test_corpora_are_matched_by_fingerprint_instead_of_name() -> None:
    first, second = corpora("ab")
    saved = BlendSchedule([first, second], [(0, [7, 3])])
    order, lines = resumed_order(
        BlendSchedule([replace_fields(second, name="a"), replace_fields(first, name="z")], [(0, [3, 7])]),
        json_state(saved, 4),
        4,
    )
    assert order.cursors(4) == {"z": 3, "a": 1} and lines == []


def test_old_single_corpus_fingerprint_state_is_loaded() -> None:
    single = make_schedule("a", (0, [1]))
    order, lines = resumed_order(single, "sa", 25)
    assert sample_stream(order, 0, 40) == sample_stream(single, 0, 40) and lines == []
    order, lines = resumed_order(make_schedule("ba", (0, [1, 1])), "sa", 25)
    assert order.cursors(25) == {"b": 0, "a": 25} and len(lines) == 2
    corpus_text = r"the only corpus of the checkpoint \(25 samples read\)"
    with pytest.raises(CheckpointError, match=f"the split, seed, .* has changed for {corpus_text}. Samples would"):
        resumed_order(single, "sx", 25)
    with pytest.raises(CheckpointError, match=f"{corpus_text} is missing; this run has: b, a. Samples would"):
        resumed_order(make_schedule("ba", (0, [1, 1])), "sx", 25)
    assert resumed_order(single, "sx", 25, allow_change=True)[0].cursors(25) == {"a": 0}
    assert resumed_order(single, "sa", 0)[0].cursors(3) == {"a": 3}


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"format": 2}, "its format is 2, only 1 is supported"),
        ({"samples_consumed": 9}, "it is for sample 9, but the run is at 10"),
        ({"cursors": {"a": 8, "b": 2}}, "cursors are .'a': 8, 'b': 2., but its phases result in .'a': 7, 'b': 3"),
        ({"phases": [{"start": 0}]}, "KeyError: 'weights'"),
        ({"phases": None}, "TypeError"),
    ],
)
def test_damaged_state_is_rejected(change: dict[str, Any], problem: str) -> None:
    order = make_schedule("ab", (0, [7, 3]))
    with pytest.raises(CheckpointError, match=f"the data order in the checkpoint cannot be used: .*{problem}"):
        resumed_order(order, {**json_state(order, 10), **change}, 10)


def test_weights_become_smallest_integers() -> None:
    assert integer_weights([0.7, 0.3]) == integer_weights([7, 3]) == integer_weights([14, 6.0]) == (7, 3)
    assert integer_weights([0.1, 0.0, 0.2]) == (1, 0, 2) and integer_weights([1e-3, 1]) == (1, 1000)
    tiny, large = integer_weights([1e-300, 1e300])
    assert tiny == 1 and large <= 2**48 + 1
    for weights in ([0, 0], [-1, 2], [float("nan"), 1], [float("inf"), 1], []):
        with pytest.raises(DataError, match="weights of corpora must be finite, at least 0 and not all 0"):
            integer_weights(weights)


def test_invalid_blend_is_rejected() -> None:
    first, second = corpora("ab")
    with pytest.raises(DataError, match="got a and a with the same name a"):
        BlendSchedule([first, replace_fields(second, name="a")], [(0, [1, 1])])
    with pytest.raises(DataError, match="got a and b with the same fingerprint t9.v.sa"):
        BlendSchedule([first, replace_fields(second, fingerprint=first.fingerprint)], [(0, [1, 1])])
    with pytest.raises(DataError, match="must have weights from its first sample on"):
        BlendSchedule([first], [(3, [1])])
    with pytest.raises(IndexError, match="start at 0, got -1"):
        BlendSchedule([first], [(0, [1])]).locate(-1)
