"""The warning at the start about a disk without room for the checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron import files, log
from megatron.config import parse
from megatron.training.callbacks.disk_space import DiskSpaceWarning, checkpoint_bytes

NUM_PARAMETERS = 1_000_000


@pytest.mark.parametrize(
    ("flags", "bytes_per_parameter"),
    [
        ("", 12),
        ("--bf16", 12),  # the main params are in fp32
        ("--fp64", 24),
        ("--bf16 --exp-avg-dtype bf16", 10),
        ("--no-save-optim", 4),
        ("--optimizer sgd", 4),
    ],
)
def test_checkpoint_size_follows_optimizer(flags: str, bytes_per_parameter: int) -> None:
    config = parse(["--data-path", "mock", "--vocab-size", "64", *flags.split()], world_size=1)
    assert checkpoint_bytes(config, NUM_PARAMETERS) == bytes_per_parameter * NUM_PARAMETERS


@pytest.mark.parametrize(
    ("flags", "resumed_step", "free_bytes", "words"),
    [
        ("--save-interval 5", None, 24_000_000, ""),
        ("--save-interval 5", None, 23_999_999, "2 checkpoints need about 24.0 MB, but only 24.0 MB are free"),
        ("--save-interval 5", 10, 23_999_999, ""),  # the other checkpoint is there
        ("--save-interval 5", 10, 6_300_000, "a checkpoint needs about 12.0 MB, but only 6.3 MB are free"),
        ("--save-interval-minutes 0", None, 12_000_000, ""),  # a single save, at the end
    ],
)
def test_warning_names_needed_and_free_space(
    flags: str, resumed_step: int | None, free_bytes: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(log, "warning", warnings.append)
    monkeypatch.setattr(files, "free_bytes", lambda folder: free_bytes)
    callback = DiskSpaceWarning([NUM_PARAMETERS, 500_000, 500_000])
    config = parse(["--data-path", "mock", "--vocab-size", "64", *flags.split()], world_size=1)
    callback.trainer = SimpleNamespace(  # type: ignore[assignment]
        config=config, folder=Path("runs/mine"), resumed_step=resumed_step
    )
    callback.on_train_start()
    assert len(warnings) == bool(words) and words in "".join(warnings)
