"""A run that is killed and resumed gives the very same numbers as one that was not (row E14)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pretrain_gpt2
import pretrain_t5
from examples.bert import pretrain_bert
from examples.llama import pretrain_llama
from examples.mpt import pretrain_mpt
from megatron.checkpoint import open_latest
from megatron.checkpoint.manifest import CHECKPOINTS
from megatron.mpu.groups import SINGLE
from megatron.mpu.shard import Shard
from megatron.training import Callback
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import INJECTED_CALLBACKS, combine_injectors, inject_after_update, make_flags, train_ranks
from tests.training.resharded import gather_recorded, make_shard_recorder

DROPOUT_FLAGS = "--hidden-dropout 0.1 --attention-dropout 0.1"


class KillAfterStep(Callback):
    """Ends the process once so many steps are done, behind the save of the last."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_start(self) -> None:
        if self.trainer.progress.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def make_kill_injector(step: int):
    """Return a plant that ends the process by SIGKILL once so many steps are done."""

    return lambda rank: INJECTED_CALLBACKS.append(KillAfterStep(step))


def draw_random_numbers(rank: int) -> None:
    """Plant a use of torch's own generator, as a user's layer may make it: after each step another one on each rank.

    Without it the generators stay as they were seeded, and one that is not restored would not be missed.
    """
    inject_after_update(lambda rank, _: torch.rand(rank + 1))(rank)


def random_states(folder: Path) -> list[bytes]:
    """Return the state of torch's generator on each rank as the last checkpoint holds it."""
    saved = open_latest(folder / CHECKPOINTS, SINGLE)
    names = sorted(name for name in saved.names() if name.startswith("rng/cpu/"))
    return [saved.read(name, Shard(saved.shape(name))).numpy().tobytes() for name in names]


def read_losses(folder: Path) -> list[tuple[int, str, str]]:
    """Return (step, loss, gradient norm) as hexadecimal numbers."""
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    return [(r["step"], float(r["loss"]).hex(), float(r["grad_norm"]).hex()) for r in records]


def assert_equal_checkpoints(first_run: Path, second_run: Path) -> None:
    """Weights, moments, random states and counters are equal, bit for bit."""
    first, second = open_latest(first_run / CHECKPOINTS, SINGLE), open_latest(second_run / CHECKPOINTS, SINGLE)
    assert first.step == second.step
    assert first.names() == second.names()
    for name in first.names():
        full_shard = Shard(first.shape(name))
        assert first.read(name, full_shard).equal(second.read(name, full_shard)), name
    for key in ("progress", "scaler", "optimizer_steps", "data_fingerprint"):
        assert first.metadata[key] == second.metadata[key]


