"""Greedy generation on the device: the CPU's tokens, and with the cache those of the whole model without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.generate import Sampling, generate_gpt2, generate_t5
from tests.gpu.families import FAMILIES, VOCAB, built

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
NEW = 12
PROMPTS = [[5, 17, 3, 99, 42, 7, 8], [200], [11, 12, 13, 14]]
DECODERS = ["gpt2", "gpt2 untied", "llama", "mpt"]


def talkative(name: str, place: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Return a model whose words depend on what came before: with smaller weights some say one word for ever."""
    model = built(FAMILIES[name], dtype, place).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.5)
    return model


def generated(name: str, place: torch.device, dtype: torch.dtype = torch.float32, **how: Any) -> list[list[int]]:
    model = talkative(name, place, dtype)
    if name.startswith("t5"):
        return generate_t5(model, PROMPTS, start_id=1, max_new_tokens=NEW, **how)
    return generate_gpt2(model, PROMPTS, max_new_tokens=NEW, **how)


@torch.no_grad()
def without_cache(name: str, place: torch.device, dtype: torch.dtype) -> tuple[list[list[int]], float]:
    """Return the likeliest tokens one after another from the whole model, and how near the second likeliest came."""
    model = talkative(name, place, dtype)
    rows, nearest = [], float("inf")
    for prompt in PROMPTS:
        source, answer = (prompt, [1]) if name.startswith("t5") else ([], list(prompt))
        start = len(answer)
        for _ in range(NEW):
            tokens = torch.tensor([answer], device=place)
            if source:
                logits = model(torch.tensor([source], device=place), tokens)
            elif name.startswith("mpt"):
                logits = model(tokens)
            else:
                logits = model(tokens, torch.arange(len(answer), device=place)[None])
            best = logits[-1, 0, :VOCAB].double().topk(2)
            nearest = min(nearest, float(best.values[0] - best.values[1]))
            answer.append(int(best.indices[0]))
        rows.append(answer[start:])
    return rows, nearest


@pytest.mark.parametrize("name", [*DECODERS, "t5", "t5 v1.1", "t5 as CPM"])
def test_greedy_tokens_are_the_cpus_and_those_of_the_whole_model(name: str, place: torch.device) -> None:
    wanted, nearest = without_cache(name, CPU, torch.float64)
    assert nearest > 1e-4, "a tie would be decided by rounding: take other weights"
    assert len({token for row in wanted for token in row}) > 6, "there is something to say"
    assert generated(name, place) == wanted
    assert without_cache(name, place, torch.float32)[0] == wanted


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_in_16_bits_a_row_is_generated_whatever_stands_beside_it_and_ends_at_its_end(
    name: str, place: torch.device
) -> None:
    rows = generated(name, place, torch.bfloat16)
    assert [len(row) for row in rows] == [NEW] * 3 and all(0 <= token < VOCAB for row in rows for token in row)
    first = generated(name, place)
    ended = generated(name, place, eos_id=first[0][2])
    assert ended[0] == first[0][: first[0].index(first[0][2]) + 1]


def test_sampled_tokens_are_the_cpus_for_the_same_keys(place: torch.device) -> None:
    """The random numbers are of the host, so only rounding could choose another token."""
    how = {"sampling": Sampling(temperature=0.7, top_k=20)}
    found = generated("gpt2", place, **how)
    assert found == generated("gpt2", CPU, **how) != generated("gpt2", CPU)
