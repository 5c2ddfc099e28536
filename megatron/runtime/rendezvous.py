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

ALL = "all"
_CLAIMS, _HEARTBEATS, _HOLDERS, _SIZE = "claims", "heartbeats", "holders", "size"
_COME, _BEGIN = "come", "begin"
_HEARTBEAT_S = 0.5
_DEAD_S = 4 * _HEARTBEAT_S
"""Seconds without heartbeats after which a process that has claimed a rank is considered gone and may be replaced."""
_LINGER_S = 2 * _HEARTBEAT_S
"""Seconds for which the process with the store waits after a failed rendezvous, so that others can read the reason."""
_BEGIN_S = 30.0
"""Timeout of the second barrier: all ranks have joined and poll the store, so a rank without response is gone."""
_POLL_S = 0.25
CONNECTIONS, OWN_FILES = 4, 256
"""Connections of a rank to the store, including one during a reconnect; other open files of the store's process."""
_LOOK_S = 10.0
"""Seconds to wait for the list of missing ranks: if several ranks time out together, only one of them searches."""


def rendezvous(rank: int, size: int, timeout: timedelta, signal_name: Callable[[], str | None]) -> Store:
    """Return the store for torch's process groups once all ranks have joined. Collective.

    Args:
        signal_name: function that returns the name of the signal that has requested a stop, or None.

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
    keys = PrefixStore(f"megatron/rendezvous/{attempt}", store)
    try:
        _claim(keys, rank, size, address)
        _barrier(keys, _COME, rank, size, deadline, requirement, signal_name)
        _barrier(keys, _BEGIN, rank, size, time.monotonic() + _BEGIN_S, requirement, signal_name)
    except JobError:
        if _is_server(rank):
            time.sleep(_LINGER_S)
        raise
    except RuntimeError as error:
        raise PeerError(
            f"{requirement}, but rank 0, which hosts the store, has exited ({_first_line(error)})"
        ) from error
    return PrefixStore("default_pg", store)


def open_store(rank: int, size: int, deadline: float, wanted: str, signal_name: Callable[[], str | None]) -> Store:
    """Connect to the store at MASTER_ADDR:MASTER_PORT; without a launcher, rank 0 hosts it.

    Raises:
        ConfigError, PeerError, StopRequest: as in ``rendezvous``.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_server = _is_server(rank)
    if is_server:
        make_room(size)
    else:
        _await_server(host, port, deadline, wanted, signal_name)
    try:
        return TCPStore(
            host, port, is_master=is_server, wait_for_workers=False, multi_tenant=is_server,
            timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
        )  # fmt: skip
    except RuntimeError as error:
        if not is_server:
            raise PeerError(f"{wanted}, but the server there does not respond ({_first_line(error)})") from error
        with marked(is_of_this_rank=True):
            raise ConfigError(
                f"rank 0 cannot listen at {host}:{port}: {_first_line(error)}. Another process may have RANK=0, or "
                "another job may use this port. Set a distinct RANK for each process and a distinct MASTER_PORT for "
                "each job; MASTER_ADDR must be the host of rank 0"
            ) from error


def make_room(size: int) -> None:
    """Raise this process's limit of open files for a store with ``size`` ranks; warn if that is not allowed.

    A rank has three connections: of its process groups, and of the watchdogs of its run and of its pipeline.
    """
    num_needed = CONNECTIONS * size + OWN_FILES
    num_allowed = files.allow_open_files(num_needed)
    if num_allowed < num_needed:
        log.warning(
            f"the store of {size:,} ranks needs {num_needed:,} open files, but `ulimit -n` allows only "
            f"{num_allowed:,}: further ranks cannot connect. Raise the limit (ulimit -Hn) on the node of rank 0"
        )


