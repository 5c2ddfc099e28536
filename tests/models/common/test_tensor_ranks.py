"""Decoders on 2 and 4 tensor ranks against one process, in fp64: logits, loss and every gradient."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch

from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import ModelArgs
from megatron.mpu.groups import Group
from megatron.mpu.shard import is_partial
from megatron.optim.gradients.sum_group import SumGroup
from tests.helpers.harness import run_ranks
from tests.helpers.llama_samples import llama_sizes
from tests.helpers.model_samples import (
    VOCAB,
    Parts,
    batch_of,
    filled,
    gradients_of,
    joined,
    place_of,
    small_sizes,
    worst_relative,
)
from tests.helpers.mpt_samples import mpt_sizes
from tests.helpers.whole import whole_world


class Case(NamedTuple):
    """A decoder: its sizes, and whether its batch has documents that are kept apart."""

    sizes: ModelArgs
    has_documents: bool = False


CASES = {
    "GPT-2": Case(small_sizes()),
    "GPT-2, documents": Case(small_sizes(), True),
    "GPT-2, untied": Case(small_sizes(untie_embeddings=True)),
    "GPT-2, head size 6, not h / a": Case(small_sizes(kv_hidden_size=6)),
    "GPT-2, feed-forward 20": Case(small_sizes(ff_hidden_size=20)),
    "GPT-2, no biases": Case(small_sizes(hidden_bias=False)),
    "GPT-2, residual after the norm": Case(small_sizes(apply_residual_connection_post_layernorm=True)),
    "GPT-2, vocabulary by 8, tanh": Case(small_sizes(make_vocab_size_divisible_by=8, activation="gelu-tanh")),
    "GPT-2, recompute": Case(small_sizes(checkpoint_activations=True)),
    "LLaMA, 2 groups": Case(llama_sizes()),
    "LLaMA, a group for each head": Case(llama_sizes(num_query_groups=0)),
    "LLaMA, documents": Case(llama_sizes(num_attention_heads=8, num_query_groups=4), True),
    "LLaMA, tied": Case(llama_sizes(untie_embeddings=False, num_query_groups=4, activation="gated-gelu")),
    "LLaMA, biases": Case(llama_sizes(hidden_bias=True, num_attention_heads=8, num_query_groups=4, rotary_base=500.0)),
    "LLaMA, recompute": Case(llama_sizes(checkpoint_activations=True, num_query_groups=4), True),
    "LLaMA, scaled": Case(llama_sizes(rotary_scaling="linear", rotary_scaling_factor=3.0, num_query_groups=4)),
    "MPT": Case(mpt_sizes()),
    "MPT, documents": Case(mpt_sizes(), True),
    "MPT, untied": Case(mpt_sizes(untie_embeddings=True)),
    "MPT, 12 heads": Case(mpt_sizes(num_attention_heads=12)),
    "MPT, clipped": Case(mpt_sizes(clip_qkv=0.5, alibi_bias_max=4)),
    "MPT, recompute": Case(mpt_sizes(checkpoint_activations=True), True),
    "q/k norm, head, rms": Case(small_sizes(qk_norm="head", normalization="RMSNorm"), True),
    "q/k norm, head": Case(small_sizes(qk_norm="head", num_query_groups=2, position_embedding_type="rope"), True),
    "q/k norm, all, rms": Case(small_sizes(qk_norm="all", normalization="RMSNorm", num_query_groups=2), True),
    "q/k norm, all": Case(small_sizes(qk_norm="all", layernorm_1p=True, position_embedding_type="rope"), True),
    "q/k norm, all, no bias": Case(small_sizes(qk_norm="all", norm_bias=False, window_size=4), True),
}
OF_SIZE = {
    size: [name for name, case in CASES.items() if case.sizes.num_query_groups in (0, 4) or size <= 2]
    for size in (1, 2, 4)
}
"""A group of queries is cut whole or not at all."""


class Result(NamedTuple):
    """What one rank has found; its padding is in the logits and in the gradients."""

    logits: torch.Tensor
    loss: float
    count: float
    gradients: Parts


def run(rank: int, size: int) -> dict[str, Result]:
    group = whole_world(rank, size)
    return {name: one(group, CASES[name]) for name in OF_SIZE[size]}


def one(group: Group, case: Case) -> Result:
    """Return the results of a case, gradients that are summands summed."""
    model = filled(DecoderModel(case.sizes, place_of(group)).double())
    batch: dict[str, Any] = vars(batch_of(with_documents=case.has_documents))
    if case.sizes.position_embedding_type == "alibi":
        del batch["position_ids"]
    with torch.no_grad():
        logits = model(batch["tokens"], batch.get("position_ids"), batch["segment_ids"])
    loss, count = model(**batch)
    (loss / count).backward()
    partial = SumGroup(group, is_partial)
    for parameter in model.parameters():
        partial.register(parameter)
    partial.sum(lambda parameter: parameter.grad)
    return Result(logits, loss.item(), count.item(), gradients_of(model))


@functools.cache
def seen(size: int) -> list[dict[str, Result]]:
    return run_ranks(size, run, size) if size > 1 else [run(0, 1)]


@pytest.mark.parametrize(
    ("size", "name"),
    [
        *((2, name) for name in OF_SIZE[2]),
        *(pytest.param(4, name, marks=pytest.mark.slow) for name in OF_SIZE[4]),
    ],
)
def test_tensor_ranks_together_equal_one_process(name: str, size: int) -> None:
    one_process = seen(1)[0][name]
    ranks = [results[name] for results in seen(size)]
    together = torch.cat([rank.logits for rank in ranks], dim=-1)[..., :VOCAB]
    assert (together - one_process.logits[..., :VOCAB]).abs().max() <= 1e-12 * one_process.logits.abs().max()
    assert {rank.count for rank in ranks} == {one_process.count}
    assert all(abs(rank.loss - one_process.loss) <= 1e-12 * one_process.loss for rank in ranks)
    worst, where = worst_relative(joined([rank.gradients for rank in ranks]), joined([one_process.gradients]))
    assert worst <= 1e-11, where


@pytest.mark.parametrize("name", [name for name in CASES if ", " in name and "recompute" not in name])
def test_every_case_is_another_model(name: str) -> None:
    """Where the sizes of a case are those of the plain one, all its numbers would be, too, if nothing acted."""
    plain = {"GPT-2": "GPT-2", "LLaMA": "LLaMA, 2 groups", "MPT": "MPT", "q/k norm": "GPT-2"}[name.partition(", ")[0]]
    if name == plain:
        return
    found, other = (seen(1)[0][each].logits[..., :VOCAB] for each in (plain, name))
    assert (found - other).abs().max() > 1e-4 * found.abs().max()


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_padded_rows_of_embedding_and_head_get_no_gradient_at_all(size: int) -> None:
    padded = 0
    for results in seen(size):
        for result in results.values():
            for parameter, (shard, gradient) in result.gradients.items():
                if parameter in ("embedding.word.weight", "head.weight"):
                    padded += gradient.shape[0] - shard.length
                    assert gradient[shard.length :].count_nonzero() == 0
    assert padded > 0
