"""Budgets on the kernel launches and the memory traffic of layers and of the loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from megatron.config import ModelConfig
from megatron.costs.memory import loss_bytes
from tests.cuda.device import bytes_moved
from tests.cuda.worker import LOSS_HIDDEN, LOSS_TOKENS, LOSS_VOCAB, CostCase, Worker


class Budget(NamedTuple):
    """Upper bounds of forward and backward together: ``Cost.units`` and ``Cost.launches`` of ``layer_cost``."""

    units: float
    launches: int


BUDGETS = {
    "llama-7b": Budget(49.5, 15),
    "gpt2-1.3b": Budget(53.5, 18),
    "llama-3-8b": Budget(56.5, 19),
    "moe": Budget(117.5, 56),
    "llama-7b-fp8": Budget(119.5, 83),
    "moe-fp8": Budget(271.5, 138),
    "loss": Budget(10.5, 31),
}
"""Case -> bytes moved, in bf16 tensors [s, b, h] or for the loss per logit, and launches; see ``layer_cost.SHAPES``."""


TABLE_GRADIENT_BYTES = 6
"""Bytes moved per element of the head's table for its gradient, without products: backward reads the fp32 sum and
writes it in bf16. The products of all chunks add to the sum themselves."""


@pytest.mark.parametrize("name", BUDGETS)
def test_layer_stays_within_budget(worker: Worker, name: str) -> None:
    (cost,) = worker.run(CostCase(name))
    assert (cost.units <= BUDGETS[name].units, cost.launches <= BUDGETS[name].launches) == (True, True), (
        f"{cost.units:.1f} units, {cost.launches} launches; python -m tests.cuda {name} lists the kernels"
    )
    assert cost.forward.num_products


@pytest.mark.parametrize("name", ["llama-7b-fp8", pytest.param("moe-fp8", marks=pytest.mark.slow)])
def test_later_micro_batches_do_not_quantize_weights(worker: Worker, name: str) -> None:
    """Later micro-batches only quantize the rows of the input and of the output gradient, for each of 4 products."""
    num_weights = 4  # or stacks of weights, one for all experts
    first, later = (worker.run(CostCase(name, is_later_micro_batch=is_later))[0] for is_later in (False, True))
    assert not later.count("column_maxima_kernel") and not later.count("quantize_columns_kernel")
    for kernel in ("row_maxima_kernel", "quantize_rows_kernel"):
        assert (first.count(kernel), later.count(kernel)) == (3 * num_weights, 2 * num_weights)
    scale_launches, zero_launches = 2 * 2 * num_weights, num_weights
    assert first.launches - later.launches == 4 * num_weights + scale_launches + zero_launches


def test_gradient_of_the_table_stays_within_budget(worker: Worker) -> None:
    trained, frozen = (worker.run(CostCase("loss", extra))[0] for extra in ("", "frozen"))
    num_bytes, num_chunks = trained.num_bytes - frozen.num_bytes, 2
    assert num_bytes <= TABLE_GRADIENT_BYTES * LOSS_VOCAB * LOSS_HIDDEN + 64  # and a scalar
    assert trained.launches - frozen.launches == 1
    assert trained.forward.num_products - frozen.forward.num_products == num_chunks


@pytest.mark.parametrize("extra", ["", "cap", "torch", "torch cap"])
def test_memory_of_the_chunked_loss_matches_estimate(worker: Worker, extra: str) -> None:
    (cost,) = worker.run(CostCase("loss", extra))
    model = ModelConfig(
        num_layers=1, hidden_size=LOSS_HIDDEN, num_attention_heads=1, vocab_size=LOSS_VOCAB, max_position_embeddings=1
    )
    has_kernels = "torch" not in extra
    estimate = loss_bytes(model, LOSS_TOKENS, 1, width=2, has_cap="cap" in extra, has_kernels=has_kernels)
    inputs = 2 * LOSS_HIDDEN * (LOSS_TOKENS + LOSS_VOCAB)  # seen by the tracker as well
    assert cost.peak_bytes - inputs == pytest.approx(estimate, rel=0.03)


def test_triton_kernels_are_counted(worker: Worker) -> None:
    plain, dropped = (worker.run(CostCase("gpt2-1.3b", f"--hidden-dropout {rate}"))[0] for rate in (0, 0.1))
    assert dropped.count("dropout_kernel") == 4 and not plain.count("dropout_kernel")
    # four launches that read and write one tensor each; one of them includes the residual sum, a kernel of 3 tensors
    assert dropped.launches == plain.launches + 4 - 1
    assert dropped.units == pytest.approx(plain.units + 8 - 3)


def make_bytes(operator: Any, *args: Any, written: int = 0) -> int:
    """Return ``bytes_moved`` of an operator whose first ``written`` arguments are written."""
    output = operator(*args)
    outputs = [] if written else [output]
    return bytes_moved(operator.__name__, args, {}, list(args[:written]), outputs)


def test_bytes_of_operators() -> None:
    x, y, row = torch.ones(4, 8), torch.ones(4, 8), torch.ones(8)
    idx = torch.zeros(4, 1, dtype=torch.int64)
    assert make_bytes(torch.add, x, y) == 3 * 128
    assert make_bytes(torch.add, x, x) == 2 * 128
    assert make_bytes(torch.add, x, row) == make_bytes(torch.add, x, row.expand(4, 8)) == 2 * 128 + 32
    assert make_bytes(torch.Tensor.add_, x, y, written=1) == 3 * 128
    assert make_bytes(torch.Tensor.copy_, x, y, written=1) == 2 * 128
    assert make_bytes(torch.Tensor.zero_, x, written=1) == 128
    assert make_bytes(torch.gather, x, 1, idx) == 4 * 8 + 2 * 16
    assert make_bytes(torch.Tensor.scatter_add_, x, 1, idx, torch.ones(4, 1), written=1) == 4 * 8 + 3 * 16
