"""The reason for an ended job is told, whichever rank leaves first and however long rank 0 takes to leave."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.errors import exit_code
from megatron.launch import machine
from megatron.launch.outcome import RESTARTABLE_CODES, End, Exit, job_result
from megatron.runtime import exit_guard
from tests.helpers.harness import fork_ranks
from tests.helpers.launch_jobs import Job
from tests.helpers.runs import make_flags, write_corpus

RANK_SCRIPT = """\
import os, sys, time
from pathlib import Path
from megatron.errors import NumericsError, PeerError, StopRequest, marked
from megatron.runtime import exit_guard, rank_status
from megatron.runtime.exit_signals import StopRequests

rank, place = int(os.environ["RANK"]), Path(sys.argv[1])
stop = StopRequests()
stop.install_handlers()

def main():
    plan = sys.argv[2 + rank]
    rank_status.open_status_file()
    rank_status.write_state(rank_status.RUNNING)
    if plan == "peer":
        while not (place / "ready").exists():
            time.sleep(0.005)
        raise PeerError("another rank is gone")
    if plan == "exits":
        while rank and not (place / "ready").exists():
            time.sleep(0.005)
        try:
            sys.exit(0)
        except SystemExit as error:
            exit_guard.report_failure(error, f"rank {rank}")
            (place / "ready").touch()
            time.sleep(0 if rank else 0.15)  # rank 0 has more to close
            raise
    if plan == "asked":
        (place / f"listens-{rank}").touch()
        while stop.stop_reason(1) is None:
            time.sleep(0.005)
        raise StopRequest(stop.stop_reason(1))
    if plan == "alike":
        with marked(is_of_this_rank=False):
            raise NumericsError("all steps were bad")
    try:
        raise NumericsError("bad") if plan == "saves" else ArithmeticError("planted")
    except ArithmeticError as error:
        if plan == "closes":
            exit_guard.report_failure(error, "rank 0")
        (place / "ready").touch()
        time.sleep(60)

exit_guard.guard(main, lambda: f"rank {rank}")
"""
BAD_LOSSES_SCRIPT = """\
import os, time
import pretrain_gpt2 as script
from pathlib import Path
from megatron.runtime import exit_guard
from megatron.training import loss_forms, single_stage_engine
from megatron.training.startup import pretrain
from megatron.training.callbacks.metrics_writer import MetricsWriter
from tds.loss import Weighted

plain, note, place = loss_forms.as_weighted, exit_guard.write_report_time, Path(__file__).parent

def until(name):
    while not (place / name).exists():
        time.sleep(0.005)

def note_in_turn():
    if os.environ["RANK"] == "0":
        until("rank 1 says it")
        return note()
    note()
    (place / "rank 1 says it").touch()
    until("rank 0 closes")

def spoiled(loss):
    weighted = plain(loss)
    return Weighted(weighted.total * float("nan"), weighted.count)

def close_late(self, *, should_plot=True):
    os.write(2, b"closing\\n")
    (place / "rank 0 closes").touch()
    time.sleep(60)
    raise OSError("no space left")

exit_guard.write_report_time = note_in_turn
single_stage_engine.as_weighted = loss_forms.as_weighted = spoiled
MetricsWriter.close = close_late
pretrain(script.train_valid_test_datasets_provider, script.model_provider, script.forward_step)
"""


def start_job(folder: Path, *plans: str) -> Job:
    folder.mkdir(exist_ok=True)
    script = folder / "ranks.py"
    script.write_text(RANK_SCRIPT)
    preload = ("--preload", "megatron.runtime.exit_guard,megatron.runtime.exit_signals")
    return Job(folder, [[] for _ in plans], *preload, script=script, arguments=[str(folder), *plans])


def test_patience_error_is_reported_while_rank_0_closes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real ranks, whatever their speed: rank 1 says it first, and leaves while rank 0 closes its files.

    What closing raises replaces neither the reason nor its code.
    """
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = tmp_path / "bad.py"
    script.write_text(BAD_LOSSES_SCRIPT)
    argv = make_flags(write_corpus(tmp_path), tmp_path / "run", "--stability-guard skip --stability-patience 2")
    preload = ",".join(machine.PRELOADED_MODULES)
    job = Job(tmp_path, [[], []], "--preload", preload, script=script, arguments=argv)
    assert job.wait(50) == 5, job.output
    reason, _, remaining_output = job.output.partition("closing\n")
    assert reason.count("--stability-patience") == 1 and "--stability-patience" not in remaining_output
    assert "a peer died" not in job.output
    assert "launch: ended by the same error on every rank, first by rank 1 (stage 0, tensor 0, data 1" in job.output
    assert "the job ends with code 5" in job.output


