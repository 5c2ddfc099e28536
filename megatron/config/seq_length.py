"""A sequence length that grows during training: --seq-length-schedule as text, and the length of each step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.config.config import Config

# How many tokens a model reads at a time while the length grows: arithmetic on the tokens consumed, and nothing else.
#
# ``--seq-length-schedule "0: 512; 1e9: 2048; 5e9: 4096"``: a step that begins at or after so many tokens consumed has
# that length. A sample stays a window of L = --seq-length tokens and the label of the last one, whatever the length l
# of a step, a divisor of L: its L / l pieces are read as samples of their own. Piece k is columns k l ... k l + l of
# the window, so neighbours share one token, and each token is a label exactly once, as in the whole window:
#
#     window of L = 8     t0 t1 t2 t3 t4 t5 t6 t7 t8
#     pieces of l = 4     t0 t1 t2 t3 t4
#                                     t4 t5 t6 t7 t8
#
# So the tokens of a step, the samples and their order, and the position in them do not depend on the schedule. Tokens
# consumed are samples consumed x L.

FLAG = "--seq-length-schedule"
LARGEST_TOKENS = 2**62
"""Tokens are counted in 64 bits."""

_RULE = 'must be steps "TOKENS: LENGTH" with semicolons between them, such as "0: 512; 1e9: 2048; 5e9: 4096"'


@dataclass(frozen=True)
class SeqLengths:
    """Tokens of a piece by tokens consumed; no ``steps``: ``full`` in every step.

    Args:
        full: tokens of a sample (--seq-length).
        steps: (tokens, length), both rising, the first from 0 tokens on and the last of ``full``.
    """

    full: int
    steps: tuple[tuple[int, int], ...] = ()

    def at(self, tokens: int) -> int:
        """Return the length of a step that begins after so many tokens consumed."""
        number = bisect_right(self.steps, tokens, key=lambda step: step[0])
        return self.steps[number - 1][1] if number else self.full

    def of_step(self, samples_consumed: int) -> int:
        """Return the length of the step that begins after so many samples."""
        return self.at(samples_consumed * self.full)

    def all(self) -> list[int]:
        """Return every length that a step can have, rising."""
        return [length for _, length in self.steps] or [self.full]

    def starts(self) -> list[tuple[int, int, int]]:
        """Return (tokens, first sample, length) of each entry: a sample begins at or after the tokens."""
        return [(tokens, -(-tokens // self.full), length) for tokens, length in self.steps]

    @property
    def do_change(self) -> bool:
        """Whether there is more than one length."""
        return len(self.steps) > 1


def parse_lengths(text: str) -> tuple[tuple[int, int], ...]:
    """Return (tokens, length) of each entry of a schedule, as they stand there.

    Raises:
        ValueError: not such a text.
    """
    wrong = f"{FLAG} {_RULE}; got {text!r}"
    steps = tuple(_entry(part.strip(), wrong) for part in text.split(";") if part.strip())
    if not steps:
        raise ValueError(f"{wrong}, without a step. Leave it out, or write one")
    return steps


def _entry(part: str, wrong: str) -> tuple[int, int]:
    tokens, colon, length = (piece.strip() for piece in part.partition(":"))
    if not colon:
        raise ValueError(f"{wrong}, where {part!r} has no colon")
    start, size = _whole(tokens), _whole(length)
    if start is None:
        raise ValueError(f"{wrong}, where {tokens!r} is no whole number of tokens of at least 0")
    if not size:
        raise ValueError(f"{wrong}, where {length!r} is no length, a whole number of at least 1")
    return start, size


def _whole(word: str) -> int | None:
    """Return the whole number that ``word`` is, also one as 1e9; None for anything else."""
    if word.isdecimal():
        return int(word) if int(word) <= LARGEST_TOKENS else None
    try:
        number = float(word)
    except ValueError:
        return None
    is_whole = math.isfinite(number) and number == int(number) and 0 <= number <= LARGEST_TOKENS
    return int(number) if is_whole else None


def schedule_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with the schedule, and with its lengths in this layout; all of it, each with the way out."""
    text = config.batch.seq_length_schedule
    if text is None or config.own.KIND != "decoder":  # which is told of the flag
        return
    try:
        steps = parse_lengths(text)
    except ValueError as error:
        yield str(error)
        return
    yield from _order_problems(steps)
    yield from _size_problems(steps, config.batch.seq_length)
    yield from _layout_problems(config, [length for _, length in steps if length != config.batch.seq_length])


def _order_problems(steps: tuple[tuple[int, int], ...]) -> Iterator[str]:
    if steps[0][0]:
        yield (
            f"{FLAG} must say the length from the first token on, got {steps[0][0]} tokens in its first entry. Let it "
            f"begin with 0: {steps[0][1]}"
        )
    for (before, shorter), (after, longer) in zip(steps, steps[1:], strict=False):
        if after <= before:
            yield f"tokens of {FLAG} must rise, got {after} behind {before}. Put its entries in order"
        if longer <= shorter:
            yield (
                f"lengths of {FLAG} must rise, got {longer} behind {shorter}. Leave one of the two out, or let the "
                "later one be the longer"
            )


def _size_problems(steps: tuple[tuple[int, int], ...], full: int) -> Iterator[str]:
    largest = max(length for _, length in steps)
    for length in dict.fromkeys(length for _, length in steps if full % length and length < full):
        works = [each for each in range(1, full + 1) if full % each == 0]
        near = sorted(sorted(works, key=lambda each: abs(each - length))[:3])
        yield (
            f"each length of {FLAG} must divide --seq-length, so that a sample is cut into whole pieces, got {length} "
            f"and {full} ({full} / {length} = {full / length:g}). Near it are {', '.join(map(str, near))}"
        )
    if largest > full:
        yield (
            f"no length of {FLAG} may be more than --seq-length, the length of a sample, got {largest} and {full}. "
            f"Use --seq-length {largest}, or a shorter length"
        )
    elif steps[-1][1] < full and largest < full:
        yield (
            f"the last length of {FLAG} must be --seq-length, got {steps[-1][1]} and {full}. Add a last entry "
            f'"TOKENS: {full}", or use --seq-length {largest}'
        )


def _layout_problems(config: Config, lengths: list[int]) -> Iterator[str]:
    """Yield which lengths cannot be cut over ranks; --seq-length itself is checked with that flag."""
    parallel = config.parallel
    c, t = parallel.context_parallel_size, parallel.model_parallel_size
    if c > 1:
        parts = 2 * c * (t if parallel.sequence_parallel else 1)
        tensor = " x --model-parallel-size" if parallel.sequence_parallel else ""
        rule, leave = f"2 x --context-parallel-size{tensor} = {parts}", "another --context-parallel-size"
    elif parallel.sequence_parallel:
        parts, rule, leave = t, f"--model-parallel-size = {t}, with --sequence-parallel", "no --sequence-parallel"
    else:
        return
    wrong = [str(length) for length in lengths if length % parts]
    if wrong:
        yield (
            f"each length of {FLAG} must be a multiple of {rule}, got {', '.join(wrong)}. Use multiples of {parts}, or "
            f"{leave}"
        )
