"""Stack of the main thread, read from another thread, for ranks that hang."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
import traceback
from types import FrameType

import torch

DEEPEST = 12
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_INSTALLED = {"site-packages", "dist-packages"}
_OWN_FOLDERS = tuple(os.path.join(folder, "") for folder in (sysconfig.get_paths()["stdlib"], *torch.__path__))
"""Of what may lie elsewhere: Python's own modules, and torch, which is often built in a checkout."""


def main_frame() -> FrameType | None:
    """Return the innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def format_stack(frame: FrameType | None) -> str:
    """Return the innermost ``DEEPEST`` calls in the form of a traceback, the last call last."""
    if frame is None:
        return ""
    return "".join(traceback.format_list(traceback.extract_stack(frame, DEEPEST)))


def format_place(frame: FrameType | None) -> str:
    """Return the innermost call that is neither Python's nor an installed library's, such as "read (loader.py:12)"."""
    each = frame
    while each is not None and _is_library(each.f_code.co_filename):
        each = each.f_back
    each = each or frame
    return f"{each.f_code.co_name} ({os.path.basename(each.f_code.co_filename)}:{each.f_lineno})" if each else "?"


def communication(frame: FrameType | None) -> str | None:
    """Return the operation between ranks that a thread waits in, such as "all_reduce"; None if it is in none.

    An operation that was started earlier is waited for by ``work.wait()``, which leaves no frame of its own.
    """
    name, each = None, frame
    while each is not None:
        if each.f_code.co_filename.endswith(_COLLECTIVES):
            name = each.f_code.co_name
        each = each.f_back
    if name is None and frame is not None and ".wait(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        name = "an operation that it has started"
    return name


def _is_library(path: str) -> bool:
    return path.startswith(("<", *_OWN_FOLDERS)) or not _INSTALLED.isdisjoint(path.split(os.sep))
