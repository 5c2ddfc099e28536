"""Runs that save in the background, go on, start again and lose a disk."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.tensorboard  # noqa: F401 - imported once, not by every fork

from megatron import files
from megatron.checkpoint import Checkpoint, open_checkpoint, open_latest
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.errors import CheckpointError
from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard
from megatron.training import Callback, resume
from megatron.training.callbacks import checkpointer
from megatron.training.callbacks.checkpointer import Checkpointer
from megatron.training.callbacks.metrics_writer import read_metrics
from megatron.training.run_lock import LOCK_NAME
from tests.helpers.runs import (
    INJECTED_CALLBACKS,
    TOKENIZER,
    combine_injectors,
    inject_after_update,
    launch_script,
    make_flags,
    train_ranks,
)
from tests.training.test_resume import draw_random_numbers, make_kill_injector, read_losses

SHORT_RUN_FLAGS = "--train-iters 8 --hidden-dropout 0.1 --eval-iters 0"


def read_tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: checkpoint.read(name, Shard(checkpoint.shape(name))) for name in checkpoint.names()}


def assert_equal_state(first: Checkpoint, second: Checkpoint) -> None:
    """The same tensors bit for bit, and the same counters."""
    first_tensors, second_tensors = read_tensors(first), read_tensors(second)
    assert first_tensors.keys() == second_tensors.keys()
    assert all(
        torch.equal(first_tensors[name].flatten().view(torch.uint8), second_tensors[name].flatten().view(torch.uint8))
        for name in first_tensors
    )
    assert [first.metadata[key] for key in ("progress", "scaler", "optimizer_steps")] == [
        second.metadata[key] for key in ("progress", "scaler", "optimizer_steps")
    ]


def open_step(folder: Path, step: int) -> Checkpoint:
    return open_checkpoint(folder / CHECKPOINTS / f"step-{step:08d}", SINGLE)


@pytest.fixture(scope="module")
def uninterrupted_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was not stopped and saved at steps 4 and 8, at once."""
    folder = tmp_path_factory.mktemp("saves") / "run"
    assert train_ranks(1, make_flags(corpus, folder, f"{SHORT_RUN_FLAGS} --save-interval 4"), draw_random_numbers)[
        0
    ] == [0]
    return folder


def delay_disk(rank: int) -> None:
    """Plant a disk that takes what a save in the background writes only after some more steps."""
    import threading

    step_semaphore = threading.Semaphore(0)

    def wait_for_steps(operation: str, path: Path) -> None:
        if operation == "create" and threading.current_thread() is not threading.main_thread():
            for _ in range(2):
                step_semaphore.acquire(timeout=5)

    inject_after_update(lambda *_: step_semaphore.release())(rank)
    files.before_operation = wait_for_steps


def test_run_killed_during_async_save_resumes_bitwise(uninterrupted_run: Path, corpus: Path, tmp_path: Path) -> None:
    """Rows A01 and K26: at step 6 the save of step 4 is durable or not, and training has changed the tensors."""
    resumed = tmp_path / "cut"
    argv = make_flags(corpus, resumed, f"{SHORT_RUN_FLAGS} --save-interval 2 --async-save")
    codes, _ = train_ranks(1, argv, combine_injectors(draw_random_numbers, delay_disk, make_kill_injector(6)))
    assert codes == [-9]
    train_steps = [record["step"] for record in read_metrics(resumed / "metrics.jsonl") if record["kind"] == "train"]
    assert train_steps[-1] >= 5
    durable_step = open_latest(resumed / CHECKPOINTS, SINGLE).step
    assert 2 <= durable_step <= 4
    assert train_ranks(1, [*argv, "--load", str(resumed)], draw_random_numbers)[0] == [0]
    assert read_losses(resumed) == read_losses(uninterrupted_run)
    assert_equal_state(open_latest(resumed / CHECKPOINTS, SINGLE), open_step(uninterrupted_run, 8))
    assert_equal_state(open_step(resumed, 4), open_step(uninterrupted_run, 4))
    save_fields = [set(r) - {"kind", "step"} for r in read_metrics(resumed / "metrics.jsonl") if r["kind"] == "save"]
    assert {"staged_s", "staged_bytes", "save_stall_s", "save_stall_share"} in save_fields
    assert {"durable_s", "durable_bytes"} in save_fields
    assert not [path for path in (resumed / CHECKPOINTS).iterdir() if path.name.startswith(".tmp")]


