"""The z-loss: its formula on any number of ranks, whole and in chunks, and what runs tell of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import parse
from megatron.errors import ConfigError
from megatron.models.common.language_model import LazyLogits, materialize_logits, model_loss
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.groups import Group
from megatron.mpu.layers import vocab_range
from megatron.training.trainer import Trainer
from tests.helpers.harness import run_ranks
from tests.helpers.layouts import check_fp64, compare_layout
from tests.helpers.model_samples import small_model_args
from tests.optim.test_adafactor_layouts import build_training
from tests.optim.test_param_rates import MetricsRecorder

VOCAB, WIDTH, S, B, COEFFICIENT = 13, 6, 5, 2, 0.3


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = {"x": (S, B, WIDTH), "table": (VOCAB, WIDTH), "bias": (VOCAB,)}
    result = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    result["labels"] = torch.randint(0, VOCAB, (B, S), generator=generator)
    result["mask"] = torch.rand(B, S, generator=generator, dtype=torch.float64).round(decimals=1)
    return result


def reference_losses(cap: float) -> tuple[list[float], list[torch.Tensor]]:
    """Return cross-entropy and z-loss, and the gradients of their sum."""
    inputs = make_tensors()
    leaves = [inputs[name].clone().requires_grad_() for name in ("x", "table", "bias")]
    logits = leaves[0] @ leaves[1].T + leaves[2]
    logits = cap * torch.tanh(logits / cap) if cap else logits
    log_z = torch.log(torch.exp(logits).sum(-1))
    weights = inputs["mask"].T
    entropy = ((log_z - logits.gather(-1, inputs["labels"].T.unsqueeze(-1)).squeeze(-1)) * weights).sum()
    squares = (COEFFICIENT * log_z**2 * weights).sum()
    (entropy + squares).backward()
    return [entropy.item(), squares.item()], [leaf.grad for leaf in leaves]  # type: ignore[misc]


def run_rank(rank: int, size: int) -> list[Any]:
    """Return what this rank has, whole and in chunks, without a cap and with one."""
    group = Group(tuple(range(size)), rank, None if size == 1 else torch.distributed.group.WORLD)
    parallel, inputs, results = ParallelContext(group), make_tensors(), []
    rows, start, num_real = vocab_range(VOCAB, group, 1)
    for at_once in (0, 3):
        for cap in (0.0, 1.5):
            x = inputs["x"].clone().requires_grad_()
            table, bias = torch.zeros(rows, WIDTH, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
            table[:num_real], bias[:num_real] = (
                inputs["table"][start : start + num_real],
                inputs["bias"][start : start + num_real],
            )
            lazy = LazyLogits(x, table.requires_grad_(), bias.requires_grad_(), at_once or 1, cap)
            args = small_model_args(vocab_size=VOCAB, hidden_size=WIDTH, z_loss=COEFFICIENT)
            logits = lazy if at_once else materialize_logits(lazy)
            losses = model_loss(logits, inputs["labels"], inputs["mask"], args, parallel)
            assert list(losses) == ["loss", "z_loss"] and not losses["z_loss"][0].requires_grad
            with torch.no_grad():
                eval_loss = model_loss(logits, inputs["labels"], inputs["mask"], args, parallel)
            assert isinstance(eval_loss, tuple) and torch.equal(eval_loss[0], losses["loss"][0]), (
                "evaluations have no z-loss"
            )
            losses["loss"][0].mul(1.0).backward()
            gradients = [x.grad, table.grad[:num_real], bias.grad[:num_real]]  # type: ignore[index]
            counts = [losses[name][1].item() for name in losses]
            results.append((cap, [losses[name][0].item() for name in losses], counts, gradients, start))
    return results


@pytest.mark.parametrize("size", [1, 2])
def test_loss_and_gradients_match_formula_on_any_ranks(size: int) -> None:
    """The number is the cross-entropy, and the gradient that of both."""
    ranks = run_ranks(size, run_rank, size)
    for case_idx, (cap, losses, counts, _, _) in enumerate(ranks[0]):
        expected, (x_grad, table_grad, bias_grad) = reference_losses(cap)
        assert losses == pytest.approx(expected, rel=1e-13) and counts == [make_tensors()["mask"].sum().item()] * 2
        assert all(rank[case_idx][1] == losses for rank in ranks)
        torch.testing.assert_close(sum(rank[case_idx][3][0] for rank in ranks), x_grad, rtol=1e-12, atol=1e-12)
        for _, _, _, (_, table, bias), start in (rank[case_idx] for rank in ranks):
            torch.testing.assert_close(table, table_grad[start : start + len(table)], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(bias, bias_grad[start : start + len(bias)], rtol=1e-12, atol=1e-12)


LAYOUTS = [
    (2, 1, 1, "--sequence-parallel", ""), (2, 2, 1, "", ""), (1, 1, 2, "--zero-stage 3", ""), (1, 4, 1, "", ""),
    (2, 1, 2, "", "--loss-chunk-tokens 5"),
    (1, 2, 2, "--zero-stage 1", "--loss-chunk-tokens 7"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data", "layout", "extra"), LAYOUTS)
def test_every_layout_matches_one_process_gradients(tensor: int, pipe: int, data: int, layout: str, extra: str) -> None:
    """Its sibling in the short run is in tests/optim/test_param_rates.py."""
    check_fp64(compare_layout(tensor, pipe, data, 4, f"--fp64 --z-loss 0.02 {extra}", layout, steps=3))


def run_logged(rank: int, pipe: int, family: str) -> tuple[list[dict[str, Any]], list[float]]:
    """Return the metrics of two steps with a z-loss, and evaluations of the same batches with and without."""
    results = []
    for extra in ("--z-loss 0.01", ""):
        config, world, engine, data = build_training(rank, family, pipe, 1, f"--fp64 --log-interval 1 {extra}")
        logger = MetricsRecorder()
        trainer = Trainer(config, world, engine, data, Path(), [logger])
        evaluated = engine.evaluate_batch(data.batches("train", config, world, 0))
        with trainer.open_batches():
            trainer.train_step()
            trainer.train_step()
        results.append((logger.metrics, evaluated))
    (metrics, with_z_loss), (plain, without_z_loss) = results
    return [*metrics, *plain], [with_z_loss, without_z_loss]


@pytest.mark.parametrize(
    ("pipe", "family"), [(2, "gpt2"), *(pytest.param(*e, marks=pytest.mark.slow) for e in [(1, "gpt2"), (2, "t5")])]
)
def test_z_loss_is_logged_separately_and_skipped_in_evaluation(pipe: int, family: str) -> None:
    """The first loss is the cross-entropy, as without; the second differs by what was trained on."""
    for (first, second, plain, other), (with_z_loss, without_z_loss) in run_ranks(pipe, run_logged, pipe, family):
        assert with_z_loss == without_z_loss
        assert first["loss"] == plain["loss"] and second["loss"] != other["loss"]
        assert "z_loss" not in plain and first["z_loss"] == pytest.approx(0.01 * 4.6**2, rel=0.5)
        assert first["grad_norm"] != plain["grad_norm"]


def test_bert_rejects_z_loss() -> None:
    line = "--num-layers 1 --hidden-size 16 --num-attention-heads 4 --vocab-size 200 --data-path none --z-loss 1e-4"
    with pytest.raises(ConfigError, match="--z-loss is not supported: BERT.* two means"):
        parse(line.split(), world_size=1, family="bert", env={})
