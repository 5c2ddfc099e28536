"""--seq-length-curriculum: DeepSpeed's lengths at every step, the trained tokens, and every invalid curriculum."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import Config, parse
from megatron.config.batch_rampup import BatchSizes
from megatron.config.curriculum import curriculum_phases, curriculum_text
from megatron.config.seq_length import SeqLengths
from megatron.errors import ConfigError

FLAG = "--seq-length-curriculum"
LINEAR = "fixed_linear min_difficulty=8 max_difficulty=64 total_curriculum_step=50 difficulty_step=8"


class Scheduler:
    """DeepSpeed's scheduler, step by step: the difficulty is computed anew until it has reached the maximum."""

    def __init__(self, section: dict[str, Any]) -> None:
        self.section, self.current = section, section["min_difficulty"]

    def update(self, step: int) -> int:
        section, config = self.section, self.section["schedule_config"]
        if self.current >= section["max_difficulty"]:
            return self.current
        if section["schedule_type"] == "fixed_discrete":
            later = [size for last, size in zip(config["max_step"], config["difficulty"][1:], strict=True)]
            self.current = config["difficulty"][0]
            for last, size in zip(config["max_step"], later, strict=True):
                if step <= last:
                    break
                self.current = size
        else:
            degree = config.get("root_degree", 1) if section["schedule_type"] == "fixed_root" else 1
            span = section["max_difficulty"] - section["min_difficulty"]
            length = math.floor(math.pow(step / config["total_curriculum_step"], 1 / degree) * span + self.first)
            self.current = min(length // config["difficulty_step"] * config["difficulty_step"], self.first + span)
        return self.current

    @property
    def first(self) -> int:
        return int(self.section["min_difficulty"])


def lengths_of(section: dict[str, Any], full: int) -> SeqLengths:
    return SeqLengths(full, curriculum=curriculum_phases(curriculum_text(section)))


@settings(max_examples=60, deadline=None)
@given(
    low=st.integers(8, 200), span=st.integers(-3, 300), total=st.integers(1, 90), stride=st.integers(1, 8),
    degree=st.sampled_from([None, 1, 2, 3, 0.5, 1.7]),
)  # fmt: skip
def test_root_lengths_equal_deepspeed_at_every_step(
    low: int, span: int, total: int, stride: int, degree: float | None
) -> None:
    config: dict[str, float] = {"total_curriculum_step": total, "difficulty_step": stride}
    config |= {} if degree is None else {"root_degree": degree}
    section = {
        "schedule_type": "fixed_linear" if degree is None else "fixed_root", "min_difficulty": low,
        "max_difficulty": max(low + span, 1), "schedule_config": config,
    }  # fmt: skip
    scheduler, lengths = Scheduler(section), lengths_of(section, 1000)
    steps = range(3 * total + 40)
    assert [lengths.length_of_step(0, step) for step in steps] == [scheduler.update(step + 1) for step in steps]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 64), min_size=2, max_size=5), maximum=st.integers(1, 70), low=st.integers(1, 70),
    data=st.data(),
)  # fmt: skip
def test_discrete_lengths_equal_deepspeed_at_every_step(
    sizes: list[int], maximum: int, low: int, data: st.DataObject
) -> None:
    """Also with lengths that shrink before one has reached the maximum."""
    last_steps = data.draw(st.lists(st.integers(1, 30), min_size=len(sizes) - 1, max_size=len(sizes) - 1, unique=True))
    section = {
        "schedule_type": "fixed_discrete", "min_difficulty": low, "max_difficulty": maximum,
        "schedule_config": {"difficulty": sizes, "max_step": sorted(last_steps)},
    }  # fmt: skip
    scheduler, lengths = Scheduler(section), lengths_of(section, 100)
    assert [lengths.length_of_step(0, step) for step in range(35)] == [scheduler.update(step + 1) for step in range(35)]


