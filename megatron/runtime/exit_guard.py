"""End of a process: one line that names the failed rank and the cause, and the exit code of the job (no torch).

Once a rank has died the launcher says so in a file (above), then sends SIGTERM: that means leave, not
save.
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
from typing import NoReturn

from megatron import environment
from megatron.errors import ConfigError, JobError, PeerError, StopRequest, exit_code
from megatron.runtime.launcher_files import is_first_to_report, leave_words, note_reported, peer_failure, trace_of
from megatron.runtime.rank_status import heartbeat_now, note_reporting, own

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
_GPU_OF_ITS_OWN = "Give each rank a GPU of its own: look at LOCAL_RANK and CUDA_VISIBLE_DEVICES of both ranks"
_INTERFACE = "Let NCCL_SOCKET_IFNAME name an interface of this host that reaches the other hosts, or unset it"
_SETTINGS = "Look at the NCCL_... variables of this rank; NCCL_DEBUG=WARN shows more"
_NCCL_SET_UP = {
    "duplicate gpu detected": _GPU_OF_ITS_OWN,
    "out of memory": "NCCL needs some 100 MB of the GPU for each group: end what else uses it, or lower --batch-size",
    "no socket interface found": _INTERFACE,
    "neither af_inet": _INTERFACE,
    "nccl_socket_ifname": _INTERFACE,
    "shared memory segment": "Give the container more of /dev/shm (docker run --shm-size=8g, or --ipc=host)",
    "ncclinvalidusage": _SETTINGS,
    "ncclinvalidargument": _SETTINGS,
}
"""What NCCL says of the rank that it runs on, and the cure; another start would end alike."""
_NCCL_FAILURES = ("ncclunhandledcudaerror", "ncclsystemerror", "ncclinternalerror")
"""What may be of this rank or of another: that stands behind "Last error:"."""
_NCCL_PEER_SIGNS = ("remote", "connect", "closed", "reset", "broken pipe", "timed out", "timeout", "abort", "peer")
_leaving = threading.RLock()
"""Held for good by the thread whose error ends this process."""
_code: int | None = None
"""The exit code of the error that has been told."""
_is_guarded = _is_reporting = _is_hurried = False
_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory")


def trace_crashes() -> None:
    """Let a crash in native code leave a trace: with our launcher in a file that it shows with the rank's number."""
    failure = os.environ.get("MEGATRON_FAILURE_FILE")
    if failure:
        try:
            file = os.open(
                trace_of(failure, int(os.environ.get("RANK", "0"))),
                os.O_CREAT | os.O_WRONLY | os.O_APPEND,
            )
            faulthandler.enable(file)
            return
        except OSError:
            pass  # the launcher is gone, or its disk is full: standard error is left
    faulthandler.enable(sys.__stderr__ or 2)


def guard(main: Callable[[], None], who: Callable[[], str]) -> None:
    """Call ``main``; when it raises, say so in one line and end the process with the error's exit code.

    Args:
        who: returns this rank's name for the message, such as "rank 3 (stage 1, tensor 1, data 0)".
    """
    global _is_guarded
    _is_guarded = True
    try:
        main()
    except BaseException as error:
        if not _ends_process(error):
            raise
        text = environment.problem(error)
        leave(error if text is None else ConfigError(text), who())


def report_failure(error: BaseException, who: str) -> None:
    """Say now what will end this process: undoing what it holds takes a while, in which the launcher may end it.

    Below ``guard`` alone; what is raised later counts for nothing then. Elsewhere the caller may go on.
    """
    if _is_guarded and _ends_process(error):
        _report(error, who)


def _ends_process(error: BaseException) -> bool:
    """Return whether ``error`` is a failure: a SystemExit is one in mid-run, and not behind --help or the run."""
    return not isinstance(error, SystemExit) or own().is_running


def leave(error: BaseException, who: str, linger: Callable[[], object] | None = None) -> NoReturn:
    """Say what happened and end this process at once, without waiting for peers that may never answer.

    Of several threads, and of several errors, the first one says it and gives the code.

    Args:
        linger: called between the last words and the end, while other threads are silent; its errors count for nothing.
    """
    code = _report(error, who)
    if linger is not None:
        with suppress(Exception):
            linger()
    os._exit(code)


def leave_for_dead_peer(death: str) -> None:
    """End this process, from a signal's handler in the main thread, since the launcher says that a peer died.

    An error of this rank that is on its way out counts more: it may be why the peer left. Returns only if its last
    words are in the midst of being said, and the process ends behind them.
    """
    global _is_hurried
    _is_hurried = True
    if _code is not None:
        os._exit(_code)
    if _is_reporting:
        return
    who = f"rank {os.environ.get('RANK', '0')}"
    handled = sys.exc_info()[1]
    if isinstance(handled, JobError) and not isinstance(handled, StopRequest):
        leave(handled, who)
    os.write(2, f"{who}: leaving, {death}\n".encode())  # the signal may have fallen into a print
    os._exit(4)


