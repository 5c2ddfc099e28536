"""Table of the estimated gain of FP8, which docs/fp8.md and its translation contain."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import fp8_gain
from megatron.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_pages_have_the_estimated_table() -> None:
    lines = list(fp8_gain.table_lines())
    assert "\n".join(lines) in (ROOT / "docs" / "fp8.md").read_text(encoding="utf-8")
    assert "\n".join(lines[2:]) in (ROOT / "docs" / "zh" / "fp8.md").read_text(encoding="utf-8")


def test_gain_grows_with_the_width_and_the_tokens() -> None:
    narrow, wide, long = (fp8_gain.layer_times(*sizes) for sizes in ((1024, 4096), (8192, 4096), (8192, 32768)))
    assert narrow.speedup < 1 < wide.speedup < long.speedup < 3 / (1 + 2 / 1.6), "the limit of two of three products"
    assert wide.fp8 > wide.bf16 - wide.products


def test_gpus_without_fp8_are_rejected() -> None:
    with pytest.raises(ConfigError, match="needs a GPU with products in FP8"):
        fp8_gain.layer_times(1024, 4096, "a100-80g")
