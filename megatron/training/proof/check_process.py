"""The processes of a layout check: one that coordinates, the ranks of the small layout, and the single process.

The coordinator is forked from rank 0 before the first process group is created and before a device is initialised; the
other processes are forks of the coordinator. All of them compute on the CPU, at low priority and with gloo over the
loopback interface. They use no files, and only ports that the kernel assigns. A process ends with its parent.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron import device
from megatron.arguments.deepspeed_keys import engine_features
from megatron.child_process import die_with_parent
from megatron.config import Config
from megatron.errors import PeerError
from megatron.models import registry
from megatron.runtime import rank_status
from megatron.runtime.exit_guard import as_peer_error
from megatron.training.proof.check_result import FAILED, NOT_CHECKED, OK, CheckResult, bound_problems
from megatron.training.proof.shrink import NUM_STEPS, ShrinkError, Shrunk, shrink
from megatron.training.proof.uncovered import uncovered_parts

if TYPE_CHECKING:
    import torch

    from megatron.training.data import DatasetsProvider
    from megatron.training.parity import Trace
    from megatron.training.step_engine import ForwardStep

LIMIT_S = 20.0
"""Seconds after which a check beside a run is stopped."""
PROVE_ONLY_LIMIT_S = 600.0
"""Seconds after which a check without a run is stopped."""
NICENESS = 10
"""Priority of a check beside a run: a rank gets ten times as much of a core that both want."""
HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
LAUNCHER_VARIABLES = (
    "MEGATRON_FAILURE_FILE", "MEGATRON_PROGRESS_FILE", "MEGATRON_REGROUP_FILE", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip
REFERENCE = -1
"""Number of the single process among the ranks."""
_END_MARGIN_S = 2.0
_ERROR_GRACE_S = 1.0


@dataclass(frozen=True)
class CheckJob:
    """The run whose layout is checked.

    Args:
        config: run configuration.
        world_size: the run's rank count.
        device_type: the run's device.
        datasets_provider: data sets from the run's own script; None: random tokens.
        limit_s: seconds after which the check is stopped.
        niceness: added to the priority of the processes.
    """

    config: Config
    world_size: int
    device_type: str
    model_provider: Callable[[], torch.nn.Module]
    forward_step: ForwardStep
    datasets_provider: DatasetsProvider | None = None
    limit_s: float = LIMIT_S
    niceness: int = NICENESS


class CheckProcess:
    """A layout check that runs in a child process; forks it on construction.

    Attributes:
        result: None while the check runs.
    """

    def __init__(self, job: CheckJob) -> None:
        self.result: CheckResult | None = None
        self._limit_s = job.limit_s + _END_MARGIN_S
        self._started_at = time.monotonic()
        self._received = b""
        self._read_end, write_end = os.pipe()
        self._pid = _fork(lambda: _coordinate(job, write_end))
        os.close(write_end)
        os.set_blocking(self._read_end, False)

    def poll(self) -> CheckResult | None:
        """Return the result, or None if the check still runs. Does not wait."""
        if self.result is not None:
            return self.result
        while True:
            try:
                received = os.read(self._read_end, 1 << 16)
            except BlockingIOError:
                if time.monotonic() - self._started_at > self._limit_s:
                    self._finish(CheckResult(NOT_CHECKED, _limit_reason(self._limit_s - _END_MARGIN_S)))
                return self.result
            if not received:
                break
            self._received += received
        if self._received:
            self._finish(CheckResult.from_dict(json.loads(self._received)))
        else:
            self._finish(CheckResult(NOT_CHECKED, "the process of the check was ended"))
        return self.result

    def wait(self) -> CheckResult:
        """Wait until the check has ended or its limit has passed, and return the result."""
        while self.poll() is None:
            select.select([self._read_end], [], [], 1.0)
        assert self.result is not None
        return self.result

    def close(self) -> None:
        """End the check if it still runs."""
        if self.result is None:
            self._finish(CheckResult(NOT_CHECKED, "the run ended before the check"))

    def _finish(self, result: CheckResult) -> None:
        self.result = result
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        os.close(self._read_end)


def _limit_reason(limit_s: float) -> str:
    advice = f" (--prove-only has {PROVE_ONLY_LIMIT_S:g} s)" if limit_s < PROVE_ONLY_LIMIT_S else ""
    return f"stopped after {limit_s:g} s{advice}"


def _fork(main: Callable[[], None]) -> int:
    """Call ``main`` in a fork of this process, and return the fork's process id. The fork ends when its parent ends."""
    parent = os.getpid()
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)  # our handlers must not run in the fork
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        return pid
    try:
        die_with_parent()
        gc.freeze()  # a collection would copy the pages of all objects
        signal.set_wakeup_fd(-1)
        for signum in HANDLED_SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        if os.getppid() == parent:
            main()
    finally:
        os._exit(0)


