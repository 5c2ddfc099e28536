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
from tests.helpers.model_samples import small_sizes
from tests.helpers.recomputed import FAMILIES, bits, make
from tests.helpers.whole import whole_world

CHUNK = 5
KINDS = [(family, untied) for family in FAMILIES for untied in (False, True) if not (family == "bert" and untied)]


def chunks_and_whole(rank: int, size: int) -> dict[Any, Any]:
    """Return (loss and gradients with chunks, the same with whole logits) of each kind; without dropout."""
    group, found = whole_world(rank, size), {}
    for family, untied in KINDS:
        off = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "num_layers": 1, "untie_embeddings": untied}
        off |= {"t5": {"enc_layers": 1, "dec_layers": 1}, "llama": {"num_query_groups": 4}}.get(family, {})
        found[family, untied] = [
            bits(make(family, group, torch.float64, loss_chunk_tokens=tokens, **off)) for tokens in (CHUNK, 0)
        ]
    return found


@functools.cache
def seen(size: int) -> list[dict[Any, Any]]:
    return run_ranks(size, chunks_and_whole, size) if size > 1 else [chunks_and_whole(0, 1)]


def test_sizes_of_a_model_of_ones_own_mean_whole_logits_and_a_configuration_decides() -> None:
    model = ModelConfig(
        num_layers=1, hidden_size=16, num_attention_heads=1, vocab_size=1024, max_position_embeddings=64
    )
    x, table = torch.empty(8192, 1, 16, device="meta"), torch.empty(1024, 16, device="meta")
    plain = small_sizes(hidden_size=16, vocab_size=1024)
    assert type(head_output(x, table, plain, ParallelContext())) is torch.Tensor
    assert type(head_output(x, table, model_args_from(model), ParallelContext())) is LazyLogits


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("family", "untied"), KINDS)
def test_chunks_give_the_loss_and_every_gradient_of_whole_logits(family: str, untied: bool, size: int) -> None:
    for results in seen(size):
        chunked, whole = results[family, untied]
        assert len(chunked) == len(whole) > 5
        for one, two in zip(chunked, whole, strict=True):
            assert (one - two).abs().max() <= 1e-13 * max(two.abs().max(), 1e-3)
        assert any(not torch.equal(one, two) for one, two in zip(chunked, whole, strict=True)), "nothing was cut"
