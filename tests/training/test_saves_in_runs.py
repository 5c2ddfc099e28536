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
from megatron.training.run_lock import NAME
from tests.helpers.runs import PLANTED, TOKENIZER, after_update, flags, start_script, together, train_ranks
from tests.training.test_resume import draw_numbers, kill_after, losses

SHORT = "--train-iters 8 --hidden-dropout 0.1 --eval-iters 0"


def tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: checkpoint.read(name, Shard(checkpoint.shape(name))) for name in checkpoint.names()}


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    """The same tensors bit for bit, and the same counters."""
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name].flatten().view(torch.uint8), b[name].flatten().view(torch.uint8)) for name in a)
    assert [one.metadata[key] for key in ("progress", "scaler", "optimizer_steps")] == [
        other.metadata[key] for key in ("progress", "scaler", "optimizer_steps")
    ]


def at(folder: Path, step: int) -> Checkpoint:
    return open_checkpoint(folder / CHECKPOINTS / f"step-{step:08d}", SINGLE)


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was not stopped and saved at steps 4 and 8, at once."""
    folder = tmp_path_factory.mktemp("saves") / "run"
    assert train_ranks(1, flags(corpus, folder, f"{SHORT} --save-interval 4"), draw_numbers)[0] == [0]
    return folder


def slow_disk(rank: int) -> None:
    """Plant a disk that takes what a save in the background writes only after some more steps."""
    import threading

    stepped = threading.Semaphore(0)

    def wait(operation: str, path: Path) -> None:
        if operation == "create" and threading.current_thread() is not threading.main_thread():
            for _ in range(2):
                stepped.acquire(timeout=5)

    after_update(lambda *_: stepped.release())(rank)
    files.before_operation = wait


def test_a_run_killed_while_it_saves_in_the_background_goes_on_as_if_it_had_not(
    whole: Path, corpus: Path, tmp_path: Path
) -> None:
    """Rows A01 and K26: at step 6 the save of step 4 is durable or not, and training has changed the tensors."""
    cut = tmp_path / "cut"
    argv = flags(corpus, cut, f"{SHORT} --save-interval 2 --async-save")
    codes, _ = train_ranks(1, argv, together(draw_numbers, slow_disk, kill_after(6)))
    assert codes == [-9]
    seen = [record["step"] for record in read_metrics(cut / "metrics.jsonl") if record["kind"] == "train"]
    assert seen[-1] >= 5
    durable = open_latest(cut / CHECKPOINTS, SINGLE).step
    assert 2 <= durable <= 4
    assert train_ranks(1, [*argv, "--load", str(cut)], draw_numbers)[0] == [0]
    assert losses(cut) == losses(whole)
    assert_same(open_latest(cut / CHECKPOINTS, SINGLE), at(whole, 8))
    assert_same(at(cut, 4), at(whole, 4))
    names = [set(r) - {"kind", "step"} for r in read_metrics(cut / "metrics.jsonl") if r["kind"] == "save"]
    assert {"staged_s", "staged_bytes", "save_stall_s", "save_stall_share"} in names
    assert {"durable_s", "durable_bytes"} in names
    assert not [path for path in (cut / CHECKPOINTS).iterdir() if path.name.startswith(".tmp")]


@pytest.mark.parametrize("steps", [8, pytest.param(6, marks=pytest.mark.slow)])
def test_a_run_that_is_done_says_so_and_takes_no_step(steps: int, whole: Path, corpus: Path, tmp_path: Path) -> None:
    """Row K31: at the last step, and past the end."""
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(whole, folder)
    before = (folder / "metrics.jsonl").read_bytes()
    argv = flags(corpus, folder, f"{SHORT} --train-iters {steps} --load {folder}")
    assert start_script(1, argv, log) == [0]
    assert f"all {steps} steps are done already" in log.read_text()
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert {path.name for path in (folder / CHECKPOINTS).iterdir()} == {"latest", "step-00000004", "step-00000008"}
    assert not (folder / NAME).exists()


def test_other_settings_are_warned_of_and_weights_alone_are_taken(whole: Path, corpus: Path, tmp_path: Path) -> None:
    """Rows K15, K19 and K20: another layout, batch, rate and length; the position stays one in samples."""
    folder, log = tmp_path / "run", tmp_path / "log"
    extra = "--train-iters 9 --lr 1e-3 --batch-size 1 --gas 1 --model-parallel-size 2 --load-weights-only"
    assert start_script(2, flags(corpus, folder, f"{SHORT} {extra} --load {whole}"), log) == [0, 0]
    text = log.read_text()
    assert "saved tp1 pp1 dp1, now tp2 pp1 dp1" in text
    (warned,) = re.findall("warning: settings differ from the checkpoint: (.*)", text)
    changes = ["train_iters: saved 8, now 9", "lr: saved 0.003, now 0.001", "batch_size: saved 2, now 1"]
    assert all(each in warned for each in changes), warned
    after, before = open_latest(folder / CHECKPOINTS, SINGLE), at(whole, 8)
    position = {"samples_consumed": 8 * 4 + 1, "samples_skipped": 0, "tokens_consumed": (8 * 4 + 1) * 32}
    assert after.metadata["progress"] == {"step": 9, "updates": 9, **position}
    assert (before.metadata["optimizer_steps"], after.metadata["optimizer_steps"]) == (8, 1), "Adam counts from 0"


def full_disk(rank: int) -> None:
    """Plant a disk that is full while the first checkpoint is written."""
    failed: Counter[str] = Counter()

    def refuse(operation: str, path: Path) -> None:
        if operation == "create" and "step-00000002" in str(path) and not failed["there"]:
            failed["there"] += 1
            raise OSError(errno.ENOSPC, "No space left on device")

    files.before_operation = refuse


@pytest.mark.parametrize(("flag", "code"), [("", 0), ("--on-save-error stop --async-save", 3)])
def test_a_full_disk_costs_a_checkpoint_or_ends_the_run(flag: str, code: int, corpus: Path, tmp_path: Path) -> None:
    """Row K10."""
    folder, log = tmp_path / "run", tmp_path / "log"
    argv = flags(corpus, folder, f"{SHORT} --train-iters 4 --save-interval 2 {flag}")
    assert start_script(1, argv, log, full_disk) == [code]
    assert log.read_text().count("NOT SAVED") == 1
    assert "No space left" in log.read_text()
    found = sorted(path.name for path in (folder / CHECKPOINTS).iterdir())
    assert found == (["latest", "step-00000004"] if code == 0 else [])


def test_a_damaged_checkpoint_is_told_once_and_what_one_rank_alone_finds_by_that_rank(
    corpus: Path, whole: Path, tmp_path: Path
) -> None:
    def refuse(rank: int) -> None:
        def restore(*_: Any, **__: Any) -> None:
            raise CheckpointError("its generators are odd")

        if rank == 1:
            resume.restore = restore  # type: ignore[assignment]

    argv = flags(corpus, tmp_path / "run", f"{SHORT} --load {whole}")
    assert start_script(2, argv, tmp_path / "odd", refuse) == [4, 3]
    assert re.findall("rank .*odd", (tmp_path / "odd").read_text()) == [
        "rank 1 (stage 0, tensor 0, data 1) failed: CheckpointError: its generators are odd"
    ]
    damaged = shutil.copytree(whole / CHECKPOINTS / "step-00000008", tmp_path / "step-00000008")
    shard = damaged / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    argv = flags(corpus, tmp_path / "other", f"{SHORT} --load {damaged}")
    assert start_script(2, argv, tmp_path / "log") == [3, 3]
    text = (tmp_path / "log").read_text()
    assert text.count("is truncated") == 1 and "failed:" not in text


def test_a_run_goes_back_to_its_own_checkpoints_only(corpus: Path, whole: Path, tmp_path: Path) -> None:
    """``roll_back``: steps that come again are those of an undisturbed run."""
    folder = tmp_path / "run"
    shutil.copytree(whole / CHECKPOINTS, folder / CHECKPOINTS)  # of an earlier run in this folder

    def go_back_once(rank: int) -> None:
        messages: list[str] = []
        checkpointer.log.warning = messages.append  # type: ignore[assignment]

        class GoBackOnce(Callback):
            has_gone = False

            def on_step_end(self, result: Any) -> None:
                run = self.trainer
                saver = run.find(Checkpointer)
                assert saver is not None
                if run.progress.step == 1:
                    assert any("holds 2 checkpoints of an earlier run" in line for line in messages)
                    with pytest.raises(
                        CheckpointError, match="no checkpoint of this run up to step 99.*no checkpoint found"
                    ):
                        saver.roll_back(99)
                if run.progress.step == 7 and not self.has_gone:
                    self.has_gone = True
                    assert run.progress.samples_consumed == 28
                    path = saver.roll_back(5)
                    assert (path.name, run.progress.step, run.progress.samples_consumed) == ("step-00000003", 3, 12)

        PLANTED.append(GoBackOnce())

    argv = flags(corpus, folder, f"{SHORT} --save-interval 3 --keep-last 2 --async-save")
    assert train_ranks(1, argv, together(draw_numbers, go_back_once))[0] == [0]
    assert losses(folder) == losses(whole)
    assert_same(open_latest(folder / CHECKPOINTS, SINGLE), at(whole, 8))
    found = sorted(path.name[10:] for path in (folder / CHECKPOINTS).glob("step-*"))
    assert found == ["004", "006-1", "008", "008-1"], "--keep-last is about the run's own"


def test_a_run_does_not_go_back_to_a_branch_that_it_has_left(corpus: Path, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)

    def go_back_at_the_end(rank: int) -> None:
        save = Checkpointer.save_step

        def go_back_and_save(saver: Checkpointer) -> None:
            assert saver.trainer.progress.step == 9 and saver.roll_back(9).name == "step-00000004"
            save(saver)

        Checkpointer.save_step = go_back_and_save  # type: ignore[method-assign]

    extra = f"{SHORT} --train-iters 9 --load {folder}/{CHECKPOINTS}/step-00000004"
    assert train_ranks(1, flags(corpus, folder, extra), together(draw_numbers, go_back_at_the_end))[0] == [0]


def test_another_tokenizer_ends_with_3(whole: Path, corpus: Path, tmp_path: Path) -> None:
    """Row K17: also where only the weights are taken, for which the data are not compared."""
    tokenizer, prefix, log = tmp_path / "tokenizer.json", tmp_path / "texts", tmp_path / "log"
    for suffix in (".bin", ".idx"):  # without the sidecar that names the first one
        shutil.copy(f"{corpus}{suffix}", f"{prefix}{suffix}")
    extra = f"{SHORT} --train-iters 0 --finetune --load {whole} --tokenizer-path {tokenizer}"
    tokenizer.write_text(TOKENIZER.read_text() + "\n")  # another file with the same ids
    assert start_script(1, flags(prefix, tmp_path / "same", extra), log) == [0]
    content = json.loads(TOKENIZER.read_text())
    vocabulary = content["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    tokenizer.write_text(json.dumps(content))
    assert start_script(1, flags(prefix, tmp_path / "run", extra), log) == [3]
    assert "the tokenizer must match the checkpoint" in log.read_text()


def test_strict_load_goes_back_to_no_older_checkpoint(whole: Path, corpus: Path, tmp_path: Path) -> None:
    """Row K08."""
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(whole, folder)
    (shard,) = (folder / CHECKPOINTS / "step-00000008").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    argv = flags(corpus, folder, f"{SHORT} --load {folder}")
    assert start_script(1, [*argv, "--strict-load"], log) == [3]
    assert "truncated" in log.read_text()
    assert start_script(1, argv, log) == [0]
    assert "falling back to step-00000004" in log.read_text()
