"""A process ends with the one that forked it."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from megatron.child_process import die_with_parent


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
@pytest.mark.parametrize("signum", [None, signal.SIGTERM])
def test_child_receives_signal_when_parent_is_killed(signum: signal.Signals | None) -> None:
    readable, writable = os.pipe()
    parent = os.fork()
    if not parent:
        if os.fork():
            signal.pause()
        signal.signal(signal.SIGTERM, lambda received, _: os._exit(os.write(writable, b"heard %d" % received) * 0))
        die_with_parent() if signum is None else die_with_parent(signum)
        os.write(writable, b"ready")
        while True:
            signal.pause()
    os.close(writable)
    assert os.read(readable, 20) == b"ready"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert os.read(readable, 20) == (b"" if signum is None else b"heard %d" % signum)  # "": the pipe's last end is gone
    os.close(readable)
