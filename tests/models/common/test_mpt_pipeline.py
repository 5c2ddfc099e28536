"""MPT's layers as a pipeline has them: names, what passes between them, and layers that are compiled."""

from __future__ import annotations

import pytest
import torch

from megatron.models.common.masks import Masks
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.pipeline import TransformerLayerPipe, layer_specs, random_batch
from megatron.training.compile import compile_layers
from tests.helpers.model_samples import fill_weights, make_batch
from tests.helpers.mpt_samples import mpt_model_args


def test_stage_layers_share_one_bias_and_forward_documents() -> None:
    embedding, *layers, norm, _ = [
        spec.build() for spec in layer_specs(mpt_model_args(untie_embeddings=True), ParallelContext())
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
def test_compiled_layers_use_documents_of_each_micro_batch() -> None:
    args, parallel = mpt_model_args(), ParallelContext()
    masks = Masks(args, parallel)
    layers = torch.nn.Sequential(
        *[fill_weights(TransformerLayerPipe(args, parallel, layer_idx, masks)).double() for layer_idx in range(2)]
    )
    first, second = (make_batch(with_documents=True, seed=seed).segment_ids for seed in (0, 1))
    hidden = torch.randn(12, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    eager = [layers((hidden, ids))[0].detach() for ids in (first, second, first)]
    compile_layers(layers, parallel.streams, torch.device("cpu"), backend="eager")
    for ids, expected in zip((first, second, first), eager, strict=True):
        torch.testing.assert_close(layers((hidden, ids))[0], expected, rtol=1e-13, atol=1e-13)
    assert not eager[0].equal(eager[1])