@pytest.mark.parametrize(
    ("script", "tensor", "pipe", "world_size", "extra_flags"),
    [
        pytest.param(pretrain_gpt2, 1, 1, 1, "", marks=pytest.mark.slow),
        (pretrain_gpt2, 2, 2, 4, ""),
        pytest.param(pretrain_gpt2, 1, 1, 2, "", marks=pytest.mark.slow),
        pytest.param(pretrain_gpt2, 1, 2, 4, "--context-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(
            pretrain_gpt2, 1, 1, 2, "--optimizer sgd --sgd-momentum 0.9 --zero-stage 1", marks=pytest.mark.slow
        ),
        pytest.param(
            pretrain_gpt2,
            1,
            1,
            2,
            "--iterations-to-skip 2 6 --weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 1 "
            "--lr-warmup-iters 6 --lr-warmup-init 1e-5 --step-batch-size-schedule 0:4,64:8",
            marks=pytest.mark.slow,
        ),
        pytest.param(pretrain_t5, 2, 2, 4, "", marks=pytest.mark.slow),
        pytest.param(pretrain_llama, 2, 2, 4, "", marks=pytest.mark.slow),
        pytest.param(pretrain_mpt, 2, 2, 4, "", marks=pytest.mark.slow),
        pytest.param(pretrain_bert, 2, 2, 4, "", marks=pytest.mark.slow),
    ],
    ids=[
        "1-1-1",
        "2-2-4",
        "1-1-2",
        "context",
        "sgd",
        "schedules",
        "t5-2-2-4",
        "llama-2-2-4",
        "mpt-2-2-4",
        "bert-2-2-4",
    ],
)
def test_killed_and_resumed_run_equals_uninterrupted_run_bitwise(
    script: ModuleType, tensor: int, pipe: int, world_size: int, extra_flags: str, corpus: Path, tmp_path: Path
) -> None:
    layout = f"--model-parallel-size {tensor} --pipe-parallel-size {pipe} {extra_flags} {DROPOUT_FLAGS} --train-iters 8"
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "cut"
    assert (
        train_ranks(world_size, make_flags(corpus, uninterrupted, layout, script), draw_random_numbers, script)[0]
        == [0] * world_size
    )
    save_argv = make_flags(corpus, resumed, f"{layout} --save-interval 4", script)
    codes, _ = train_ranks(world_size, save_argv, combine_injectors(draw_random_numbers, make_kill_injector(6)), script)
    assert -signal.SIGKILL in codes
    assert read_losses(resumed)[-1][0] >= 5  # it was beyond its checkpoint when it died
    assert (
        train_ranks(world_size, [*save_argv, "--load", str(resumed)], draw_random_numbers, script)[0]
        == [0] * world_size
    )
    assert read_losses(resumed) == read_losses(uninterrupted)
    assert_equal_checkpoints(uninterrupted, resumed)
    states = random_states(uninterrupted)
    assert len(set(states)) == len(states) == world_size


@pytest.mark.parametrize(
    ("script", "variant"),
    [
        (pretrain_gpt2, ""),
        pytest.param(
            pretrain_t5,
            "--activation gated-gelu --untie-embeddings-and-output-weights --reset-attention-mask",
            marks=pytest.mark.slow,
        ),
        pytest.param(pretrain_llama, "--reset-attention-mask --reset-position-ids", marks=pytest.mark.slow),
        pytest.param(pretrain_mpt, "--reset-attention-mask --eod-mask-loss", marks=pytest.mark.slow),
        pytest.param(pretrain_bert, "--short-seq-prob 0.5", marks=pytest.mark.slow),
    ],
)
def test_checkpoint_resumes_in_other_layout_with_equal_losses(
    script: ModuleType, variant: str, corpus: Path, tmp_path: Path
) -> None:
    """Row E15: the bits right after the load, gathered, and the losses from there on."""
    folder, exact_flags = tmp_path / "run", f"--fp64 --hidden-dropout 0 --attention-dropout 0 --train-iters 8 {variant}"
    pipeline_flags = "--model-parallel-size 2 --pipe-parallel-size 2 --exit-interval 4"
    save_recorder, load_recorder = make_shard_recorder(tmp_path / "one"), make_shard_recorder(tmp_path / "two")
    assert (
        train_ranks(4, make_flags(corpus, folder, f"{exact_flags} {pipeline_flags}", script), save_recorder, script)[0]
        == [75] * 4
    )
    train_ranks(
        1, make_flags(corpus, tmp_path / "other", f"{exact_flags} --load {folder}", script), load_recorder, script
    )
    saved, loaded = gather_recorded(tmp_path / "one", "saved"), gather_recorded(tmp_path / "two", "loaded")
    assert {name.split("/")[0] for name in saved} == {"weights", "optimizer"} and saved.keys() == loaded.keys()
    assert all(torch.equal(value, loaded[name]) for name, value in saved.items())
    train_ranks(1, make_flags(corpus, tmp_path / "whole", exact_flags, script), script=script)
    resumed_records, full_records = (
        read_metrics(tmp_path / "other" / "metrics.jsonl"),
        read_metrics(tmp_path / "whole/metrics.jsonl"),
    )
    expected = [r["loss"] for r in full_records if r["kind"] == "train" and r["step"] > 4]
    assert len(expected) == 4
    assert [r["loss"] for r in resumed_records if r["kind"] == "train"] == pytest.approx(expected, abs=1e-12, rel=0)
