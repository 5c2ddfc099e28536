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
from tests.helpers.layouts import check_fp64, difference
from tests.helpers.model_samples import small_sizes
from tests.optim.test_adafactor_layouts import started
from tests.optim.test_param_rates import Logged

VOCAB, WIDTH, S, B, C = 13, 6, 5, 2, 0.3


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    made = {"x": (S, B, WIDTH), "table": (VOCAB, WIDTH), "bias": (VOCAB,)}
    found = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in made.items()}
    found["labels"] = torch.randint(0, VOCAB, (B, S), generator=generator)
    found["mask"] = torch.rand(B, S, generator=generator, dtype=torch.float64).round(decimals=1)
    return found


def formula(cap: float) -> tuple[list[float], list[torch.Tensor]]:
    """Return cross-entropy and z-loss, and the gradients of their sum."""
    given = tensors()
    leaves = [given[name].clone().requires_grad_() for name in ("x", "table", "bias")]
    logits = leaves[0] @ leaves[1].T + leaves[2]
    logits = cap * torch.tanh(logits / cap) if cap else logits
    log_z = torch.log(torch.exp(logits).sum(-1))
    weights = given["mask"].T
    entropy = ((log_z - logits.gather(-1, given["labels"].T.unsqueeze(-1)).squeeze(-1)) * weights).sum()
    squares = (C * log_z**2 * weights).sum()
    (entropy + squares).backward()
    return [entropy.item(), squares.item()], [leaf.grad for leaf in leaves]  # type: ignore[misc]


def found_on(rank: int, size: int) -> list[Any]:
    """Return what this rank has, whole and in chunks, without a cap and with one."""
    group = Group(tuple(range(size)), rank, None if size == 1 else torch.distributed.group.WORLD)
    place, given, found = ParallelContext(group), tensors(), []
    rows, start, real = vocab_range(VOCAB, group, 1)
    for at_once in (0, 3):
        for cap in (0.0, 1.5):
            x = given["x"].clone().requires_grad_()
            table, bias = torch.zeros(rows, WIDTH, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
            table[:real], bias[:real] = given["table"][start : start + real], given["bias"][start : start + real]
            lazy = LazyLogits(x, table.requires_grad_(), bias.requires_grad_(), at_once or 1, cap)
            sizes = small_sizes(vocab_size=VOCAB, hidden_size=WIDTH, z_loss=C)
            logits = lazy if at_once else materialize_logits(lazy)
            pairs = model_loss(logits, given["labels"], given["mask"], sizes, place)
            assert list(pairs) == ["loss", "z_loss"] and not pairs["z_loss"][0].requires_grad
            with torch.no_grad():
                alone = model_loss(logits, given["labels"], given["mask"], sizes, place)
            assert isinstance(alone, tuple) and torch.equal(alone[0], pairs["loss"][0]), "evaluations have no z-loss"
            pairs["loss"][0].mul(1.0).backward()
            gradients = [x.grad, table.grad[:real], bias.grad[:real]]  # type: ignore[index]
            counts = [pairs[name][1].item() for name in pairs]
            found.append((cap, [pairs[name][0].item() for name in pairs], counts, gradients, start))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_loss_and_gradients_are_those_of_the_formula_on_any_ranks(size: int) -> None:
    """The number is the cross-entropy, and the gradient that of both."""
    ranks = run_ranks(size, found_on, size)
    for number, (cap, losses, counts, _, _) in enumerate(ranks[0]):
        wanted, (of_x, of_table, of_bias) = formula(cap)
        assert losses == pytest.approx(wanted, rel=1e-13) and counts == [tensors()["mask"].sum().item()] * 2
        assert all(rank[number][1] == losses for rank in ranks)
        torch.testing.assert_close(sum(rank[number][3][0] for rank in ranks), of_x, rtol=1e-12, atol=1e-12)
        for _, _, _, (_, table, bias), start in (rank[number] for rank in ranks):
            torch.testing.assert_close(table, of_table[start : start + len(table)], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(bias, of_bias[start : start + len(bias)], rtol=1e-12, atol=1e-12)


LAYOUTS = [
    (2, 1, 1, "--sequence-parallel", ""), (2, 2, 1, "", ""), (1, 1, 2, "--zero-stage 3", ""), (1, 4, 1, "", ""),
    (2, 1, 2, "", "--loss-chunk-tokens 5"),
    (1, 2, 2, "--zero-stage 1", "--loss-chunk-tokens 7"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data", "layout", "extra"), LAYOUTS)
def test_every_layout_has_the_gradients_of_one_process(
    tensor: int, pipe: int, data: int, layout: str, extra: str
) -> None:
    """Its sibling in the short run is in tests/optim/test_param_rates.py."""
    check_fp64(difference(tensor, pipe, data, 4, f"--fp64 --z-loss 0.02 {extra}", layout, steps=3))


def logged(rank: int, pipe: int, family: str) -> tuple[list[dict[str, Any]], list[float]]:
    """Return the metrics of two steps with a z-loss, and evaluations of the same batches with and without."""
    found = []
    for extra in ("--z-loss 0.01", ""):
        config, here, engine, data = started(rank, family, pipe, 1, f"--fp64 --log-interval 1 {extra}")
        watch = Logged()
        trainer = Trainer(config, here, engine, data, Path(), [watch])
        evaluated = engine.evaluate_batch(data.batches("train", config, here, 0))
        with trainer.open_batches():
            trainer.train_step()
            trainer.train_step()
        found.append((watch.metrics, evaluated))
    (metrics, with_it), (plain, without) = found
    return [*metrics, *plain], [with_it, without]


@pytest.mark.parametrize(
    ("pipe", "family"), [(2, "gpt2"), *(pytest.param(*e, marks=pytest.mark.slow) for e in [(1, "gpt2"), (2, "t5")])]
)
def test_an_evaluation_has_none_and_a_step_logs_it_apart(pipe: int, family: str) -> None:
    """The first loss is the cross-entropy, as without; the second differs by what was trained on."""
    for (first, second, plain, other), (with_it, without) in run_ranks(pipe, logged, pipe, family):
        assert with_it == without
        assert first["loss"] == plain["loss"] and second["loss"] != other["loss"]
        assert "z_loss" not in plain and first["z_loss"] == pytest.approx(0.01 * 4.6**2, rel=0.5)
        assert first["grad_norm"] != plain["grad_norm"]


def test_bert_refuses_it() -> None:
    line = "--num-layers 1 --hidden-size 16 --num-attention-heads 4 --vocab-size 200 --data-path none --z-loss 1e-4"
    with pytest.raises(ConfigError, match="over two heads"):
        parse(line.split(), world_size=1, family="bert", env={})
