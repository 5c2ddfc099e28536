"""Rows K and A that no other test of checkpoints holds alone."""

from __future__ import annotations

import os
import random
import signal
import time
import zlib
from pathlib import Path

import pytest

from megatron.checkpoint import open_latest
from megatron.errors import CheckpointError, exit_code
from megatron.mpu.groups import SINGLE
from tests.checkpoint.samples import assert_holds, save_alone


def test_a_field_of_a_later_version_is_named_and_nothing_older_is_taken(tmp_path: Path) -> None:
    """Row K21: the same format number, and something in the manifest that this program would pass over."""
    save_alone(tmp_path, 10)
    path = save_alone(tmp_path, 20) / "manifest.json"
    body = path.read_bytes().split(b"\n", 1)[1].replace(b'"files": {', b'"quantised": {"as": "fp8"}, "files": {')
    path.write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(body) + body)
    with pytest.raises(CheckpointError, match="fields that this program does not know: quantised") as caught:
        open_latest(tmp_path, SINGLE)
    assert exit_code(caught.value) == 3


def test_loads_that_are_killed_one_after_another_leave_a_checkpoint_that_loads(tmp_path: Path) -> None:
    """Row A07."""
    save_alone(tmp_path, 10)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
    draw = random.Random(3)
    assert_holds(open_latest(tmp_path, SINGLE), 10)
    for _ in range(5):
        child = os.fork()
        if not child:
            while True:
                assert_holds(open_latest(tmp_path, SINGLE), 10)
        time.sleep(draw.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert_holds(open_latest(tmp_path, SINGLE), 10)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")} == before
