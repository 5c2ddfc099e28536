"""A run with ``--layout-independent-dropout`` goes on in another layout as if it had never stopped (row E15)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import pretrain_gpt2
import pretrain_t5
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import flags, train_ranks

DROPPED = "--fp64 --hidden-dropout 0.1 --attention-dropout 0.1 --layout-independent-dropout"
GLOBAL_BATCH = 8


def layout(tensor: int, pipe: int, data: int, micro: int, context: int = 1) -> str:
    """Return the flags of a layout, with the same global batch in each."""
    gas = GLOBAL_BATCH // (data * micro)
    axes = f"--model-parallel-size {tensor} --pipe-parallel-size {pipe} --context-parallel-size {context}"
    return f"{axes} --batch-size {micro} --gas {gas}"


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]


def check(
    script: ModuleType, places: list[tuple[int, int, int, int, int]], corpus: Path, folder: Path, steps: int
) -> None:
    """Compare a chain of runs, each in another layout and from the last one's checkpoint, with one process."""
    whole, last = folder / "whole", None
    once = f"{DROPPED} --train-iters {steps} --eval-iters 0"
    train_ranks(1, flags(corpus, whole, f"{once} {layout(1, 1, 1, 4)}", script), script=script)
    found, each = [], steps // len(places)
    for number, (tensor, pipe, data, micro, context) in enumerate(places):
        own = folder / f"part{number}"
        more = f"{once} {layout(tensor, pipe, data, micro, context)}" + ("" if last is None else f" --load {last}")
        is_last = number == len(places) - 1
        more += "" if is_last else f" --exit-interval {each}"
        size = tensor * pipe * data * context
        codes, _ = train_ranks(size, flags(corpus, own, more, script), script=script)
        assert codes == [0 if is_last else 75] * size
        found += losses(own)
        last = own
    assert len(found) == steps
    assert found == pytest.approx(losses(whole), abs=1e-12, rel=0)


def test_a_checkpoint_goes_on_in_another_layout(corpus: Path, tmp_path: Path) -> None:
    check(pretrain_gpt2, [(2, 1, 1, 2, 1), (1, 1, 2, 4, 1), (1, 1, 1, 4, 2)], corpus, tmp_path, 6)


CHAIN = [(2, 2, 1, 4, 1), (1, 1, 4, 1, 1), (4, 1, 1, 8, 1), (1, 2, 2, 1, 1), (1, 1, 1, 2, 1)]
CONTEXT_CHAIN = [(1, 2, 1, 4, 2), (1, 1, 1, 1, 4), (2, 1, 1, 8, 2), (1, 1, 2, 1, 2), (1, 1, 1, 2, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("script", [pretrain_gpt2, pretrain_t5])
def test_a_chain_of_five_layouts_is_one_run_of_fifty_steps(script: ModuleType, corpus: Path, tmp_path: Path) -> None:
    check(script, CHAIN, corpus, tmp_path, 50)


@pytest.mark.slow
def test_a_chain_of_context_sizes_is_one_run_of_fifty_steps(corpus: Path, tmp_path: Path) -> None:
    check(pretrain_gpt2, CONTEXT_CHAIN, corpus, tmp_path, 50)
