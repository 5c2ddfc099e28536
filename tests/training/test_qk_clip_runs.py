"""Runs with QK-clip: resuming to the bit, skipped steps, and the logged attention logits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from examples.llama import pretrain_llama
from megatron.training.callbacks.metrics_writer import read_metrics
from tests.helpers.runs import make_flags, train_ranks, write_corpus

FLAGS = "--attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
CLIP = f"{FLAGS} --qk-clip --qk-clip-threshold 0.02"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def train(num_ranks: int, corpus: Path, folder: Path, flags: str, exit_code: int = 0) -> list[dict[str, Any]]:
    """Train and return the records of the steps in the run folder."""
    argv = make_flags(corpus, folder, flags, pretrain_llama)
    assert train_ranks(num_ranks, argv, script=pretrain_llama)[0] == [exit_code] * num_ranks
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]


def values_of(records: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return losses, norms and logits as hexadecimal numbers, which differ in any bit."""
    return [tuple(float(r[name]).hex() for name in ("loss", "grad_norm", "max_attention_logit")) for r in records]


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (1, "--fp64"),
        pytest.param(2, "--bf16 --zero-stage 1", marks=pytest.mark.slow),
        pytest.param(2, "--fp64 --zero-stage 3", marks=pytest.mark.slow),
        pytest.param(4, "--fp64 --model-parallel-size 2 --pipe-parallel-size 2", marks=pytest.mark.slow),
    ],
)
def test_resumed_run_continues_to_the_bit(num_ranks: int, layout: str, corpus: Path, tmp_path: Path) -> None:
    flags = f"{CLIP} {layout} --train-iters 4"
    plain = train(num_ranks, corpus, tmp_path / "plain", flags)
    train(num_ranks, corpus, tmp_path / "run", f"{flags} --exit-interval 2", exit_code=75)
    resumed = train(num_ranks, corpus, tmp_path / "run", f"{flags} --resume")
    assert len(plain) == 4 and values_of(resumed) == values_of(plain)


@pytest.mark.slow
def test_logging_does_not_change_training(corpus: Path, tmp_path: Path) -> None:
    """Without clipping, only logged steps are measured; each value is that of its own step."""
    flags = f"{FLAGS} --fp64 --train-iters 5 --log-max-attention-logit"
    plain = train(1, corpus, tmp_path / "plain", f"{FLAGS} --fp64 --train-iters 5")
    every_step = train(1, corpus, tmp_path / "every", flags)
    some_steps = train(1, corpus, tmp_path / "some", f"{flags} --log-interval 2")
    assert [r["loss"] for r in every_step] == [r["loss"] for r in plain]
    assert [r["step"] for r in some_steps] == [1, 2, 4, 5]
    logits = {r["step"]: r["max_attention_logit"] for r in every_step}
    assert [r["max_attention_logit"] for r in some_steps] == [logits[r["step"]] for r in some_steps]
    assert len(set(logits.values())) == 5 and all(math.isfinite(logit) for logit in logits.values())


@pytest.mark.slow
def test_high_learning_rate_raises_logits_only_without_clipping(corpus: Path, tmp_path: Path) -> None:
    flags = f"{FLAGS} --fp64 --train-iters 25 --lr 0.2 --optimizer muon --lr-decay-style constant --lr-warmup-iters 0"
    grown = train(1, corpus, tmp_path / "plain", f"{flags} --log-max-attention-logit")
    clipped = train(1, corpus, tmp_path / "clipped", f"{flags} --qk-clip --qk-clip-threshold 5")
    assert max(r["max_attention_logit"] for r in grown) > 100
    # a step's update may raise clipped logits once, before they are clipped again
    assert max(r["max_attention_logit"] for r in clipped) < 15
