"""The learning rate of every recorded script at every step is Megatron's: our step n has the rate of its step n + 1.

Megatron sets the rate of a step before it counts the samples of the step, so its first step has rate 0. Here the
samples of a step count for its own rate (docs/migration.md).

The formulas, with all lengths in samples, w the warm-up, d the decay, and n the samples of the updates made so far:

* n <= w: lr n / w
* n > d: min_lr
* otherwise, with u = (n - w) / (d - w): min_lr + (lr - min_lr) c, c = 1 - u (linear) or (1 + cos(pi u)) / 2 (cosine)

Source: Megatron-LM, optimizer_param_scheduler.py, ``get_lr``; training.py, ``get_optimizer_param_scheduler``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from megatron.config import Config
from megatron.training.optimizer_setup import make_learning_rate
from tests.helpers.rows import check_rows
from tests.migration.test_files import SCRIPTS, values
from tests.migration.test_start import files as files
from tests.migration.test_start import ranks, started

OTHER_FORMULAS = ("cpm-gpt2", "cpm-t5")
"""CPM counts the decay from step 0, not from the end of the warm-up, and freezes it before its end."""


class Lengths(NamedTuple):
    """A schedule as Megatron reads it from flags: rates, style, and lengths in samples."""

    lr: float
    min_lr: float
    style: str
    warmup: float
    decay: float


def lengths_of(script: Mapping[str, Any]) -> Lengths:
    """Return the schedule that Megatron builds from the flags of ``script``."""
    flags, expected = values(dict(script)), script["expected"]

    def number(flag: str) -> float | None:
        return float(flags[flag][0].replace("_", "")) if flag in flags else None

    size, samples = expected["global_batch_size"], number("--train-samples")
    length = number("--encoder-seq-length") or number("--seq-length")
    if samples is None:
        decay = (number("--lr-decay-iters") or number("--train-iters") or 0) * size
        warmup = (number("--lr-warmup-iters") or 0) * size
    else:
        decay = number("--lr-decay-samples") or samples
        warmup = number("--lr-warmup-samples") or 0
    fraction = number("--lr-warmup-fraction") or number("--warmup")
    warmup = warmup if fraction is None else fraction * decay
    if (tokens := number("--lr-decay-tokens")) is not None:
        decay = tokens / (length or 0)
    if (tokens := number("--lr-warmup-tokens")) is not None:
        warmup = tokens / (length or 0)
    return Lengths(
        number("--lr") or 0, number("--min-lr") or 0, flags.get("--lr-decay-style", ["linear"])[0], warmup, decay
    )


def rates_of(schedule: Lengths, consumed: np.ndarray) -> np.ndarray:
    """Return Megatron's rates after so many samples; see the formulas above."""
    lr, min_lr, style, warmup, decay = schedule
    u = (consumed - warmup) / (decay - warmup)
    c = 1 - u if style == "linear" else (np.cos(np.pi * u) + 1) / 2
    rates = min_lr + (lr - min_lr) * c
    rates[consumed > decay] = min_lr
    rising = consumed <= warmup
    rates[rising] = lr * consumed[rising] / max(warmup, 1e-300)
    return rates


class Steps:
    """The samples consumed after each step of a script, as Megatron counts them."""

    def __init__(self, script: Mapping[str, Any]) -> None:
        flags, expected = values(dict(script)), script["expected"]
        self.full, self.number = expected["global_batch_size"], expected["train_iters"]
        ramp = [0]
        if "--rampup-batch-size" in flags:
            start, increment, samples = (int(word.replace("_", "")) for word in flags["--rampup-batch-size"])
            parts = (self.full - start) // increment
            while ramp[-1] <= samples and len(ramp) <= self.number:
                ramp.append(ramp[-1] + start + int(ramp[-1] * parts / samples) * increment)
        self.ramp = np.array(ramp)

    def consumed(self, steps: np.ndarray) -> np.ndarray:
        """Return the samples consumed after ``steps``, counted from 1."""
        last = len(self.ramp) - 1
        return self.ramp[np.minimum(steps, last)] + np.maximum(steps - last, 0) * self.full

    def reaching(self, samples: float) -> int:
        """Return the first step after which ``samples`` are consumed."""
        if samples <= self.ramp[-1]:
            return int(np.searchsorted(self.ramp, samples))
        return len(self.ramp) - 1 + math.ceil((samples - int(self.ramp[-1])) / self.full)


