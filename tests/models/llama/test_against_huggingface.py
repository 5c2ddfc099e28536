"""Hugging Face's LLaMA with the same weights: logits, loss, every gradient, and weights after 20 steps.

The reference is made from a random configuration; nothing is downloaded. Its norms and its angles are in fp32 whatever
the model is in, which leaves 1e-7: in fp64 ``in_its_own_dtype`` keeps both in fp64.
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
from tests.helpers.decoder_against_huggingface import Against
from tests.models.gpt2.test_against_huggingface import DTYPES, VOCAB

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
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
def in_its_own_dtype() -> Iterator[None]:
    """Let their norms, angles and softmax compute in fp64, by the same formulas."""
    from transformers.models.llama import modeling_llama as theirs

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def angles(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        freqs = position_ids[..., None].double() * frequencies(self.config)
        both = torch.cat((freqs, freqs), dim=-1)
        return both.cos(), both.sin()

    def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.softmax(x, dim)

    with ExitStack() as stack:
        stack.enter_context(patch.object(theirs.LlamaRMSNorm, "forward", norm))
        stack.enter_context(patch.object(theirs.LlamaRotaryEmbedding, "forward", angles))
        stack.enter_context(patch.object(theirs.nn.functional, "softmax", softmax))
        yield


def frequencies(config: Any) -> torch.Tensor:
    """Return their frequencies in fp64, by the formulas of ``modeling_rope_utils``."""
    rope = config.rope_parameters
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    if rope["rope_type"] == "default":
        return plain
    old = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    lengths = 2 * torch.pi / plain
    slow = torch.where(lengths > old / low, plain / rope["factor"], plain)
    smooth = (old / lengths - low) / (high - low)
    between = (1 - smooth) * slow / rope["factor"] + smooth * slow
    is_between = ~(lengths < old / high) & ~(lengths > old / low)
    return torch.where(is_between, between, slow)


def make_reference(kind: str) -> tuple[Any, Config]:
    """Return their model and our configuration of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    dtype, own = KINDS[kind]
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB, "max_position_embeddings": 32, "hidden_size": 32, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "bos_token_id": 0,
        "eos_token_id": 0, "rms_norm_eps": 1e-3, **own,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(DTYPES[dtype])
    with torch.no_grad():  # norms and biases away from 1 and 0, so that each of them matters
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, config_from_values(FORMAT.values(model.config.to_dict()), family="llama")


DTYPE_OF = {kind: settings[0] for kind, settings in KINDS.items()}
CASE = Against(FORMAT, DTYPE_OF, make_reference, in_its_own_dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_the_same_weights_give_the_same_logits_loss_and_gradients(kind: str, size: int) -> None:
    CASE.check(kind, size)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_back_bit_for_bit_from_any_number_of_tensor_ranks(kind: str) -> None:
    CASE.check_there_and_back(kind, (1, 2, 4))


def test_a_rank_holds_whole_groups() -> None:
    """Rows go by group: its queries, its key, its value, as the conversion has them."""
    config, before, *_ = CASE.reference("fp64")
    whole = FORMAT.to_ours(before, config)["layers.1.attention.query_key_value.weight"]
    second = CASE.shards("fp64", 1, 4)["layers.1.attention.query_key_value.weight"][1]
    assert second.equal(whole[16:32])
    query, key, value = (before[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    assert second.equal(torch.cat([query[8:16], key[4:8], value[4:8]]))


def test_our_model_of_their_configuration_has_their_sizes() -> None:
    model, config = make_reference("fp64 tied, biases, llama3")
    built = build_model(config, ParallelContext())
    assert sum(p.numel() for p in built.parameters()) == sum(p.numel() for p in model.parameters())
    sizes = model_args(config)
    assert sizes.rotary == Rotary(
        head_size=4, base=500.0, scaling="llama3", factor=4.0, low_frequency_factor=1.0, high_frequency_factor=4.0,
        original_positions=16,
    )  # fmt: skip
