"""Runs that 8c23b9e6 has started keep their learning rate and their end when they are resumed.

``former_lengths`` holds three of its checkpoints, of steps of 4 samples of 8 tokens, with a linear decay from 1e-3:

| folder | started with | saved after |
|---|---|---|
| samples | ``--train-samples 160 --warmup 0.03``; the guard skipped steps 5 to 8 | step 8 |
| steps | ``--train-iters 12 --warmup 0.3``: a warm-up of 3.6 steps, truncated to 3 | step 5 |
| tokens | ``--train-tokens 390 --warmup 0.3``: 13 steps, which the learning rate follows | step 5 |
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments.parser import parse
from megatron.checkpoint import open_latest
from megatron.checkpoint.checkpoint_args import load_checkpoint_args
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.config import Config
from megatron.mpu.groups import SINGLE
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.optimizer_setup import make_lr_scheduler
from megatron.training.train_progress import TrainProgress
from tests.helpers.runs import train_ranks

SAVED_RUNS = Path(__file__).parent / "former_lengths"
FLAGS = {
    "samples": "--train-samples 160 --warmup 0.03",
    "steps": "--train-iters 12 --warmup 0.3",
    "tokens": "--train-tokens 390 --warmup 0.3",
}
BASE_ARGS = (
    "--seq-length 8 --data-path mock --tokenizer-type NullTokenizer --vocab-size 64 --device cpu --progress plain "
    "--eval-iters 0 --log-interval 1 --lr 1e-3 --min-lr 0 --lr-decay-style linear --attention-dropout 0 "
    "--hidden-dropout 0"
)
SAVED_RATES = {
    "samples": [(9, 1 - (20 - 4.8) / 155.2), (10, 1 - (24 - 4.8) / 155.2), (44, 1 - (160 - 4.8) / 155.2)],
    "steps": [(6, 1 - 3 / 9), (7, 1 - 4 / 9), (12, 0.0)],
    "tokens": [(6, 1 - 3 / 10), (7, 1 - 4 / 10), (13, 0.0)],
}
"""(step, rate / 1e-3) as 8c23b9e6 continued them, at the fewest, the next and the last step if none is skipped."""


def resume_config(name: str, extra: str = "") -> tuple[Config, TrainProgress]:
    args = f"{BASE_ARGS} --batch-size 2 --gas 2 --load {SAVED_RUNS / name} {FLAGS[name]} {extra}"
    config = parse(args.split(), world_size=1, env={}, checkpoint_args=partial(load_checkpoint_args, name="x"))
    state = open_latest(SAVED_RUNS / name / CHECKPOINTS, SINGLE).metadata
    return config, TrainProgress.from_metadata(state, config.tokens_per_sample)


def remaining_rates(config: Config, progress: TrainProgress, samples_per_step: int = 4) -> list[tuple[int, float]]:
    """Return step and rate of each step that is left."""
    schedule, step_rates = make_lr_scheduler(config), []
    for step_offset in range(1, config.run_length(1).steps_left(progress.step, progress.samples_consumed) + 1):
        by_samples = config.optimizer.lr_follows_samples
        position = (
            progress.samples_updated + step_offset * samples_per_step if by_samples else progress.updates + step_offset
        )
        step_rates.append((progress.step + step_offset, schedule.after(position) / 1e-3))
    return step_rates


@pytest.mark.parametrize("name", ["steps", "tokens"])
def test_resumed_run_preserves_truncated_warmup_and_lr_unit(name: str) -> None:
    config, progress = resume_config(name)
    assert progress == TrainProgress(5, 5, 20)
    actual = remaining_rates(config, progress)
    assert [actual[0], actual[1], actual[-1]] == [
        (step, pytest.approx(rate, abs=1e-12)) for step, rate in SAVED_RATES[name]
    ]
    (note,) = [note for note in config.notes if "that this run keeps" in note]
    assert "lr-warmup-rounding down (a new run: none)" in note
    assert "train-tokens-lr-unit steps (a new run: samples)" in note


def test_new_run_uses_exact_warmup_and_follows_tokens() -> None:
    def new_rates(name: str) -> list[tuple[int, float]]:
        args = (
            f"{BASE_ARGS} --batch-size 2 --gas 2 --num-layers 1 --hidden-size 8 --num-attention-heads 2 {FLAGS[name]}"
        )
        return remaining_rates(parse(args.split(), world_size=1, env={}), TrainProgress())

    assert new_rates("steps")[0] == (1, pytest.approx(1 / 3.6)) and new_rates("steps")[4] == (
        5,
        pytest.approx(1 - 1.4 / 8.4),
    )
    end, warmup = 390 / 8, 0.3 * 390 / 8
    assert new_rates("tokens")[4] == (5, pytest.approx(1 - (20 - warmup) / (end - warmup)))
    assert new_rates("tokens")[-1] == (13, 0.0)


def test_skipped_samples_do_not_advance_learning_rate() -> None:
    config, progress = resume_config("samples")
    assert progress == TrainProgress(8, 4, 32, samples_skipped=16)
    actual = remaining_rates(config, progress)
    assert [actual[0], actual[1]] == [
        (step, pytest.approx(rate, abs=1e-12)) for step, rate in SAVED_RATES["samples"][:2]
    ]
    assert actual[-1][0] == 40, "the samples are consumed, whatever was skipped"
    config, progress = resume_config("samples", "--gas 4")
    actual = remaining_rates(config, progress, 8)
    assert actual[0] == (9, pytest.approx(1 - (24 - 4.8) / 155.2)) and actual[-1][0] == 8 + 16


@pytest.mark.parametrize("name", ["steps", "tokens"])
def test_run_repeated_from_config_preserves_warmup_and_lr_unit(name: str) -> None:
    args = f"--config {SAVED_RUNS / name / 'config.json'}"
    config = parse(args.split(), world_size=1, env={})
    assert config.optimizer.lr_warmup_rounding == "down" and config.optimizer.train_tokens_lr_unit == "steps"
    assert config.optimizer.warmup_length == 3


def repeat_run(tmp_path: Path, first_args: str, extra: str = "") -> tuple[Config, Config]:
    config = parse(f"{BASE_ARGS} --batch-size 2 --gas 2 {first_args}".split(), world_size=1, env={})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    return config, parse(f"--config {tmp_path / 'config.json'} {extra}".split(), world_size=1, env={})


@pytest.mark.parametrize(
    "first_args",
    [
        "--train-samples 161", "--train-tokens 391", "--train-tokens 391 --train-iters 9", "--train-iters 7",
        "--train-samples 160 --lr-warmup-iters 3 --lr-decay-iters 30 --lr-decay-style wsd --lr-wsd-decay-iters 5",
    ],
)  # fmt: skip
def test_repeated_run_has_limits_and_rates_of_first_run(first_args: str, tmp_path: Path) -> None:
    config, repeated_config = repeat_run(tmp_path, first_args)
    assert repeated_config.batch == config.batch and repeated_config.optimizer == config.optimizer
    config, repeated_config = repeat_run(tmp_path, first_args, "--gas 4")
    if config.optimizer.lr_follows_samples:
        length_fields = ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
        assert [getattr(repeated_config.optimizer, name) for name in length_fields] == [
            getattr(config.optimizer, name) for name in length_fields
        ]
    for name in ("train_samples", "train_tokens", "requested_train_iters"):
        assert getattr(repeated_config.batch, name) == getattr(config.batch, name)


@pytest.mark.parametrize("first_args", ["--train-samples 160", "--train-tokens 1280"])
def test_length_flag_replaces_all_lengths_of_repeated_run(first_args: str, tmp_path: Path) -> None:
    for extra, limits in (
        ("--train-iters 30", (None, None, 30, None)),
        ("--train-samples 80", (80, None, 20, 80)),
    ):
        _, repeated_config = repeat_run(tmp_path, first_args, extra)
        batch = repeated_config.batch
        assert (batch.train_samples, batch.train_tokens, batch.train_iters) == limits[:3], extra
        assert (
            repeated_config.optimizer.lr_decay_samples == limits[3]
            and repeated_config.optimizer.lr_decay_iters == batch.train_iters
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAGS)
def test_resumed_run_continues_former_learning_rates(name: str, tmp_path: Path) -> None:
    args = f"{BASE_ARGS} --batch-size 2 --gas 2 --load {SAVED_RUNS / name} --save {tmp_path / 'run'} {FLAGS[name]}"
    argv = [*args.split(), "--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "2"]
    config, _ = resume_config(name)
    flag_names = [f"--{field.replace('_', '-')}" for field in ("lr_warmup_rounding", "train_tokens_lr_unit")]
    settings = [config.optimizer.lr_warmup_rounding, config.optimizer.train_tokens_lr_unit]
    argv += [word for pair in zip(flag_names, settings, strict=True) for word in pair]
    assert train_ranks(1, argv)[0] == [0]
    rate_by_step: dict[int, Any] = {
        record["step"]: record["learning_rate"]
        for record in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if record["kind"] == "train"
    }
    for step, rate in SAVED_RATES[name][:2]:
        assert rate_by_step[step] == pytest.approx(1e-3 * rate, abs=1e-12)
    assert max(rate_by_step) == {"samples": 40, "steps": 12, "tokens": 13}[name]
