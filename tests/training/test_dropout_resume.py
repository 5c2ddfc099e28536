"""A run with ``--layout-independent-dropout`` goes on in another layout as if it had never stopped (row E15)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import pretrain_gpt2
import pretrain_t5
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import make_flags, train_ranks

DROPOUT_FLAGS = "--fp64 --hidden-dropout 0.1 --attention-dropout 0.1 --layout-independent-dropout"
GLOBAL_BATCH = 8


def layout_flags(tensor: int, pipe: int, data: int, micro_batch_size: int, context: int = 1) -> str:
    """Return the flags of a layout, with the same global batch in each."""
    gas = GLOBAL_BATCH // (data * micro_batch_size)
    axes = f"--model-parallel-size {tensor} --pipe-parallel-size {pipe} --context-parallel-size {context}"
    return f"{axes} --batch-size {micro_batch_size} --gas {gas}"


def read_losses(folder: Path) -> list[float]:
    return [r["loss"] for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]


def check_layout_chain(
    script: ModuleType, layouts: list[tuple[int, int, int, int, int]], corpus: Path, folder: Path, steps: int
) -> None:
    """Compare a chain of runs, each in another layout and from the last one's checkpoint, with one process."""
    reference_dir, last_dir = folder / "whole", None
    base_flags = f"{DROPOUT_FLAGS} --train-iters {steps} --eval-iters 0"
    train_ranks(1, make_flags(corpus, reference_dir, f"{base_flags} {layout_flags(1, 1, 1, 4)}", script), script=script)
    chain_losses, steps_per_run = [], steps // len(layouts)
    for run_idx, (tensor, pipe, data, micro_batch_size, context) in enumerate(layouts):
        run_dir = folder / f"part{run_idx}"
        run_flags = f"{base_flags} {layout_flags(tensor, pipe, data, micro_batch_size, context)}" + (
            "" if last_dir is None else f" --load {last_dir}"
        )
        is_last = run_idx == len(layouts) - 1
        run_flags += "" if is_last else f" --exit-interval {steps_per_run}"
        num_ranks = tensor * pipe * data * context
        codes, _ = train_ranks(num_ranks, make_flags(corpus, run_dir, run_flags, script), script=script)
        assert codes == [0 if is_last else 75] * num_ranks
        chain_losses += read_losses(run_dir)
        last_dir = run_dir
    assert len(chain_losses) == steps
    assert chain_losses == pytest.approx(read_losses(reference_dir), abs=1e-12, rel=0)


def test_checkpoint_resumes_in_another_layout(corpus: Path, tmp_path: Path) -> None:
    check_layout_chain(pretrain_gpt2, [(2, 1, 1, 2, 1), (1, 1, 2, 4, 1), (1, 1, 1, 4, 2)], corpus, tmp_path, 6)


LAYOUT_CHAIN = [(2, 2, 1, 4, 1), (1, 1, 4, 1, 1), (4, 1, 1, 8, 1), (1, 2, 2, 1, 1), (1, 1, 1, 2, 1)]
CONTEXT_CHAIN = [(1, 2, 1, 4, 2), (1, 1, 1, 1, 4), (2, 1, 1, 8, 2), (1, 1, 2, 1, 2), (1, 1, 1, 2, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("script", [pretrain_gpt2, pretrain_t5])
def test_five_layout_chain_equals_single_50_step_run(script: ModuleType, corpus: Path, tmp_path: Path) -> None:
    check_layout_chain(script, LAYOUT_CHAIN, corpus, tmp_path, 50)


@pytest.mark.slow
def test_context_size_chain_equals_single_50_step_run(corpus: Path, tmp_path: Path) -> None:
    check_layout_chain(pretrain_gpt2, CONTEXT_CHAIN, corpus, tmp_path, 50)
