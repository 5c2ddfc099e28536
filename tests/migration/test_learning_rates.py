"""The learning rate of every recorded script at every step is Megatron's: our step n has the rate of its step n + 1.

Megatron sets the rate of a step before it counts the samples of the step, so its first step has rate 0. Here the
samples of a step count for its own rate (docs/migration.md). With --lr-step-offset -1 they do not, and our step n has
the rate of Megatron's step n.

The formulas, with all lengths in samples, w the warm-up, d the decay, and n the samples of the updates made so far:

With a curriculum, lengths and n in samples are tokens after truncation / sequence length, except in a warm-up in steps.

* n <= w, if w > 0: lr n / w
* n > d: min_lr
* otherwise, with u = (n - w) / (d - w): min_lr + (lr - min_lr) c, c = 1 - u (linear) or (1 + cos(pi u)) / 2 (cosine)

Source: Megatron-LM, optimizer_param_scheduler.py, ``get_lr``; training.py, ``get_optimizer_param_scheduler``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from megatron.config import Config
from megatron.training.optimizer_setup import SchedulePositions, make_lr_scheduler
from megatron.training.train_progress import TrainProgress
from tests.helpers.rows import check_rows
from tests.migration.test_files import SCRIPTS, flag_values
from tests.migration.test_start import files as files
from tests.migration.test_start import parse_script, script_world_size

OTHER_FORMULAS = ("cpm-gpt2", "cpm-t5", "nvidia-gpt3-175b")
"""CPM counts the decay from step 0, not from the end of the warm-up, and freezes it before its end.

``nvidia-gpt3-175b`` has lengths in steps next to a growing batch. Here they count steps; in
Megatron-LM it does not start.
"""


class MegatronSchedule(NamedTuple):
    """A schedule as Megatron reads it from flags: rates, style, and lengths in samples."""

    lr: float
    min_lr: float
    style: str
    warmup: float
    decay: float


def megatron_schedule(script: Mapping[str, Any]) -> MegatronSchedule:
    """Return the schedule that Megatron builds from the flags of ``script``."""
    flags, expected = flag_values(dict(script)), script["expected"]

    def flag_number(flag: str) -> float | None:
        return float(flags[flag][0].replace("_", "")) if flag in flags else None

    global_batch_size, samples = expected["global_batch_size"], flag_number("--train-samples")
    length = flag_number("--encoder-seq-length") or flag_number("--seq-length")
    if samples is None:
        decay = (flag_number("--lr-decay-iters") or flag_number("--train-iters") or 0) * global_batch_size
        warmup = (flag_number("--lr-warmup-iters") or 0) * global_batch_size
    else:
        decay = flag_number("--lr-decay-samples") or samples
        warmup = flag_number("--lr-warmup-samples") or 0
    fraction = flag_number("--lr-warmup-fraction") or flag_number("--warmup")
    warmup = warmup if fraction is None else fraction * decay
    if (tokens := flag_number("--lr-decay-tokens")) is not None:
        decay = tokens / (length or 0)
    if (tokens := flag_number("--lr-warmup-tokens")) is not None:
        warmup = tokens / (length or 0)
    return MegatronSchedule(
        flag_number("--lr") or 0,
        flag_number("--min-lr") or 0,
        flags.get("--lr-decay-style", ["linear"])[0],
        warmup,
        decay,
    )


def megatron_rates(schedule: MegatronSchedule, consumed: np.ndarray) -> np.ndarray:
    """Return Megatron's rates after so many samples; see the formulas above."""
    lr, min_lr, style, warmup, decay = schedule
    u = (consumed - warmup) / (decay - warmup)
    c = 1 - u if style == "linear" else (np.cos(np.pi * u) + 1) / 2
    rates = min_lr + (lr - min_lr) * c
    rates[consumed > decay] = min_lr
    rising = (consumed <= warmup) & (warmup > 0)
    rates[rising] = lr * consumed[rising] / max(warmup, 1)
    return rates