def _coordinate(job: CheckJob, write_end: int) -> None:
    """Run the check and write the result to ``write_end``; the coordinator's main function."""
    _leave_run(job.niceness)
    started_at = time.monotonic()
    try:
        result = _check(job, started_at + job.limit_s)
    except Exception as error:
        result = CheckResult(NOT_CHECKED, f"{type(error).__name__}: {error}")
    result = replace(result, seconds=round(time.monotonic() - started_at, 2))
    os.write(write_end, json.dumps(result.to_dict()).encode())


def _leave_run(niceness: int) -> None:
    """Detach this fork from the run: no output, no launcher files and variables, no device."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    faulthandler.disable()
    rank_status.use_private_memory()
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    if niceness:
        os.nice(niceness)


def _check(job: CheckJob, deadline: float) -> CheckResult:
    """Run the small layout and the single process; return the result of their comparison."""
    uncovered = uncovered_parts(
        job.config, job.device_type, needs_deepspeed=bool(engine_features(job.config.deepspeed))
    )
    try:
        keeps_data = job.datasets_provider is not None
        shrunk = shrink(job.config, job.world_size, job.device_type, keeps_data=keeps_data)
    except ShrinkError as error:
        return CheckResult(NOT_CHECKED, f"this configuration cannot be shrunk: {error}", uncovered=uncovered)
    if job.device_type != "cpu":
        _use_cpu()
    # Imported once here instead of in every rank. They take a second if the launcher has not imported torch.
    from megatron.training.parity import compare

    registry.model_parts(job.config.family)
    if shrunk.config.parallel.has_pipeline:
        registry.pipeline_class(job.config.family)
    outcomes = _run_ranks(job, shrunk, deadline)
    if outcomes is None:
        return CheckResult(NOT_CHECKED, _limit_reason(job.limit_s), uncovered=uncovered)
    errors = {rank: outcome for rank, outcome in sorted(outcomes.items()) if isinstance(outcome, RankError)}
    if errors:
        rank = min(errors, key=lambda number: errors[number].is_of_peer)  # the first one whose error is its own
        name = "the small model in one process" if rank == REFERENCE else f"rank {rank} of the small layout"
        return CheckResult(NOT_CHECKED, f"{name} failed: {errors[rank].text}", uncovered=uncovered)
    traces = {rank: outcome for rank, outcome in outcomes.items() if not isinstance(outcome, RankError)}
    reference = traces.pop(REFERENCE)
    try:
        difference = compare(reference, list(traces.values()))
    except ValueError as error:
        return CheckResult(FAILED, str(error), num_ranks=shrunk.world_size, uncovered=uncovered)
    differences = {name: float(getattr(difference, name)) for name in ("first_loss", "loss", "first_norm", "gradient")}
    problems = bound_problems(differences, difference.worst_gradient, difference.expert_tokens)
    return CheckResult(
        FAILED if problems else OK,
        "; ".join(problems),
        difference.worst_gradient,
        num_ranks=shrunk.world_size,
        model=_describe(shrunk),
        notes=shrunk.notes,
        uncovered=uncovered,
        **differences,
    )


def _describe(shrunk: Shrunk) -> str:
    parallel = shrunk.config.parallel
    sizes = {
        "tensor": parallel.model_parallel_size,
        "pipe": parallel.num_stages,
        "data": parallel.data_parallel_size(shrunk.world_size),
        "context": parallel.context_parallel_size,
        "expert": parallel.expert_model_parallel_size,
        "experts' tensor": parallel.expert_shards if parallel.has_fewer_expert_shards else 0,
    }
    layout = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    return f"{layout}, {shrunk.config.total_layers} layers of width {shrunk.config.model.hidden_size}"


def _use_cpu() -> None:
    """If this process has imported DeepSpeed, switch it to the CPU."""
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    set_accelerator(CPU_Accelerator())


@dataclass(frozen=True)
class RankError:
    """The error that ended a rank of the check; ``is_of_peer``: another rank caused it."""

    text: str
    is_of_peer: bool = False


def _run_ranks(job: CheckJob, shrunk: Shrunk, deadline: float) -> Mapping[int, Trace | RankError] | None:
    """Run all ranks and the single process, and return each trace or error.

    Once a rank has failed, the others have ``_ERROR_GRACE_S`` to end. Returns None if the deadline passed.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    ranks_by_pipe: dict[int, int] = {}
    received: dict[int, bytes] = {}
    outcomes: dict[int, Trace | RankError] = {}
    pids = []
    has_error = False
    try:
        for rank in (REFERENCE, *range(shrunk.world_size)):
            read_end, write_end = os.pipe()
            pids.append(_fork(partial(_rank_main, job, shrunk, rank, listener, write_end)))
            os.close(write_end)
            ranks_by_pipe[read_end], received[rank] = rank, b""
        listener.close()
        while ranks_by_pipe:
            ready, _, _ = select.select(list(ranks_by_pipe), [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                return outcomes if has_error else None
            for read_end in ready:
                rank = ranks_by_pipe[read_end]
                if data := os.read(read_end, 1 << 20):
                    received[rank] += data
                    continue
                os.close(read_end)
                del ranks_by_pipe[read_end]
                outcome = _load(received[rank]) if received[rank] else RankError("it ended without a result")
                outcomes[rank] = outcome
                if isinstance(outcome, RankError) and not has_error:
                    has_error, deadline = True, min(deadline, time.monotonic() + _ERROR_GRACE_S)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return outcomes


def _rank_main(job: CheckJob, shrunk: Shrunk, rank: int, listener: socket.socket, write_end: int) -> None:
    """Train the small model on one rank, and write the trace or the error to ``write_end``."""
    try:
        outcome: Trace | RankError = _trace(job, shrunk, rank, listener)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        outcome = RankError(text, isinstance(as_peer_error(error), PeerError))
    import torch

    buffer = io.BytesIO()
    torch.save(outcome, buffer)
    with open(write_end, "wb") as file:
        file.write(buffer.getvalue())


def _load(data: bytes) -> Trace | RankError:
    """Decode a rank's outcome from the bytes that it wrote."""
    import torch

    from megatron.mpu.shard import Shard
    from megatron.training.parity import Trace

    with torch.serialization.safe_globals([Trace, RankError, Shard]):
        outcome: Trace | RankError = torch.load(io.BytesIO(data), weights_only=True)
    return outcome


def _trace(job: CheckJob, shrunk: Shrunk, rank: int, listener: socket.socket) -> Trace:
    """Trace one rank of the small layout, or the single process."""
    import torch
    import torch.distributed as dist

    from megatron.mpu.initialize import initialize_model_parallel
    from megatron.training.parity import trace_steps
    from megatron.training.world import World

    is_reference = rank == REFERENCE
    config, world_size = (shrunk.reference, 1) if is_reference else (shrunk.config, shrunk.world_size)
    rank = max(rank, 0)
    rank_text, size_text = str(rank), str(world_size)
    os.environ.update(RANK=rank_text, LOCAL_RANK=rank_text, WORLD_SIZE=size_text, LOCAL_WORLD_SIZE=size_text)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=max(job.limit_s, 10.0))
    if is_reference:
        store: Any = dist.HashStore()
    else:
        port = listener.getsockname()[1]
        is_master = rank == 0
        store = dist.TCPStore(
            "127.0.0.1", port, world_size, is_master=is_master, timeout=timeout, wait_for_workers=False,
            master_listen_fd=listener.detach() if is_master else None,
        )  # fmt: skip
        listener.close()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    parallel, cpu = config.parallel, torch.device("cpu")
    grid = initialize_model_parallel(
        parallel.model_parallel_size,
        parallel.pipe_parallel_size,
        cpu,
        timeout,
        parallel.context_parallel_size,
        *config.expert_sizes,
        parallel.context_inner,
    )
    world = World("cpu", cpu, grid, rank, parallel.loss_stage)
    device.seed(config.run.seed)
    dataset, tokenizer, config = _open_data(job, config)
    providers = (job.model_provider, job.forward_step)
    return trace_steps(config, world, dataset, *providers, num_steps=NUM_STEPS, tokenizer=tokenizer)


def _open_data(job: CheckJob, config: Config) -> tuple[Any, Any, Config]:
    """Open the training data; return it, the tokenizer (None: a mock), and the configuration with its vocabulary."""
    from megatron.training import global_vars
    from megatron.training.mock_data import random_data
    from megatron.training.vocabulary import with_tokenizer

    if job.datasets_provider is None:
        return random_data(config), None, config
    tokenizer, config = with_tokenizer(config)
    global_vars.set_current(config, tokenizer, None)
    if config.data.is_mock:
        return random_data(config, tokenizer=tokenizer), tokenizer, config
    dataset, _, _ = job.datasets_provider([NUM_STEPS * config.batch.global_batch_size(1), 0, 0])
    return dataset, tokenizer, config
