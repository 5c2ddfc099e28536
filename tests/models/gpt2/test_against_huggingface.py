"""Hugging Face's GPT-2 with the same weights: logits, loss, every gradient, and weights after 20 steps.

The reference is made from a random configuration; nothing is downloaded. Its loss is taken from its logits here,
because ``labels=`` would cast them to fp32.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import model_args_from
from megatron.models.gpt2.huggingface import from_ours, model_fields, to_ours
from megatron.mpu.shard import set_shard, shard_of
from megatron.optim import build_optimizer
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import BATCH, SEQ, VOCAB, gradients_of, joined, place_of, worst_relative
from tests.helpers.whole import fill, whole_world

HEADS, STEPS, LR = 4, 20, 0.1
# (logits, as part of the largest; loss, relative; gradients, relative Frobenius; weights after all steps)
ALLOWED = {"fp64": (1e-12, 1e-13, 1e-11, 1e-10), "fp32": (2e-6, 1e-6, 3e-6, None)}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
KINDS = [
    ("fp64", True, "sdpa"),
    ("fp64", False, "sdpa"),
    ("fp64", True, "eager"),
    ("fp32", True, "sdpa"),
    ("fp32", False, "eager"),
]
CUT = KINDS[1]


def is_trained(kind) -> bool:
    """Return whether this kind is compared after the steps as well."""
    return kind[0] == "fp64" and kind[2] == "sdpa"


def text(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of a step."""
    whole = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))
    return whole[:, :-1], whole[:, 1:]


def make_reference(dtype, tied, attention):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=32, n_layer=2, n_head=HEADS, tie_word_embeddings=tied,
        bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation=attention,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(DTYPES[dtype])
    with torch.no_grad():  # biases and norms away from 0 and 1, so that each of them matters
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def reference_loss(model, step):
    tokens, labels = text(step)
    logits = model(tokens, use_cache=False).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@functools.cache
def reference(kind):
    """Return configuration, weights before, logits, loss, gradients, and weights after the steps, under their names."""
    dtype, tied, attention = kind
    model = make_reference(dtype, tied, attention)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits, loss = reference_loss(model, 0)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    if is_trained(kind):
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for step in range(STEPS):
            optimizer.zero_grad()
            reference_loss(model, step)[1].backward()
            optimizer.step()
    after = {name: p.detach() for name, p in model.named_parameters()}
    return model.config, before, logits.detach(), loss.item(), gradients, after


def ours(rank, size):
    """Return what this rank sees for each kind: its logits, the loss, its gradients, its weights after the steps."""
    return {kind: one(whole_world(rank, size), kind) for kind in KINDS}


def ours_of_parts(rank, size):
    """Return the same of one kind with the sequence cut over the ranks."""
    return one(whole_world(rank, size), CUT, cuts=True)


def one(group, kind, cuts=False):
    config, before, *_ = reference(kind)
    sizes = model_args_from(None, **model_fields(config), kv_hidden_size=config.n_embd // config.n_head)
    model = DecoderModel(sizes, replace(place_of(group), sequence_parallel=cuts)).to(DTYPES[kind[0]])
    weights = to_ours(before, HEADS)
    assert sorted(weights) == sorted(name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        set_shard(parameter, shard_of(parameter))
        fill(parameter, weights[name])
    with torch.no_grad():
        logits = model(text(0)[0], torch.arange(SEQ).expand(BATCH, SEQ))
    optimizer = build_optimizer(model.parameters(), name="sgd", lr=LR, dtype=DTYPES[kind[0]], tensor=group)
    loss = our_loss(model, 0)
    loss.backward()
    optimizer.reducer.sum_over_groups()
    gradients = gradients_of(model)
    if is_trained(kind):
        optimizer.zero_grad()
        train(model, optimizer)
    after = {name: (shard_of(p), p.detach()) for name, p in model.named_parameters()}
    return logits, loss.item(), gradients, after


def our_loss(model, step):
    tokens, labels = text(step)
    positions = torch.arange(SEQ).expand(BATCH, SEQ)
    total, count = model(tokens, positions, labels=labels, loss_mask=torch.ones(BATCH, SEQ))
    return total / count


def train(model, optimizer):
    for step in range(STEPS):
        our_loss(model, step).backward()
        optimizer.step()


@functools.cache
def seen(size):
    """Return, for each kind, the results of all ranks."""
    for kind in KINDS:
        reference(kind)  # ahead of the fork, once for all
    ranks = run_ranks(size, ours, size) if size > 1 else [ours(0, 1)]
    return {kind: [results[kind] for results in ranks] for kind in KINDS}


def theirs(parts, names):
    """Return the global tensors of all ranks' parts under Hugging Face's names."""
    found = from_ours(joined(parts), HEADS)
    return {name: found[name] for name in names}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]} {'tied' if kind[1] else 'untied'} {kind[2]}")
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_the_same_weights_give_the_same_logits_loss_and_gradients(kind, size):
    check_equal(kind, seen(size)[kind])


def test_the_same_weights_give_the_same_with_the_sequence_cut_over_two_ranks():
    reference(CUT)
    check_equal(CUT, run_ranks(2, ours_of_parts, 2))


def check_equal(kind, ranks):
    _, before, logits, loss, gradients, after = reference(kind)
    together = torch.cat([rank[0] for rank in ranks], dim=-1)[..., :VOCAB].transpose(0, 1)
    observed = [(together - logits).abs().max().item() / logits.abs().max().item()]
    observed.append(max(abs(rank[1] - loss) / loss for rank in ranks))
    worst, where = worst_relative(theirs([rank[2] for rank in ranks], gradients), gradients)
    observed.append(worst)
    if is_trained(kind):
        moved, _ = worst_relative(theirs([rank[3] for rank in ranks], after), after)
        observed.append(moved)
        assert all(torch.linalg.vector_norm(after[n] - before[n]) > 1e-3 * before[n].norm() for n in after), "it trains"
    print(
        f"t={len(ranks)} {kind}: observed", [f"{value:.1e}" for value in observed], "allowed", ALLOWED[kind[0]], where
    )
    for what, value, allowed in zip(("logits", "loss", where, "weights"), observed, ALLOWED[kind[0]], strict=False):
        assert value <= allowed, what