def test_published_curriculum_has_its_lengths() -> None:
    """Megatron-DeepSpeed's ds_pretrain_gpt_1.3B_rope_slw.sh: 64 to 2048 in 953 steps, in steps of 8."""
    section = {
        "schedule_type": "fixed_linear", "min_difficulty": 64, "max_difficulty": 2048,
        "schedule_config": {"total_curriculum_step": 953, "difficulty_step": 8},
    }  # fmt: skip
    scheduler, lengths = Scheduler(section), lengths_of(section, 2048)
    expected = [scheduler.update(step) for step in range(1, 2000)]
    assert [lengths.length_of_step(0, step) for step in range(1999)] == expected
    assert expected[:4] == [64, 64, 64, 72] and expected[951:954] == [2040, 2048, 2048]


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(0, 80), tokens=st.integers(1, 20000), start=st.integers(0, 60), is_growing=st.booleans(),
)  # fmt: skip
def test_tokens_and_steps_equal_sums_over_steps(steps: int, tokens: int, start: int, is_growing: bool) -> None:
    lengths = SeqLengths(64, curriculum=curriculum_phases(LINEAR))
    sizes = BatchSizes.ramp(12, 4, 4, 40) if is_growing else BatchSizes(4)
    consumed = [sizes.consumed_after(step) for step in range(2000)]
    by_step = [sizes.at(consumed[step]) * lengths.length_of_step(0, step) for step in range(2000)]
    assert lengths.tokens_after(steps, sizes) == sum(by_step[:steps])
    expected = next(count for count, total in enumerate(accumulate(by_step[start:]), 1) if total >= tokens)
    assert lengths.steps_until(tokens, sizes, start, consumed[start]) == expected
    assert lengths.steps_until(0, sizes, start, consumed[start]) == 0
    samples = tokens // 64
    assert round(lengths.samples_of(lengths.tokens_of(samples, sizes), sizes), 6) == samples
    by_sample = [lengths.length_of_step(0, step) for step in range(400) for _ in range(sizes.at(consumed[step]))]
    assert lengths.tokens_of(samples, sizes) == sum(by_sample[:samples])
    assert SeqLengths(64).steps_until(tokens, sizes, start, consumed[start]) == sizes.steps_until(
        consumed[start] + Fraction(tokens, 64), consumed[start]
    )


def parse_flags(extra: str, *, world_size: int = 1, family: str = "gpt2", curriculum: str | None = LINEAR) -> Config:
    words = f"--data-path none --vocab-size 99 --seq-length 64 --dry-run --batch-size 4 {extra}".split()
    words += [] if curriculum is None else [FLAG, *curriculum.split()]
    return parse(words, world_size=world_size, env={}, family=family)


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        ("linear", "must start with a schedule_type, fixed_linear, fixed_root, fixed_discrete, got 'linear'"),
        ("fixed_linear min_difficulty=8", "must have the keys min_difficulty, max_difficulty, total_curriculum_step"),
        (f"{LINEAR} root_degree=2", "with fixed_linear must have the keys"),
        (LINEAR.replace("=50", "=0"), "total_curriculum_step of --seq-length-curriculum"),
        (LINEAR.replace("=50", "=5,6"), "must be one integer, got 2"),
        (LINEAR.replace("ty=8", "ty=4"), "must have lengths of at least 1, got 0 in step 1"),
        (LINEAR.replace("fixed_linear", "fixed_root") + " root_degree=0", "must be a number above 0, got '0'"),
        ("fixed_discrete min_difficulty=8 max_difficulty=64 difficulty=8,64 max_step=5,9", "one entry more than"),
        (LINEAR.replace("=64", "=128"), "may exceed --seq-length, the length of a sample, got 128 and 64"),
    ],
)
def test_invalid_curriculum_raises(curriculum: str, message: str) -> None:
    with pytest.raises(ConfigError) as exc_info:
        parse_flags("", curriculum=curriculum)
    assert message in str(exc_info.value) and FLAG in str(exc_info.value)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--seq-length-schedule 0:8;99:64", "exclude each other, got both"),
        ("--context-parallel-size 8", "must be a multiple of 2 x --context-parallel-size = 16, got 8, 24, 40, 56"),
        ("--eval-only --load x", "--seq-length-curriculum applies to training only, got --eval-only"),
        (
            "--train-tokens 9000 --lr-decay-tokens 900 --lr-decay-style wsd --lr-wsd-decay-iters 9",
            "--lr-wsd-decay-iters 9 with --seq-length-curriculum",
        ),
        ("--train-samples 900 --lr-warmup-tokens 99", "--lr-warmup-tokens with --seq-length-curriculum"),
    ],
)  # fmt: skip
def test_contradicting_flags_raise(extra: str, message: str) -> None:
    with pytest.raises(ConfigError) as exc_info:
        parse_flags(extra, world_size=8)
    assert message in str(exc_info.value)


