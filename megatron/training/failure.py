"""How a process ends: one line that says which rank failed and why, and the job's exit code.

The launcher names a file in MEGATRON_FAILURE_FILE. Once a rank has died it writes there who, then sends SIGTERM:
that means leave, not save.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from megatron.errors import JobError, PeerError, exit_code
from megatron.training import position

_PEER_SIGNS = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "timeout",
    "socket",
    "nccl",
    "read error",
    "write error",
    "application timeout",
)


_leaving = threading.Lock()
_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory")


def trace_crashes() -> None:
    """Let a crash in native code leave a trace: with our launcher in a file that it shows with the rank's number."""
    failure = os.environ.get("MEGATRON_FAILURE_FILE")
    if failure:
        try:
            file = os.open(trace_of(failure, int(os.environ.get("RANK", "0"))), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            faulthandler.enable(file)
            return
        except OSError:
            pass  # the launcher is gone, or its disk is full: standard error is left
    faulthandler.enable(sys.__stderr__ or 2)


def trace_of(failure_file: str, rank: int) -> str:
    """Return the path of what a crash of this rank leaves."""
    return f"{failure_file}.trace-{rank}"


def guard(main: Callable[[], None], who: Callable[[], str]) -> None:
    """Call ``main``; when it raises, say so in one line and end the process with the error's exit code.

    Args:
        who: returns this rank's name for the message, such as "rank 3 (stage 1, tensor 1, data 0)".
    """
    try:
        main()
    except SystemExit:
        raise
    except BaseException as error:
        leave(error, who())


def leave(error: BaseException, who: str, linger: Callable[[], object] | None = None) -> NoReturn:
    """Say what happened and end this process at once, without waiting for peers that may never answer.

    Of several threads the first one says it.

    Args:
        linger: called between the last words and the end, while other threads are silent; its errors count for nothing.
    """
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()
    if threading.current_thread() is threading.main_thread():
        signal.signal(
            signal.SIGCHLD, signal.SIG_DFL
        )  # torch's handler raises of a dead reader in the midst of the line
    failure = as_peer_error(error)
    code = exit_code(failure)
    if is_same_everywhere(failure):
        if os.environ.get("RANK", "0") == "0":
            print_line(str(failure))
    elif isinstance(failure, PeerError):
        at = position.now()
        print_line(f"{who}: leaving{f' at {at}' if at else ''}, {failure}")
    else:
        print_line(f"{who} failed: {out_of_memory(error) or f'{type(error).__name__}: {error}'}")
        if not isinstance(failure, JobError) and is_first_to_tell():
            traceback.print_exception(error, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if linger is not None:
        with suppress(Exception):
            linger()
    os._exit(code)


def is_same_everywhere(error: BaseException) -> bool:
    """Return whether every rank raises this error alike, so that one of them is enough to say it."""
    return isinstance(error, JobError) and not error.is_of_this_rank


def as_peer_error(error: BaseException) -> BaseException:
    """Return a PeerError for what a process group raises when another rank is gone, else ``error`` itself."""
    dist = sys.modules.get("torch.distributed")  # not imported yet: no group can have failed
    kinds = (dist.DistError,) if dist is not None else ()
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower()
        if isinstance(cause, kinds) or (type(cause) is RuntimeError and any(sign in text for sign in _PEER_SIGNS)):
            return PeerError(told_by_launcher() or f"another rank is gone or did not answer ({error})")
        cause = cause.__cause__
    return error


def out_of_memory(error: BaseException) -> str | None:
    """Return what to say of an allocation that failed: bytes, and what the rank was at; None for other errors.

    Torch raises a class of its own on GPUs and a RuntimeError on CPUs, Python and numpy a MemoryError.
    """
    text = str(error)
    is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not is_memory and not (type(error) is RuntimeError and any(sign in text.lower() for sign in _MEMORY_SIGNS)):
        return None
    wanted = re.search(r"(?:tried|trying|unable) to allocate ([\d.]+ ?\w+)", text, re.I)
    first = (text.splitlines() or [type(error).__name__])[0]
    return (
        f"out of memory: could not allocate {wanted.group(1) if wanted else 'what it needed'}, "
        f"at {position.now() or 'the start'} ({first}). "
        "Lower --batch-size, add --checkpoint-activations, or cut the model further (--pipe-parallel-size, "
        "--model-parallel-size)."
    )


def is_first_to_tell() -> bool:
    """Return whether no other rank of this node has shown its traceback: the same one from each says nothing new."""
    place = os.environ.get("MEGATRON_FAILURE_FILE")
    if not place:
        return True
    try:
        os.close(os.open(f"{place}.traceback", os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False
    except OSError:
        return True


def told_by_launcher() -> str | None:
    """Return what the launcher has written of a dead peer, or None while all live."""
    place = os.environ.get("MEGATRON_FAILURE_FILE")
    if not place:
        return None
    try:
        return Path(place).read_text().strip() or None
    except OSError:
        return None


def print_line(text: str) -> None:
    """Write one line to standard error in one call, so that lines of several ranks do not mix."""
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()
