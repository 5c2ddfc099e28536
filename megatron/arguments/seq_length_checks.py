"""Checks of ``--seq-length-schedule`` and ``--seq-length-curriculum`` against the sequence length and the layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.config import curriculum
from megatron.config.curriculum import curriculum_phases
from megatron.config.seq_length import FLAG, parse_lengths

if TYPE_CHECKING:
    from megatron.config.config import Config


def curriculum_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each problem in the curriculum, and for lengths that the layout does not support."""
    text, full, name = config.batch.seq_length_curriculum, config.batch.seq_length, curriculum.NAME
    if text is None or config.family_config.KIND != "decoder":  # other families reject the flag
        return
    if config.batch.seq_length_schedule is not None:
        yield f"{FLAG} and {name} exclude each other, got both. Remove one of them"
    try:
        phases = curriculum_phases(text)
    except ValueError as error:
        yield str(error)
        return
    if (largest := max(length for _, length in phases)) > full:
        yield (
            f"no length of {name} may exceed --seq-length, the length of a sample, got {largest} and {full}. Use "
            f"--seq-length {largest}, or a smaller max_difficulty"
        )
    yield from _layout_problems(
        config, list(dict.fromkeys(length for _, length in phases if length < full)), name, "difficulty_step"
    )


def schedule_problems(config: Config) -> Iterator[str]:
    """Yield an error message for each problem in the schedule, including lengths that this layout does not support."""
    text = config.batch.seq_length_schedule
    if text is None or config.family_config.KIND != "decoder":  # other families reject the flag
        return
    try:
        steps = parse_lengths(text)
    except ValueError as error:
        yield str(error)
        return
    yield from _order_problems(steps)
    yield from _size_problems(steps, config.batch.seq_length)
    yield from _layout_problems(config, [length for _, length in steps if length != config.batch.seq_length], FLAG)


def _order_problems(steps: tuple[tuple[int, int], ...]) -> Iterator[str]:
    if steps[0][0]:
        yield (
            f"{FLAG} must start at 0 tokens, got {steps[0][0]} tokens in its first entry. Start with 0: {steps[0][1]}"
        )
    for (before, shorter), (after, longer) in zip(steps, steps[1:], strict=False):
        if after <= before:
            yield f"tokens of {FLAG} must increase, got {after} after {before}. Sort its entries"
        if longer <= shorter:
            yield (
                f"lengths of {FLAG} must increase, got {longer} after {shorter}. Remove one of the two, or raise the "
                "later one"
            )


def _size_problems(steps: tuple[tuple[int, int], ...], full: int) -> Iterator[str]:
    largest = max(length for _, length in steps)
    for length in dict.fromkeys(length for _, length in steps if full % length and length < full):
        divisors = [divisor for divisor in range(1, full + 1) if full % divisor == 0]
        nearest = sorted(sorted(divisors, key=lambda divisor: abs(divisor - length))[:3])
        yield (
            f"each length of {FLAG} must divide --seq-length, so that a sample is split into equal chunks, got "
            f"{length} and {full} ({full} / {length} = {full / length:g}). The nearest valid lengths are "
            f"{', '.join(map(str, nearest))}"
        )
    if largest > full:
        yield (
            f"no length of {FLAG} may exceed --seq-length, the length of a sample, got {largest} and {full}. Use "
            f"--seq-length {largest}, or a shorter length"
        )
    elif steps[-1][1] < full and largest < full:
        yield (
            f"the last length of {FLAG} must be --seq-length, got {steps[-1][1]} and {full}. Add a last entry "
            f'"TOKENS: {full}", or use --seq-length {largest}'
        )


def _layout_problems(config: Config, lengths: list[int], flag: str, key: str = "") -> Iterator[str]:
    """Yield an error message if the ranks cannot split some of ``lengths``.

    Args:
        lengths: the lengths in the schedule, except --seq-length.
        flag: the flag that sets the lengths.
        key: the part of its value whose multiples are the lengths; "" if they are listed.
    """
    parallel = config.parallel
    c, t = parallel.context_parallel_size, parallel.model_parallel_size
    if c > 1:
        num_chunks = 2 * c * (t if parallel.sequence_parallel else 1)
        tensor = " x --model-parallel-size" if parallel.sequence_parallel else ""
        rule, fix = f"2 x --context-parallel-size{tensor} = {num_chunks}", "another --context-parallel-size"
    elif parallel.sequence_parallel:
        num_chunks, rule, fix = t, f"--model-parallel-size = {t}, with --sequence-parallel", "no --sequence-parallel"
    else:
        return
    invalid = [str(length) for length in lengths if length % num_chunks]
    if invalid:
        got = ", ".join(invalid[:5]) + (f" and {len(invalid) - 5} more" if len(invalid) > 5 else "")
        multiples = f"a {key} that is a multiple" if key else "multiples"
        yield (
            f"each length of {flag} must be a multiple of {rule}, got {got}. Use {multiples} of {num_chunks}, or {fix}"
        )
