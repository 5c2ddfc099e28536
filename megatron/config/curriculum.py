"""``--seq-length-curriculum``: DeepSpeed's legacy curriculum, which truncates samples to a length that grows.

Step k, counted from 1, reads the first l(k) inputs and labels of each sample of the step; the remaining tokens of these
samples are dropped. Skipped steps count. DeepSpeed calls the length the difficulty:

| schedule_type | length l(k) |
|---|---|
| fixed_linear | as fixed_root with root_degree 1 |
| fixed_root | min(x - x mod difficulty_step, max_difficulty), with x = floor((k / total_curriculum_step)^(1 / root_degree) (max_difficulty - min_difficulty) + min_difficulty) |
| fixed_discrete | difficulty[i] of the first i with k <= max_step[i]; the last difficulty after the last max_step |

Once a length has reached max_difficulty, it is used for all later steps. If min_difficulty is not below max_difficulty,
every step has length min_difficulty.

Source: DeepSpeed, runtime/data_pipeline/curriculum_scheduler.py, ``CurriculumScheduler.update_difficulty``, which
Megatron-DeepSpeed's ``train`` (megatron/training.py) and DeepSpeed's engine call with the number of steps taken plus 1.
Its ``evaluate`` reads samples at full length, and ``get_batch`` in pretrain_gpt.py truncates them.
"""  # noqa: E501 - the formula is one row of the table

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

FLAG = "--seq-length-curriculum"
NAME = f"{FLAG} (curriculum_learning in DeepSpeed's JSON)"
ROOT_KEYS = ("total_curriculum_step", "difficulty_step")
DISCRETE_KEYS = ("difficulty", "max_step")
SCHEDULE_KEYS = {
    "fixed_linear": ROOT_KEYS,
    "fixed_root": (*ROOT_KEYS, "root_degree"),
    "fixed_discrete": DISCRETE_KEYS,
}
"""Schedule type -> the keys of its ``schedule_config``."""
DIFFICULTY_KEYS = ("min_difficulty", "max_difficulty")


class Curriculum(NamedTuple):
    """A schedule of DeepSpeed's curriculum; the attributes have the names of its JSON keys."""

    schedule_type: str
    min_difficulty: int
    max_difficulty: int
    total_curriculum_step: int = 1
    difficulty_step: int = 1
    root_degree: float = 1
    difficulty: tuple[int, ...] = ()
    max_step: tuple[int, ...] = ()

    def difficulty_at(self, step: int) -> int:
        """Compute the difficulty at ``step``, counted from 1, before it has reached the maximum."""
        if self.schedule_type == "fixed_discrete":
            phase = next((idx for idx, last in enumerate(self.max_step) if step <= last), len(self.max_step))
            return self.difficulty[-1] if step > self.max_step[-1] else self.difficulty[phase]
        low, high = self.min_difficulty, self.max_difficulty
        progress = (float(step) / self.total_curriculum_step) ** (1.0 / self.root_degree)
        value = math.floor(progress * (high - low) + low)
        return min(value - value % self.difficulty_step, high)

    def phases(self) -> tuple[tuple[int, int], ...]:
        """List (first step, length) for each change of the length, in increasing steps from step 1."""
        if self.min_difficulty >= self.max_difficulty:
            return ((1, self.min_difficulty),)
        phases: list[tuple[int, int]] = []
        for step in self._changes():
            length = self.difficulty_at(step)
            if not phases or length != phases[-1][1]:
                phases.append((step, length))
            if length >= self.max_difficulty or length < 1:
                break
        return tuple(phases)

    def _changes(self) -> Iterator[int]:
        """Yield the steps at which the difficulty may change, from step 1."""
        if self.schedule_type == "fixed_discrete":
            yield from sorted({1, *(last + 1 for last in self.max_step)})
            return
        step = 1
        while True:
            yield step
            length, stride = self.difficulty_at(step), 1
            while self.difficulty_at(step + stride) == length:
                stride *= 2
            low, high = step + stride // 2, step + stride  # the difficulty changes after low, at high or before
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self.difficulty_at(middle) == length else (low, middle)
            step = high


@functools.cache
def curriculum_phases(text: str) -> tuple[tuple[int, int], ...]:
    """Parse a curriculum, and list (first step, length) for each change of its length.

    Raises:
        ValueError: the text has another form, or a length is below 1.
    """
    phases = parse_curriculum(text).phases()
    for step, length in phases:
        if length < 1:
            raise ValueError(
                f"{NAME} must have lengths of at least 1, got {length} in step {step}: {text!r}. Raise min_difficulty "
                "to difficulty_step or more"
            )
    return phases


def curriculum_text(section: Mapping[str, Any]) -> str:
    """Convert the section "curriculum_learning" of DeepSpeed's JSON to the value of ``--seq-length-curriculum``."""
    schedule_type = str(section.get("schedule_type", ""))
    config = section.get("schedule_config", {})
    keys = SCHEDULE_KEYS.get(schedule_type, ())
    values = {name: section[name] for name in DIFFICULTY_KEYS if name in section}
    values |= {name: config[name] for name in keys if name in config}
    return " ".join([schedule_type, *(f"{name}={_value_text(value)}" for name, value in values.items())])


def parse_curriculum(text: str) -> Curriculum:
    """Parse ``"fixed_linear min_difficulty=64 max_difficulty=2048 total_curriculum_step=953 difficulty_step=8"``.

    Raises:
        ValueError: the text has another form.
    """
    schedule_type, *words = text.split() or [""]
    if schedule_type not in SCHEDULE_KEYS:
        raise ValueError(
            f"{NAME} must start with a schedule_type, {', '.join(SCHEDULE_KEYS)}, got {text!r}. Write it as "
            "fixed_linear min_difficulty=64 max_difficulty=2048 total_curriculum_step=1000 difficulty_step=8"
        )
    keys = (*DIFFICULTY_KEYS, *SCHEDULE_KEYS[schedule_type])
    values = dict(word.partition("=")[::2] for word in words)
    if set(values) != set(keys) or len(words) != len(keys):
        raise ValueError(f"{NAME} with {schedule_type} must have the keys {', '.join(keys)}, once each, got {text!r}")
    lists = {name: _parse_integers(name, values.pop(name), text) for name in DISCRETE_KEYS if name in values}
    degree = {"root_degree": _parse_degree(values.pop("root_degree"), text)} if "root_degree" in values else {}
    numbers = {name: _parse_integers(name, value, text) for name, value in values.items()}
    for name, value in numbers.items():
        if len(value) != 1:
            raise ValueError(f"{name} of {NAME} must be one integer, got {len(value)} in {text!r}")
    if lists and len(lists["difficulty"]) != len(lists["max_step"]) + 1:
        raise ValueError(
            f"difficulty of {NAME} must have one entry more than max_step, got {len(lists['difficulty'])} and "
            f"{len(lists['max_step'])} in {text!r}"
        )
    fields: dict[str, Any] = {name: value[0] for name, value in numbers.items()} | lists | degree
    return Curriculum(schedule_type, **fields)


def _value_text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


def _parse_integers(name: str, words: str, text: str) -> tuple[int, ...]:
    numbers = words.split(",")
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise ValueError(f"{name} of {NAME} must be integers of at least 1, got {words!r} in {text!r}")
    return tuple(int(number) for number in numbers)


def _parse_degree(word: str, text: str) -> float:
    try:
        degree = float(word)
    except ValueError:
        degree = 0.0
    if not 0 < degree < math.inf:
        raise ValueError(f"root_degree of {NAME} must be a number above 0, got {word!r} in {text!r}")
    return degree
