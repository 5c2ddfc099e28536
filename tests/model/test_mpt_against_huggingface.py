"""Hugging Face's MPT with the same weights: logits, loss, every gradient, and weights after 20 steps.

The reference is made from a random configuration; nothing is downloaded. Its biases and its softmax are in fp32
whatever the model is in: in fp64 ``in_its_own_dtype`` keeps both in fp64, else 1e-7 would be what there can be.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from megatron.checkpoint.hf.mpt import FORM, build, prepare
from megatron.config import Config
from megatron.model import MptModel, mpt_sizes_from
from megatron.mpu.groups import Group
from megatron.mpu.shard import shard_of
from megatron.optim import build_optimizer
from tests.harness import run_ranks
from tests.model.samples import gradients_of, joined, place_of, worst_relative
from tests.model.test_against_huggingface import ALLOWED, BATCH, DTYPES, LR, SEQ, STEPS, VOCAB, text
from tests.mpu.whole import fill, whole_world

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
TRAINED = "fp64"


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
    config = Config.of_values(FORM.values(model.config.to_dict()), family="mpt")
    prepare(model, config)
    return model, config


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
    model = MptModel(mpt_sizes_from(config.model, config.mpt), place_of(group)).to(dtype)
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


def our_loss(model: MptModel, step: int) -> torch.Tensor:
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
    for size in (1, 2):
        parts = [shards(kind, rank, size) for rank in range(size)]
        back = FORM.from_ours(joined(parts), config)
        for name, tensor in back.items():
            assert tensor.equal(before[name]), name
        assert {"lm_head.weight", *back} == set(before)


def shards(kind: str, rank: int, size: int) -> Any:
    """Return what a tensor rank holds of the weights; none talks to the others."""
    config, before, *_ = reference(kind)
    model = MptModel(mpt_sizes_from(config.model, config.mpt), place_of(Group(tuple(range(size)), rank))).double()
    for name, weight in FORM.to_ours(before, config).items():
        parameter = dict(model.named_parameters())[name]
        shard_of(parameter).unpadded(parameter.data).copy_(shard_of(parameter).cut(weight))
    dtype = DTYPES[KINDS[kind][0]]
    return {name: (shard_of(p), p.detach().to(dtype)) for name, p in model.named_parameters()}


def test_without_the_setting_their_model_takes_a_slope_of_eight() -> None:
    """What ``prepare`` is for: should their model look at ``alibi_bias_max`` one day, this fails, and it can go."""
    kind = "fp64 untied, 12 heads, steeper, clipped"
    model, config = make_reference(kind)
    del model.transformer.build_mpt_alibi_tensor  # what prepare put there
    with torch.no_grad():
        difference = (model(text(0)[0]).logits - reference(kind)[2]).abs().max()
    assert difference > 1e-3


def test_our_model_of_their_configuration_has_their_sizes() -> None:
    _, config = make_reference("fp32")
    built = build(config.model, config)
    assert sum(p.numel() for p in built.parameters()) == sum(t.numel() for t in make_reference("fp32")[0].parameters())
