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
from tests.helpers.decoder_against_huggingface import Against
from tests.helpers.model_samples import worst_relative
from tests.helpers.modern_decoders import FLAGS, LENGTH, MODERN, VOCAB, Modern, drawn, in_its_own_dtype
from tests.models.gpt2.test_against_huggingface import text

RANDOM = {f"random {seed}": drawn(seed) for seed in range(24)}
QUICK = ("random 0", "random 2", "random 7", "random 9")
"""Of the random ones: a Gemma 3, a Qwen 2, a Gemma 2 and an OLMo 2."""
MODELS = {**MODERN, **RANDOM}
CUT = ("qwen3", "gemma3", "olmo2")
"""Those that the short run cuts over tensor ranks, and goes on from prompts with."""
ALONE = (1e-12, 1e-13, 1e-12, None)
"""(logits, loss, gradients, weights) of one process."""


SOME = [pytest.param(kind, marks=() if kind in CUT else pytest.mark.slow) for kind in MODERN]


def make_reference(kind: str) -> tuple[Any, Config]:
    """Return their model and our configuration of it."""
    model = MODELS[kind]
    return model.their_model(), model.our_config()


def case(kinds: dict[str, Modern]) -> Against:
    return Against(FORMAT, dict.fromkeys(kinds, "fp64"), make_reference, in_its_own_dtype)


TOGETHER = {groups: case({n: m for n, m in MODERN.items() if m.groups == groups}) for groups in (2, 3)}
"""Models by the number of tensor ranks that they are cut over."""
SINGLE = {name: case({name: model}) for name, model in MODELS.items()}


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=() if name in (*MODERN, *QUICK) else pytest.mark.slow) for name in MODELS]
)
def test_the_same_weights_give_the_same_logits_loss_and_gradients(kind: str) -> None:
    one = SINGLE[kind]
    object.__setattr__(one, "allowed", {"fp64": ALONE})
    one.check(kind, 1)


@pytest.mark.parametrize("kind", SOME)
def test_two_or_three_tensor_ranks_give_the_same_logits_loss_and_gradients(kind: str) -> None:
    TOGETHER[MODERN[kind].groups].check(kind, MODERN[kind].groups)


@pytest.mark.parametrize("kind", MODERN)
def test_weights_come_back_bit_for_bit_from_any_number_of_tensor_ranks(kind: str) -> None:
    SINGLE[kind].check_there_and_back(kind, (1, MODERN[kind].groups))


@pytest.mark.parametrize("kind", MODERN)
def test_the_flags_of_each_are_its_settings(kind: str) -> None:
    """And with their norms, angles and softmax in fp32, as they are, their logits are ours to fp32's rounding."""
    model = MODERN[kind]
    config = model.our_config()
    words = f"{FLAGS} {model.flags} --seq-length {LENGTH} --data-path none --device cpu".split()
    parsed = parse(words, world_size=1, family="llama")
    assert parsed.identity() == config.identity() and parsed.model == config.model
    _, before, logits, *_ = SINGLE[kind].reference(kind)
    theirs = model.their_model()
    theirs.load_state_dict(before)
    with torch.no_grad():
        assert worst_relative({"": theirs(text(0)[0]).logits}, {"": logits})[0] < 1e-6


@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_greedy_generation_is_theirs(kind: str) -> None:
    """Prompts of several lengths, far beyond the window; each of theirs is alone, so that nothing is padded.

    Heads are untied, for a random model with a tied one says its last token once more.
    """
    theirs = MODERN[kind].their_model(tie_word_embeddings=False).eval()
    config = config_from_huggingface(theirs.config.to_dict())
    ours = build_model(config, ParallelContext()).double().eval()
    ours.load_state_dict(FORMAT.to_ours(theirs.state_dict(), config))
    prompts = [[5, 17, 3, 60, 2], [42, 1, 3, 8, 9, 77, 5, 6, 2, 20, 21, 22], [7]]
    with in_its_own_dtype():
        wanted = [
            theirs.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    assert len({token for row in wanted for token in row}) > 5
    assert generate_gpt2(ours, prompts, max_new_tokens=12) == wanted
    assert all(token < VOCAB for row in wanted for token in row)
