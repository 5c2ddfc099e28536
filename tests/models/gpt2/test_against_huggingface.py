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
from tests.helpers.model_samples import (
    BATCH,
    SEQ,
    VOCAB,
    get_sharded_grads,
    join_shards,
    make_parallel_context,
    worst_relative_error,
)
from tests.helpers.whole import fill_shard, group_of_all_ranks

HEADS, STEPS, LR = 4, 20, 0.1
# (logits, as part of the largest; loss, relative; gradients, relative Frobenius; weights after all steps)
ALLOWED = {"fp64": (1e-12, 1e-13, 1e-11, 1e-10), "fp32": (2e-6, 1e-6, 3e-6, None)}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
CASES = [
    ("fp64", True, "sdpa"),
    ("fp64", False, "sdpa"),
    ("fp64", True, "eager"),
    ("fp32", True, "sdpa"),
    ("fp32", False, "eager"),
]
SEQUENCE_PARALLEL_CASE = CASES[1]


def is_trained(case) -> bool:
    """Return whether this kind is compared after the steps as well."""
    return case[0] == "fp64" and case[2] == "sdpa"


def random_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of a step."""
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def make_reference(dtype, is_tied, attention):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=32, n_layer=2, n_head=HEADS, tie_word_embeddings=is_tied,
        bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation=attention,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(DTYPES[dtype])
    with torch.no_grad():  # biases and norms away from 0 and 1, so that each of them matters
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def reference_loss(model, step):
    tokens, labels = random_batch(step)
    logits = model(tokens, use_cache=False).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@functools.cache
def reference(case):
    """Return configuration, weights before, logits, loss, gradients, and weights after the steps, under their names."""
    dtype, is_tied, attention = case
    model = make_reference(dtype, is_tied, attention)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits, loss = reference_loss(model, 0)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    if is_trained(case):
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for step in range(STEPS):
            optimizer.zero_grad()
            reference_loss(model, step)[1].backward()
            optimizer.step()
    after = {name: p.detach() for name, p in model.named_parameters()}
    return model.config, before, logits.detach(), loss.item(), gradients, after


def run_cases(rank, size):
    """Return what this rank sees for each kind: its logits, the loss, its gradients, its weights after the steps."""
    return {case: run_case(group_of_all_ranks(rank, size), case) for case in CASES}


def run_sequence_parallel(rank, size):
    """Return the same of one kind with the sequence cut over the ranks."""
    return run_case(group_of_all_ranks(rank, size), SEQUENCE_PARALLEL_CASE, is_sequence_parallel=True)


def run_case(group, case, is_sequence_parallel=False):
    config, before, *_ = reference(case)
    args = model_args_from(None, **model_fields(config), kv_hidden_size=config.n_embd // config.n_head)
    model = DecoderModel(args, replace(make_parallel_context(group), sequence_parallel=is_sequence_parallel)).to(
        DTYPES[case[0]]
    )
    weights = to_ours(before, HEADS)
    assert sorted(weights) == sorted(name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        set_shard(parameter, shard_of(parameter))
        fill_shard(parameter, weights[name])
    with torch.no_grad():
        logits = model(random_batch(0)[0], torch.arange(SEQ).expand(BATCH, SEQ))
    optimizer = build_optimizer(model.parameters(), name="sgd", lr=LR, dtype=DTYPES[case[0]], tensor=group)
    loss = compute_loss(model, 0)
    loss.backward()
    optimizer.reducer.sum_over_groups()
    gradients = get_sharded_grads(model)
    if is_trained(case):
        optimizer.zero_grad()
        train(model, optimizer)
    after = {name: (shard_of(p), p.detach()) for name, p in model.named_parameters()}
    return logits, loss.item(), gradients, after


def compute_loss(model, step):
    tokens, labels = random_batch(step)
    positions = torch.arange(SEQ).expand(BATCH, SEQ)
    total, count = model(tokens, positions, labels=labels, loss_mask=torch.ones(BATCH, SEQ))
    return total / count


def train(model, optimizer):
    for step in range(STEPS):
        compute_loss(model, step).backward()
        optimizer.step()


@functools.cache
def results_by_case(size):
    """Return, for each kind, the results of all ranks."""
    for case in CASES:
        reference(case)  # ahead of the fork, once for all
    ranks = run_ranks(size, run_cases, size) if size > 1 else [run_cases(0, 1)]
    return {case: [results[case] for results in ranks] for case in CASES}


def to_hf_names(shards, names):
    """Return the global tensors of all ranks' parts under Hugging Face's names."""
    tensors = from_ours(join_shards(shards), HEADS)
    return {name: tensors[name] for name in names}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {'tied' if case[1] else 'untied'} {case[2]}")
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_logits_loss_and_gradients_match_hugging_face(case, size):
    check_matches_reference(case, results_by_case(size)[case])


def test_sequence_parallel_matches_hugging_face():
    reference(SEQUENCE_PARALLEL_CASE)
    check_matches_reference(SEQUENCE_PARALLEL_CASE, run_ranks(2, run_sequence_parallel, 2))


def check_matches_reference(case, ranks):
    _, before, logits, loss, gradients, after = reference(case)
    gathered = torch.cat([rank[0] for rank in ranks], dim=-1)[..., :VOCAB].transpose(0, 1)
    observed = [(gathered - logits).abs().max().item() / logits.abs().max().item()]
    observed.append(max(abs(rank[1] - loss) / loss for rank in ranks))
    worst, worst_name = worst_relative_error(to_hf_names([rank[2] for rank in ranks], gradients), gradients)
    observed.append(worst)
    if is_trained(case):
        weight_error, _ = worst_relative_error(to_hf_names([rank[3] for rank in ranks], after), after)
        observed.append(weight_error)
        assert all(torch.linalg.vector_norm(after[n] - before[n]) > 1e-3 * before[n].norm() for n in after), "it trains"
    print(
        f"t={len(ranks)} {case}: observed",
        [f"{value:.1e}" for value in observed],
        "allowed",
        ALLOWED[case[0]],
        worst_name,
    )
    for metric, value, allowed in zip(
        ("logits", "loss", worst_name, "weights"), observed, ALLOWED[case[0]], strict=False
    ):
        assert value <= allowed, metric
