"""What must happen when things go wrong: exit codes, one line that names the culprit, nobody left behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.data import IndexedDataset
from megatron.runtime import rank_status
from megatron.training.trainer import Trainer
from tests.helpers.runs import inject_after_update, launch_script, make_flags

PIPELINE = "--model-parallel-size 2 --pipe-parallel-size 2"


def at_step(step: int, target_rank: int | None, action: Callable[[], None]) -> Callable[[int], None]:
    """Return a plant that calls ``action`` on ``target_rank`` (on all ranks for None) once so many steps are done."""

    def run_action_once(rank: int, run: Trainer) -> None:
        if run.progress.step == step and target_rank in (None, rank):
            action()

    return inject_after_update(run_action_once)


def send_signal(signum: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signum)


def raise_error() -> None:
    raise ArithmeticError("planted on purpose")


def leave_well() -> None:
    sys.exit(0)


@pytest.mark.parametrize("target_rank", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_sigterm_saves_and_exits_with_75(target_rank: int | None, corpus: Path, tmp_path: Path) -> None:
    """Rows A09 and A10: on all ranks, or on one alone."""
    log = tmp_path / "log"
    codes = launch_script(
        4, make_flags(corpus, tmp_path / "run", PIPELINE), log, at_step(5, target_rank, send_signal(signal.SIGTERM))
    )
    assert codes == [75] * 4
    assert (tmp_path / "run/checkpoints/step-00000005/manifest.json").exists()
    text = log.read_text()
    assert "--load" in text
    assert text.count("stopped after step 5 of 20") == 1


def test_ctrl_c_saves_and_exits_with_75(corpus: Path, tmp_path: Path) -> None:
    """Row A12."""
    fault = at_step(3, None, send_signal(signal.SIGINT))
    assert launch_script(2, make_flags(corpus, tmp_path / "run"), tmp_path / "log", fault) == [75, 75]


def test_second_signal_exits_immediately(corpus: Path, tmp_path: Path) -> None:
    """Row A11, without our launcher."""

    def send_sigterm_twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    codes = launch_script(
        1, make_flags(corpus, tmp_path / "run"), tmp_path / "log", at_step(3, None, send_sigterm_twice)
    )
    assert codes == [128 + signal.SIGTERM]


def test_killed_rank_ends_other_ranks_with_4(corpus: Path, tmp_path: Path) -> None:
    """Row A02: without a launcher's help, by the broken connections alone."""
    start_time = time.monotonic()
    fault = at_step(3, 2, send_signal(signal.SIGKILL))
    codes = launch_script(4, make_flags(corpus, tmp_path / "run", PIPELINE), tmp_path / "log", fault)
    assert codes[2] == -signal.SIGKILL
    assert [codes[rank] for rank in (0, 1, 3)] == [4, 4, 4]
    assert time.monotonic() - start_time < 40
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if "exiting" in line]
    assert len(lines) == 3


def test_exception_is_reported_by_raising_rank(corpus: Path, tmp_path: Path) -> None:
    """Row A14."""
    log = tmp_path / "log"
    fault = at_step(3, 1, raise_error)
    codes = launch_script(4, make_flags(corpus, tmp_path / "run", PIPELINE), log, fault)
    assert codes[1] == 1
    assert [codes[rank] for rank in (0, 2, 3)] == [4, 4, 4]
    text = log.read_text()
    assert text.count("Traceback") == 1
    assert "rank 1 (stage 0, tensor 1, data 0) failed: ArithmeticError: planted on purpose" in text


def test_sys_exit_0_after_finished_run_exits_with_0(corpus: Path, tmp_path: Path) -> None:
    def check_run_state_at_exit(rank: int) -> None:
        sys.exit = lambda code: os._exit(9 if rank_status.current_status().is_running else code)  # type: ignore[assignment,arg-type]

    argv = make_flags(corpus, tmp_path / "run", "--train-iters 1 --eval-iters 0")
    assert launch_script(1, argv, tmp_path / "log", check_run_state_at_exit) == [0]


def test_early_sys_exit_0_ends_run_with_1_and_shows_line(corpus: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    codes = launch_script(1, make_flags(corpus, tmp_path / "run", "--log-interval 100"), log, at_step(3, 0, leave_well))
    text = log.read_text()
    assert codes == [1]
    assert re.search(
        r"rank 0 \(.*\) failed: a run may end only after its last step, .* got sys.exit\(0\) at step 3, ", text
    )
    assert ", in leave_well\n    sys.exit(0)" in text


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--model-parallel-size 3", "world"),
        ("--num-attention-heads 3", "--num-attention-heads"),
        ("--pipe-parallel-size 4", "--num-layers"),
        ("--gradient-clipping 1", "--gradient-clipping"),
        ("--deepspeed_config missing.json", "missing.json"),
        ("--fp16", "fp16"),
        ("--seq-length 64 --max-position-embeddings 32", "--max-position-embeddings"),
    ],
)
def test_bad_configuration_ends_every_rank_with_2(extra: str, message: str, corpus: Path, tmp_path: Path) -> None:
    """Rows C: said once, before any process group."""
    log = tmp_path / "log"
    assert launch_script(4, make_flags(corpus, tmp_path / "run", extra), log) == [2] * 4
    assert message in log.read_text()
    assert "Traceback" not in log.read_text()


def truncate(prefix: Path) -> None:
    data = prefix.with_suffix(".bin").read_bytes()
    prefix.with_suffix(".bin").write_bytes(data[:-1])


