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
from megatron.runtime.launcher_files import claim_traceback, mark_reported, peer_failure, trace_path, write_common_error
from megatron.runtime.rank_status import current_operation, current_status, write_report_time

_PEER_ERROR_PATTERNS = (
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
_SEPARATE_GPU_ADVICE = "Assign a separate GPU to each rank: check LOCAL_RANK and CUDA_VISIBLE_DEVICES of both ranks"
_INTERFACE_ADVICE = "Set NCCL_SOCKET_IFNAME to an interface of this host that reaches the other hosts, or unset it"
_NCCL_VARIABLES_ADVICE = "Check the NCCL_... variables of this rank; NCCL_DEBUG=WARN logs details"
_NCCL_SETUP_ADVICE = {
    "duplicate gpu detected": _SEPARATE_GPU_ADVICE,
    "out of memory": (
        "NCCL needs about 100 MB of GPU memory per process group: end other processes on the GPU, or lower --batch-size"
    ),
    "no socket interface found": _INTERFACE_ADVICE,
    "neither af_inet": _INTERFACE_ADVICE,
    "nccl_socket_ifname": _INTERFACE_ADVICE,
    "shared memory segment": "Increase the container's /dev/shm (docker run --shm-size=8g, or --ipc=host)",
    "ncclinvalidusage": _NCCL_VARIABLES_ADVICE,
    "ncclinvalidargument": _NCCL_VARIABLES_ADVICE,
}
"""Texts of NCCL errors that are caused by the rank itself -> the fix. A restart would fail again."""
_NCCL_FAILURES = ("ncclunhandledcudaerror", "ncclsystemerror", "ncclinternalerror")
"""NCCL errors of this rank or of a peer; the text after "Last error:" distinguishes them."""
_NCCL_PEER_PATTERNS = ("remote", "connect", "closed", "reset", "broken pipe", "timed out", "timeout", "abort", "peer")
_exit_lock = threading.RLock()
"""Acquired by the thread whose error ends this process, and never released."""
_reported_exit_code: int | None = None
"""The exit code of the error that has been reported."""
_is_guarded = _is_reporting = _should_exit_after_report = False
_OUT_OF_MEMORY_PATTERNS = ("out of memory", "can't allocate memory", "cannot allocate memory")


def enable_crash_traces() -> None:
    """Enable faulthandler; with our launcher, it writes to a file that the launcher prints with the rank's number."""
    failure_file = os.environ.get("MEGATRON_FAILURE_FILE")
    if failure_file:
        try:
            descriptor = os.open(
                trace_path(failure_file, int(os.environ.get("RANK", "0"))),
                os.O_CREAT | os.O_WRONLY | os.O_APPEND,
            )
            faulthandler.enable(descriptor)
            return
        except OSError:
            pass  # the launcher is gone, or its disk is full: use standard error
    faulthandler.enable(sys.__stderr__ or 2)


def guard(main: Callable[[], None], get_rank_name: Callable[[], str]) -> None:
    """Call ``main``; if it raises, print one line and exit with the error's exit code.

    Args:
        get_rank_name: function that returns this rank's name for the message, such as "rank 3 (stage 1, tensor 1, data
            0)".
    """
    global _is_guarded
    _is_guarded = True
    try:
        main()
    except BaseException as error:
        if not _is_failure(error):
            raise
        text = environment.problem(error)
        exit_with_error(error if text is None else ConfigError(text), get_rank_name())


def report_failure(error: BaseException, rank_name: str) -> None:
    """Report ``error``, which will end this process.

    Called before cleanup, during which the launcher may kill the process. Errors raised after this call are not
    reported. No-op outside of ``guard``, because the caller may handle the error.
    """
    if _is_guarded and _is_failure(error):
        _report(error, rank_name)


def _is_failure(error: BaseException) -> bool:
    """Return True unless ``error`` is a SystemExit outside of a run."""
    return not isinstance(error, SystemExit) or current_status().is_running


def exit_with_error(error: BaseException, rank_name: str, before_exit: Callable[[], object] | None = None) -> NoReturn:
    """Report ``error`` and exit immediately, without waiting for peers that may never answer.

    If several threads call this, or several errors occur, the first one is reported and determines the exit code.

    Args:
        rank_name: name of this rank.
        before_exit: called between the report and the exit, while other threads cannot report; its errors are ignored.
    """
    code = _report(error, rank_name)
    if before_exit is not None:
        with suppress(Exception):
            before_exit()
    os._exit(code)


def exit_for_dead_peer(failure_text: str) -> None:
    """Exit from a signal handler in the main thread, because the launcher has reported the death of a peer.

    If this rank is handling an error of its own, that error is reported instead, since it may be the reason for the
    peer's exit. Returns only if the signal has interrupted a report; the process then exits after the report.
    """
    global _should_exit_after_report
    _should_exit_after_report = True
    if _reported_exit_code is not None:
        os._exit(_reported_exit_code)
    if _is_reporting:
        return
    rank_name = f"rank {os.environ.get('RANK', '0')}"
    handled_error = sys.exc_info()[1]
    if isinstance(handled_error, JobError) and not isinstance(handled_error, StopRequest):
        exit_with_error(handled_error, rank_name)
    os.write(
        2, f"{rank_name}: exiting, {failure_text}\n".encode()
    )  # os.write, because the signal may have interrupted a print
    os._exit(4)


def _report(error: BaseException, rank_name: str) -> int:
    """Report ``error`` unless an error has been reported already; return the exit code.

    Only one thread can report. Calls from other threads block forever, because the reporting thread ends the process.
    """
    global _reported_exit_code, _is_reporting
    if not _exit_lock.acquire(blocking=False):
        threading.Event().wait()
    if _reported_exit_code is not None:
        return _reported_exit_code
    _is_reporting = True
    write_report_time()
    if threading.current_thread() is threading.main_thread():
        # While the line is printed, torch's handler would raise an error for a dead data worker.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    reported_error = as_peer_error(error)
    with suppress(OSError):  # standard error may be closed; the exit code still matters
        _print_error(error, reported_error, rank_name)
        sys.stdout.flush()
        sys.stderr.flush()
    _reported_exit_code = exit_code(reported_error)
    if _should_exit_after_report:
        os._exit(_reported_exit_code)
    return _reported_exit_code


def _print_error(error: BaseException, reported_error: BaseException, rank_name: str) -> None:
    """Print the line for an error. An error that all ranks raise is printed on rank 0 only."""
    if is_raised_on_all_ranks(reported_error):
        rank = os.environ.get("RANK", "0")
        write_common_error(str(reported_error), int(rank))
        if rank == "0":
            print_line(str(reported_error))
            mark_reported()
    elif isinstance(reported_error, PeerError | StopRequest):
        operation = current_operation()
        print_line(f"{rank_name}: exiting{f' at {operation}' if operation else ''}, {reported_error}")
    else:
        cause = reported_error if isinstance(reported_error, JobError) else error
        reason = out_of_memory_text(error) or _early_exit_text(error) or f"{type(cause).__name__}: {cause}"
        print_line(f"{rank_name} failed: {reason}")
        mark_reported()
        if not isinstance(reported_error, JobError) and claim_traceback():
            traceback.print_exception(error, file=sys.stderr)


def _early_exit_text(error: BaseException) -> str | None:
    """Return the message for SystemExit during the run; None for other errors."""
    if not isinstance(error, SystemExit):
        return None
    return (
        f"a run may end only after its last step, with an error or on a stop request, got sys.exit({error.code!r}) at "
        f"{current_operation() or 'the start'}. Raise an error instead, or stop the run with --exit-interval or SIGTERM"
    )


def is_raised_on_all_ranks(error: BaseException) -> bool:
    """Return True if every rank raises this error, so that it is reported only once."""
    return isinstance(error, JobError) and not error.is_of_this_rank


def as_peer_error(error: BaseException) -> BaseException:
    """Return a PeerError if ``error`` is a process group's error about a rank that is gone; otherwise ``error`` itself.

    For an NCCL error about this rank, ``local_nccl_error`` determines the result.
    """
    dist = sys.modules.get("torch.distributed")  # not imported yet: no group can have failed
    dist_errors = (dist.DistError,) if dist is not None else ()
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower()
        if isinstance(cause, dist_errors) and (local_error := local_nccl_error(cause)) is not None:
            return local_error
        if isinstance(cause, dist_errors) or (
            type(cause) is RuntimeError and any(pattern in text for pattern in _PEER_ERROR_PATTERNS)
        ):
            return PeerError(peer_failure() or f"another rank has exited or does not respond ({error})")
        cause = cause.__cause__
    return error


def local_nccl_error(error: BaseException, *, is_during_setup: bool = False) -> BaseException | None:
    """Return the error to raise for an NCCL error on this rank, or None if another rank caused it.

    If a setting of this rank or its machine prevents NCCL from working, the result is a ConfigError, which prevents a
    restart. If a device failed during a run, the result is ``error`` itself.

    Args:
        is_during_setup: True during set-up, when any failure would recur after a restart.
    """
    text = str(error).lower()
    _, _, last_error = str(error).partition("Last error:")
    advice = next((advice for pattern, advice in _NCCL_SETUP_ADVICE.items() if pattern in text), None)
    if advice is None:
        is_peer_error = any(pattern in last_error.lower() for pattern in _NCCL_PEER_PATTERNS)
        if is_peer_error or not any(pattern in text for pattern in _NCCL_FAILURES):
            return None
        if not is_during_setup:
            return error
    detail = (last_error.strip() or str(error)).splitlines()[0]
    config_error = ConfigError(f"NCCL failed on this rank: {detail}. {advice or _NCCL_VARIABLES_ADVICE}")
    config_error.is_of_this_rank = True
    return config_error


def out_of_memory_text(error: BaseException) -> str | None:
    """Return a message about a failed allocation, with the size and the current operation; None for other errors.

    Torch raises OutOfMemoryError on GPUs and RuntimeError on CPUs; Python and numpy raise MemoryError.
    """
    text = str(error)
    is_memory_error = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not is_memory_error and not (
        type(error) is RuntimeError and any(pattern in text.lower() for pattern in _OUT_OF_MEMORY_PATTERNS)
    ):
        return None
    size_match = re.search(r"(?:tried|trying|unable) to allocate ([\d.]+ ?\w+)", text, re.I)
    first_line = (text.splitlines() or [type(error).__name__])[0]
    return (
        f"out of memory: could not allocate {size_match.group(1) if size_match else 'memory'}, "
        f"at {current_operation() or 'the start'} ({first_line}). "
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
