"""Norms of queries and keys on tensor ranks: outputs and gradients of one process, whole and cut weights."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import ParallelContext
from megatron.mpu.groups import Group
from megatron.mpu.shard import is_partial, shard_of
from megatron.optim.main_params import SequenceParallelGradients
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import (
    VOCAB,
    batch_of,
    filled,
    gradients_of,
    joined,
    place_of,
    small_sizes,
    worst_relative,
)
from tests.helpers.whole import whole_world

VARIANTS: dict[str, dict[str, Any]] = {
    "head, rms": {"qk_norm": "head", "normalization": "RMSNorm"},
    "head": {"qk_norm": "head", "num_query_groups": 2, "position_embedding_type": "rope"},
    "all, rms": {"qk_norm": "all", "normalization": "RMSNorm", "num_query_groups": 2},
    "all": {"qk_norm": "all", "layernorm_1p": True, "position_embedding_type": "rope"},
    "all, no bias": {"qk_norm": "all", "norm_bias": False, "window_size": 4},
}


def run(rank: int, size: int) -> dict[str, tuple[torch.Tensor, Any]]:
    group = whole_world(rank, size)
    return {name: one(group, changes) for name, changes in VARIANTS.items()}


def one(group: Group, changes: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """Return logits and gradients, those that are summands summed."""
    model = filled(DecoderModel(small_sizes(**changes), place_of(group)).double())
    batch = vars(batch_of(with_documents=True))
    with torch.no_grad():
        logits = model(batch["tokens"], batch["position_ids"], batch["segment_ids"])
    loss, count = model(**batch)
    (loss / count).backward()
    partial = SequenceParallelGradients(group)
    for parameter in model.parameters():
        partial.register(parameter)
    partial.sum(lambda parameter: parameter.grad)
    return logits, gradients_of(model)


@functools.cache
def seen(size: int) -> list[dict[str, tuple[torch.Tensor, Any]]]:
    return run_ranks(size, run, size) if size > 1 else [run(0, 1)]


@pytest.mark.parametrize("name", VARIANTS)
def test_norms_of_queries_and_keys_on_tensor_ranks_are_those_of_one_process(name: str) -> None:
    logits, gradients = seen(1)[0][name]
    ranks = [results[name] for results in seen(2)]
    together = torch.cat([rank[0] for rank in ranks], dim=-1)[..., :VOCAB]
    assert (together - logits[..., :VOCAB]).abs().max() <= 1e-12 * logits.abs().max()
    worst, where = worst_relative(joined([rank[1] for rank in ranks]), joined([gradients]))
    assert worst <= 1e-11, where


@pytest.mark.parametrize("kind", ["head", "all"])
def test_a_heads_norm_is_whole_and_its_gradient_a_summand_that_of_all_heads_is_cut(kind: str) -> None:
    sizes = small_sizes(qk_norm=kind, num_query_groups=2)
    for place, is_cut in ((ParallelContext(Group((0, 1), 1)), True), (ParallelContext(), False)):
        held = dict(DecoderModel(sizes, place).layers[0].attention.named_parameters())
        norms = {name: held[name] for name in held if "_norm." in name}
        assert sorted(norms) == ["key_norm.bias", "key_norm.weight", "query_norm.bias", "query_norm.weight"]
        assert all(is_partial(each) == (is_cut and kind == "head") for each in norms.values())
        shards = {name: shard_of(each) for name, each in norms.items()}
        assert all(shard.is_partitioned == (kind == "all") for shard in shards.values())
        if kind == "all":
            assert (shards["query_norm.weight"].start, shards["key_norm.weight"].start) == (
                (8, 4) if is_cut else (0, 0)
            )
            assert shards["key_norm.weight"].global_shape == (8,)
