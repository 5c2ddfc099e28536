"""Greedy generation on the device: the CPU's tokens, and with the cache those of the whole model without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.generate import Sampling, generate_gpt2, generate_t5
from tests.gpu.families import FAMILIES, VOCAB, build_model

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
NUM_NEW_TOKENS = 12
PROMPTS = [[5, 17, 3, 99, 42, 7, 8], [200], [11, 12, 13, 14]]
DECODERS = ["gpt2", "gpt2 untied", "llama", "mpt"]


def make_varied_model(name: str, torch_device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Return a model whose words depend on what came before: with smaller weights some say one word for ever."""
    model = build_model(FAMILIES[name], dtype, torch_device).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.5)
    return model


def generate_tokens(
    name: str, torch_device: torch.device, dtype: torch.dtype = torch.float32, **options: Any
) -> list[list[int]]:
    model = make_varied_model(name, torch_device, dtype)
    if name.startswith("t5"):
        return generate_t5(model, PROMPTS, start_id=1, max_new_tokens=NUM_NEW_TOKENS, **options)
    return generate_gpt2(model, PROMPTS, max_new_tokens=NUM_NEW_TOKENS, **options)


@torch.no_grad()
def generate_without_cache(name: str, torch_device: torch.device, dtype: torch.dtype) -> tuple[list[list[int]], float]:
    """Return the likeliest tokens one after another from the whole model, and how near the second likeliest came."""
    model = make_varied_model(name, torch_device, dtype)
    rows, min_margin = [], float("inf")
    for prompt in PROMPTS:
        source, output_ids = (prompt, [1]) if name.startswith("t5") else ([], list(prompt))
        start = len(output_ids)
        for _ in range(NUM_NEW_TOKENS):
            tokens = torch.tensor([output_ids], device=torch_device)
            if source:
                logits = model(torch.tensor([source], device=torch_device), tokens)
            elif name.startswith("mpt"):
                logits = model(tokens)
            else:
                logits = model(tokens, torch.arange(len(output_ids), device=torch_device)[None])
            top_logits = logits[-1, 0, :VOCAB].double().topk(2)
            min_margin = min(min_margin, float(top_logits.values[0] - top_logits.values[1]))
            output_ids.append(int(top_logits.indices[0]))
        rows.append(output_ids[start:])
    return rows, min_margin


@pytest.mark.parametrize("name", [*DECODERS, "t5", "t5 v1.1", "t5 as CPM"])
def test_greedy_tokens_match_cpu_and_uncached_model(name: str, torch_device: torch.device) -> None:
    expected, min_margin = generate_without_cache(name, CPU, torch.float64)
    assert min_margin > 1e-4, "a tie would be decided by rounding: take other weights"
    assert len({token for row in expected for token in row}) > 6, "there is something to say"
    assert generate_tokens(name, torch_device) == expected
    assert generate_without_cache(name, torch_device, torch.float32)[0] == expected


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_16_bit_generation_ends_row_at_eos(name: str, torch_device: torch.device) -> None:
    rows = generate_tokens(name, torch_device, torch.bfloat16)
    assert [len(row) for row in rows] == [NUM_NEW_TOKENS] * 3 and all(
        0 <= token < VOCAB for row in rows for token in row
    )
    rows_without_eos = generate_tokens(name, torch_device)
    rows_with_eos = generate_tokens(name, torch_device, eos_id=rows_without_eos[0][2])
    assert rows_with_eos[0] == rows_without_eos[0][: rows_without_eos[0].index(rows_without_eos[0][2]) + 1]


def test_sampled_tokens_match_cpu_for_same_keys(torch_device: torch.device) -> None:
    """The random numbers are of the host, so only rounding could choose another token."""
    options = {"sampling": Sampling(temperature=0.7, top_k=20)}
    tokens = generate_tokens("gpt2", torch_device, **options)
    assert tokens == generate_tokens("gpt2", CPU, **options) != generate_tokens("gpt2", CPU)
