"""A run whose checkpoint an earlier version wrote goes on with the losses that this version would have had (row K22).

``format_1`` is of commit 858821c: a small GPT-2 after three steps, saved by one rank in fp32. ``losses.txt`` are those
of its next three steps, by the same commit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import pretrain_gpt2
from megatron.config import parse
from megatron.data.mock_dataset import MockTokens
from megatron.optim.lr_scheduler import set_learning_rate
from megatron.training import global_vars, initialize
from megatron.training.data import RunData
from megatron.training.mock_data import mock_tokenizer
from megatron.training.optimizer_setup import make_lr_scheduler
from megatron.training.setup import build_engine, make_streams
from megatron.training.train_progress import TrainProgress
from tests.helpers.harness import run_ranks
from tests.helpers.saved_states import load_state, save_state

FORMAT_1 = Path(__file__).parent / "format_1"
VOCAB, SEQ, ROWS, STEPS = 101, 16, 8, 3
MODEL_ARGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 16 --hidden-bias "
    f"--seq-length {SEQ} --vocab-size {VOCAB} --init-method-std 0.1 --attention-dropout 0 --hidden-dropout 0 --fp32 "
    "--data-path none --device cpu --train-iters 20 --lr 1e-2 --warmup 0 --clip-grad 1 --batch-size 4 --gas 2"
)


def train_three_steps(
    rank: int, source: Path | None, target: Path | None, layout: str = "", num_ranks: int = 1
) -> list[float]:
    """Take three steps from ``source``, or from the beginning, and save to ``target``; return the losses."""
    config = parse([*MODEL_ARGS.split(), *layout.split()], world_size=num_ranks).with_vocab(VOCAB)
    world = initialize.start(config)
    streams = make_streams(config, world)
    global_vars.set_current(config, mock_tokenizer(config), streams)
    engine = build_engine(config, world, streams, pretrain_gpt2.model_provider, pretrain_gpt2.forward_step)
    run_state = {"config": config, "module": engine.module, "optimizer": engine.optimizer, "world": world}
    progress = TrainProgress()
    if source is not None:
        progress = load_state(source, **run_state)
    data = RunData({"train": MockTokens(VOCAB, SEQ, seed=progress.step)} if world.reads_data else {}, None)
    batches, losses = data.batches("train", config, world), []
    for step in range(progress.step, progress.step + STEPS):
        set_learning_rate(engine.optimizer, make_lr_scheduler(config).at(step))
        losses.append(engine.train_step(batches, step).loss)
    if target is not None:
        final_step = progress.step + STEPS
        save_state(target, TrainProgress(final_step, final_step, final_step * ROWS), fingerprint=None, **run_state)
    return losses


@pytest.mark.parametrize("layout", ["", "--model-parallel-size 2"], ids=["1-1-1", "2-1-1"])
def test_format_1_checkpoint_resumes_with_recorded_losses(layout: str) -> None:
    num_ranks = 2 if layout else 1
    expected = [float(line) for line in (FORMAT_1 / "losses.txt").read_text().split()]
    assert len(expected) == STEPS and max(expected) - min(expected) > 0.01
    for losses in run_ranks(num_ranks, train_three_steps, FORMAT_1, None, layout, num_ranks):
        assert losses == pytest.approx(expected, abs=2e-5, rel=0)
