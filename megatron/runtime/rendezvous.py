"""Rendezvous of the ranks of a job in a store at MASTER_ADDR:MASTER_PORT.

Torch's own rendezvous counts a second process with the same RANK as another rank, and waits in native code, where
signals are not handled. Here every rank claims its number, polls until all have joined, and notifies the others if it
gives up. The store is hosted by rank 0, or by the launcher (torchrun's or ours) if there is one.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from megatron import files, log
from megatron.errors import ConfigError, JobError, PeerError, StopRequest, marked

ALL_JOINED = "all"
_CLAIMS, _HEARTBEATS, _HOLDERS, _SIZE = "claims", "heartbeats", "holders", "size"
_JOIN_BARRIER, _START_BARRIER = "come", "begin"
_HEARTBEAT_S = 0.5
_DEAD_AFTER_S = 4 * _HEARTBEAT_S
"""Seconds without heartbeats after which a process that has claimed a rank is considered gone and may be replaced."""
_LINGER_S = 2 * _HEARTBEAT_S
"""Seconds for which the process with the store waits after a failed rendezvous, so that others can read the reason."""
_START_TIMEOUT_S = 30.0
"""Timeout of the second barrier: all ranks have joined and poll the store, so a rank without response is gone."""
_POLL_S = 0.25
CONNECTIONS_PER_RANK, OTHER_OPEN_FILES = 4, 256
"""Number of a rank's connections to the store (one of them for a reconnect), and of other open files of the process
that hosts the store."""
_SEARCH_TIMEOUT_S = 10.0
"""Seconds to wait for the list of missing ranks: if several ranks time out together, only one of them searches."""


def rendezvous(rank: int, size: int, timeout: timedelta, signal_name: Callable[[], str | None]) -> Store:
    """Wait for all ranks and return the store for torch's process groups. Collective.

    Args:
        signal_name: returns the name of the signal that has requested a stop, or None.

    Raises:
        ConfigError: another process has this RANK, has another WORLD_SIZE, or uses the port.
        PeerError: not all ranks joined in time; the message names the missing ones.
        StopRequest: a stop was requested while ranks were missing.
    """
    address, limit_s = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", timeout.total_seconds()
    requirement = f"all {size} ranks must join at {address} within {limit_s:.0f} s (--phase-timeout-minutes)"
    deadline = time.monotonic() + limit_s
    store = open_store(rank, size, deadline, requirement, signal_name)
    store.set_timeout(timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    rendezvous_store = PrefixStore(f"megatron/rendezvous/{attempt}", store)
    try:
        _claim_rank(rendezvous_store, rank, size, address)
        _barrier(rendezvous_store, _JOIN_BARRIER, rank, size, deadline, requirement, signal_name)
        _barrier(
            rendezvous_store, _START_BARRIER, rank, size, time.monotonic() + _START_TIMEOUT_S, requirement, signal_name
        )
    except JobError:
        if _is_server(rank):
            time.sleep(_LINGER_S)
        raise
    except RuntimeError as error:
        raise PeerError(
            f"{requirement}, but rank 0, which hosts the store, has exited ({_first_line(error)})"
        ) from error
    return PrefixStore("default_pg", store)


def open_store(rank: int, size: int, deadline: float, requirement: str, signal_name: Callable[[], str | None]) -> Store:
    """Connect to the store at MASTER_ADDR:MASTER_PORT; without a launcher, rank 0 hosts it.

    Raises:
        ConfigError, PeerError, StopRequest: as in ``rendezvous``.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_server = _is_server(rank)
    if is_server:
        raise_open_files_limit(size)
    else:
        _await_server(host, port, deadline, requirement, signal_name)
    try:
        return TCPStore(
            host, port, is_master=is_server, wait_for_workers=False, multi_tenant=is_server,
            timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
        )  # fmt: skip
    except RuntimeError as error:
        if not is_server:
            raise PeerError(f"{requirement}, but the server there does not respond ({_first_line(error)})") from error
        with marked(is_of_this_rank=True):
            raise ConfigError(
                f"rank 0 cannot listen at {host}:{port}: {_first_line(error)}. Another process may have RANK=0, or "
                "another job may use this port. Set a distinct RANK for each process and a distinct MASTER_PORT for "
                "each job; MASTER_ADDR must be the host of rank 0"
            ) from error


def raise_open_files_limit(size: int) -> None:
    """Raise this process's limit of open files for a store with ``size`` ranks; warn if that is not allowed.

    A rank has three connections: one for its process groups, one for the watchdog of its run, and one for the watchdog
    of its pipeline. ``CONNECTIONS_PER_RANK`` adds one for a reconnect.
    """
    num_needed = CONNECTIONS_PER_RANK * size + OTHER_OPEN_FILES
    num_allowed = files.allow_open_files(num_needed)
    if num_allowed < num_needed:
        log.warning(
            f"the store of {size:,} ranks needs {num_needed:,} open files, but `ulimit -n` allows only "
            f"{num_allowed:,}: further ranks cannot connect. Raise the limit (ulimit -Hn) on the node of rank 0"
        )


