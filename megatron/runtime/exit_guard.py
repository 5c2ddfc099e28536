"""Exit of a rank: print one line with the failed rank and the cause, and exit with the code of the error. No torch.

When a rank has died, the launcher reports it in the failure file (``launcher_files``) and sends SIGTERM: the other
ranks then exit without saving.
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
_GPU_OF_ITS_OWN = "Assign a separate GPU to each rank: check LOCAL_RANK and CUDA_VISIBLE_DEVICES of both ranks"
_INTERFACE = "Set NCCL_SOCKET_IFNAME to an interface of this host that reaches the other hosts, or unset it"
_SETTINGS = "Check the NCCL_... variables of this rank; NCCL_DEBUG=WARN logs details"
_NCCL_SET_UP = {
    "duplicate gpu detected": _GPU_OF_ITS_OWN,
    "out of memory": (
        "NCCL needs about 100 MB of GPU memory per process group: end other processes on the GPU, or lower --batch-size"
    ),
    "no socket interface found": _INTERFACE,
    "neither af_inet": _INTERFACE,
    "nccl_socket_ifname": _INTERFACE,
    "shared memory segment": "Increase the container's /dev/shm (docker run --shm-size=8g, or --ipc=host)",
    "ncclinvalidusage": _SETTINGS,
    "ncclinvalidargument": _SETTINGS,
}
"""Texts of NCCL errors that are caused by the rank itself -> the fix. A restart would fail again."""
_NCCL_FAILURES = ("ncclunhandledcudaerror", "ncclsystemerror", "ncclinternalerror")
"""NCCL errors of this rank or of a peer; the text after "Last error:" distinguishes them."""
_NCCL_PEER_SIGNS = ("remote", "connect", "closed", "reset", "broken pipe", "timed out", "timeout", "abort", "peer")
_leaving = threading.RLock()
"""Acquired by the thread whose error ends this process, and never released."""
_code: int | None = None
"""The exit code of the error that has been reported."""
_is_guarded = _is_reporting = _is_hurried = False
_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory")


def trace_crashes() -> None:
    """Enable faulthandler; with our launcher, it writes to a file that the launcher prints with the rank's number."""
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
            pass  # the launcher is gone, or its disk is full: use standard error
    faulthandler.enable(sys.__stderr__ or 2)


def guard(main: Callable[[], None], who: Callable[[], str]) -> None:
    """Call ``main``; if it raises, print one line and exit with the error's exit code.

    Args:
        who: function that returns this rank's name for the message, such as "rank 3 (stage 1, tensor 1, data 0)".
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
    """Report ``error``, which will end this process. Called before the cleanup, in which the launcher may kill it.

    Errors raised after this call are not reported. No-op outside of ``guard``, because the caller may handle the error.
    """
    if _is_guarded and _ends_process(error):
        _report(error, who)


def _ends_process(error: BaseException) -> bool:
    """Return True if ``error`` is a failure; SystemExit is one during a run, but not after --help or the run's end."""
    return not isinstance(error, SystemExit) or own().is_running


def leave(error: BaseException, who: str, linger: Callable[[], object] | None = None) -> NoReturn:
    """Report ``error`` and exit immediately, without waiting for peers that may never answer.

    If several threads call this, or several errors occur, the first one is reported and determines the exit code.

    Args:
        who: name of this rank.
        linger: called between the report and the exit, while other threads are blocked; its errors are ignored.
    """
    code = _report(error, who)
    if linger is not None:
        with suppress(Exception):
            linger()
    os._exit(code)


def leave_for_dead_peer(death: str) -> None:
    """Exit from a signal handler in the main thread, because the launcher has reported the death of a peer.

    If this rank is handling an error of its own, that error is reported instead, since it may be the reason for the
    peer's exit. Returns only if the signal has interrupted a report; the process then exits after the report.
    """
    global _is_hurried
    _is_hurried = True
    if _code is not None:
        os._exit(_code)
    if _is_reporting:
        return
    rank_name = f"rank {os.environ.get('RANK', '0')}"
    handled = sys.exc_info()[1]
    if isinstance(handled, JobError) and not isinstance(handled, StopRequest):
        leave(handled, rank_name)
    os.write(
        2, f"{rank_name}: exiting, {death}\n".encode()
    )  # os.write, because the signal may have interrupted a print
    os._exit(4)


