"""Ranks for tests, forked from a process that has imported torch; starting four ranks takes 0.1 s.

``run_ranks(n, function, *args)`` calls ``function(rank, *args)`` in ``n`` processes that form a gloo world
(rendezvous by file) and returns their results in rank order. If a rank raises, dies or hangs, the call fails with the
rank's traceback. Children are awaited and killed by their own ids, so no process is left running.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.large_pages import use_large_pages

GROUP_TIMEOUT_S = 20
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class RankFailure(AssertionError):
    """A rank raised an error, died or did not end in time."""


def run_ranks(num_ranks: int, function: Any, *args: Any, deadline_s: float = 60.0, init: bool = True) -> list[Any]:
    """Call ``function(rank, *args)`` in ``num_ranks`` forked processes; return their results in rank order.

    Args:
        deadline_s: seconds within which all ranks must end.
        init: form a gloo process group first.

    Raises:
        RankFailure: with the traceback of each rank that failed.
    """
    codes, results, tracebacks = fork_ranks(num_ranks, function, *args, deadline_s=deadline_s, init=init)
    if any(codes):
        message = "\n".join(f"--- rank {r} exit {c}\n{tracebacks[r]}" for r, c in enumerate(codes) if c)
        raise RankFailure(f"exit codes {codes}\n{message}")
    return results


def fork_ranks(
    num_ranks: int, function: Any, *args: Any, deadline_s: float = 60.0, init: bool = True
) -> tuple[list[int], list[Any], list[str]]:
    """Like ``run_ranks``, but return (exit codes, results, tracebacks); the exit code of a signal is negative."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        exchange_dir = Path(folder)
        sys.stdout.flush()
        sys.stderr.flush()
        _preload_modules()
        _cache_start_checks()
        use_large_pages()
        children = [_fork(rank, num_ranks, exchange_dir, function, args, init) for rank in range(num_ranks)]
        codes = _wait(children, deadline_s)
        results: list[Any] = [None] * num_ranks
        tracebacks = [""] * num_ranks
        for rank in range(num_ranks):
            if (exchange_dir / f"result-{rank}").exists():
                results[rank] = pickle.loads((exchange_dir / f"result-{rank}").read_bytes())
            if (exchange_dir / f"report-{rank}").exists():
                tracebacks[rank] = (exchange_dir / f"report-{rank}").read_text()
        return codes, results, tracebacks


PRELOADED_MODULES = {
    "deepspeed": (
        "deepspeed.comm.mori", "tds.module_inject.auto_ep_config", "tds.module_inject.auto_ep_layer",
        "tds.module_inject.auto_ep_comm",
    ),
    "torch": ("torch.profiler._cupti_monitor",),
    "megatron.training.startup": (
        *(f"megatron.training.{name}" for name in (
            "setup", "initialize", "auto_placement", "run_callbacks", "run_lock", "start_table", "vocabulary",
        )),
        "megatron.data.gpt_dataset", "megatron.costs.cost", "megatron.models.common.decoder",
        "megatron.costs.decoder_cost", "megatron.models.common.pipeline", "megatron.models.t5.pipeline",
        *(f"megatron.training.callbacks.{name}" for name in (
            "checkpointer", "console", "run_description", "stability_guard", "replica_check", "precision_speed",
            "straggler", "heartbeat",
        )),
    ),
}  # fmt: skip
"""Module -> modules that ranks import later. If the test run has imported the key, they are imported before the fork.

This saves 20 ms in each of thousands of ranks. DeepSpeed's modules are imported by their names in tds: the first such
import walks over all loaded modules, which would copy many memory pages in a forked rank.
"""


def _preload_modules() -> None:
    """Import once, instead of in every rank, the modules that ranks import to build a model and an engine."""
    for package, names in PRELOADED_MODULES.items():
        for name in names if package in sys.modules else ():
            with suppress(ImportError):  # the module does not exist in this release of DeepSpeed or torch
                importlib.import_module(name)


def _cache_start_checks() -> None:
    """Compute once the code checksum and versions that ranks compare at the start of a run.

    Otherwise each rank would compute them again, which takes a third of the time of a small run.
    """
    consistency = sys.modules.get("megatron.training.rank_consistency")
    if consistency is None or hasattr(consistency.code_checksum, "cache_info"):
        return
    consistency.code_checksum, consistency._package_version = map(
        functools.cache, (consistency.code_checksum, consistency._package_version)
    )
    consistency.code_checksum()
    consistency.code_checksum(script="")  # for proof.json
    for name in consistency.VERSIONS:
        consistency._package_version(name)


def _fork(rank: int, num_ranks: int, exchange_dir: Path, function: Any, args: tuple[Any, ...], init: bool) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # no rank outlives its test run
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks),
            DS_ACCELERATOR="cpu", MASTER_ADDR="localhost", MASTER_PORT="29500" if num_ranks > 1 else "0",
        )  # fmt: skip
        torch.set_num_threads(1)
        if init:
            store = dist.FileStore(str(exchange_dir / "store"), num_ranks)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
            )
        result = function(rank, *args)
        (exchange_dir / f"result-{rank}.tmp").write_bytes(pickle.dumps(result))
        os.rename(exchange_dir / f"result-{rank}.tmp", exchange_dir / f"result-{rank}")
        if init:
            dist.barrier()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        (exchange_dir / f"report-{rank}").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(children: list[int], deadline_s: float) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + deadline_s
    while len(codes) < len(children) and time.monotonic() < deadline:
        for child in children:
            if child not in codes:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    for child in children:
        if child not in codes:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            codes[child] = -9999
    return [codes[child] for child in children]
