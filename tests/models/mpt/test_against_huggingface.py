"""Hugging Face's MPT with the same weights: logits, loss, every gradient, and weights after 20 steps.

The reference is made from a random configuration; nothing is downloaded. Its biases and its softmax are in fp32
whatever the model is in: in fp64 ``compute_in_model_dtype`` keeps both in fp64, else 1e-7 would be what there can be.
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
from tests.helpers.decoder_against_huggingface import HuggingFaceComparison
from tests.models.gpt2.test_against_huggingface import DTYPES, SEQ, VOCAB, random_batch

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
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
def compute_in_model_dtype() -> Iterator[None]:
    """Let their ``.float()`` make fp64 of integers and leave fp64 as it is."""

    def to_double(x: torch.Tensor) -> torch.Tensor:
        return x.double()

    with patch.object(torch.Tensor, "float", to_double):
        yield


def make_reference(case: str) -> tuple[Any, Config]:
    """Return their model and our configuration of it."""
    from transformers import MptConfig, MptForCausalLM

    dtype, overrides, attention = CASES[case]
    torch.manual_seed(0)
    settings = {"vocab_size": VOCAB, "max_seq_len": SEQ, "d_model": 32, "n_layers": 2, "n_heads": 4, **overrides}
    model = MptForCausalLM(MptConfig(**settings, attn_config=attention)).to(DTYPES[dtype])
    with torch.no_grad():  # norms away from 1, so that they matter
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    config = config_from_values(FORMAT.values(model.config.to_dict()), family="mpt")
    prepare(model, config)
    return model, config


CASE_DTYPES = {case: settings[0] for case, settings in CASES.items()}
COMPARISON = HuggingFaceComparison(FORMAT, CASE_DTYPES, make_reference, compute_in_model_dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_logits_loss_and_gradients_match_hugging_face(case: str, size: int) -> None:
    COMPARISON.check(case, size)


@pytest.mark.parametrize("case", CASES)
def test_weight_round_trip_is_bitwise_on_any_tensor_ranks(case: str) -> None:
    COMPARISON.check_round_trip(case, (1, 2))


def test_unprepared_hugging_face_model_ignores_alibi_bias_max() -> None:
    """What ``prepare`` is for: should their model look at ``alibi_bias_max`` one day, this fails, and it can go."""
    case = "fp64 untied, 12 heads, steeper, clipped"
    model, config = make_reference(case)
    del model.transformer.build_mpt_alibi_tensor  # what prepare put there
    with torch.no_grad():
        difference = (model(random_batch(0)[0]).logits - COMPARISON.run_huggingface(case)[2]).abs().max()
    assert difference > 1e-3


def test_built_model_matches_hugging_face_size() -> None:
    _, config = make_reference("fp32")
    our_model = build_model(config, ParallelContext())
    assert sum(p.numel() for p in our_model.parameters()) == sum(
        t.numel() for t in make_reference("fp32")[0].parameters()
    )