def _report(error: BaseException, who: str) -> int:
    """Report ``error`` unless an error has been reported already; return the exit code. Blocks in all other threads."""
    global _code, _is_reporting
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()
    if _code is not None:
        return _code
    _is_reporting = True
    note_reporting()
    if threading.current_thread() is threading.main_thread():
        # While the line is printed, torch's handler would raise an error for a dead data worker.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    failure = as_peer_error(error)
    with suppress(OSError):  # standard error may be closed; the exit code still matters
        _print(error, failure, who)
        sys.stdout.flush()
        sys.stderr.flush()
    _code = exit_code(failure)
    if _is_hurried:
        os._exit(_code)
    return _code


def _print(error: BaseException, failure: BaseException, who: str) -> None:
    """Print the line for an error. An error that all ranks raise is printed on rank 0 only."""
    if is_same_everywhere(failure):
        rank = os.environ.get("RANK", "0")
        leave_words(str(failure), int(rank))
        if rank == "0":
            print_line(str(failure))
            note_reported()
    elif isinstance(failure, PeerError | StopRequest):
        operation = heartbeat_now()
        print_line(f"{who}: exiting{f' at {operation}' if operation else ''}, {failure}")
    else:
        cause = failure if isinstance(failure, JobError) else error
        print_line(f"{who} failed: {out_of_memory(error) or _left_early(error) or f'{type(cause).__name__}: {cause}'}")
        note_reported()
        if not isinstance(failure, JobError) and is_first_to_report():
            traceback.print_exception(error, file=sys.stderr)


def _left_early(error: BaseException) -> str | None:
    """Return the message for a SystemExit during the run; None for other errors."""
    if not isinstance(error, SystemExit):
        return None
    return (
        f"a run may end only after its last step, with an error or on a stop request, got sys.exit({error.code!r}) at "
        f"{heartbeat_now() or 'the start'}. Raise an error instead, or stop the run with --exit-interval or SIGTERM"
    )


def is_same_everywhere(error: BaseException) -> bool:
    """Return True if every rank raises this error, so that it is reported only once."""
    return isinstance(error, JobError) and not error.is_of_this_rank


def as_peer_error(error: BaseException) -> BaseException:
    """Return a PeerError for an error that a process group raises if another rank is gone; other errors are unchanged.

    For an error of NCCL about this rank, the result of ``fault_of_this_rank`` is returned.
    """
    dist = sys.modules.get("torch.distributed")  # not imported yet: no group can have failed
    dist_errors = (dist.DistError,) if dist is not None else ()
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower()
        if isinstance(cause, dist_errors) and (local_error := fault_of_this_rank(cause)) is not None:
            return local_error
        if isinstance(cause, dist_errors) or (
            type(cause) is RuntimeError and any(sign in text for sign in _PEER_SIGNS)
        ):
            return PeerError(peer_failure() or f"another rank has exited or does not respond ({error})")
        cause = cause.__cause__
    return error


def fault_of_this_rank(error: BaseException, *, is_set_up: bool = False) -> BaseException | None:
    """Return the error to raise for an NCCL error of this rank, or None if it concerns another rank.

    If a setting of this rank or its machine prevents NCCL from working, the result is a ConfigError, which prevents a
    restart. If a device failed during a run, the result is ``error`` itself.

    Args:
        is_set_up: True during set-up, when any failure would recur after a restart.
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
    detail = (last.strip() or str(error)).splitlines()[0]
    config_error = ConfigError(f"NCCL failed on this rank: {detail}. {cure or _SETTINGS}")
    config_error.is_of_this_rank = True
    return config_error


def out_of_memory(error: BaseException) -> str | None:
    """Return the message for a failed allocation, with its size and the rank's operation; None for other errors.

    Torch raises OutOfMemoryError on GPUs and RuntimeError on CPUs; Python and numpy raise MemoryError.
    """
    text = str(error)
    is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not is_memory and not (type(error) is RuntimeError and any(sign in text.lower() for sign in _MEMORY_SIGNS)):
        return None
    size_match = re.search(r"(?:tried|trying|unable) to allocate ([\d.]+ ?\w+)", text, re.I)
    first_line = (text.splitlines() or [type(error).__name__])[0]
    return (
        f"out of memory: could not allocate {size_match.group(1) if size_match else 'memory'}, "
        f"at {heartbeat_now() or 'the start'} ({first_line}). "
        "Lower --batch-size, add --checkpoint-activations, or split the model over more ranks "
        "(--pipe-parallel-size, --model-parallel-size)."
    )


def print_line(text: str) -> None:
    """Write one line to standard error in one call, so that lines of several ranks do not mix."""
    line = text.rstrip("\n") + "\n"
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except RuntimeError:  # called from a signal handler that has interrupted a print
        os.write(2, line.encode())
