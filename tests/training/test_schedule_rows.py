"""The start table shows the phases of the learning rate in steps, the tokens and the epochs of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.arguments import parse
from megatron.data.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.training.schedule_rows import count_tokens, epoch_rows, schedule_rows, schedule_text


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--warmup 0.1", "cosine, 0.001 to 0, in steps: warm-up 20, decay 180"),
        ("--lr-decay-style linear --lr-warmup-iters 5 --min-lr 1e-5 --lr-decay-iters 105",
         "linear, 0.001 to 1e-05, in steps: warm-up 5, decay 100, at 1e-05 95"),
        ("--lr-decay-style linear --warmup 0 --lr-decay-iters 400", "linear, 0.001 to 0, in steps: decay 200 of 400"),
        ("--lr-decay-style constant --warmup 0.05", "constant, 0.001, in steps: warm-up 10, constant 190"),
        ("--lr-decay-style wsd --lr-warmup-iters 10 --lr-wsd-decay-iters 20",
         "wsd, 0.001 to 0, in steps: warm-up 10, stable 170, decay 20"),
        ("--lr-decay-style wsd --warmup 0 --wsd-decay-fraction 0.25",
         "wsd, 0.001 to 0, in steps: stable 150, decay 50"),
        ("--train-iters 12 --warmup 0.3", "cosine, 0.001 to 0, in steps: warm-up 3.6, decay 8.4"),
        ("--train-iters 12 --warmup 0.3 --lr-warmup-rounding down", "cosine, 0.001 to 0, in steps: warm-up 3, decay 9"),
        ("--lr-warmup-samples 40 --lr-decay-samples 800", "cosine, 0.001 to 0, in steps: warm-up 10, decay 190"),
        ("--lr-decay-style inverse-square-root --warmup 0.1",
         "inverse-square-root, 0.001 to 0, in steps: warm-up 20, decay 180"),
        ("--train-samples 400 --lr-warmup-samples 40 --rampup-batch-size 2 2 80 --batch-size 2 --gas 2",
         "cosine, 0.001 to 0, in steps: warm-up 20, decay 100"),
    ],
)  # fmt: skip
def test_schedule_phases_sum_to_train_steps(flags: str, expected: str) -> None:
    config = parse(["--lr", "1e-3", *flags.split()], world_size=1, env={})
    assert schedule_text(config, 1) == expected


def test_token_row_counts_all_samples() -> None:
    config = parse("--train-iters 10 --seq-length 64 --batch-size 2 --gas 3".split(), world_size=4, env={})
    assert dict(schedule_rows(config, 4))["tokens"] == "15,360 in 10 steps (240 samples)"
    assert not list(schedule_rows(parse(["--train-iters", "0"], world_size=1, env={}), 1))


def write_dataset(prefix: Path, num_tokens: int) -> str:
    with IndexedDatasetBuilder(prefix, vocab_size=100) as builder:
        builder.add(np.arange(num_tokens) % 100, np.full(num_tokens // 10, 10))
    return str(prefix)


def test_epochs_follow_file_sizes(tmp_path: Path) -> None:
    small, large = write_dataset(tmp_path / "small", 1000), write_dataset(tmp_path / "large", 4000)
    assert (count_tokens(small), count_tokens(large), count_tokens("/nowhere")) == (1000, 4000, None)

    def epochs(flags: str, family: str = "gpt2") -> str:
        base_flags = {"t5": "--enc-seq-length 50"}.get(family, "--seq-length 50") + " --train-iters 10 --batch-size 2"
        config = parse([*f"{base_flags} {flags}".split(), "--dry-run"], world_size=1, env={}, family=family)
        return dict(epoch_rows(config, 1)).get("epochs", "")

    assert epochs(f"--data-path {large} --split 50,25,25") == "about 0.5"
    assert epochs(f"--data-path 0.5 {small} 0.5 {large} --split 1,0,0") == f"about {small} 0.5, {large} 0.125"
    assert epochs(f"--train-data-path {small} --valid-data-path {large}") == "about 1"
    assert epochs(f"--data-path {large} --split 1,0,0 --gas 1000") == "about 250"
    assert epochs(f"--data-path {large} --split 1,0,0 --gas 10000") == "about 2,500"
    assert epochs(f"--data-path {large} --split 1,0,0", "bert") == "about 0.235", "47 tokens and 3 control tokens"
    assert epochs(f"--data-path {large} --split 1,0,0", "t5") == "about 0.27", "inputs of 50 are made of 54 tokens"
    assert epochs("--data-path mock") == epochs("--data-path /nowhere/x") == ""
