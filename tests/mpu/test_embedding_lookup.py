"""Gradients of looked-up tables in 16 bits: repeated rows are accumulated in fp32, in every table of every family."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.models.bert.model import BertEmbedding
from megatron.models.common.language_model import Embedding, PositionEmbedding
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.t5.model import T5Model
from megatron.mpu.embedding_lookup import accumulate_rows, embedding_lookup
from megatron.mpu.layers import VocabParallelEmbedding
from tests.helpers.bert_samples import bert_model_args
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import fill_weights, small_model_args
from tests.helpers.t5_samples import t5_model_args
from tests.helpers.whole import group_of_all_ranks

V, H, N, TOKEN = 11, 8, 2000, 3
HALF_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def output_grad(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Positive values, so that a sum in bf16 stops growing after a few hundred of them."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def assert_rounded_once(grad: torch.Tensor, expected: torch.Tensor) -> None:
    assert ((grad.double() - expected).abs() <= torch.finfo(grad.dtype).eps * expected.abs()).all()


@HALF_DTYPES
def test_repeated_rows_round_once_and_other_rows_are_zero(dtype: torch.dtype) -> None:
    ids = torch.cat([torch.full((N,), TOKEN), torch.tensor([0, V - 1, 0])]).view(1, -1)
    grads = output_grad(dtype, *ids.shape, H)
    table = torch.randn(V, H).to(dtype).requires_grad_()
    rows = embedding_lookup(ids, table)
    rows.backward(grads)
    table_fp64 = table.detach().double().requires_grad_()
    F.embedding(ids, table_fp64).backward(grads.double())
    assert torch.equal(rows, F.embedding(ids, table))
    assert table.grad.dtype == dtype
    assert_rounded_once(table.grad, table_fp64.grad)


def test_accumulate_rows_returns_only_occurring_rows_in_fp32() -> None:
    ids, row_sums = accumulate_rows(torch.tensor([9, 2, 9]), torch.ones(3, H, dtype=torch.bfloat16))
    assert ids.tolist() == [2, 9] and row_sums.dtype == torch.float32
    assert row_sums[:, 0].tolist() == [1.0, 2.0]


def test_frozen_table_is_supported_and_unknown_id_raises() -> None:
    table = torch.randn(V, H).bfloat16()
    assert not embedding_lookup(torch.tensor([1]), table).requires_grad
    with pytest.raises(IndexError):
        embedding_lookup(torch.tensor([V]), table)


def run_rank(rank: int, size: int) -> list[tuple[int, int, torch.Tensor]]:
    """Return (first token, rows of tokens, gradient) of a vocabulary-parallel table, without and with sequence cut."""
    group, results = group_of_all_ranks(rank, size), []
    grads = output_grad(torch.bfloat16, N, 1, H)
    for sequence_parallel in (False, True):
        layer = VocabParallelEmbedding(V, H, group=group, sequence_parallel=sequence_parallel).bfloat16()
        y = layer(torch.full((N, 1), TOKEN))
        y.backward(grads.chunk(size)[rank] if sequence_parallel else grads)
        results.append((layer.start, layer.num_real, layer.weight.grad))
    return results


def test_vocab_parallel_table_accumulates_in_fp32() -> None:
    expected = output_grad(torch.bfloat16, N, 1, H).double().sum((0, 1))
    for results in [run_rank(0, 1), *run_ranks(2, run_rank, 2)]:
        for start, num_real, grad in results:
            local_idx = TOKEN - start
            is_local = 0 <= local_idx < num_real
            if is_local:
                assert_rounded_once(grad[local_idx], expected)
            assert grad.count_nonzero(dim=1).count_nonzero() == is_local


@HALF_DTYPES
def test_positions_and_token_types_accumulate_in_fp32(dtype: torch.dtype) -> None:
    grads = output_grad(dtype, N, H)
    position = PositionEmbedding(V, H).to(dtype)
    position(torch.full((N,), TOKEN)).backward(grads)
    assert_rounded_once(position.weight.grad[TOKEN], grads.double().sum(0))


def sum_output_grads(model: torch.nn.Module, embedding: torch.nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """Return the sum in fp64 of the gradients that reach the outputs of ``embedding``."""
    output_grads = []
    embedding.register_full_backward_hook(lambda _, grad_inputs, grad_outputs: output_grads.append(grad_outputs[0]))
    outputs = model(*inputs)
    outputs.backward(output_grad(outputs.dtype, *outputs.shape))
    return sum(grad.double().flatten(0, 1).sum(0) for grad in output_grads)


@HALF_DTYPES
def test_gpt_bert_and_t5_tables_accumulate_in_fp32(dtype: torch.dtype) -> None:
    tokens, first_positions = torch.full((N // 4, 4), TOKEN), torch.zeros(N // 4, 4, dtype=torch.int64)
    gpt = Embedding(small_model_args(), ParallelContext()).to(dtype)
    expected = sum_output_grads(gpt, gpt, tokens, first_positions)
    assert_rounded_once(gpt.word.weight.grad[TOKEN], expected)
    assert_rounded_once(gpt.position.weight.grad[0], expected)

    bert = BertEmbedding(bert_model_args(), ParallelContext()).to(dtype)
    bert.norm = torch.nn.Identity()
    expected = sum_output_grads(bert, bert, tokens[:, :2], first_positions[:, :2])
    assert_rounded_once(bert.word.weight.grad[TOKEN], expected)
    assert_rounded_once(bert.token_type.weight.grad[0], expected)

    t5 = fill_weights(T5Model(t5_model_args(untie_embeddings=True))).to(dtype)
    expected = sum_output_grads(t5, t5.embedding, tokens[:, :2], tokens[:, :1])
    error = (t5.embedding.word.weight.grad[TOKEN].double() - expected).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps * expected.abs().max()  # two look-ups, one for each side