def watched(steps: Steps, schedule: Lengths, number: int) -> np.ndarray:
    """Return about ``number`` steps, with the first ones and those around the ends of warm-up and decay."""
    borders = (steps.reaching(schedule.warmup), steps.reaching(schedule.decay))
    near = [np.arange(border - 10, border + 10) for border in (11, steps.number, *borders)]
    found = np.unique(np.concatenate([np.arange(1, steps.number, max(steps.number // number, 1)), *near]))
    return found[(found >= 1) & (found <= steps.number)]


def differences(config: Config, script: Mapping[str, Any], number: int) -> dict[int, tuple[float, float]]:
    """Return step -> our rate and Megatron's where they differ by more than rounding, of about ``number`` steps."""
    schedule, steps, ours = lengths_of(script), Steps(script), make_learning_rate(config)
    chosen = watched(steps, schedule, number)
    consumed = steps.consumed(chosen)
    by_samples = config.optimizer.lr_follows_samples
    done = (consumed if by_samples else chosen).tolist()
    theirs = rates_of(schedule, consumed.astype(np.float64)).tolist()
    return {
        step: (own, rate)
        for step, own, rate in zip(chosen.tolist(), map(ours.after, done), theirs, strict=True)
        if not math.isclose(own, rate, rel_tol=1e-9, abs_tol=1e-18)
    }


def test_a_script_has_megatrons_rates(files: dict[str, str]) -> None:
    def check(name: str) -> None:
        script = SCRIPTS[name]
        config = started(script, files, script["refused"])
        assert differences(config, script, 100) == {}
        sizes = config.batch.sizes(config.parallel.data_parallel_size(ranks(script, script["refused"])))
        steps = Steps(script)
        some = watched(steps, lengths_of(script), 5)
        assert [sizes.consumed_after(step) for step in some.tolist()] == steps.consumed(some).tolist()

    check_rows([name for name in SCRIPTS if name not in OTHER_FORMULAS], check)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in OTHER_FORMULAS])
def test_a_script_has_megatrons_rates_at_every_step(name: str, files: dict[str, str]) -> None:
    """Of a run of more than two million steps at every n-th of them."""
    script = SCRIPTS[name]
    assert differences(started(script, files, script["refused"]), script, 1_000_000) == {}


def test_the_warm_up_of_a_fraction_is_not_truncated(files: dict[str, str], tmp_path: Path) -> None:
    """0.01 x 320 = 3.2 steps: the first step has 3.125e-5 of 1e-4, with --lr-warmup-rounding down 3.333e-5."""
    flags = [["--train-iters", "320"], ["--lr", "1e-4"], ["--lr-warmup-fraction", "0.01"]]
    script = next(script for script in SCRIPTS.values() if script["program"] == "pretrain_gpt.py")
    kept = [words for words in script["flags"] if not words[0].startswith(("--train", "--lr", "--min-lr"))]
    first = {}
    for rounding in ("none", "down"):
        changed = {**script, "flags": [*kept, *flags, ["--lr-warmup-rounding", rounding]]}
        config = started(changed, files, script["refused"])
        first[rounding] = [make_learning_rate(config).at(update) for update in range(5)]
    assert first["none"][0] == pytest.approx(3.125e-5, rel=1e-12)
    assert first["none"][2] == pytest.approx(9.375e-5, rel=1e-12)
    assert first["none"][3] == pytest.approx(1e-4 * (1 - 0.8 / 316.8), rel=1e-12), "the decay begins within step 4"
    assert first["down"][0] == pytest.approx(1e-4 / 3, rel=1e-12)
    assert first["down"][3] == pytest.approx(1e-4 * (1 - 1 / 317), rel=1e-12)