@pytest.mark.parametrize("num_steps", [8, pytest.param(6, marks=pytest.mark.slow)])
def test_finished_run_is_reported_and_takes_no_step(
    num_steps: int, uninterrupted_run: Path, corpus: Path, tmp_path: Path
) -> None:
    """Row K31: at the last step, and past the end."""
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(uninterrupted_run, folder)
    before = (folder / "metrics.jsonl").read_bytes()
    argv = make_flags(corpus, folder, f"{SHORT_RUN_FLAGS} --train-iters {num_steps} --load {folder}")
    assert launch_script(1, argv, log) == [0]
    assert f"all {num_steps} steps are done already" in log.read_text()
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert {path.name for path in (folder / CHECKPOINTS).iterdir()} == {"latest", "step-00000004", "step-00000008"}
    assert not (folder / LOCK_NAME).exists()


def test_weights_only_load_warns_about_changed_settings(uninterrupted_run: Path, corpus: Path, tmp_path: Path) -> None:
    """Rows K15, K19 and K20: another layout, batch, rate and length; the position stays one in samples."""
    folder, log = tmp_path / "run", tmp_path / "log"
    extra_flags = "--train-iters 9 --lr 1e-3 --batch-size 1 --gas 1 --model-parallel-size 2 --load-weights-only"
    assert launch_script(
        2, make_flags(corpus, folder, f"{SHORT_RUN_FLAGS} {extra_flags} --load {uninterrupted_run}"), log
    ) == [0, 0]
    text = log.read_text()
    assert "saved tp1 pp1 dp1, now tp2 pp1 dp1" in text
    (warning,) = re.findall("warning: settings differ from the checkpoint: (.*)", text)
    changes = ["train_iters: saved 8, now 9", "lr: saved 0.003, now 0.001", "batch_size: saved 2, now 1"]
    assert all(change in warning for change in changes), warning
    after, before = open_latest(folder / CHECKPOINTS, SINGLE), open_step(uninterrupted_run, 8)
    position = {"samples_consumed": 8 * 4 + 1, "samples_skipped": 0, "tokens_consumed": (8 * 4 + 1) * 32}
    assert after.metadata["progress"] == {"step": 9, "updates": 9, **position}
    assert (before.metadata["optimizer_steps"], after.metadata["optimizer_steps"]) == (8, 1), "Adam counts from 0"


def fill_disk(rank: int) -> None:
    """Plant a disk that is full while the first checkpoint is written."""
    failures: Counter[str] = Counter()

    def raise_no_space(operation: str, path: Path) -> None:
        if operation == "create" and "step-00000002" in str(path) and not failures["there"]:
            failures["there"] += 1
            raise OSError(errno.ENOSPC, "No space left on device")

    files.before_operation = raise_no_space


@pytest.mark.parametrize(("flag", "exit_code"), [("", 0), ("--on-save-error stop --async-save", 3)])
def test_full_disk_skips_checkpoint_or_ends_run(flag: str, exit_code: int, corpus: Path, tmp_path: Path) -> None:
    """Row K10."""
    folder, log = tmp_path / "run", tmp_path / "log"
    argv = make_flags(corpus, folder, f"{SHORT_RUN_FLAGS} --train-iters 4 --save-interval 2 {flag}")
    assert launch_script(1, argv, log, fill_disk) == [exit_code]
    assert log.read_text().count("NOT SAVED") == 1
    assert "No space left" in log.read_text()
    names = sorted(path.name for path in (folder / CHECKPOINTS).iterdir())
    assert names == (["latest", "step-00000004"] if exit_code == 0 else [])


def test_damaged_checkpoint_is_reported_once_and_rank_error_by_that_rank(
    corpus: Path, uninterrupted_run: Path, tmp_path: Path
) -> None:
    def inject_failure(rank: int) -> None:
        def raise_checkpoint_error(*_: Any, **__: Any) -> None:
            raise CheckpointError("its generators are odd")

        if rank == 1:
            resume.restore = raise_checkpoint_error  # type: ignore[assignment]

    argv = make_flags(corpus, tmp_path / "run", f"{SHORT_RUN_FLAGS} --load {uninterrupted_run}")
    assert launch_script(2, argv, tmp_path / "odd", inject_failure) == [4, 3]
    assert re.findall("rank .*odd", (tmp_path / "odd").read_text()) == [
        "rank 1 (stage 0, tensor 0, data 1) failed: CheckpointError: its generators are odd"
    ]
    damaged = shutil.copytree(uninterrupted_run / CHECKPOINTS / "step-00000008", tmp_path / "step-00000008")
    shard = damaged / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    argv = make_flags(corpus, tmp_path / "other", f"{SHORT_RUN_FLAGS} --load {damaged}")
    assert launch_script(2, argv, tmp_path / "log") == [3, 3]
    text = (tmp_path / "log").read_text()
    assert text.count("is truncated") == 1 and "failed:" not in text


