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
from tests.helpers.latent_samples import latent_model_args
from tests.helpers.llama_samples import llama_model_args
from tests.helpers.model_samples import (
    VOCAB,
    ShardedTensors,
    fill_weights,
    get_sharded_grads,
    join_shards,
    make_batch,
    make_parallel_context,
    small_model_args,
    worst_relative_error,
)
from tests.helpers.mpt_samples import mpt_model_args
from tests.helpers.whole import group_of_all_ranks


class Case(NamedTuple):
    """A decoder: its sizes, and whether its batch has documents that are kept apart."""

    args: ModelArgs
    has_documents: bool = False


CASES = {
    "GPT-2": Case(small_model_args()),
    "GPT-2, documents": Case(small_model_args(), True),
    "GPT-2, untied": Case(small_model_args(untie_embeddings=True)),
    "GPT-2, head size 6, not h / a": Case(small_model_args(kv_hidden_size=6)),
    "GPT-2, feed-forward 20": Case(small_model_args(ff_hidden_size=20)),
    "GPT-2, no biases": Case(small_model_args(hidden_bias=False)),
    "GPT-2, residual after the norm": Case(small_model_args(apply_residual_connection_post_layernorm=True)),
    "GPT-2, vocabulary by 8, tanh": Case(small_model_args(make_vocab_size_divisible_by=8, activation="gelu-tanh")),
    "GPT-2, recompute": Case(small_model_args(checkpoint_activations=True)),
    "LLaMA, 2 groups": Case(llama_model_args()),
    "LLaMA, a group for each head": Case(llama_model_args(num_query_groups=0)),
    "LLaMA, documents": Case(llama_model_args(num_attention_heads=8, num_query_groups=4), True),
    "LLaMA, tied": Case(llama_model_args(untie_embeddings=False, num_query_groups=4, activation="gated-gelu")),
    "LLaMA, biases": Case(
        llama_model_args(hidden_bias=True, num_attention_heads=8, num_query_groups=4, rotary_base=500.0)
    ),
    "LLaMA, recompute": Case(llama_model_args(checkpoint_activations=True, num_query_groups=4), True),
    "LLaMA, scaled": Case(llama_model_args(rotary_scaling="linear", rotary_scaling_factor=3.0, num_query_groups=4)),
    "LLaMA, sinks": Case(llama_model_args(softmax_type="learnable", num_attention_heads=8, num_query_groups=4), True),
    "LLaMA, output gate": Case(
        llama_model_args(attention_output_gate=True, num_attention_heads=8, num_query_groups=4, add_qkv_bias=True)
    ),
    "LLaMA, q/k norm behind rope": Case(llama_model_args(qk_norm="head", qk_norm_order="after", num_query_groups=4)),
    "LLaMA, clamped": Case(
        llama_model_args(
            activation="gated-quick-gelu", activation_func_clamp_value=0.3, glu_linear_offset=1.0, num_query_groups=4
        )
    ),
    "LLaMA, xIELU": Case(llama_model_args(activation="xielu", num_query_groups=4), True),
    "LLaMA, parallel": Case(
        llama_model_args(parallel_residual="separate-norms", qk_norm="per-head", num_query_groups=4, logit_scale=0.5)
    ),
    "MPT": Case(mpt_model_args()),
    "MPT, documents": Case(mpt_model_args(), True),
    "MPT, untied": Case(mpt_model_args(untie_embeddings=True)),
    "MPT, 12 heads": Case(mpt_model_args(num_attention_heads=12)),
    "MPT, clipped": Case(mpt_model_args(clip_qkv=0.5, alibi_bias_max=4)),
    "MPT, recompute": Case(mpt_model_args(checkpoint_activations=True), True),
    "q/k norm, head, rms": Case(small_model_args(qk_norm="head", normalization="RMSNorm"), True),
    "q/k norm, head": Case(small_model_args(qk_norm="head", num_query_groups=2, position_embedding_type="rope"), True),
    "q/k norm, all, rms": Case(small_model_args(qk_norm="all", normalization="RMSNorm", num_query_groups=2), True),
    "q/k norm, all": Case(small_model_args(qk_norm="all", layernorm_1p=True, position_embedding_type="rope"), True),
    "latents": Case(latent_model_args(num_attention_heads=4), True),
    "latents, direct queries, recompute": Case(
        latent_model_args(num_attention_heads=4, q_lora_rank=0, checkpoint_activations=True)
    ),
    "latents, output gate": Case(latent_model_args(num_attention_heads=4, attention_output_gate=True), True),
    "q/k norm, all, no bias": Case(small_model_args(qk_norm="all", norm_bias=False, window_size=4), True),
}
CASES_BY_SIZE = {
    size: [name for name, case in CASES.items() if case.args.num_query_groups in (0, 4) or size <= 2]
    for size in (1, 2, 4)
}
"""A group of queries is cut whole or not at all."""


