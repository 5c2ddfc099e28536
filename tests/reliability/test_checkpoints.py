"""Rows K that no other test of checkpoints holds alone."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from megatron.checkpoint import open_latest
from megatron.errors import CheckpointError, exit_code
from megatron.mpu.groups import SINGLE
from tests.helpers.checkpoint_samples import save_on_one_rank
from tests.helpers.runs import launch_script, make_flags


def test_unknown_manifest_field_is_rejected_without_fallback(tmp_path: Path) -> None:
    """Row K21: the same format number, and something in the manifest that this program would pass over."""
    save_on_one_rank(tmp_path, 10)
    path = save_on_one_rank(tmp_path, 20) / "manifest.json"
    body = path.read_bytes().split(b"\n", 1)[1].replace(b'"files": {', b'"quantised": {"as": "fp8"}, "files": {')
    path.write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(body) + body)
    with pytest.raises(CheckpointError, match="fields that this program does not support: quantised") as raised:
        open_latest(tmp_path, SINGLE)
    assert exit_code(raised.value) == 3


def test_other_optimizer_state_is_rejected_and_weights_can_be_loaded(corpus: Path, tmp_path: Path) -> None:
    """Row K18."""
    short_run, log = "--fp32 --eval-iters 0 --train-iters", tmp_path / "log"
    assert launch_script(1, make_flags(corpus, tmp_path / "one", f"{short_run} 1"), log) == [0]
    other_optimizer = f"{short_run} 2 --optimizer adafactor --load {tmp_path / 'one'}"
    assert launch_script(1, make_flags(corpus, tmp_path / "two", other_optimizer), log) == [3]
    assert all(word in log.read_text() for word in ("adamw", "adafactor", "--no-load-optim"))
    assert launch_script(1, make_flags(corpus, tmp_path / "three", f"{other_optimizer} --no-load-optim"), log) == [0]
