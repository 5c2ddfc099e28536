"""Which weights of every family's list of layers are summed over the tensor ranks; no ranks are needed to see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from megatron.models.bert import pipeline as bert_pipeline
from megatron.models.common import pipeline as common_pipeline
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.registry import FAMILIES
from megatron.models.t5 import pipeline as t5_pipeline
from megatron.mpu.groups import Group
from megatron.mpu.shard import is_partial, shard_of
from tds.deepspeed.shared_layers import use_shared_modules
from tests.models.common.test_sequence_parallel import cases

TENSOR_GROUP = Group((0, 1), 0)
PIPELINES: dict[str, ModuleType] = {
    "gpt2": common_pipeline,
    "llama": common_pipeline,
    "mpt": common_pipeline,
    "bert": bert_pipeline,
    "t5": t5_pipeline,
}
ShardCounts = Counter[tuple[tuple[int, ...], bool, bool]]


def pipeline_parameters(pipeline_module: ModuleType, args: Any, parallel: ParallelContext) -> dict[str, nn.Parameter]:
    """Return what all layers of the pipeline hold, those that several share once."""
    with use_shared_modules(nn.ModuleDict()) as shared:
        layers = nn.ModuleList(spec.build() for spec in pipeline_module.layer_specs(args, parallel))
    return {**dict(layers.named_parameters()), **dict(shared.named_parameters())}


def count_shards(parameters: Iterable[nn.Parameter]) -> ShardCounts:
    """Return how many of ``parameters`` have each (shape, whether it is cut, whether its gradient is a summand)."""
    return Counter((tuple(p.shape), shard_of(p).is_partitioned, is_partial(p)) for p in parameters)


@pytest.mark.parametrize("name", cases())
def test_replicated_parameters_are_partial_in_pipeline_as_in_model(name: str) -> None:
    case, parallel = cases()[name], ParallelContext(TENSOR_GROUP, sequence_parallel=True)
    family = name.partition(" ")[0].rstrip(",")
    pipeline_module = PIPELINES[family]
    parameters = pipeline_parameters(pipeline_module, case.args, parallel)
    for key, parameter in parameters.items():
        is_replicated = not shard_of(parameter).is_partitioned and "next_sentence." not in key
        assert is_partial(parameter) == is_replicated, key
    assert not any(
        map(is_partial, pipeline_parameters(pipeline_module, case.args, ParallelContext(TENSOR_GROUP)).values())
    )
    model_counts, pipeline_counts = (
        count_shards(params) for params in (case.model_class(case.args, parallel).parameters(), parameters.values())
    )
    extra_counts = pipeline_counts - model_counts  # the table that a decoder's last stage holds once more for its head
    assert not model_counts - pipeline_counts and all(
        is_sharded and not has_partial_grad for _, is_sharded, has_partial_grad in extra_counts
    )
    assert extra_counts.total() == (FAMILIES[family].model_type == "decoder" and not case.args.untie_embeddings)


def test_every_family_is_covered() -> None:
    assert set(FAMILIES) == set(PIPELINES) == {name.partition(" ")[0].rstrip(",") for name in cases()}
