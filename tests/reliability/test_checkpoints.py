"""Rows K that no other test of checkpoints holds alone."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from megatron.checkpoint import open_latest
from megatron.errors import CheckpointError, exit_code
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import save_alone
from tests.helpers.runs import flags, start_script


def test_a_field_of_a_later_version_is_named_and_nothing_older_is_taken(tmp_path: Path) -> None:
    """Row K21: the same format number, and something in the manifest that this program would pass over."""
    save_alone(tmp_path, 10)
    path = save_alone(tmp_path, 20) / "manifest.json"
    body = path.read_bytes().split(b"\n", 1)[1].replace(b'"files": {', b'"quantised": {"as": "fp8"}, "files": {')
    path.write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(body) + body)
    with pytest.raises(CheckpointError, match="fields that this program does not support: quantised") as caught:
        open_latest(tmp_path, SINGLE)
    assert exit_code(caught.value) == 3


def test_moments_of_another_optimizer_are_refused_and_weights_alone_are_taken(corpus: Path, tmp_path: Path) -> None:
    """Row K18."""
    short, log = "--fp32 --eval-iters 0 --train-iters", tmp_path / "log"
    assert start_script(1, flags(corpus, tmp_path / "one", f"{short} 1"), log) == [0]
    other = f"{short} 2 --optimizer adafactor --load {tmp_path / 'one'}"
    assert start_script(1, flags(corpus, tmp_path / "two", other), log) == [3]
    assert all(word in log.read_text() for word in ("adamw", "adafactor", "--no-load-optim"))
    assert start_script(1, flags(corpus, tmp_path / "three", f"{other} --no-load-optim"), log) == [0]
