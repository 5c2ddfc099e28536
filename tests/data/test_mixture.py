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
from megatron.data.blend_schedule import BlendSchedule, Corpus, whole_weights
from megatron.errors import CheckpointError, DataError

NAMES = "abcde"
Schedule = list[tuple[int, list[float]]]


def corpora(names: str = "ab") -> list[Corpus]:
    """Fingerprints fall in another order than names."""
    return [Corpus(name, f"t{9 - NAMES.index(name)}.v.s{name}", 10 * (NAMES.index(name) + 1)) for name in names]


def order_of(names: str, *steps: tuple[int, list[float]]) -> BlendSchedule:
    return BlendSchedule(corpora(names), list(steps))


def stream(order: BlendSchedule, start: int, stop: int) -> list[tuple[str, int]]:
    return [(order.corpora[c].name, k) for c, k in map(order.locate, range(start, stop))]


def reloaded(order: BlendSchedule, at: int) -> dict[str, Any]:
    return json.loads(json.dumps(order.state(at), sort_keys=True))


@st.composite
def schedules(draw: Any, num_corpora: int) -> Schedule:
    one = st.lists(st.integers(0, 9), min_size=num_corpora, max_size=num_corpora).filter(any)
    starts = sorted(draw(st.sets(st.integers(1, 60), max_size=3)))
    return [(start, draw(one)) for start in [0, *starts]]


@settings(max_examples=60)
@given(st.data())
def test_no_sample_is_missed_or_read_twice_whatever_changes(data: Any) -> None:
    """A run is stopped again and again and resumed with other weights, corpora in addition and in another order."""
    names = data.draw(st.sampled_from(["a", "ab", "cba"]))
    order = order_of(names, *data.draw(schedules(len(names))))
    read: dict[str, int] = {}
    at = 0
    for _ in range(3):
        stop = at + data.draw(st.integers(0, 40))
        for name, place in stream(order, at, stop):
            assert place == read.get(name, 0)
            read[name] = place + 1
        at = stop
        assert {name: count for name, count in order.cursors(at).items() if count} == read
        more = data.draw(st.sampled_from(["", NAMES[len(names) : len(names) + 1]]))
        names = "".join(data.draw(st.permutations(names + more)))
        now = order_of(names, *data.draw(schedules(len(names))))
        order, _ = resumed_order(now, reloaded(order, at), at)
    assert sum(read.values()) == at


@settings(max_examples=60)
@given(st.data())
def test_a_resumed_run_reads_what_an_undisturbed_one_reads(data: Any) -> None:
    names = data.draw(st.sampled_from(["a", "ab", "abc", "edcba"]))
    steps = data.draw(schedules(len(names)))
    whole, at = order_of(names, *steps), 0
    order = whole
    for _ in range(3):
        at += data.draw(st.integers(0, 35))
        listed = "".join(data.draw(st.permutations(names)))
        same = [(start, [weights[names.index(name)] for name in listed]) for start, weights in steps]
        order, lines = resumed_order(order_of(listed, *same), reloaded(order, at), at)
        assert stream(order, 0, 130) == stream(whole, 0, 130)
        assert order.cursors(at) == {name: whole.cursors(at)[name] for name in listed}
        assert not [line for line in lines if "new weights" in line and at not in [start for start, _ in steps]]


def test_a_phase_starts_where_the_schedule_says_and_at_the_cursors() -> None:
    order = order_of("ab", (0, [3, 1]), (8, [0, 1]), (10, [1, 1]))
    assert stream(order, 8, 14) == [("b", 2), ("b", 3), ("b", 4), ("a", 6), ("b", 5), ("a", 7)]
    assert order.cursors(0) == {"a": 0, "b": 0} and order.cursors(10) == {"a": 6, "b": 4}
    assert order.weights(0) == {"a": 0.75, "b": 0.25} and order.weights(8) == {"a": 0.0, "b": 1.0}
    assert order.epochs(10) == {"a": 0.6, "b": 0.2}


def test_counts_are_exact_far_out() -> None:
    order = order_of("abc", (0, [0.5, 0.3, 0.2]), (2**40, [0.1, 0.1, 0.8]))
    before, after = order.cursors(2**40), order.cursors(2**40 + 10**9)
    assert sum(before.values()) == 2**40 and [after[n] - before[n] for n in "abc"] == [10**8, 10**8, 8 * 10**8]
    assert all(abs(before[name] * 10 - 2**40 * share) < 10 for name, share in zip("abc", (5, 3, 2), strict=True))
    resumed, _ = resumed_order(order, reloaded(order, 2**40 + 12345), 2**40 + 12345)
    assert stream(resumed, 2**40 + 12345, 2**40 + 12400) == stream(order, 2**40 + 12345, 2**40 + 12400)


def test_an_order_travels_to_other_processes() -> None:
    order = order_of("ab", (0, [0.7, 0.3]), (5, [1, 1]))
    assert stream(pickle.loads(pickle.dumps(order)), 0, 30) == stream(order, 0, 30)


