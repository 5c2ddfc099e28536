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
from tests.helpers.runs import PLANTED, after_update, flags, together, train_ranks
from tests.training.resharded import keep_parts, kept

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


class Kill(Callback):
    """Ends the process once so many steps are done, behind the save of the last."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_start(self) -> None:
        if self.trainer.progress.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_after(step: int):
    """Return a plant that ends the process by SIGKILL once so many steps are done."""

    return lambda rank: PLANTED.append(Kill(step))


def draw_numbers(rank: int) -> None:
    """Plant a use of torch's own generator, as a user's layer may make it: after each step another one on each rank.

    Without it the generators stay as they were seeded, and one that is not restored would not be missed.
    """
    after_update(lambda rank, _: torch.rand(rank + 1))(rank)


def random_states(folder: Path) -> list[bytes]:
    """Return the state of torch's generator on each rank as the last checkpoint holds it."""
    saved = open_latest(folder / CHECKPOINTS, SINGLE)
    names = sorted(name for name in saved.names() if name.startswith("rng/cpu/"))
    return [saved.read(name, Shard(saved.shape(name))).numpy().tobytes() for name in names]


def losses(folder: Path) -> list[tuple[int, str, str]]:
    """Return (step, loss, gradient norm) as hexadecimal numbers."""
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    return [(r["step"], float(r["loss"]).hex(), float(r["grad_norm"]).hex()) for r in records]


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Weights, moments, random states and counters are equal, bit for bit."""
    a, b = open_latest(one / CHECKPOINTS, SINGLE), open_latest(other / CHECKPOINTS, SINGLE)
    assert a.step == b.step
    assert a.names() == b.names()
    for name in a.names():
        whole = Shard(a.shape(name))
        assert a.read(name, whole).equal(b.read(name, whole)), name
    for key in ("progress", "scaler", "optimizer_steps", "data_fingerprint"):
        assert a.metadata[key] == b.metadata[key]


@pytest.mark.parametrize(
    ("script", "tensor", "pipe", "world_size", "more"),
    [
        pytest.param(pretrain_gpt2, 1, 1, 1, "", marks=pytest.mark.slow),
        (pretrain_gpt2, 2, 2, 4, ""),
        pytest.param(pretrain_gpt2, 1, 1, 2, "", marks=pytest.mark.slow),
        pytest.param(pretrain_gpt2, 1, 2, 4, "--context-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(
            pretrain_gpt2, 1, 1, 2, "--optimizer sgd --sgd-momentum 0.9 --zero-stage 1", marks=pytest.mark.slow
        ),
        pytest.param(pretrain_t5, 2, 2, 4, "", marks=pytest.mark.slow),
        pytest.param(pretrain_llama, 2, 2, 4, "", marks=pytest.mark.slow),
        pytest.param(pretrain_mpt, 2, 2, 4, "", marks=pytest.mark.slow),
        pytest.param(pretrain_bert, 2, 2, 4, "", marks=pytest.mark.slow),
    ],
    ids=["1-1-1", "2-2-4", "1-1-2", "context", "sgd", "t5-2-2-4", "llama-2-2-4", "mpt-2-2-4", "bert-2-2-4"],
)
def test_killed_and_resumed_run_is_bit_for_bit_the_same(
    script: ModuleType, tensor: int, pipe: int, world_size: int, more: str, corpus: Path, tmp_path: Path
) -> None:
    layout = f"--model-parallel-size {tensor} --pipe-parallel-size {pipe} {more} {DROPOUT} --train-iters 8"
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train_ranks(world_size, flags(corpus, whole, layout, script), draw_numbers, script)[0] == [0] * world_size
    saving = flags(corpus, cut, f"{layout} --save-interval 4", script)
    codes, _ = train_ranks(world_size, saving, together(draw_numbers, kill_after(6)), script)
    assert -signal.SIGKILL in codes
    assert losses(cut)[-1][0] >= 5  # it was beyond its checkpoint when it died
    assert train_ranks(world_size, [*saving, "--load", str(cut)], draw_numbers, script)[0] == [0] * world_size
    assert losses(cut) == losses(whole)
    assert_same_checkpoint(whole, cut)
    states = random_states(whole)
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
def test_checkpoint_of_one_layout_goes_on_in_another(
    script: ModuleType, variant: str, corpus: Path, tmp_path: Path
) -> None:
    """Row E15: the bits right after the load, gathered, and the losses from there on."""
    folder, exact = tmp_path / "run", f"--fp64 --hidden-dropout 0 --attention-dropout 0 --train-iters 8 {variant}"
    pipeline = "--model-parallel-size 2 --pipe-parallel-size 2 --exit-interval 4"
    one, other = keep_parts(tmp_path / "one"), keep_parts(tmp_path / "two")
    assert train_ranks(4, flags(corpus, folder, f"{exact} {pipeline}", script), one, script)[0] == [75] * 4
    train_ranks(1, flags(corpus, tmp_path / "other", f"{exact} --load {folder}", script), other, script)
    saved, loaded = kept(tmp_path / "one", "saved"), kept(tmp_path / "two", "loaded")
    assert {name.split("/")[0] for name in saved} == {"weights", "optimizer"} and saved.keys() == loaded.keys()
    assert all(torch.equal(value, loaded[name]) for name, value in saved.items())
    train_ranks(1, flags(corpus, tmp_path / "whole", exact, script), script=script)
    resumed, whole = read_metrics(tmp_path / "other" / "metrics.jsonl"), read_metrics(tmp_path / "whole/metrics.jsonl")
    wanted = [r["loss"] for r in whole if r["kind"] == "train" and r["step"] > 4]
    assert len(wanted) == 4
    assert [r["loss"] for r in resumed if r["kind"] == "train"] == pytest.approx(wanted, abs=1e-12, rel=0)
