"""Models of all families with their loss in chunks, against the same with whole logits."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron.config import ModelConfig
from megatron.models.common.language_model import LazyLogits, head_output
from megatron.models.common.model_args import model_args_from
from megatron.models.common.parallel_context import ParallelContext
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import small_model_args
from tests.helpers.recomputed import FAMILIES, loss_and_grads, make_model
from tests.helpers.whole import group_of_all_ranks

CHUNK = 5
CASES = [
    (family, is_untied) for family in FAMILIES for is_untied in (False, True) if not (family == "bert" and is_untied)
]


def run_chunked_and_full(rank: int, size: int) -> dict[Any, Any]:
    """Return (loss and gradients with chunks, the same with whole logits) of each kind; without dropout."""
    group, results = group_of_all_ranks(rank, size), {}
    for family, is_untied in CASES:
        overrides = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "num_layers": 1, "untie_embeddings": is_untied}
        overrides |= {"t5": {"enc_layers": 1, "dec_layers": 1}, "llama": {"num_query_groups": 4}}.get(family, {})
        results[family, is_untied] = [
            loss_and_grads(make_model(family, group, torch.float64, loss_chunk_tokens=chunk_tokens, **overrides))
            for chunk_tokens in (CHUNK, 0)
        ]
    return results


@functools.cache
def rank_results(size: int) -> list[dict[Any, Any]]:
    return run_ranks(size, run_chunked_and_full, size) if size > 1 else [run_chunked_and_full(0, 1)]


def test_manual_args_give_full_logits_and_config_gives_chunks() -> None:
    model = ModelConfig(
        num_layers=1, hidden_size=16, num_attention_heads=1, vocab_size=1024, max_position_embeddings=64
    )
    x, table = torch.empty(8192, 1, 16, device="meta"), torch.empty(1024, 16, device="meta")
    manual_args = small_model_args(hidden_size=16, vocab_size=1024)
    assert type(head_output(x, table, manual_args, ParallelContext())) is torch.Tensor
    assert type(head_output(x, table, model_args_from(model), ParallelContext())) is LazyLogits


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("family", "is_untied"), CASES)
def test_chunked_loss_and_gradients_match_full_logits(family: str, is_untied: bool, size: int) -> None:
    for results in rank_results(size):
        chunked, full = results[family, is_untied]
        assert len(chunked) == len(full) > 5
        for actual, expected in zip(chunked, full, strict=True):
            assert (actual - expected).abs().max() <= 1e-13 * max(expected.abs().max(), 1e-3)
        assert any(not torch.equal(actual, expected) for actual, expected in zip(chunked, full, strict=True)), (
            "nothing was cut"
        )
