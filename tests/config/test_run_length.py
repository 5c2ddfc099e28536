"""The end of a run in steps, samples and tokens, for any sequence of global batch sizes."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.arguments.parser import parse
from megatron.config import Config, elastic
from megatron.config.batch_rampup import BatchSizes
from megatron.config.elastic import RankRange
from megatron.config.run_length import RunLength


def run_steps(length: RunLength, step: int, consumed: int, max_steps: int = 10**6) -> tuple[int, int]:
    """Take steps one by one while any are left; return the steps and samples then."""
    while length.steps_left(step, consumed) and max_steps:
        step, consumed, max_steps = step + 1, consumed + length.batch_sizes.at(consumed), max_steps - 1
    return step, consumed


BATCH_SIZES = st.one_of(
    st.builds(BatchSizes, st.integers(1, 40)),
    st.builds(
        lambda start, increment, n, samples: BatchSizes.ramp(start + increment * n, start, increment, samples),
        st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 300),
    ),
)  # fmt: skip
"""Constant global batches and ramp-ups."""


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(BATCH_SIZES, st.integers(0, 20)), max_size=5),
    BATCH_SIZES,
    st.integers(0, 600),
    st.integers(0, 600),
)
@example([(BatchSizes(4), 20)], BatchSizes(8), 160, 160)
@example([(BatchSizes(8), 10)], BatchSizes(4), 160, 160)
def test_run_end_depends_on_consumed_samples_only(
    previous: list[tuple[BatchSizes, int]], last_sizes: BatchSizes, samples: int, min_samples: int
) -> None:
    """After any sequence of batch sizes, and ``steps_left`` is the number of steps that are taken."""
    for limits in ({"samples": samples}, {"min_samples": min_samples}, {"samples": samples, "min_samples": 300}):
        step = consumed = 0
        for batch_sizes, steps in previous:
            step, consumed = run_steps(RunLength(batch_sizes, **limits), step, consumed, steps)
        length = RunLength(last_sizes, **limits)
        assert run_steps(length, step, consumed) == (
            step + length.steps_left(step, consumed),
            last_sizes.consumed_after(length.steps_left(step, consumed), consumed),
        )
        _, end = run_steps(length, step, consumed)
        if "samples" in limits:
            assert end <= samples, "no sample beyond the limit"
        if limits.keys() == {"samples"}:
            assert samples < end + last_sizes.at(end), "another step does not fit"
        if limits.keys() == {"min_samples"}:
            assert end >= min_samples
            assert end == consumed or end - last_sizes.full < min_samples, (
                "the step that reaches the limit is the last one"
            )


def test_first_limit_ends_run() -> None:
    length = RunLength(BatchSizes(4), steps=10, samples=100, min_samples=50)
    assert run_steps(length, 0, 0) == (10, 40)
    assert run_steps(length, 5, 44) == (7, 52), "the tokens"
    assert run_steps(length, 2, 96) == (2, 96), "the tokens are consumed already"
    assert run_steps(RunLength(BatchSizes(4), samples=10), 0, 0) == (2, 8)
    assert run_steps(RunLength(BatchSizes(4), steps=3), 1, 400) == (3, 408)


def parse_line(line: str) -> Config:
    return parse(f"--batch-size 2 --gas 2 --seq-length 16 {line}".split(), world_size=1, env={})


def test_flags_set_run_limits() -> None:
    def limits(line: str) -> tuple[int | None, ...]:
        length = parse_line(line).run_length(1)
        return length.steps, length.samples, length.min_samples

    assert limits("--train-iters 7") == (7, None, None)
    assert limits("--train-samples 30") == (None, 30, None)
    assert limits("--train-tokens 161") == (None, None, 11)
    assert limits("--train-tokens 161 --train-iters 9") == (9, None, 11)
    assert limits("--train-tokens 161 --train-samples 30") == (None, 30, 11)
    assert parse_line("--train-tokens 161 --train-iters 9").batch.train_iters == 3, "steps of a new run"
    t5 = parse("--enc-seq-length 48 --dec-seq-length 16 --train-tokens 480".split(), world_size=1, env={}, family="t5")
    assert t5.run_length(1).min_samples == 10, "what the encoder reads, as in Megatron-DeepSpeed"
    t5 = parse("--train-tokens 51200".split(), world_size=1, env={}, family="t5")
    assert t5.batch.train_iters * 4 == t5.run_length(1).min_samples == 51200 // t5.sequence_lengths[0]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.sampled_from(["--train-samples 100", "--train-tokens 1600"]))
def test_elastic_run_ends_after_same_samples(num_replicas: int, limit: str) -> None:
    """Micro-batches are shared unequally where they must be: 8 of them on 3 replicas."""
    config = parse(f"--batch-size 2 --gas 2 --seq-length 16 {limit}".split(), world_size=4, env={})
    fitted = elastic.with_replicas(config, RankRange(1, 4), num_replicas)
    assert run_steps(fitted.run_length(num_replicas), 0, 0) == run_steps(config.run_length(4), 0, 0)
    assert fitted.optimizer.lr_decay_samples == 100
