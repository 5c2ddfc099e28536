"""Setup of forked child processes."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Loaded before any fork, since loading takes locks.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(signum: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send signal ``signum`` to this process when its parent ends. Only Linux supports this.

    A parent that ended before this call is not noticed, so the caller must compare ``os.getppid()`` afterwards.

    Source: prctl(2), ``PR_SET_PDEATHSIG``; the signal is sent when the thread that forked ends.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