class ConsumedSamples:
    """The samples consumed after each step of a script, as Megatron counts them."""

    def __init__(self, script: Mapping[str, Any]) -> None:
        flags, expected = flag_values(dict(script)), script["expected"]
        self.global_batch_size, self.num_steps = expected["global_batch_size"], expected["train_iters"]
        ramp = [0]
        if "--rampup-batch-size" in flags:
            start, increment, samples = (int(word.replace("_", "")) for word in flags["--rampup-batch-size"])
            num_increments = (self.global_batch_size - start) // increment
            while ramp[-1] <= samples and len(ramp) <= self.num_steps:
                ramp.append(ramp[-1] + start + int(ramp[-1] * num_increments / samples) * increment)
        self.ramp = np.array(ramp)

        self.difficulties: np.ndarray | None = None
        section = script.get("deepspeed_config", {}).get("curriculum_learning", {})
        if section.get("enabled"):
            low, high, config = section["min_difficulty"], section["max_difficulty"], section["schedule_config"]
            steps = np.arange(1, self.num_steps + 1)
            values = np.floor(steps / config["total_curriculum_step"] * (high - low) + low)
            self.difficulties = np.minimum(values // config["difficulty_step"] * config["difficulty_step"], high)
            self.full = float(flags["--seq-length"][0])

    def trained(self, steps: np.ndarray) -> np.ndarray:
        """Return the tokens after truncation / sequence length after ``steps``; without a curriculum, the samples."""
        if self.difficulties is None:
            return self.consumed(steps)
        totals = np.concatenate([[0.0], np.cumsum(self.difficulties) * self.global_batch_size / self.full])
        return totals[steps]

    def consumed(self, steps: np.ndarray) -> np.ndarray:
        """Return the samples consumed after ``steps``, counted from 1."""
        last = len(self.ramp) - 1
        return self.ramp[np.minimum(steps, last)] + np.maximum(steps - last, 0) * self.global_batch_size

    def reaching(self, samples: float) -> int:
        """Return the first step after which ``samples`` are consumed."""
        if samples <= self.ramp[-1]:
            return int(np.searchsorted(self.ramp, samples))
        return len(self.ramp) - 1 + math.ceil((samples - int(self.ramp[-1])) / self.global_batch_size)


def select_steps(steps: ConsumedSamples, schedule: MegatronSchedule, num_selected: int) -> np.ndarray:
    """Return about ``num_selected`` steps, with the first ones and those around the ends of warm-up and decay."""
    borders = (steps.reaching(schedule.warmup), steps.reaching(schedule.decay))
    near_borders = [np.arange(border - 10, border + 10) for border in (11, steps.num_steps, *borders)]
    selected = np.unique(
        np.concatenate([np.arange(1, steps.num_steps, max(steps.num_steps // num_selected, 1)), *near_borders])
    )
    return selected[(selected >= 1) & (selected <= steps.num_steps)]


def rate_differences(
    config: Config, script: Mapping[str, Any], num_selected: int, offset: int = 0
) -> dict[int, tuple[float, float]]:
    """Return step -> (our rate, Megatron's) of those of ``num_selected`` steps that differ by more than rounding.

    Args:
        offset: --lr-step-offset. With -1, our step n is compared with Megatron's step n, otherwise with n + 1.
    """
    config = replace(config, optimizer=replace(config.optimizer, lr_step_offset=offset))
    schedule, steps, learning_rate = megatron_schedule(script), ConsumedSamples(script), make_lr_scheduler(config)
    if config.batch.seq_lengths.truncates:
        return curriculum_differences(config, script, steps, num_selected, offset)
    selected = select_steps(steps, schedule, num_selected)
    before, after = steps.consumed(selected - 1), steps.consumed(selected)
    if not config.optimizer.lr_follows_samples:
        positions = map(learning_rate.position, (selected - 1).tolist(), [1] * len(selected))
    else:
        positions = map(learning_rate.position, before.tolist(), (after - before).tolist())
    expected_rates = megatron_rates(schedule, (before if offset else after).astype(np.float64)).tolist()
    return {
        step: (actual, expected)
        for step, actual, expected in zip(
            selected.tolist(), map(learning_rate.after, positions), expected_rates, strict=True
        )
        if not math.isclose(actual, expected, rel_tol=1e-9, abs_tol=1e-18)
    }


def curriculum_differences(
    config: Config, script: Mapping[str, Any], steps: ConsumedSamples, num_selected: int, offset: int
) -> dict[int, tuple[float, float]]:
    """Return the differences of ``rate_differences`` for a script with a curriculum."""
    schedule, learning_rate, full = megatron_schedule(script), make_lr_scheduler(config), config.batch.seq_length
    positions = SchedulePositions(config, learning_rate, config.parallel.data_parallel_size(script["world_size"]))
    selected = select_steps(steps, schedule, num_selected)
    before, shift = steps.consumed(selected - 1), 0 if offset == 0 else 1
    dropped = (before - steps.trained(selected - 1)) * full
    actual_rates = [
        learning_rate.after(
            positions.of_rate(
                TrainProgress(step - 1, step - 1, samples, tokens_dropped=round(tokens)),
                steps.global_batch_size,
                config.batch.seq_lengths.length_of_step(samples, step - 1),
            )
        )
        for step, samples, tokens in zip(selected.tolist(), before.tolist(), dropped.tolist(), strict=True)
    ]
    warmup_steps = flag_values(dict(script)).get("--lr-warmup-iters")
    trained = steps.trained(selected - shift)
    if warmup_steps is not None:
        schedule = schedule._replace(warmup=float(steps.trained(np.array([int(warmup_steps[0])]))[0]))
    expected_rates = megatron_rates(schedule, trained)
    if warmup_steps is not None:
        is_warmup = selected - shift <= int(warmup_steps[0])
        expected_rates[is_warmup] = schedule.lr * (selected - shift)[is_warmup] / int(warmup_steps[0])
    return {
        step: (actual, expected)
        for step, actual, expected in zip(selected.tolist(), actual_rates, expected_rates.tolist(), strict=True)
        if not math.isclose(actual, expected, rel_tol=1e-9, abs_tol=1e-18)
    }


def test_script_matches_megatron_rates(files: dict[str, str]) -> None:
    def check(name: str) -> None:
        script = SCRIPTS[name]
        config = parse_script(script, files, script["refused"])
        assert rate_differences(config, script, 100) == {}
        assert rate_differences(config, script, 100, offset=-1) == {}
        batch_sizes = config.batch.batch_sizes(
            config.parallel.data_parallel_size(script_world_size(script, script["refused"]))
        )
        steps = ConsumedSamples(script)
        selected = select_steps(steps, megatron_schedule(script), 5)
        assert [batch_sizes.consumed_after(step) for step in selected.tolist()] == steps.consumed(selected).tolist()

    check_rows([name for name in SCRIPTS if name not in OTHER_FORMULAS], check)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in OTHER_FORMULAS])
def test_script_matches_megatron_rates_at_every_step(name: str, files: dict[str, str]) -> None:
    """Of a run of more than two million steps at every n-th of them."""
    script = SCRIPTS[name]
    assert rate_differences(parse_script(script, files, script["refused"]), script, 1_000_000) == {}


def test_fractional_warmup_is_not_truncated(files: dict[str, str], tmp_path: Path) -> None:
    """0.01 x 320 = 3.2 steps: the first step has 3.125e-5 of 1e-4, with --lr-warmup-rounding down 3.333e-5."""
    flags = [["--train-iters", "320"], ["--lr", "1e-4"], ["--lr-warmup-fraction", "0.01"]]
    script = next(script for script in SCRIPTS.values() if script["program"] == "pretrain_gpt.py")
    other_flags = [words for words in script["flags"] if not words[0].startswith(("--train", "--lr", "--min-lr"))]
    rates = {}
    for rounding in ("none", "down"):
        changed = {**script, "flags": [*other_flags, *flags, ["--lr-warmup-rounding", rounding]]}
        config = parse_script(changed, files, script["refused"])
        rates[rounding] = [make_lr_scheduler(config).at(update) for update in range(5)]
    assert rates["none"][0] == pytest.approx(3.125e-5, rel=1e-12)
    assert rates["none"][2] == pytest.approx(9.375e-5, rel=1e-12)
    assert rates["none"][3] == pytest.approx(1e-4 * (1 - 0.8 / 316.8), rel=1e-12), "the decay begins within step 4"
    assert rates["down"][0] == pytest.approx(1e-4 / 3, rel=1e-12)
    assert rates["down"][3] == pytest.approx(1e-4 * (1 - 1 / 317), rel=1e-12)