def _is_server(rank: int) -> bool:
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _await_server(
    host: str, port: int, deadline: float, requirement: str, signal_name: Callable[[], str | None]
) -> None:
    """Wait until the port responds.

    Raises:
        PeerError, StopRequest: as in ``rendezvous``.
    """
    while True:
        try:
            socket.create_connection((host, port), timeout=min(2.0, max(0.1, deadline - time.monotonic()))).close()
            return
        except OSError as error:
            if signal_name() is not None:
                raise _stop_request(signal_name()) from None
            if time.monotonic() > deadline:
                raise PeerError(
                    f"{requirement}, but rank 0 did not join: nothing responds there ({error.strerror or error}). "
                    "Start rank 0 on the host MASTER_ADDR with the same MASTER_PORT"
                ) from error
        time.sleep(_POLL_S)


def _claim_rank(store: Store, rank: int, size: int, address: str) -> None:
    """Register this process as rank ``rank``, possibly replacing a process that is gone.

    Raises:
        ConfigError: a live process has this rank, or other ranks have another WORLD_SIZE.
    """
    first_size = store.compare_set(_SIZE, "", str(size)).decode()
    with marked(is_of_this_rank=True):
        if first_size != str(size):
            raise ConfigError(
                f"all ranks at {address} must have the same WORLD_SIZE, got WORLD_SIZE={size} on RANK={rank} and "
                f"{first_size} on another rank. Set the same WORLD_SIZE on all ranks, or a distinct MASTER_PORT for "
                "each job"
            )
        if store.add(f"{_CLAIMS}/{rank}", 1) > 1 and _is_rank_alive(store, rank):
            holder = store.get(f"{_HOLDERS}/{rank}").decode()
            problem = (
                f"each process must have a distinct RANK, got RANK={rank} twice at {address}: {holder}, and "
                f"{_process_name()}"
            )
            store.compare_set(_JOIN_BARRIER, "", problem)
            raise ConfigError(
                f"{problem}. Number the processes from 0 to {size - 1}, or set a distinct MASTER_PORT for each job"
            )
    store.set(f"{_HOLDERS}/{rank}", _process_name())


def _process_name() -> str:
    """Return a name for this process, stored in the keys that it claims."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _is_rank_alive(store: Store, rank: int) -> bool:
    """Return True if the process that claimed ``rank`` has completed the rendezvous or still sends heartbeats."""
    heartbeats = store.add(f"{_HEARTBEATS}/{rank}", 0)
    deadline = time.monotonic() + _DEAD_AFTER_S
    while time.monotonic() < deadline:
        if store.check([_JOIN_BARRIER]) or store.add(f"{_HEARTBEATS}/{rank}", 0) > heartbeats:
            return True
        time.sleep(_POLL_S)
    return False


def _barrier(
    store: Store,
    name: str,
    rank: int,
    size: int,
    deadline: float,
    requirement: str,
    signal_name: Callable[[], str | None],
) -> None:
    """Wait until all ranks have called this with ``name``. If one rank gives up, all ranks raise."""
    # A process that replaces another one of the same rank must not be counted a second time.
    is_first = store.compare_set(f"{name}/{rank}", "", _process_name()).decode() == _process_name()
    if is_first and store.add(f"{name}/number", 1) == size:
        store.compare_set(name, "", ALL_JOINED)
    start = next_heartbeat = time.monotonic()
    while not store.check([name]):
        now = time.monotonic()
        if signal_name() is not None:
            store.compare_set(name, "", f"{requirement}, but rank {rank} has exited: it received {signal_name()}")
        elif now > deadline:
            missing = missing_ranks(store, f"{name}/", size)
            store.compare_set(name, "", f"{requirement}, but {_format_missing(missing)}")
        elif now > next_heartbeat:
            next_heartbeat = now + _HEARTBEAT_S
            store.add(f"{_HEARTBEATS}/{rank}", 1)
        time.sleep(min(_POLL_S, max(0.001, (now - start) / 50)))  # polls frequently at first, then rarely
    result = store.get(name).decode()
    if result == ALL_JOINED:
        return
    if signal_name() is not None:
        raise _stop_request(signal_name())
    raise PeerError(result)


def missing_ranks(store: Store, prefix: str, size: int) -> list[int]:
    """Return the ranks from 0 to ``size - 1`` for which the store has no key ``prefix + rank``.

    Only the first caller searches; the others read its result. All callers time out simultaneously, so separate
    searches would take ``size`` squared requests.
    """
    result_key = f"{prefix}missing"
    if store.add(f"{prefix}looks", 1) > 1:
        deadline = time.monotonic() + _SEARCH_TIMEOUT_S
        while time.monotonic() < deadline:
            if store.check([result_key]):
                return [int(rank) for rank in store.get(result_key).decode().split()]
            time.sleep(_POLL_S)
    missing = [rank for rank in range(size) if not store.check([f"{prefix}{rank}"])]
    store.set(result_key, " ".join(map(str, missing)))
    return missing


def _format_missing(missing: list[int]) -> str:
    return (
        f"rank{'s' * (len(missing) > 1)} {format_ranks(missing)} did not join. Start every process with a "
        "distinct RANK and the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
    )


def _stop_request(signal_name: str | None) -> StopRequest:
    error = StopRequest(
        f"received {signal_name} while waiting for other ranks: no step was taken. Run the same command again"
    )
    error.is_of_this_rank = True
    return error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def format_ranks(ranks: Sequence[int]) -> str:
    """Return "0, 2-5" for the ranks 0, 2, 3, 4, 5."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