def _report(error: BaseException, who: str) -> int:
    """Say what happened, unless this thread has said before what ends this process; return the exit code."""
    global _code, _is_reporting
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()
    if _code is not None:
        return _code
    _is_reporting = True
    note_reporting()
    if threading.current_thread() is threading.main_thread():
        signal.signal(
            signal.SIGCHLD, signal.SIG_DFL
        )  # torch's handler raises of a dead reader in the midst of the line
    failure = as_peer_error(error)
    with suppress(OSError):  # nobody reads it any more; the code is news all the same
        _print(error, failure, who)
        sys.stdout.flush()
        sys.stderr.flush()
    _code = exit_code(failure)
    if _is_hurried:
        os._exit(_code)
    return _code


def _print(error: BaseException, failure: BaseException, who: str) -> None:
    if is_same_everywhere(failure):
        rank = os.environ.get("RANK", "0")
        leave_words(str(failure), int(rank))
        if rank == "0":
            print_line(str(failure))
            note_reported()
    elif isinstance(failure, PeerError | StopRequest):
        at = heartbeat_now()
        print_line(f"{who}: leaving{f' at {at}' if at else ''}, {failure}")
    else:
        cause = failure if isinstance(failure, JobError) else error
        print_line(f"{who} failed: {out_of_memory(error) or _left_early(error) or f'{type(cause).__name__}: {cause}'}")
        note_reported()
        if not isinstance(failure, JobError) and is_first_to_report():
            traceback.print_exception(error, file=sys.stderr)


def _left_early(error: BaseException) -> str | None:
    """Return what to say of a SystemExit in mid-run; None for other errors."""
    if not isinstance(error, SystemExit):
        return None
    return (
        f"a run ends after its last step, by an error or by a request to stop, got sys.exit({error.code!r}) at "
        f"{heartbeat_now() or 'the start'}. Raise an error there, or end the run with --exit-interval or a SIGTERM"
    )


def is_same_everywhere(error: BaseException) -> bool:
    """Return whether every rank raises this error alike, so that one of them is enough to say it."""
    return isinstance(error, JobError) and not error.is_of_this_rank


def as_peer_error(error: BaseException) -> BaseException:
    """Return a PeerError for what a process group raises when another rank is gone, else an error of this rank.

    That is ``error`` itself, or a ConfigError where NCCL says that it cannot work here.
    """
    dist = sys.modules.get("torch.distributed")  # not imported yet: no group can have failed
    kinds = (dist.DistError,) if dist is not None else ()
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower()
        if isinstance(cause, kinds) and (own := fault_of_this_rank(cause)) is not None:
            return own
        if isinstance(cause, kinds) or (type(cause) is RuntimeError and any(sign in text for sign in _PEER_SIGNS)):
            return PeerError(peer_failure() or f"another rank is gone or did not answer ({error})")
        cause = cause.__cause__
    return error


def fault_of_this_rank(error: BaseException, *, is_set_up: bool = False) -> BaseException | None:
    """Return the error of this rank that one of NCCL's is, None where it speaks of another rank.

    That is a ConfigError where NCCL cannot work here; a device that fails in the midst of a run is no setting, and
    ``error`` stands as it is.

    Args:
        is_set_up: the ranks have not worked together yet, so whatever fails here would fail again.
    """
    text = str(error).lower()
    _, _, last = str(error).partition("Last error:")
    cure = next((cure for sign, cure in _NCCL_SET_UP.items() if sign in text), None)
    if cure is None:
        is_of_a_peer = any(sign in last.lower() for sign in _NCCL_PEER_SIGNS)
        if is_of_a_peer or not any(sign in text for sign in _NCCL_FAILURES):
            return None
        if not is_set_up:
            return error
    said = (last.strip() or str(error)).splitlines()[0]
    found = ConfigError(f"NCCL must be able to work on this rank, got: {said}. {cure or _SETTINGS}")
    found.is_of_this_rank = True
    return found


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
        f"at {heartbeat_now() or 'the start'} ({first}). "
        "Lower --batch-size, add --checkpoint-activations, or cut the model further (--pipe-parallel-size, "
        "--model-parallel-size)."
    )


def print_line(text: str) -> None:
    """Write one line to standard error in one call, so that lines of several ranks do not mix."""
    line = text.rstrip("\n") + "\n"
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except RuntimeError:  # a signal's handler, in the midst of a print
        os.write(2, line.encode())
