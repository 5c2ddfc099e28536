"""The end of a run in steps, samples and tokens, for any sequence of global batch sizes."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.arguments.parser import parse
from megatron.config import Config, elastic
from megatron.config.batch_rampup import BatchSizes
from megatron.config.elastic import Span
from megatron.config.run_length import RunLength


def taken(length: RunLength, step: int, consumed: int, at_most: int = 10**6) -> tuple[int, int]:
    """Take steps one by one while any are left; return the steps and samples then."""
    while length.steps_left(step, consumed) and at_most:
        step, consumed, at_most = step + 1, consumed + length.sizes.at(consumed), at_most - 1
    return step, consumed


SIZES = st.one_of(
    st.builds(BatchSizes, st.integers(1, 40)),
    st.builds(
        lambda start, increment, number, samples: BatchSizes(start + increment * number, start, increment, samples),
        st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 300),
    ),
)  # fmt: skip
"""Constant global batches and ramp-ups."""


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(SIZES, st.integers(0, 20)), max_size=5), SIZES, st.integers(0, 600), st.integers(0, 600))
@example([(BatchSizes(4), 20)], BatchSizes(8), 160, 160)
@example([(BatchSizes(8), 10)], BatchSizes(4), 160, 160)
def test_the_end_depends_on_the_samples_consumed_only(
    before: list[tuple[BatchSizes, int]], last: BatchSizes, samples: int, min_samples: int
) -> None:
    """After any sequence of batch sizes, and ``steps_left`` is the number of steps that are taken."""
    for limits in ({"samples": samples}, {"min_samples": min_samples}, {"samples": samples, "min_samples": 300}):
        step = consumed = 0
        for sizes, steps in before:
            step, consumed = taken(RunLength(sizes, **limits), step, consumed, steps)
        length = RunLength(last, **limits)
        assert taken(length, step, consumed) == (
            step + length.steps_left(step, consumed),
            last.consumed_after(length.steps_left(step, consumed), consumed),
        )
        _, end = taken(length, step, consumed)
        if "samples" in limits:
            assert end <= samples, "no sample beyond the limit"
        if limits.keys() == {"samples"}:
            assert samples < end + last.at(end), "another step does not fit"
        if limits.keys() == {"min_samples"}:
            assert end >= min_samples
            assert end == consumed or end - last.full < min_samples, "the step that reaches the limit is the last one"


def test_of_several_limits_the_first_one_ends_the_run() -> None:
    length = RunLength(BatchSizes(4), steps=10, samples=100, min_samples=50)
    assert taken(length, 0, 0) == (10, 40)
    assert taken(length, 5, 44) == (7, 52), "the tokens"
    assert taken(length, 2, 96) == (2, 96), "the tokens are consumed already"
    assert taken(RunLength(BatchSizes(4), samples=10), 0, 0) == (2, 8)
    assert taken(RunLength(BatchSizes(4), steps=3), 1, 400) == (3, 408)


def read(line: str) -> Config:
    return parse(f"--batch-size 2 --gas 2 --seq-length 16 {line}".split(), world_size=1, env={})


def test_flags_give_the_limits() -> None:
    def limits(line: str) -> tuple[int | None, ...]:
        found = read(line).run_length(1)
        return found.steps, found.samples, found.min_samples

    assert limits("--train-iters 7") == (7, None, None)
    assert limits("--train-samples 30") == (None, 30, None)
    assert limits("--train-tokens 161") == (None, None, 11)
    assert limits("--train-tokens 161 --train-iters 9") == (9, None, 11)
    assert limits("--train-tokens 161 --train-samples 30") == (None, 30, 11)
    assert read("--train-tokens 161 --train-iters 9").batch.train_iters == 3, "steps of a new run"
    t5 = parse("--enc-seq-length 48 --dec-seq-length 16 --train-tokens 480".split(), world_size=1, env={}, family="t5")
    assert t5.run_length(1).min_samples == 10, "what the encoder reads, as in Megatron-DeepSpeed"
    t5 = parse("--train-tokens 51200".split(), world_size=1, env={}, family="t5")
    assert t5.batch.train_iters * 4 == t5.run_length(1).min_samples == 51200 // t5.sequence_lengths[0]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.sampled_from(["--train-samples 100", "--train-tokens 1600"]))
def test_an_elastic_job_ends_after_the_same_samples_with_any_number_of_replicas(count: int, limit: str) -> None:
    """Micro-batches are shared unequally where they must be: 8 of them on 3 replicas."""
    config = parse(f"--batch-size 2 --gas 2 --seq-length 16 {limit}".split(), world_size=4, env={})
    fitted = elastic.with_replicas(config, Span(1, 4), count)
    assert taken(fitted.run_length(count), 0, 0) == taken(config.run_length(4), 0, 0)
    assert fitted.optimizer.lr_decay_samples == 100
