"""The main thread's stack, read from another thread, for hanging ranks' reports."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
import traceback
from types import FrameType

import torch

MAX_CALLS = 12
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARY_FOLDERS = tuple(os.path.join(folder, "") for folder in (sysconfig.get_paths()["stdlib"], *torch.__path__))
"""Library folders that may be outside of site-packages: the standard library, and torch if built in a checkout."""


def main_frame() -> FrameType | None:
    """Return the main thread's innermost frame."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def format_stack(frame: FrameType | None) -> str:
    """Format the innermost ``MAX_CALLS`` calls as a traceback, most recent call last."""
    if frame is None:
        return ""
    return "".join(traceback.format_list(traceback.extract_stack(frame, MAX_CALLS)))


def format_location(frame: FrameType | None) -> str:
    """Format the innermost call outside of libraries, such as "read (loader.py:12)"."""
    inner = frame
    while inner is not None and _is_library(inner.f_code.co_filename):
        inner = inner.f_back
    inner = inner or frame
    return f"{inner.f_code.co_name} ({os.path.basename(inner.f_code.co_filename)}:{inner.f_lineno})" if inner else "?"


def communication(frame: FrameType | None) -> str | None:
    """Identify the communication that a thread is in, such as "all_reduce"; None if there is none.

    The wait for an operation that was started earlier is detected by ``.wait(`` in the source line, because
    ``work.wait()`` has no Python frame.
    """
    name, current = None, frame
    while current is not None:
        if current.f_code.co_filename.endswith(_COLLECTIVES):
            name = current.f_code.co_name
        current = current.f_back
    if name is None and frame is not None and ".wait(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        name = "an operation that it has started"
    return name


def _is_library(path: str) -> bool:
    return path.startswith(("<", *_LIBRARY_FOLDERS)) or not _INSTALLED.isdisjoint(path.split(os.sep))
