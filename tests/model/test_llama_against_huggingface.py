"""Hugging Face's LLaMA with the same weights: logits, loss, every gradient, and weights after 20 steps.

The reference is made from a random configuration; nothing is downloaded. Its norms and its angles are in fp32 whatever
the model is in, which leaves 1e-7: in fp64 ``in_its_own_dtype`` keeps both in fp64.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from megatron.checkpoint.hf.llama import FORM, build
from megatron.config import Config
from megatron.model import LlamaModel, llama_sizes_from
from megatron.mpu.groups import Group
from megatron.mpu.shard import shard_of
from megatron.ops.rotary import Rotary
from megatron.optim import build_optimizer
from tests.harness import run_ranks
from tests.model.samples import gradients_of, joined, place_of, worst_relative
from tests.model.test_against_huggingface import ALLOWED, BATCH, DTYPES, LR, SEQ, STEPS, VOCAB, text
from tests.mpu.whole import fill, whole_world

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
TRAINED = "fp64"


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
    return model, Config.of_values(FORM.values(model.config.to_dict()), family="llama")


def reference_loss(model: Any, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels = text(step)
    logits = model(tokens, use_cache=False).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@functools.cache
def reference(kind: str) -> tuple[Any, ...]:
    """Return configuration, weights before, logits, loss, gradients, and weights after the steps, under their names."""
    model, config = make_reference(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with in_its_own_dtype() if KINDS[kind][0] == "fp64" else nullcontext():
        logits, loss = reference_loss(model, 0)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        if kind == TRAINED:
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for step in range(STEPS):
                optimizer.zero_grad()
                reference_loss(model, step)[1].backward()
                optimizer.step()
    after = {name: p.detach() for name, p in model.named_parameters()}
    return config, before, logits.detach(), loss.item(), gradients, after


def ours(rank: int, size: int) -> dict[str, Any]:
    """Return what this rank sees for each kind: its logits, the loss, its gradients, its weights after the steps."""
    return {kind: one(whole_world(rank, size), kind) for kind in KINDS}


def one(group: Any, kind: str) -> Any:
    config, before, *_ = reference(kind)
    dtype = DTYPES[KINDS[kind][0]]
    model = LlamaModel(llama_sizes_from(config.model, config.llama), place_of(group)).to(dtype)
    weights = FORM.to_ours(before, config)
    assert sorted(weights) == sorted(name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.shard = shard_of(parameter)  # type: ignore[attr-defined]
        fill(parameter, weights[name])
    with torch.no_grad():
        logits = model(text(0)[0])
    loss = our_loss(model, 0)
    loss.backward()
    gradients = gradients_of(model)
    if kind == TRAINED:
        model.zero_grad()
        optimizer = build_optimizer(model.parameters(), name="sgd", lr=LR, dtype=dtype)
        for step in range(STEPS):
            our_loss(model, step).backward()
            optimizer.step()
    after = {name: (shard_of(p), p.detach()) for name, p in model.named_parameters()}
    return logits, loss.item(), gradients, after


def our_loss(model: LlamaModel, step: int) -> torch.Tensor:
    tokens, labels = text(step)
    total, count = model(tokens, labels=labels, loss_mask=torch.ones(BATCH, SEQ))
    return total / count


@functools.cache
def seen(size: int) -> dict[str, list[Any]]:
    """Return, for each kind, the results of all ranks."""
    for kind in KINDS:
        reference(kind)  # ahead of the fork, once for all
    ranks = run_ranks(size, ours, size) if size > 1 else [ours(0, 1)]
    return {kind: [results[kind] for results in ranks] for kind in KINDS}


def theirs(parts: list[Any], config: Config, names: Any) -> dict[str, torch.Tensor]:
    """Return the global tensors of all ranks' parts under Hugging Face's names."""
    found = FORM.from_ours(joined(parts), config)
    return {name: found[name] for name in names}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_same_weights_give_the_same_logits_loss_and_gradients(kind: str, size: int) -> None:
    config, before, logits, loss, gradients, after = reference(kind)
    ranks = seen(size)[kind]
    together = torch.cat([rank[0] for rank in ranks], dim=-1)[..., :VOCAB].transpose(0, 1)
    observed = [(together - logits).abs().max().item() / logits.abs().max().item()]
    observed.append(max(abs(rank[1] - loss) / loss for rank in ranks))
    worst, where = worst_relative(theirs([rank[2] for rank in ranks], config, gradients), gradients)
    observed.append(worst)
    if kind == TRAINED:
        moved, _ = worst_relative(theirs([rank[3] for rank in ranks], config, after), after)
        observed.append(moved)
        assert all(torch.linalg.vector_norm(after[n] - before[n]) > 1e-3 * before[n].norm() for n in after), "it trains"
    allowed = ALLOWED[KINDS[kind][0]]
    print(f"t={size} {kind}: observed", [f"{value:.1e}" for value in observed], "allowed", allowed, where)
    for what, value, limit in zip(("logits", "loss", where, "weights"), observed, allowed, strict=False):
        assert value <= limit, what


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_back_bit_for_bit_from_any_number_of_tensor_ranks(kind: str) -> None:
    config, before, *_ = reference(kind)
    for size in (1, 2, 4):
        back = FORM.from_ours(joined([shards(kind, rank, size) for rank in range(size)]), config)
        for name, tensor in back.items():
            assert tensor.equal(before[name]), name
        assert {"lm_head.weight", *back} == set(before)


def shards(kind: str, rank: int, size: int) -> Any:
    """Return what a tensor rank holds of the weights; none talks to the others."""
    config, before, *_ = reference(kind)
    place = place_of(Group(tuple(range(size)), rank))
    model = LlamaModel(llama_sizes_from(config.model, config.llama), place).to(DTYPES[KINDS[kind][0]])
    parameters = dict(model.named_parameters())
    for name, weight in FORM.to_ours(before, config).items():
        shard = shard_of(parameters[name])
        shard.unpadded(parameters[name].data).copy_(shard.cut(weight))
    return {name: (shard_of(p), p.detach()) for name, p in model.named_parameters()}


def test_a_rank_holds_whole_groups() -> None:
    """Rows go by group: its queries, its key, its value, as the conversion has them."""
    config, before, *_ = reference("fp64")
    whole = FORM.to_ours(before, config)["layers.1.attention.query_key_value.weight"]
    second = shards("fp64", 1, 4)["layers.1.attention.query_key_value.weight"][1]
    assert second.equal(whole[16:32])
    query, key, value = (before[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    assert second.equal(torch.cat([query[8:16], key[4:8], value[4:8]]))


def test_our_model_of_their_configuration_has_their_sizes() -> None:
    model, config = make_reference("fp64 tied, biases, llama3")
    built = build(config.model, config)
    assert sum(p.numel() for p in built.parameters()) == sum(p.numel() for p in model.parameters())
    sizes = llama_sizes_from(config.model, config.llama)
    assert sizes.rotary == Rotary(
        head_size=4, base=500.0, scaling="llama3", factor=4.0, low_frequency_factor=1.0, high_frequency_factor=4.0,
        original_positions=16,
    )  # fmt: skip
