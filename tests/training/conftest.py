"""The repository's texts as token files, made once, and runs without what costs most of a small one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.training.callbacks import metrics_writer, speed_monitor
from tests.helpers.runs import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def cheap_runs() -> Iterator[None]:
    """Leave out what costs most of a small run: the picture, and measuring the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_writer, "draw_losses", lambda *_: None)
        patch.setattr(speed_monitor, "MATMUL_SECONDS", 0.0)
        yield