def _is_server(rank: int) -> bool:
    """Return True if this process hosts the store."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _await_server(host: str, port: int, deadline: float, wanted: str, signal_name: Callable[[], str | None]) -> None:
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
                raise _asked_to_stop(signal_name()) from None
            if time.monotonic() > deadline:
                raise PeerError(
                    f"{wanted}, but rank 0 did not join: nothing responds there ({error.strerror or error}). Start "
                    "rank 0 on the host MASTER_ADDR with the same MASTER_PORT"
                ) from error
        time.sleep(_POLL_S)


def _claim(keys: Store, rank: int, size: int, where: str) -> None:
    """Register this process as rank ``rank``, possibly replacing a process that is gone.

    Raises:
        ConfigError: a live process has this rank, or other ranks have another WORLD_SIZE.
    """
    first_size = keys.compare_set(_SIZE, "", str(size)).decode()
    with marked(is_of_this_rank=True):
        if first_size != str(size):
            raise ConfigError(
                f"all ranks at {where} must have the same WORLD_SIZE, got WORLD_SIZE={size} on RANK={rank} and "
                f"{first_size} on another rank. Set the same WORLD_SIZE on all ranks, or a distinct MASTER_PORT for "
                "each job"
            )
        if keys.add(f"{_CLAIMS}/{rank}", 1) > 1 and _is_held(keys, rank):
            holder = keys.get(f"{_HOLDERS}/{rank}").decode()
            problem = (
                f"each process must have a distinct RANK, got RANK={rank} twice at {where}: {holder}, and {_own()}"
            )
            keys.compare_set(_COME, "", problem)
            raise ConfigError(
                f"{problem}. Number the processes from 0 to {size - 1}, or set a distinct MASTER_PORT for each job"
            )
    keys.set(f"{_HOLDERS}/{rank}", _own())


def _own() -> str:
    """Return text that identifies this process: the value of the keys that it claims."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _is_held(keys: Store, rank: int) -> bool:
    """Return True if the process that claimed ``rank`` has completed the rendezvous or still sends heartbeats."""
    heartbeats = keys.add(f"{_HEARTBEATS}/{rank}", 0)
    deadline = time.monotonic() + _DEAD_S
    while time.monotonic() < deadline:
        if keys.check([_COME]) or keys.add(f"{_HEARTBEATS}/{rank}", 0) > heartbeats:
            return True
        time.sleep(_POLL_S)
    return False


def _barrier(
    keys: Store,
    name: str,
    rank: int,
    size: int,
    deadline: float,
    wanted: str,
    signal_name: Callable[[], str | None],
) -> None:
    """Wait until all ranks have called this with ``name``. If one rank gives up, all ranks raise."""
    # If this process replaces another one of the same rank, that one has been counted already.
    is_first = keys.compare_set(f"{name}/{rank}", "", _own()).decode() == _own()
    if is_first and keys.add(f"{name}/number", 1) == size:
        keys.compare_set(name, "", ALL)
    began = heartbeat = time.monotonic()
    while not keys.check([name]):
        now = time.monotonic()
        if signal_name() is not None:
            keys.compare_set(name, "", f"{wanted}, but rank {rank} has exited: it received {signal_name()}")
        elif now > deadline:
            missing = missing_of(keys, f"{name}/", size)
            keys.compare_set(name, "", f"{wanted}, but {_format_missing(missing)}")
        elif now > heartbeat:
            heartbeat = now + _HEARTBEAT_S
            keys.add(f"{_HEARTBEATS}/{rank}", 1)
        time.sleep(min(_POLL_S, max(0.001, (now - began) / 50)))  # polls frequently at first, then rarely
    result = keys.get(name).decode()
    if result == ALL:
        return
    if signal_name() is not None:
        raise _asked_to_stop(signal_name())
    raise PeerError(result)


def missing_of(keys: Store, opening: str, size: int) -> list[int]:
    """Return the numbers from 0 to ``size - 1`` for which there is no key ``opening + number``.

    The first caller searches for all. All callers time out simultaneously, so separate searches would take ``size``
    squared requests.
    """
    result_key = f"{opening}missing"
    if keys.add(f"{opening}looks", 1) > 1:
        deadline = time.monotonic() + _LOOK_S
        while time.monotonic() < deadline:
            if keys.check([result_key]):
                return [int(rank) for rank in keys.get(result_key).decode().split()]
            time.sleep(_POLL_S)
    missing = [rank for rank in range(size) if not keys.check([f"{opening}{rank}"])]
    keys.set(result_key, " ".join(map(str, missing)))
    return missing


def _format_missing(missing: list[int]) -> str:
    return (
        f"rank{'s' * (len(missing) > 1)} {format_ranks(missing)} did not join. Start every process with a "
        "distinct RANK and the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
    )


def _asked_to_stop(name: str | None) -> StopRequest:
    """Return the error for a stop request before all ranks have joined."""
    error = StopRequest(f"received {name} while waiting for other ranks: no step was taken. Run the same command again")
    error.is_of_this_rank = True
    return error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def format_ranks(ranks: Sequence[int]) -> str:
    """Return "0, 2-5" for the ranks 0, 2, 3, 4, 5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
