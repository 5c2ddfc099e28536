"""Runs of hybrid decoders: a checkpoint of any layout resumes in any other, with the same tensors and losses."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from examples.llama import pretrain_llama
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import make_flags, train_ranks
from tests.parity.hybrid_runs import VARIANTS
from tests.training.resharded import gather_recorded, make_shard_recorder

COMMON = (
    "--fp64 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --train-iters 4 --kv-channels 6 --num-layers 6 "
    "--reset-attention-mask --init-method-std 0.1"
)
NUM_STEPS = 4


class Layout(NamedTuple):
    """Number of ranks, and the flags of a layout; the global batch is 4 samples in all of them."""

    num_ranks: int
    flags: str = ""


ONE = Layout(1)
TENSOR_CONTEXT = Layout(4, "--model-parallel-size 2 --sequence-parallel --context-parallel-size 2")
CONTEXT = Layout(2, "--context-parallel-size 2")
PIPE = Layout(2, "--pipe-parallel-size 2 --pipeline-schedule zb-v --batch-size 1 --gas 4")
PIPE_EXPERTS = Layout(4, "--pipe-parallel-size 2 --expert-model-parallel-size 2 --zero-stage 1 --batch-size 1 --gas 2")
TENSOR_PIPE = Layout(4, "--model-parallel-size 2 --pipe-parallel-size 2 --checkpoint-activations")
REPLICAS = Layout(2, "--zero-stage 3 --batch-size 2 --gas 1")
TENSOR = Layout(2, "--model-parallel-size 2 --recompute-granularity selective")
QUICK = ("mixed", CONTEXT, PIPE)
CHANGES = [
    QUICK,
    ("mixed", TENSOR_CONTEXT, PIPE_EXPERTS),
    ("mixed", PIPE_EXPERTS, TENSOR),
    ("nemotron_h", PIPE_EXPERTS, TENSOR_CONTEXT),
    ("nemotron_h", REPLICAS, TENSOR_PIPE),
    ("kimi_linear", TENSOR_CONTEXT, PIPE_EXPERTS),
    ("kimi_linear", TENSOR_PIPE, REPLICAS),
    ("falcon_h1", TENSOR_CONTEXT, PIPE),
    ("falcon_h1", PIPE, REPLICAS),
    ("falcon_h1", ONE, TENSOR_CONTEXT),
]
"""Model, layout that saves, layout that resumes."""


def variant_flags(variant: str) -> str:
    groups = "--num-query-groups 4" if variant == "kimi_linear" else ""  # as many as heads in latent attention
    return f"{COMMON} {VARIANTS[variant]} {groups}"


def train(layout: Layout, corpus: Path, folder: Path, flags: str, records: Path, exit_code: int = 0) -> None:
    argv = make_flags(corpus, folder, f"{flags} {layout.flags}", pretrain_llama)
    codes, _ = train_ranks(layout.num_ranks, argv, make_shard_recorder(records), pretrain_llama)
    assert codes == [exit_code] * layout.num_ranks


def check_change(variant: str, saved: Layout, loaded: Layout, corpus: Path, folder: Path, extra: str = "") -> None:
    """Compare a run that changes its layout after 2 of 4 steps with one process, and the tensors before and after."""
    flags, run_dir = f"{variant_flags(variant)} {extra}", folder / "run"
    train(ONE, corpus, folder / "plain", flags, folder / "plain-records")
    train(saved, corpus, run_dir, f"{flags} --exit-interval 2", folder / "before", exit_code=75)
    train(loaded, corpus, run_dir, f"{flags} --resume", folder / "after")
    before, after = gather_recorded(folder / "before", "saved"), gather_recorded(folder / "after", "loaded")
    assert before.keys() == after.keys()
    assert any(name.endswith("A_log") for name in before) and any("convolution" in name for name in before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    plain, resumed = (
        [record for record in read_metrics(path / "metrics.jsonl") if record["kind"] == "train"]
        for path in (folder / "plain", run_dir)
    )
    assert [record["step"] for record in resumed] == list(range(1, NUM_STEPS + 1))
    for name in ("loss", "grad_norm"):
        expected = [record[name] for record in plain]
        assert [record[name] for record in resumed] == pytest.approx(expected, abs=1e-12, rel=1e-12), name


@pytest.mark.parametrize(
    ("variant", "saved", "loaded"),
    [pytest.param(*case, marks=() if case == QUICK else pytest.mark.slow) for case in CHANGES],
)
def test_checkpoint_resumes_in_another_layout(
    variant: str, saved: Layout, loaded: Layout, corpus: Path, tmp_path: Path
) -> None:
    check_change(variant, saved, loaded, corpus, tmp_path)


@pytest.mark.slow
def test_state_of_muon_resumes_in_another_layout(corpus: Path, tmp_path: Path) -> None:
    """Projections have a momentum; decay rates, time-step biases and convolutions have AdamW's moments."""
    check_change("mixed", TENSOR, Layout(2, "--zero-stage 1 --gas 1"), corpus, tmp_path, "--optimizer muon")


@pytest.mark.slow
def test_dropout_resumes_in_another_layout(corpus: Path, tmp_path: Path) -> None:
    dropout = "--attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
    check_change("falcon_h1", TENSOR, PIPE, corpus, tmp_path, dropout)