@pytest.mark.parametrize(
    ("damage", "extra", "message"),
    [
        (lambda prefix: prefix.with_suffix(".idx").unlink(), "", ".idx"),
        (lambda prefix: prefix.with_suffix(".bin").unlink(), "", ".bin"),
        (truncate, "", "bytes"),
        (lambda prefix: None, "--seq-length 500000", "tokens"),
        (lambda prefix: None, "--split 9998,1,1 --eval-iters 1", "split"),
    ],
    ids=["no idx", "no bin", "truncated", "too short", "empty split"],
)
def test_bad_data_ends_every_rank_with_2(
    damage: Callable[[Path], None], extra: str, message: str, corpus: Path, tmp_path: Path
) -> None:
    """Rows D: the rank that reads says it, all leave."""
    for suffix in (".idx", ".bin", ".meta.json"):
        (tmp_path / f"texts{suffix}").write_bytes(corpus.with_suffix(suffix).read_bytes())
    damage(tmp_path / "texts")
    log = tmp_path / "log"
    argv = make_flags(tmp_path / "texts", tmp_path / "run", f"{PIPELINE} {extra}")
    assert launch_script(4, argv, log) == [2] * 4
    assert message in log.read_text()
    assert "Traceback" not in log.read_text()


def kill_reader(run: Trainer) -> None:
    os.kill(run.batches._batches._pids[1], signal.SIGKILL)  # type: ignore[union-attr]


@pytest.mark.slow
def test_killed_data_reader_ends_run_and_is_named(corpus: Path, tmp_path: Path) -> None:
    """Row A22: told by number and process, with what to do; nobody stays behind."""
    log, start_time = tmp_path / "log", time.monotonic()

    def kill_once(rank: int, run: Trainer) -> None:
        if run.progress.step == 3 and rank == 1:
            kill_reader(run)

    fault = inject_after_update(kill_once)
    codes = launch_script(2, make_flags(corpus, tmp_path / "run", "--num-workers 2 --train-iters 500"), log, fault)
    assert codes == [4, 1]
    text = log.read_text()
    assert "rank 1 (stage 0, tensor 0, data 1) failed: RuntimeError: a data-loading process died: reader 1 (pid" in text
    assert "Free memory, or set --num-workers 0 to load data in the training process." in text
    assert time.monotonic() - start_time < 40


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_unreadable_sample_is_reported_with_location(num_workers: int, corpus: Path, tmp_path: Path) -> None:
    """Row A23."""
    log = tmp_path / "log"

    def fault(rank: int) -> None:
        original_read = IndexedDataset.read

        def read_or_fail(self: IndexedDataset, document: int, *span: int) -> object:
            if rank == 1 and document % 5 == 3:
                raise OSError(5, "Input/output error")
            return original_read(self, document, *span)

        IndexedDataset.read = read_or_fail  # type: ignore[method-assign, assignment]

    codes = launch_script(2, make_flags(corpus, tmp_path / "run", f"--num-workers {num_workers}"), log, fault)
    assert codes == [4, 2]
    text = log.read_text()
    location = r"sample \d+ cannot be read: document \d+, tokens \d+:\d+, byte \d+ of .*texts\.bin"
    assert len(re.findall(rf"rank 1 \(stage 0, tensor 0, data 1\) failed: SampleError: {location}", text)) == 1
    assert "Traceback" not in text


def test_missing_checkpoint_ends_every_rank_with_3(corpus: Path, tmp_path: Path) -> None:
    """Row K09: never a start from random weights."""
    log = tmp_path / "log"
    argv = make_flags(corpus, tmp_path / "run", f"--load {tmp_path / 'nowhere'}")
    assert launch_script(2, argv, log) == [3, 3]
    assert "nowhere" in log.read_text()


def test_checkpoint_of_another_model_lists_every_difference(corpus: Path, tmp_path: Path) -> None:
    """Row K16."""
    log = tmp_path / "log"
    assert launch_script(1, make_flags(corpus, tmp_path / "run", "--train-iters 1"), log) == [0]
    other_argv = make_flags(corpus, tmp_path / "run2", f"--load {tmp_path / 'run'} --hidden-size 64 --num-layers 3")
    assert launch_script(1, other_argv, log) == [3]
    text = log.read_text()
    assert "num_layers: saved 2, now 3" in text
    assert "hidden_size: saved 32, now 64" in text


def test_nan_loss_ends_every_rank_with_5(corpus: Path, tmp_path: Path) -> None:
    """Row N01: before the weights change."""
    log = tmp_path / "log"
    codes = launch_script(4, make_flags(corpus, tmp_path / "run", f"{PIPELINE} --lr 1e30 --clip-grad 0"), log)
    assert codes == [5] * 4
    assert "must be finite" in log.read_text()


def test_missing_rank_times_out_with_4(corpus: Path, tmp_path: Path) -> None:
    """Row I03: the others give up after the time-out."""

    def exit_rank_1(rank: int) -> None:
        if rank == 1:
            os._exit(0)

    argv = make_flags(corpus, tmp_path / "run", "--phase-timeout-minutes 0.03")
    codes = launch_script(2, argv, tmp_path / "log", exit_rank_1)
    assert codes == [4, 0]
    assert "within 2 s (--phase-timeout-minutes), but rank 1 did not join" in (tmp_path / "log").read_text()


def test_invalid_partition_method_ends_with_2_and_one_line_error(corpus: Path, tmp_path: Path) -> None:
    """DeepSpeed's own error would be a defect, with a traceback of each rank."""
    log = tmp_path / "log"
    args = "--pipe-parallel-size 2 --partition-method type:nothing"
    assert launch_script(2, make_flags(corpus, tmp_path / "run", args), log) == [2, 2]
    text = log.read_text()
    assert "--partition-method type:nothing cannot split this model: " in text and "Traceback" not in text
    assert "the classes are " in text and "LayerPipe" in text
