"""Rendezvous: the ranks of a job come together in a store at MASTER_ADDR:MASTER_PORT, each under its number.

Torch's own rendezvous takes a second process with the same RANK as one more, and waits in native code, where no signal
is heard. Here every rank claims its number, looks again and again whether all have come, and lets the others know when
it leaves. The store is rank 0's, or that of the launcher (torchrun's or ours) where there is one.
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
"""A process that has claimed a rank and shows no heartbeat for so long is gone: another may take its place."""
_LINGER_S = 2 * _HEARTBEAT_S
"""The store's process stays so long after the rendezvous has failed, for the others to read why."""
_BEGIN_S = 30.0
"""All have come, and look at the store every half second: whoever does not answer for so long is gone."""
_POLL_S = 0.25
CONNECTIONS, OWN_FILES = 4, 256
"""At the store: of a rank at most, one of them while it reconnects; and what its process has open else."""
_LOOK_S = 10.0
"""Of those who give up at once one looks who is missing: the others wait so long for its answer."""


def rendezvous(rank: int, size: int, timeout: timedelta, signal_name: Callable[[], str | None]) -> Store:
    """Return the store for torch's process groups once all ranks have come. Collective.

    Args:
        signal_name: returns the signal that has asked this process to stop, or None.

    Raises:
        ConfigError: another process has this RANK, or another WORLD_SIZE, or the port.
        PeerError: not all ranks came in time; with their numbers.
        StopRequest: asked to stop while others were missing.
    """
    where, limit_s = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", timeout.total_seconds()
    wanted = f"all {size} ranks must meet at {where} within {limit_s:.0f} s (--phase-timeout-minutes)"
    deadline = time.monotonic() + limit_s
    store = open_store(rank, size, deadline, wanted, signal_name)
    store.set_timeout(timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    keys = PrefixStore(f"megatron/rendezvous/{attempt}", store)
    try:
        _claim(keys, rank, size, where)
        _barrier(keys, _COME, rank, size, deadline, wanted, signal_name)
        _barrier(keys, _BEGIN, rank, size, time.monotonic() + _BEGIN_S, wanted, signal_name)
    except JobError:
        if _is_server(rank):
            time.sleep(_LINGER_S)
        raise
    except RuntimeError as error:
        raise PeerError(f"{wanted}, and rank 0, which has the store, is gone ({_first_line(error)})") from error
    return PrefixStore("default_pg", store)


def open_store(rank: int, size: int, deadline: float, wanted: str, signal_name: Callable[[], str | None]) -> Store:
    """Return the store at MASTER_ADDR:MASTER_PORT, of which rank 0 is the server where no launcher is.

    Raises:
        ConfigError, PeerError, StopRequest: as ``rendezvous``.
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
            raise PeerError(f"{wanted}, and what listens there does not answer ({_first_line(error)})") from error
        with marked(is_of_this_rank=True):
            raise ConfigError(
                f"rank 0 must be able to listen at {host}:{port}, got: {_first_line(error)}. Is there a second process "
                "with RANK=0, or another job at this port? Give each process a RANK of its own, and each job a "
                "MASTER_PORT of its own; MASTER_ADDR is the host of rank 0"
            ) from error


def make_room(size: int) -> None:
    """Let this process, which has the store, hold the connections of ``size`` ranks, and warn if it may not.

    A rank has three: of its process groups, and of the watchdogs of its run and of its pipeline.
    """
    wanted = CONNECTIONS * size + OWN_FILES
    allowed = files.allow_open_files(wanted)
    if allowed < wanted:
        log.warning(
            f"the store of {size:,} ranks needs {wanted:,} open files, and `ulimit -n` lets this process have "
            f"{allowed:,}: ranks beyond that cannot connect. Raise the limit (ulimit -Hn) on the node of rank 0"
        )


def _is_server(rank: int) -> bool:
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _await_server(host: str, port: int, deadline: float, wanted: str, signal_name: Callable[[], str | None]) -> None:
    """Return when the port answers."""
    while True:
        try:
            socket.create_connection((host, port), timeout=min(2.0, max(0.1, deadline - time.monotonic()))).close()
            return
        except OSError as error:
            if signal_name() is not None:
                raise _asked_to_stop(signal_name()) from None
            if time.monotonic() > deadline:
                raise PeerError(
                    f"{wanted}, and rank 0 did not come: nothing answers there ({error.strerror or error}). Start it "
                    "with the same MASTER_ADDR, its own host, and the same MASTER_PORT"
                ) from error
        time.sleep(_POLL_S)


def _claim(keys: Store, rank: int, size: int, where: str) -> None:
    """Enter this process as rank ``rank``, perhaps in the place of one that is gone.

    Raises:
        ConfigError: the rank has a process that lives, or the others count otherwise.
    """
    first_size = keys.compare_set(_SIZE, "", str(size)).decode()
    with marked(is_of_this_rank=True):
        if first_size != str(size):
            raise ConfigError(
                f"all ranks at {where} must have the same WORLD_SIZE, got WORLD_SIZE={size} here (RANK={rank}) and "
                f"{first_size} there. Start all with one number, or give each job a MASTER_PORT of its own"
            )
        if keys.add(f"{_CLAIMS}/{rank}", 1) > 1 and _is_held(keys, rank):
            holder = keys.get(f"{_HOLDERS}/{rank}").decode()
            twice = (
                f"each process must have a RANK of its own, got RANK={rank} twice at {where}: {holder}, and {_own()}"
            )
            keys.compare_set(_COME, "", twice)
            raise ConfigError(
                f"{twice}. Number the processes from 0 to {size - 1}, or give each job a MASTER_PORT of its own"
            )
    keys.set(f"{_HOLDERS}/{rank}", _own())


def _own() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _is_held(keys: Store, rank: int) -> bool:
    """Whether the process that claimed ``rank`` has met the others, or still shows that it waits for them."""
    heartbeats = keys.add(f"{_HEARTBEATS}/{rank}", 0)
    end = time.monotonic() + _DEAD_S
    while time.monotonic() < end:
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
    """Return when all ranks have called this with ``name``; the first that gives up ends it for all."""
    is_first = keys.compare_set(f"{name}/{rank}", "", _own()).decode() == _own()  # or one that is gone was counted
    if is_first and keys.add(f"{name}/number", 1) == size:
        keys.compare_set(name, "", ALL)
    began = heartbeat = time.monotonic()
    while not keys.check([name]):
        now = time.monotonic()
        if signal_name() is not None:
            keys.compare_set(name, "", f"{wanted}, and rank {rank} has left: it received {signal_name()}")
        elif now > deadline:
            missing = missing_of(keys, f"{name}/", size)
            keys.compare_set(name, "", f"{wanted}, {_format_missing(missing)}")
        elif now > heartbeat:
            heartbeat = now + _HEARTBEAT_S
            keys.add(f"{_HEARTBEATS}/{rank}", 1)
        time.sleep(min(_POLL_S, max(0.001, (now - began) / 50)))  # soon after the last one, and few questions meanwhile
    word = keys.get(name).decode()
    if word == ALL:
        return
    if signal_name() is not None:
        raise _asked_to_stop(signal_name())
    raise PeerError(word)


def missing_of(keys: Store, opening: str, size: int) -> list[int]:
    """Return the numbers from 0 to ``size - 1`` for which there is no key ``opening + number``.

    Whoever comes first looks for all who ask: if each looked for itself, the store would be asked ``size`` squared
    times, for all give up at the same time.
    """
    answer = f"{opening}missing"
    if keys.add(f"{opening}looks", 1) > 1:
        end = time.monotonic() + _LOOK_S
        while time.monotonic() < end:
            if keys.check([answer]):
                return [int(number) for number in keys.get(answer).decode().split()]
            time.sleep(_POLL_S)
    missing = [number for number in range(size) if not keys.check([f"{opening}{number}"])]
    keys.set(answer, " ".join(map(str, missing)))
    return missing


def _format_missing(missing: list[int]) -> str:
    return (
        f"rank{'s' * (len(missing) > 1)} {format_ranks(missing)} did not come. Start each process with a RANK of its "
        "own and with the MASTER_ADDR, MASTER_PORT and WORLD_SIZE of the others"
    )


def _asked_to_stop(name: str | None) -> StopRequest:
    error = StopRequest(f"received {name} while it waited for other ranks: no step was taken. Start again as before")
    error.is_of_this_rank = True
    return error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def format_ranks(ranks: Sequence[int]) -> str:
    """Return "0, 2-5" for such ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
