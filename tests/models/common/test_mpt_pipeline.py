"""MPT's layers as a pipeline has them: names, what passes between them, and layers that are compiled."""

from __future__ import annotations

import pytest
import torch

from megatron.models.common.masks import Masks
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.pipeline import TransformerLayerPipe, layer_specs, random_batch
from megatron.training.compile import compile_layers
from tests.helpers.model_samples import batch_of, filled
from tests.helpers.mpt_samples import mpt_sizes


def test_all_layers_of_a_stage_share_one_bias_and_pass_documents_on() -> None:
    embedding, *layers, norm, _ = [
        spec.build() for spec in layer_specs(mpt_sizes(untie_embeddings=True), ParallelContext())
    ]
    assert len({id(layer.masks) for layer in layers}) == 1
    inputs, _ = random_batch(101, (2, 6), ["segment_ids"])
    x = embedding(inputs)
    for layer in layers:
        x = layer(x)
        assert len(x) == 2 and x[1] is inputs[1]
    assert norm(x).shape == (6, 2, 16)
    assert torch.is_tensor(embedding(inputs[0])) and torch.is_tensor(embedding(inputs[:1]))


@pytest.mark.slow
def test_compiled_layers_follow_the_documents_of_each_micro_batch() -> None:
    sizes, place = mpt_sizes(), ParallelContext()
    masks = Masks(sizes, place)
    layers = torch.nn.Sequential(*[filled(TransformerLayerPipe(sizes, place, i, masks)).double() for i in range(2)])
    first, second = (batch_of(with_documents=True, seed=seed).segment_ids for seed in (0, 1))
    hidden = torch.randn(12, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = [layers((hidden, ids))[0].detach() for ids in (first, second, first)]
    compile_layers(layers, place.streams, torch.device("cpu"), backend="eager")
    for ids, wanted in zip((first, second, first), plain, strict=True):
        torch.testing.assert_close(layers((hidden, ids))[0], wanted, rtol=1e-13, atol=1e-13)
    assert not plain[0].equal(plain[1])