@pytest.mark.parametrize(
    ("plan", "code", "message"),
    [("closes", 1, "rank 0 failed: ArithmeticError: planted"), ("saves", 5, "rank 0 failed: NumericsError: bad")],
    ids=["that was told", "that waits for a save"],
)
def test_pending_error_outranks_peer_error(plan: str, code: int, message: str, tmp_path: Path) -> None:
    job = start_job(tmp_path, plan, "peer")
    assert job.wait(20) == code
    assert job.output.count(message) == 1 and "exiting, a peer died" not in job.output
    assert f"launch: ended by rank 0 (pid {job.output.partition('by rank 0 (pid ')[2]}" in job.output


def test_launcher_reports_error_that_rank_0_could_not(tmp_path: Path) -> None:
    job = start_job(tmp_path, "peer", "alike")
    assert job.wait(20) == 5
    assert "rank 0: exiting, the job ends: the same error on every rank, first by rank 1" in job.output
    assert job.output.count("with exit code 5: all steps were bad; the job ends with code 5") == 1


def test_launcher_does_not_repeat_rank_0_error(tmp_path: Path) -> None:
    job = start_job(tmp_path, "alike", "alike")
    assert job.wait(20) == 5
    assert job.output.count("all steps were bad") == 1


def test_first_sys_exit_rank_is_named(tmp_path: Path) -> None:
    job = start_job(tmp_path, "exits", "exits")
    assert job.wait(20) == 1
    for rank in (0, 1):
        message = (
            f"rank {rank} failed: a run may end only after its last step, with an error or on a stop request, got sys"
        )
        assert job.output.count(message) == 1
    assert job.output.count("sys.exit(0)\n") == 1, "one traceback shows the line"
    assert "launch: ended by rank 0 (pid " in job.output and "the job ends with code 1" in job.output


def test_ranks_report_signal_received_by_launcher(tmp_path: Path) -> None:
    job = start_job(tmp_path, "asked", "asked")
    while len([*tmp_path.glob("listens-*")]) < 2:
        time.sleep(0.005)
    job.send_signal(signal.SIGINT)
    assert job.wait(20) == 75
    assert "received SIGINT\n" in job.output and "SIGTERM" not in job.output


def test_error_after_report_does_not_change_exit_code() -> None:
    def end(rank: int) -> None:
        def main() -> None:
            exit_guard.report_failure(exit_guard.PeerError("gone"), "rank 0")
            raise OSError("while closing")

        exit_guard.guard(main, lambda: "rank 0")

    assert fork_ranks(1, end, init=False)[0] == [4]


def test_peer_death_is_reported_during_print(tmp_path: Path) -> None:
    """A signal may come while standard error writes, which takes no second write then."""

    class Busy:
        def write(self, text: str) -> None:
            raise RuntimeError("reentrant call")

        flush = write

    def end(rank: int) -> None:
        sys.stderr = Busy()  # type: ignore[assignment]
        exit_guard.exit_for_dead_peer("a peer died: rank 1")

    assert fork_ranks(1, end, init=False)[0] == [4]


class FakeSignals:
    """Stands for the launcher's signals, as it has seen them."""

    def __init__(self, *signal_numbers: int) -> None:
        self.received = list(signal_numbers)
        self.is_asked_to_stop, self.is_ended = bool(signal_numbers), len(signal_numbers) > 1
        self.first_name = signal.Signals(signal_numbers[0]).name if signal_numbers else ""
        self.code = 75 if signal_numbers[:1] == (signal.SIGUSR1,) else 128 + sum(signal_numbers[:1])


