"""What a process that was forked for a piece of work does at its start."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # ahead of a fork: it takes locks


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send ``number`` to this process when its parent ends; elsewhere than on Linux nothing does.

    A parent that ended before this call is not noticed: whoever forks compares ``os.getppid()`` behind it.

    Source: prctl(2), ``PR_SET_PDEATHSIG``; it is the end of the thread that forked which counts.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
