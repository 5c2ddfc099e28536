"""What the loss holds, in bytes, against the tensors that are alive while it is computed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.config import ModelConfig
from megatron.config.loss_chunk import ELSEWHERE, ON_CPU, WHOLE, tokens_at_once
from megatron.costs.memory import loss_bytes
from megatron.models.common.language_model import head_output, model_loss
from megatron.models.common.model_args import model_args_from
from megatron.models.common.parallel_context import ParallelContext
from tests.helpers.alive import Alive

MODEL = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=1, vocab_size=4096, max_position_embeddings=64)
TOKENS = 512
H = 768


@pytest.mark.parametrize(
    ("asked", "tokens", "vocab", "is_on_cpu", "expected"),
    [
        (None, 1024, 4096, True, WHOLE),
        (None, 1025, 4096, True, 205),  # five chunks of one size
        (None, 2048, 50257, True, ON_CPU),
        (None, ON_CPU + H, 50257, True, WHOLE),
        (None, 2048, 50257, False, WHOLE),
        (None, ELSEWHERE + H, 50257, False, WHOLE),
        (None, ELSEWHERE + H + 1, 50257, False, (ELSEWHERE + H + 2) // 2),
        (None, 3 * ELSEWHERE, 50257, False, ELSEWHERE),
        (0, 10**6, 50257, True, WHOLE),
        (7, 20, 3, False, 7),
        (100, 20, 3, False, 20),
        (7, 0, 3, False, WHOLE),
    ],
)
def test_chunks_are_of_one_size_and_none_where_logits_are_few(
    asked: int | None, tokens: int, vocab: int, is_on_cpu: bool, expected: int
) -> None:
    assert tokens_at_once(asked, tokens, vocab, H, is_on_cpu=is_on_cpu) == expected


@pytest.mark.parametrize("is_on_cpu", [True, False])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("forwards", [1, 4])
def test_the_automatic_choice_holds_no_more_than_whole_logits(
    is_on_cpu: bool, width: int, tensor: int, forwards: int
) -> None:
    """Sizes in use, among them one of 8192 numbers a token and 2048 tokens, where a chunk of all held 5 times more."""
    chosen = []
    for h, tokens, vocab in itertools.product((768, 2048, 8192), (1024, 2048, 4096, 16384, 65536), (30000, 128256)):
        automatic, whole = (
            loss_bytes(
                replace(MODEL, hidden_size=h, vocab_size=vocab, loss_chunk_tokens=asked), tokens, tensor, width,
                forwards=forwards, is_on_cpu=is_on_cpu,
            )
            for asked in (None, 0)
        )  # fmt: skip
        assert automatic <= whole, (h, tokens, vocab)
        chosen.append(automatic < whole)
    assert 0.3 * len(chosen) < sum(chosen) < len(chosen), "chunks are chosen for some and not for all"


@pytest.mark.parametrize(
    ("chunk", "dtype"), [(0, torch.float32), (0, torch.bfloat16), (32, torch.float32), (32, torch.bfloat16)]
)
def test_the_estimate_is_what_lies_there_at_the_worst_moment(chunk: int, dtype: torch.dtype) -> None:
    model: Any = replace(MODEL, loss_chunk_tokens=chunk)
    x, table = (torch.randn(*shape, 16, dtype=dtype, requires_grad=True) for shape in ((TOKENS, 1), (4096,)))
    labels, mask = torch.zeros(1, TOKENS, dtype=torch.long), torch.ones(1, TOKENS)
    sizes, place = model_args_from(model), ParallelContext()
    with Alive("cpu") as alive:
        total, _ = model_loss(head_output(x, table, sizes, place), labels, mask, sizes, place)
        total.backward()
    estimate = loss_bytes(model, TOKENS, 1, dtype.itemsize)
    assert abs(alive.peak - x.nbytes - table.nbytes - estimate) <= 0.03 * estimate, "views of both are seen, too"


def test_gradients_wait_for_backward_in_each_micro_batch_in_flight_and_logits_of_chunks_do_not() -> None:
    chunked, whole = replace(MODEL, loss_chunk_tokens=32), replace(MODEL, loss_chunk_tokens=0)
    of_chunks, of_whole = (
        loss_bytes(model, TOKENS, 2, 2, forwards=3) - loss_bytes(model, TOKENS, 2, 2) for model in (chunked, whole)
    )
    assert of_chunks == 2 * (TOKENS * 16 * 2 + 2048 * 16 * 4)
    assert of_whole == 2 * TOKENS * 2048 * 4