class Result(NamedTuple):
    """What one rank has found; its padding is in the logits and in the gradients."""

    logits: torch.Tensor
    loss: float
    count: float
    gradients: ShardedTensors


def run_cases(rank: int, size: int) -> dict[str, Result]:
    group = group_of_all_ranks(rank, size)
    return {name: run_case(group, CASES[name]) for name in CASES_BY_SIZE[size]}


def run_case(group: Group, case: Case) -> Result:
    """Return the results of a case, gradients that are summands summed."""
    model = fill_weights(DecoderModel(case.args, make_parallel_context(group)).double())
    batch: dict[str, Any] = vars(make_batch(with_documents=case.has_documents))
    if case.args.position_embedding_type == "alibi":
        del batch["position_ids"]
    with torch.no_grad():
        logits = model(batch["tokens"], batch.get("position_ids"), batch["segment_ids"])
    loss, count = model(**batch)
    (loss / count).backward()
    sum_group = SumGroup(group, is_partial)
    for parameter in model.parameters():
        sum_group.register(parameter)
    sum_group.sum(lambda parameter: parameter.grad)
    return Result(logits, loss.item(), count.item(), get_sharded_grads(model))


@functools.cache
def rank_results(size: int) -> list[dict[str, Result]]:
    return run_ranks(size, run_cases, size) if size > 1 else [run_cases(0, 1)]


@pytest.mark.parametrize(
    ("size", "name"),
    [
        *((2, name) for name in CASES_BY_SIZE[2]),
        *(pytest.param(4, name, marks=pytest.mark.slow) for name in CASES_BY_SIZE[4]),
    ],
)
def test_tensor_ranks_match_one_process(name: str, size: int) -> None:
    one_process = rank_results(1)[0][name]
    ranks = [results[name] for results in rank_results(size)]
    gathered = torch.cat([rank.logits for rank in ranks], dim=-1)[..., :VOCAB]
    assert (gathered - one_process.logits[..., :VOCAB]).abs().max() <= 1e-12 * one_process.logits.abs().max()
    assert {rank.count for rank in ranks} == {one_process.count}
    assert all(abs(rank.loss - one_process.loss) <= 1e-12 * one_process.loss for rank in ranks)
    worst, worst_name = worst_relative_error(
        join_shards([rank.gradients for rank in ranks]), join_shards([one_process.gradients])
    )
    assert worst <= 1e-11, worst_name


@pytest.mark.parametrize("name", [name for name in CASES if ", " in name and "recompute" not in name])
def test_every_case_changes_logits(name: str) -> None:
    """Where the sizes of a case are those of the plain one, all its numbers would be, too, if nothing acted."""
    baseline = {"GPT-2": "GPT-2", "LLaMA": "LLaMA, 2 groups", "MPT": "MPT", "q/k norm": "GPT-2", "latents": "latents"}[
        name.partition(", ")[0]
    ]
    if name == baseline:
        return
    baseline_logits, case_logits = (rank_results(1)[0][case_name].logits[..., :VOCAB] for case_name in (baseline, name))
    assert (baseline_logits - case_logits).abs().max() > 1e-4 * baseline_logits.abs().max()


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_padded_rows_get_zero_gradient(size: int) -> None:
    num_padded = 0
    for results in rank_results(size):
        for result in results.values():
            for parameter, (shard, gradient) in result.gradients.items():
                if parameter in ("embedding.word.weight", "head.weight"):
                    num_padded += gradient.shape[0] - shard.length
                    assert gradient[shard.length :].count_nonzero() == 0
    assert num_padded > 0