@pytest.mark.parametrize("family", ["t5", "bert"])
def test_curriculum_raises_for_t5_and_bert(family: str) -> None:
    with pytest.raises(ConfigError, match="full length, which cannot be truncated"):
        parse(["--data-path", "none", FLAG, LINEAR], world_size=1, env={}, family=family)


def test_run_ends_after_trained_tokens() -> None:
    """4 x 8 tokens in steps 1 to 7, 4 x 16 from the first length of 16 on, ..."""
    config = parse_flags("--train-tokens 5000")
    lengths = config.batch.seq_lengths
    totals = list(accumulate(4 * lengths.length_of_step(0, step) for step in range(100)))
    steps = next(count for count, total in enumerate(totals, 1) if total >= 5000)
    assert config.batch.train_iters == steps > 5000 / 4 / 64 and config.optimizer.lr_trained_tokens == "all"
    run_length = config.run_length(1)
    for step in range(steps + 2):
        dropped = 4 * step * 64 - ([0, *totals][step])
        assert run_length.steps_left(step, 4 * step, dropped) == max(steps - step, 0)
    assert [parse_flags(f"--train-iters {n}").notes for n in (49, 50)][0] != []
    assert not [note for note in parse_flags("--train-iters 50").notes if FLAG in note]


SECTION: dict[str, Any] = {
    "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 64,
    "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 50, "difficulty_step": 8},
}  # fmt: skip


def parse_section(section: dict[str, Any] | None, tmp_path: Path, extra: str = "") -> Config:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({} if section is None else {"curriculum_learning": section}))
    return parse_flags(f"--deepspeed_config {path} {extra}", curriculum=None)


def test_json_section_sets_curriculum(tmp_path: Path) -> None:
    assert parse_section(SECTION, tmp_path).batch.seq_length_curriculum == LINEAR
    config = parse_section(SECTION, tmp_path, "--curriculum-learning-legacy")
    assert config.batch.seq_length_curriculum == LINEAR
    discrete = {**SECTION, "schedule_type": "fixed_discrete"}
    discrete["schedule_config"] = {"difficulty": [8, 64], "max_step": [5]}
    phases = parse_section(discrete, tmp_path).batch.seq_lengths.curriculum
    assert phases == ((1, 8), (6, 64))
    for disabled in ({**SECTION, "enabled": False}, {"min_difficulty": 8}):
        assert not parse_section(disabled, tmp_path).batch.seq_lengths.truncates


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"curriculum_type": "vocab"}, "curriculum_learning.curriculum_type must be one of seqlen, got 'vocab'"),
        ({"schedule_type": "custom"}, "curriculum_learning.schedule_type must be one of fixed_linear"),
        ({"min_difficulty": 0}, "curriculum_learning.min_difficulty must be a positive integer, got 0"),
        ({"schedule_config": {"difficulty_step": 8}}, "must have the keys min_difficulty, max_difficulty, total_curr"),
        ({"schedule_config": {"max_step": [0]}}, "schedule_config.max_step must be a list of positive integers, got"),
        ({"schedule_config": {"steps": 8}}, "unknown key steps in curriculum_learning.schedule_config"),
    ],
)  # fmt: skip
def test_invalid_json_section_raises(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as exc_info:
        parse_section({**SECTION, **changes}, tmp_path)
    assert message in str(exc_info.value)


def test_legacy_flag_needs_section(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs an enabled section curriculum_learning"):
        parse_section(None, tmp_path, "--curriculum-learning-legacy")