def test_changed_weights_and_a_new_corpus_are_told() -> None:
    old = order_of("ab", (0, [7, 3]))
    order, lines = resumed_order(order_of("abc", (0, [1, 1, 2])), reloaded(old, 10), 10)
    assert lines == [
        "data: c is new and starts at its first sample",
        "data: new weights from sample 10 on: 0.25 a from its sample 7, 0.25 b from its sample 3, "
        "0.5 c from its sample 0",
    ]
    assert stream(order, 0, 10) == stream(old, 0, 10)
    assert resumed_order(order, reloaded(order, 12), 12)[1] == []
    assert resumed_order(order_of("abc", (0, [0.7, 0.3, 0])), reloaded(old, 10), 10)[1] == lines[:1], (
        "0 changes no weight"
    )


def test_a_changed_setting_is_named_and_hashes_are_not() -> None:
    (a,) = corpora("a")
    old, now = BlendSchedule([a], [(0, [1])]), BlendSchedule([changed(a, fingerprint="t7.v.s9")], [(0, [1])])
    said = {"samples": ["--split was 900,50,50, now 949,50,1"], "content": ["--data-path was a, now b"]}
    with pytest.raises(CheckpointError, match="but --split was 900,50,50, now 949,50,1. Samples would") as caught:
        same_files = BlendSchedule([changed(a, fingerprint="t9.v.s9")], [(0, [1])])
        resumed_order(same_files, reloaded(old, 4), 4, settings=said)
    assert "--data-path" not in str(caught.value), "the files are the same, wherever they are"
    with pytest.raises(CheckpointError, match="--split was .*; --data-path was a, now b; corpus a .* other documents"):
        resumed_order(now, reloaded(old, 4), 4, settings=said)
    assert resumed_order(old, reloaded(old, 4), 4, settings=said)[1] == [], "another spelling of the same samples"


def test_numbers_of_documents_and_tokens_that_have_changed_are_named_with_their_corpus() -> None:
    a, b = corpora("ab")
    before = changed(b, num_documents=10_786, num_tokens=2_000_000)
    old = BlendSchedule([changed(a, num_documents=3, num_tokens=30), before], [(0, [7, 3])])
    after = changed(before, num_documents=10_787, num_tokens=2_000_123, fingerprint="t1.v.s1")
    now = BlendSchedule([old.corpora[0], after], [(0, [7, 3])])
    said = r"corpus b \(3 samples read\) had 10,786 documents, now 10,787 and 2,000,000 tokens, now 2,000,123"
    with pytest.raises(CheckpointError, match=said):
        resumed_order(now, reloaded(old, 10), 10)
    same_sizes = BlendSchedule([old.corpora[0], changed(before, fingerprint="t1.v.s1")], [(0, [7, 3])])
    with pytest.raises(CheckpointError, match="corpus b .* has different documents now"):
        resumed_order(same_sizes, reloaded(old, 10), 10)
    assert resumed_order(old, reloaded(old, 10), 10)[1] == []


def test_company_that_changes_what_is_drawn_is_told() -> None:
    """Spans of a corpus that is alone are keyed otherwise than those of one of several."""
    a, b = (changed(corpus, is_drawn=True) for corpus in corpora("ab"))
    alone, both = BlendSchedule([a], [(0, [1])]), BlendSchedule([a, b], [(0, [1, 0])])
    message = "data: a is {}, so the random spans or middles of its samples change from this step on".format
    assert resumed_order(both, reloaded(alone, 5), 5)[1][1:] == [message("one of several corpora now")]
    assert resumed_order(both, "sa", 5)[1][1:] == [message("one of several corpora now")]
    assert message("the only corpus now") in resumed_order(alone, reloaded(both, 5), 5, allow_change=True)[1]
    assert resumed_order(both, reloaded(alone, 0), 0)[1] == resumed_order(both, reloaded(both, 5), 5)[1] == []


def changed(corpus: Corpus, **fields: Any) -> Corpus:
    return Corpus(**{**corpus.__dict__, **fields})


