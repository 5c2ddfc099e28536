"""Qwen 2 and 3, Llama 3, Mistral, Gemma 2 and 3, OLMo 2 with Hugging Face's weights: logits, loss, every gradient.

The references are random models of ``transformers``' own classes with every feature on and odd sizes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.checkpoint.huggingface.config import config_from_huggingface
from megatron.config import Config, parse
from megatron.generate import generate_gpt2
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.llama.huggingface import FORMAT
from megatron.models.registry import build_model
from tests.helpers.decoder_against_huggingface import HuggingFaceComparison
from tests.helpers.model_samples import worst_relative_error
from tests.helpers.modern_decoders import FLAGS, MODEL_CASES, SEQ_LENGTH, VOCAB, ModelCase, disable_upcasts, random_case
from tests.models.gpt2.test_against_huggingface import random_batch

RANDOM_MODELS = {f"random {seed}": random_case(seed) for seed in range(24)}
QUICK_NAMES = ("random 0", "random 2", "random 7", "random 9")
"""Of the random ones: a Gemma 3, a Qwen 2, a Gemma 2 and an OLMo 2."""
MODELS = {**MODEL_CASES, **RANDOM_MODELS}
SHARDED_NAMES = ("qwen3", "gemma3", "olmo2")
"""Those that the short run cuts over tensor ranks, and goes on from prompts with."""
SINGLE_PROCESS_TOLERANCES = (1e-12, 1e-13, 1e-12, None)
"""(logits, loss, gradients, weights) of one process."""


MODEL_PARAMS = [pytest.param(name, marks=() if name in SHARDED_NAMES else pytest.mark.slow) for name in MODEL_CASES]


def make_reference(name: str) -> tuple[Any, Config]:
    """Return their model and our configuration of it."""
    model = MODELS[name]
    return model.huggingface_model(), model.our_config()


def make_comparison(models: dict[str, ModelCase]) -> HuggingFaceComparison:
    return HuggingFaceComparison(FORMAT, dict.fromkeys(models, "fp64"), make_reference, disable_upcasts)


COMPARISONS_BY_GROUPS = {
    groups: make_comparison({n: m for n, m in MODEL_CASES.items() if m.num_kv_heads == groups}) for groups in (2, 3)
}
"""Models by the number of tensor ranks that they are cut over."""
COMPARISONS = {name: make_comparison({name: model}) for name, model in MODELS.items()}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in (*MODEL_CASES, *QUICK_NAMES) else pytest.mark.slow) for name in MODELS],
)
def test_logits_loss_and_gradients_match_hugging_face(name: str) -> None:
    comparison = COMPARISONS[name]
    object.__setattr__(comparison, "allowed", {"fp64": SINGLE_PROCESS_TOLERANCES})
    comparison.check(name, 1)


@pytest.mark.parametrize("name", MODEL_PARAMS)
def test_tensor_ranks_match_hugging_face(name: str) -> None:
    COMPARISONS_BY_GROUPS[MODEL_CASES[name].num_kv_heads].check(name, MODEL_CASES[name].num_kv_heads)


@pytest.mark.parametrize("name", MODEL_CASES)
def test_weight_round_trip_is_bitwise_on_any_tensor_ranks(name: str) -> None:
    COMPARISONS[name].check_round_trip(name, (1, MODEL_CASES[name].num_kv_heads))


@pytest.mark.parametrize("name", MODEL_CASES)
def test_flags_match_hugging_face_settings(name: str) -> None:
    """And with their norms, angles and softmax in fp32, as they are, their logits are ours to fp32's rounding."""
    model = MODEL_CASES[name]
    config = model.our_config()
    flags = f"{FLAGS} {model.flags} --seq-length {SEQ_LENGTH} --data-path none --device cpu".split()
    parsed = parse(flags, world_size=1, family="llama")
    assert parsed.identity() == config.identity() and parsed.model == config.model
    _, before, logits, *_ = COMPARISONS[name].run_huggingface(name)
    hf_model = model.huggingface_model()
    hf_model.load_state_dict(before)
    with torch.no_grad():
        assert worst_relative_error({"": hf_model(random_batch(0)[0]).logits}, {"": logits})[0] < 1e-6


@pytest.mark.parametrize("name", MODEL_PARAMS)
@torch.no_grad()
def test_greedy_generation_matches_hugging_face(name: str) -> None:
    """Prompts of several lengths, far beyond the window; each of theirs is alone, so that nothing is padded.

    Heads are untied, for a random model with a tied one says its last token once more.
    """
    hf_model = MODEL_CASES[name].huggingface_model(tie_word_embeddings=False).eval()
    config = config_from_huggingface(hf_model.config.to_dict())
    our_model = build_model(config, ParallelContext()).double().eval()
    our_model.load_state_dict(FORMAT.to_ours(hf_model.state_dict(), config))
    prompts = [[5, 17, 3, 60, 2], [42, 1, 3, 8, 9, 77, 5, 6, 2, 20, 21, 22], [7]]
    with disable_upcasts():
        expected = [
            hf_model.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    assert len({token for row in expected for token in row}) > 5
    assert generate_gpt2(our_model, prompts, max_new_tokens=12) == expected
    assert all(token < VOCAB for row in expected for token in row)
