"""Hugging Face's MPT with the same weights: logits, loss, every gradient, and weights after 20 steps.

The reference is made from a random configuration; nothing is downloaded. Its biases and its softmax are in fp32
whatever the model is in: in fp64 ``in_its_own_dtype`` keeps both in fp64, else 1e-7 would be what there can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.arguments import config_from_values
from megatron.config import Config
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.mpt.huggingface import FORMAT, prepare
from megatron.models.registry import build_model
from tests.helpers.decoder_against_huggingface import Against
from tests.models.gpt2.test_against_huggingface import DTYPES, SEQ, VOCAB, text

KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp64": ("fp64", {}, {}),
    "fp64 untied, 12 heads, steeper, clipped": (
        "fp64",
        {"tie_word_embeddings": False, "d_model": 48, "n_heads": 12},
        {"alibi_bias_max": 12, "clip_qkv": 0.5},
    ),
    "fp32": ("fp32", {"n_heads": 8}, {}),
}
"""(number format, settings of the model, settings of its attention)"""


@contextmanager
def in_its_own_dtype() -> Iterator[None]:
    """Let their ``.float()`` make fp64 of integers and leave fp64 as it is."""

    def keep(x: torch.Tensor) -> torch.Tensor:
        return x.double()

    with patch.object(torch.Tensor, "float", keep):
        yield


def make_reference(kind: str) -> tuple[Any, Config]:
    """Return their model and our configuration of it."""
    from transformers import MptConfig, MptForCausalLM

    dtype, own, attention = KINDS[kind]
    torch.manual_seed(0)
    settings = {"vocab_size": VOCAB, "max_seq_len": SEQ, "d_model": 32, "n_layers": 2, "n_heads": 4, **own}
    model = MptForCausalLM(MptConfig(**settings, attn_config=attention)).to(DTYPES[dtype])
    with torch.no_grad():  # norms away from 1, so that they matter
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    config = config_from_values(FORMAT.values(model.config.to_dict()), family="mpt")
    prepare(model, config)
    return model, config


DTYPE_OF = {kind: settings[0] for kind, settings in KINDS.items()}
CASE = Against(FORMAT, DTYPE_OF, make_reference, in_its_own_dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_the_same_weights_give_the_same_logits_loss_and_gradients(kind: str, size: int) -> None:
    CASE.check(kind, size)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_back_bit_for_bit_from_any_number_of_tensor_ranks(kind: str) -> None:
    CASE.check_there_and_back(kind, (1, 2))


def test_without_the_setting_their_model_takes_a_slope_of_eight() -> None:
    """What ``prepare`` is for: should their model look at ``alibi_bias_max`` one day, this fails, and it can go."""
    kind = "fp64 untied, 12 heads, steeper, clipped"
    model, config = make_reference(kind)
    del model.transformer.build_mpt_alibi_tensor  # what prepare put there
    with torch.no_grad():
        difference = (model(text(0)[0]).logits - CASE.reference(kind)[2]).abs().max()
    assert difference > 1e-3


def test_our_model_of_their_configuration_has_their_sizes() -> None:
    _, config = make_reference("fp32")
    built = build_model(config, ParallelContext())
    assert sum(p.numel() for p in built.parameters()) == sum(t.numel() for t in make_reference("fp32")[0].parameters())