@pytest.mark.parametrize(
    ("fingerprint", "said"),
    [
        ("t1.v.s1", r"corpus b \(3 samples read\) has different documents now"),
        ("t8.w.sb", r"corpus b \(3 samples read\) was built with a different tokenizer"),
        ("t8.v.s1", r"the split, seed, length or another setting of samples has changed for corpus b \(3 samples"),
        ("t1.w.s1", r"corpus b \(3 samples read\) has different documents now; corpus b .* different tokenizer"),
    ],
)
def test_another_fingerprint_is_an_error_that_says_what_has_changed(
    fingerprint: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = corpora("ab")
    old = BlendSchedule([a, b], [(0, [7, 3])])
    now = BlendSchedule([a, changed(b, fingerprint=fingerprint)], [(0, [7, 3])])
    details: list[str] = []
    monkeypatch.setattr(log, "debug", details.append)
    with pytest.raises(CheckpointError, match=f"of the checkpoint: {said}") as caught:
        resumed_order(now, reloaded(old, 10), 10)
    assert "t8.v.sb" not in str(caught.value) and "t8.v.sb" in details[0] and fingerprint in details[0]
    order, lines = resumed_order(now, reloaded(old, 10), 10, allow_change=True)
    assert order.cursors(10) == {"a": 7, "b": 0} and "corpus b" in lines[0]
    assert "new weights from sample 10 on: 0.7 a from its sample 7, 0.3 b from its sample 0" in lines[-1]
    assert stream(order, 10, 13) == [("a", 7), ("b", 0), ("a", 8)]
    again, lines = resumed_order(now, reloaded(order, 13), 13)
    assert stream(again, 10, 40) == stream(order, 10, 40) and lines == []
    with pytest.raises(IndexError, match="start at 10, got 9"):
        again.locate(9)


def test_a_corpus_that_is_gone_is_an_error_and_weight_0_keeps_it() -> None:
    old = order_of("abc", (0, [1, 1, 1]))
    with pytest.raises(CheckpointError, match=r"corpus c \(3 samples read\) is missing; this run has: a, b"):
        resumed_order(order_of("ab", (0, [1, 1])), reloaded(old, 9), 9)
    order, lines = resumed_order(order_of("ab", (0, [1, 1])), reloaded(old, 9), 9, allow_change=True)
    assert order.cursors(9) == {"a": 3, "b": 3} and len(lines) == 2
    kept, _ = resumed_order(order_of("abc", (0, [1, 1, 0])), reloaded(old, 9), 9)
    assert kept.cursors(13) == {"a": 5, "b": 5, "c": 3}


def test_corpora_are_known_by_fingerprint_and_not_by_name() -> None:
    a, b = corpora("ab")
    old = BlendSchedule([a, b], [(0, [7, 3])])
    order, lines = resumed_order(
        BlendSchedule([changed(b, name="a"), changed(a, name="z")], [(0, [3, 7])]), reloaded(old, 4), 4
    )
    assert order.cursors(4) == {"z": 3, "a": 1} and lines == []


def test_checkpoints_of_a_single_corpus_held_its_fingerprint_alone() -> None:
    alone = order_of("a", (0, [1]))
    order, lines = resumed_order(alone, "sa", 25)
    assert stream(order, 0, 40) == stream(alone, 0, 40) and lines == []
    order, lines = resumed_order(order_of("ba", (0, [1, 1])), "sa", 25)
    assert order.cursors(25) == {"b": 0, "a": 25} and len(lines) == 2
    one = r"the only corpus of the checkpoint \(25 samples read\)"
    with pytest.raises(CheckpointError, match=f"the split, seed, .* has changed for {one}. Samples would"):
        resumed_order(alone, "sx", 25)
    with pytest.raises(CheckpointError, match=f"{one} is missing; this run has: b, a. Samples would"):
        resumed_order(order_of("ba", (0, [1, 1])), "sx", 25)
    assert resumed_order(alone, "sx", 25, allow_change=True)[0].cursors(25) == {"a": 0}
    assert resumed_order(alone, "sa", 0)[0].cursors(3) == {"a": 3}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"format": 2}, "its format is 2, only 1 is supported"),
        ({"samples_consumed": 9}, "saved at sample 9, the run at 10"),
        ({"cursors": {"a": 8, "b": 2}}, "cursors are .'a': 8, 'b': 2., its phases result in .'a': 7, 'b': 3"),
        ({"phases": [{"start": 0}]}, "KeyError: 'weights'"),
        ({"phases": None}, "TypeError"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any], said: str) -> None:
    order = order_of("ab", (0, [7, 3]))
    with pytest.raises(CheckpointError, match=f"the data order in the checkpoint cannot be used: .*{said}"):
        resumed_order(order, {**reloaded(order, 10), **change}, 10)


def test_weights_become_the_smallest_whole_numbers() -> None:
    assert whole_weights([0.7, 0.3]) == whole_weights([7, 3]) == whole_weights([14, 6.0]) == (7, 3)
    assert whole_weights([0.1, 0.0, 0.2]) == (1, 0, 2) and whole_weights([1e-3, 1]) == (1, 1000)
    tiny, large = whole_weights([1e-300, 1e300])
    assert tiny == 1 and large <= 2**48 + 1
    for weights in ([0, 0], [-1, 2], [float("nan"), 1], [float("inf"), 1], []):
        with pytest.raises(DataError, match="weights of corpora must be finite, at least 0 and not all 0"):
            whole_weights(weights)


def test_what_is_no_mixture_is_refused() -> None:
    a, b = corpora("ab")
    with pytest.raises(DataError, match="got a and a with the same name a"):
        BlendSchedule([a, changed(b, name="a")], [(0, [1, 1])])
    with pytest.raises(DataError, match="got a and b with the same fingerprint t9.v.sa"):
        BlendSchedule([a, changed(b, fingerprint=a.fingerprint)], [(0, [1, 1])])
    with pytest.raises(DataError, match="must have weights from its first sample on"):
        BlendSchedule([a], [(3, [1])])
    with pytest.raises(IndexError, match="start at 0, got -1"):
        BlendSchedule([a], [(0, [1])]).locate(-1)