TERM, WARNING = signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    ("code", "status", "signal_numbers", "durable", "expected_code", "message"),
    [
        (4, -TERM, [TERM], None, 143, "ended by rank 1 (pid 9) by SIGTERM"),
        (4, -TERM, [TERM], 5, 75, "the checkpoint of step 5 is durable"),
        (4, -WARNING, [WARNING], None, 75, "nothing was lost"),
        (4, -signal.SIGINT, [signal.SIGINT], None, 130, "by SIGINT"),
        (4, -signal.SIGKILL, [TERM], 5, 4, "by SIGKILL"),
        (143, None, [TERM, TERM], 5, 143, "ended immediately by a second signal, code 143"),
        (75, 75, [TERM], 5, 75, None),
        (2, 2, [], None, 2, None),
        (5, 5, [], None, 5, "with exit code 5; the job ends with code 5"),
    ],
)
def test_job_result_matches_table(
    code: int,
    status: int | None,
    signal_numbers: list[int],
    durable: int | None,
    expected_code: int,
    message: str | None,
) -> None:
    verdict = None if status is None else Exit(rank=1, pid=9, status=status, time_s=0.0)
    end = End(
        code=code,
        verdict=verdict,
        exits=[],
        late_message="",
        was_asked_to_stop=True,
        is_error_printed=True,
        is_same_on_all_ranks=status == 2,
    )
    job_code, line = job_result(end, FakeSignals(*signal_numbers), durable, max_restarts=1, reason="")  # type: ignore[arg-type]
    assert job_code == expected_code
    assert (line is None) == (message is None) and (message or "") in (line or "")


def test_ranks_that_did_not_exit_are_named(tmp_path: Path) -> None:
    job = Job(tmp_path, [["sleep:0.1", "exit:4"], ["at:saving", "stubborn", "wait"], ["stubborn", "wait"]])
    pid = job.wait_for_ranks(3)[1]["pid"]
    assert job.wait(20) == 4
    message = f"ended by rank 1 (stage 1, tensor 0, data 0; pid {pid}), which did not exit with the other ranks"
    assert f"launch: {message} and had to be killed, at saving, as had rank 2; the job ends with code 4" in job.output


def nccl_error(error_type: str, name: str, last_error: str) -> Exception:
    """Return what torch raises of NCCL, in its form."""
    return dist.DistBackendError(
        f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, {error_type} (run with "
        f"NCCL_DEBUG=WARN for details), NCCL version 2.27.7\n{name}\nLast error:\n{last_error}"
    )


USAGE = ("invalid usage", "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.")
INTERNAL = ("internal error - please report this issue", "ncclInternalError: Internal check failed.")
CUDA = ("unhandled cuda error", "ncclUnhandledCudaError: Call to CUDA function failed.")
SYSTEM = (
    "unhandled system error",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
)
REMOTE = (
    "remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
)
NO_FAMILY = "ncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2) nor AF_INET6(10)"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            nccl_error(*USAGE, "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10"),
            2,
            "a separate GPU to each rank",
        ),
        (nccl_error(*INTERNAL, "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 7000"), 2, "LOCAL_RANK"),
        (nccl_error(*CUDA, "Cuda failure 2 'out of memory'"), 2, "100 MB of GPU memory"),
        (nccl_error(*INTERNAL, "Bootstrap : no socket interface found"), 2, "NCCL_SOCKET_IFNAME to an interface"),
        (nccl_error(*INTERNAL, NO_FAMILY), 2, "NCCL_SOCKET_IFNAME to an interface"),
        (nccl_error(*SYSTEM, "Error while creating shared memory segment /dev/shm/nccl-a8 (size 9637888)"), 2, "--shm"),
        (nccl_error(*USAGE, ""), 2, "NCCL_DEBUG=WARN"),
        (nccl_error(*CUDA, "Cuda failure 700 'an illegal memory access was encountered'"), 1, "illegal memory access"),
        (nccl_error(*SYSTEM, ""), 1, "ncclSystemError"),
        (nccl_error(*INTERNAL, "Net : Connection closed by remote peer node2<50260>"), 4, "another rank has exited"),
        (
            nccl_error(*SYSTEM, "socketStartConnect: Connect to 10.0.0.2<17943> failed : Connection refused"),
            4,
            "exited",
        ),
        (nccl_error(*REMOTE, "socketProgressOpt: Call to recv from 10.0.0.2<33759> failed : reset"), 4, "exited"),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), 4, "another rank has exited"),
    ],
    ids=range(13),
)
def test_local_nccl_errors_are_not_attributed_to_peers(error: Exception, code: int, message: str) -> None:
    converted = exit_guard.as_peer_error(error)
    assert exit_code(converted) == code and message in str(converted)
    assert not exit_guard.is_raised_on_all_ranks(converted), "the rank that it is of must say it"
    try:
        raise RuntimeError("a step failed") from error
    except RuntimeError as outer:
        assert exit_code(exit_guard.as_peer_error(outer)) == code
    assert (code in RESTARTABLE_CODES) == (code != 2)
