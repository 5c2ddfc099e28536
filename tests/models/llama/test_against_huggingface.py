"""Hugging Face's LLaMA with the same weights: logits, loss, every gradient, and weights after 20 steps.

The reference is made from a random configuration; nothing is downloaded. Its norms and its angles are in fp32 whatever
the model is in, which leaves 1e-7: in fp64 ``compute_in_model_dtype`` keeps both in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.arguments import config_from_values
from megatron.config import Config
from megatron.models.common.decoder import model_args
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.llama.huggingface import FORMAT
from megatron.models.registry import build_model
from megatron.ops.positions import Rotary
from tests.helpers.decoder_against_huggingface import HuggingFaceComparison
from tests.models.gpt2.test_against_huggingface import DTYPES, VOCAB

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp64": ("fp64", {}),
    "fp64 tied, biases, llama3": (
        "fp64",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "fp64 eager, wide heads": ("fp64", {"head_dim": 12, "num_key_value_heads": 8, "attn_implementation": "eager"}),
    "fp32": ("fp32", {}),
}
"""(number format, settings)"""


@contextmanager
def compute_in_model_dtype() -> Iterator[None]:
    """Let their norms, angles and softmax compute in fp64, by the same formulas."""
    from transformers.models.llama import modeling_llama as modeling

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def angles(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        freqs = position_ids[..., None].double() * rope_frequencies(self.config)
        doubled = torch.cat((freqs, freqs), dim=-1)
        return doubled.cos(), doubled.sin()

    def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.softmax(x, dim)

    with ExitStack() as stack:
        stack.enter_context(patch.object(modeling.LlamaRMSNorm, "forward", norm))
        stack.enter_context(patch.object(modeling.LlamaRotaryEmbedding, "forward", angles))
        stack.enter_context(patch.object(modeling.nn.functional, "softmax", softmax))
        yield


def rope_frequencies(config: Any) -> torch.Tensor:
    """Return their frequencies in fp64, by the formulas of ``modeling_rope_utils``."""
    rope = config.rope_parameters
    base = 1.0 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    if rope["rope_type"] == "default":
        return base
    original_positions = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelengths = 2 * torch.pi / base
    scaled = torch.where(wavelengths > original_positions / low, base / rope["factor"], base)
    smooth = (original_positions / wavelengths - low) / (high - low)
    interpolated = (1 - smooth) * scaled / rope["factor"] + smooth * scaled
    is_between = ~(wavelengths < original_positions / high) & ~(wavelengths > original_positions / low)
    return torch.where(is_between, interpolated, scaled)


def make_reference(case: str) -> tuple[Any, Config]:
    """Return their model and our configuration of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    dtype, overrides = CASES[case]
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB, "max_position_embeddings": 32, "hidden_size": 32, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "bos_token_id": 0,
        "eos_token_id": 0, "rms_norm_eps": 1e-3, **overrides,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(DTYPES[dtype])
    with torch.no_grad():  # norms and biases away from 1 and 0, so that each of them matters
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, config_from_values(FORMAT.values(model.config.to_dict()), family="llama")


CASE_DTYPES = {case: settings[0] for case, settings in CASES.items()}
COMPARISON = HuggingFaceComparison(FORMAT, CASE_DTYPES, make_reference, compute_in_model_dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_logits_loss_and_gradients_match_hugging_face(case: str, size: int) -> None:
    COMPARISON.check(case, size)


@pytest.mark.parametrize("case", CASES)
def test_weight_round_trip_is_bitwise_on_any_tensor_ranks(case: str) -> None:
    COMPARISON.check_round_trip(case, (1, 2, 4))


def test_tensor_rank_holds_complete_query_groups() -> None:
    """Rows go by group: its queries, its key, its value, as the conversion has them."""
    config, before, *_ = COMPARISON.run_huggingface("fp64")
    full = FORMAT.to_ours(before, config)["layers.1.attention.query_key_value.weight"]
    rank_shard = COMPARISON.make_shards("fp64", 1, 4)["layers.1.attention.query_key_value.weight"][1]
    assert rank_shard.equal(full[16:32])
    query, key, value = (before[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    assert rank_shard.equal(torch.cat([query[8:16], key[4:8], value[4:8]]))


def test_built_model_matches_hugging_face_size() -> None:
    model, config = make_reference("fp64 tied, biases, llama3")
    our_model = build_model(config, ParallelContext())
    assert sum(p.numel() for p in our_model.parameters()) == sum(p.numel() for p in model.parameters())
    args = model_args(config)
    assert args.rotary == Rotary(
        head_size=4, base=500.0, scaling="llama3", factor=4.0, low_frequency_factor=1.0, high_frequency_factor=4.0,
        original_positions=16,
    )  # fmt: skip
