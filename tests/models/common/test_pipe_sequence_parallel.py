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
from tds.deepspeed.shared_layers import held_in
from tests.models.common.test_sequence_parallel import cases

PAIR = Group((0, 1), 0)
PIPELINES: dict[str, ModuleType] = {
    "gpt2": common_pipeline,
    "llama": common_pipeline,
    "mpt": common_pipeline,
    "bert": bert_pipeline,
    "t5": t5_pipeline,
}
Facts = Counter[tuple[tuple[int, ...], bool, bool]]


def parameters_of(home: ModuleType, sizes: Any, place: ParallelContext) -> dict[str, nn.Parameter]:
    """Return what all layers of the pipeline hold, those that several share once."""
    with held_in(nn.ModuleDict()) as shared:
        layers = nn.ModuleList(spec.build() for spec in home.layer_specs(sizes, place))
    return {**dict(layers.named_parameters()), **dict(shared.named_parameters())}


def facts_of(parameters: Iterable[nn.Parameter]) -> Facts:
    """Return how many of ``parameters`` have each (shape, whether it is cut, whether its gradient is a summand)."""
    return Counter((tuple(p.shape), shard_of(p).is_partitioned, is_partial(p)) for p in parameters)


@pytest.mark.parametrize("name", cases())
def test_what_every_rank_holds_whole_is_partial_in_a_pipeline_as_without_one(name: str) -> None:
    case, cut = cases()[name], ParallelContext(PAIR, sequence_parallel=True)
    family = name.partition(" ")[0].rstrip(",")
    home = PIPELINES[family]
    held = parameters_of(home, case.sizes, cut)
    for key, parameter in held.items():
        is_whole = not shard_of(parameter).is_partitioned and "next_sentence." not in key
        assert is_partial(parameter) == is_whole, key
    assert not any(map(is_partial, parameters_of(home, case.sizes, ParallelContext(PAIR)).values()))
    whole, found = (facts_of(each) for each in (case.kind(case.sizes, cut).parameters(), held.values()))
    copies = found - whole  # the table that a decoder's last stage holds once more for its head
    assert not whole - found and all(is_cut and not partial for _, is_cut, partial in copies)
    assert copies.total() == (FAMILIES[family].kind == "decoder" and not case.sizes.untie_embeddings)


def test_every_family_is_there() -> None:
    assert set(FAMILIES) == set(PIPELINES) == {name.partition(" ")[0].rstrip(",") for name in cases()}