def test_roll_back_uses_only_checkpoints_of_this_run(corpus: Path, uninterrupted_run: Path, tmp_path: Path) -> None:
    """``roll_back``: steps that come again are those of an undisturbed run."""
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted_run / CHECKPOINTS, folder / CHECKPOINTS)  # of an earlier run in this folder

    def inject_roll_back(rank: int) -> None:
        messages: list[str] = []
        checkpointer.log.warning = messages.append  # type: ignore[assignment]

        class RollBackOnce(Callback):
            has_gone = False

            def on_step_end(self, result: Any) -> None:
                trainer = self.trainer
                saver = trainer.find(Checkpointer)
                assert saver is not None
                if trainer.progress.step == 1:
                    assert any("contains 2 checkpoints of an earlier run" in line for line in messages)
                    with pytest.raises(
                        CheckpointError, match="no checkpoint of this run up to step 99.*no checkpoint found"
                    ):
                        saver.roll_back(99)
                if trainer.progress.step == 7 and not self.has_gone:
                    self.has_gone = True
                    assert trainer.progress.samples_consumed == 28
                    path = saver.roll_back(5)
                    assert (path.name, trainer.progress.step, trainer.progress.samples_consumed) == (
                        "step-00000003",
                        3,
                        12,
                    )

        INJECTED_CALLBACKS.append(RollBackOnce())

    argv = make_flags(corpus, folder, f"{SHORT_RUN_FLAGS} --save-interval 3 --keep-last 2 --async-save")
    assert train_ranks(1, argv, combine_injectors(draw_random_numbers, inject_roll_back))[0] == [0]
    assert read_losses(folder) == read_losses(uninterrupted_run)
    assert_equal_state(open_latest(folder / CHECKPOINTS, SINGLE), open_step(uninterrupted_run, 8))
    names = sorted(path.name[10:] for path in (folder / CHECKPOINTS).glob("step-*"))
    assert names == ["004", "006-1", "008", "008-1"], "--keep-last is about the run's own"


def test_roll_back_skips_abandoned_branch(corpus: Path, uninterrupted_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted_run, folder)

    def inject_roll_back(rank: int) -> None:
        original_save = Checkpointer.save_step

        def roll_back_and_save(saver: Checkpointer) -> None:
            assert saver.trainer.progress.step == 9 and saver.roll_back(9).name == "step-00000004"
            original_save(saver)

        Checkpointer.save_step = roll_back_and_save  # type: ignore[method-assign]

    extra_flags = f"{SHORT_RUN_FLAGS} --train-iters 9 --load {folder}/{CHECKPOINTS}/step-00000004"
    assert train_ranks(
        1, make_flags(corpus, folder, extra_flags), combine_injectors(draw_random_numbers, inject_roll_back)
    )[0] == [0]


def test_changed_tokenizer_exits_with_code_3(uninterrupted_run: Path, corpus: Path, tmp_path: Path) -> None:
    """Row K17: also where only the weights are taken, for which the data are not compared."""
    tokenizer, prefix, log = tmp_path / "tokenizer.json", tmp_path / "texts", tmp_path / "log"
    for suffix in (".bin", ".idx"):  # without the sidecar that names the first one
        shutil.copy(f"{corpus}{suffix}", f"{prefix}{suffix}")
    extra_flags = (
        f"{SHORT_RUN_FLAGS} --train-iters 0 --finetune --load {uninterrupted_run} --tokenizer-path {tokenizer}"
    )
    tokenizer.write_text(TOKENIZER.read_text() + "\n")  # another file with the same ids
    assert launch_script(1, make_flags(prefix, tmp_path / "same", extra_flags), log) == [0]
    content = json.loads(TOKENIZER.read_text())
    vocabulary = content["model"]["vocab"]
    first_token, second_token = list(vocabulary)[-2:]
    vocabulary[first_token], vocabulary[second_token] = vocabulary[second_token], vocabulary[first_token]
    tokenizer.write_text(json.dumps(content))
    assert launch_script(1, make_flags(prefix, tmp_path / "run", extra_flags), log) == [3]
    assert "the tokenizer must match the checkpoint" in log.read_text()


def test_strict_load_does_not_fall_back_to_older_checkpoint(
    uninterrupted_run: Path, corpus: Path, tmp_path: Path
) -> None:
    """Row K08."""
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(uninterrupted_run, folder)
    (shard,) = (folder / CHECKPOINTS / "step-00000008").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    argv = make_flags(corpus, folder, f"{SHORT_RUN_FLAGS} --load {folder}")
    assert launch_script(1, [*argv, "--strict-load"], log) == [3]
    assert "truncated" in log.read_text()
    assert launch_script(1, argv, log) == [0]
    assert "falling back to step-00000004" in log.read_text()
