"""Embeddings and norms as layers of a pipeline: what travels beside the hidden states, and the names of parameters."""

from __future__ import annotations

import pytest
import torch

from megatron.models.common.language_model import Embedding, WordEmbedding
from megatron.models.common.model_args import ModelArgs, ParallelContext
from megatron.models.common.pipeline import embedding_pipe, norm_pipe
from megatron.models.common.transformer import LayerNorm, RMSNorm

TOKENS = torch.tensor([[1, 2, 3]])
BESIDE = torch.zeros(1, 3, dtype=torch.int32)


@pytest.mark.parametrize(("embedding", "inputs"), [(WordEmbedding, (TOKENS,)), (Embedding, (TOKENS, TOKENS))])
def test_an_embedding_takes_its_inputs_and_hands_on_the_rest(embedding, inputs):
    sizes = ModelArgs(
        num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=16, max_position_embeddings=4,
        kv_hidden_size=4, ff_hidden_size=32,
    )  # fmt: skip
    layer = embedding_pipe(embedding, len(inputs))(sizes, ParallelContext()).eval()
    whole = embedding(sizes, ParallelContext()).eval()
    whole.load_state_dict(layer.state_dict())  # the same names
    hidden = layer(inputs)
    assert torch.equal(hidden, whole(*inputs))
    for beside in ((BESIDE,), (BESIDE, TOKENS)):
        x, *rest = layer((*inputs, *beside))
        assert torch.equal(x, hidden) and all(a is b for a, b in zip(rest, beside, strict=True))
    if len(inputs) == 1:
        assert torch.equal(layer(TOKENS), hidden)
    assert type(layer).__name__ == f"{embedding.__name__}Pipe"


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_a_last_norm_ends_what_travels_beside(norm):
    layer, whole = norm_pipe(norm)(ParallelContext(), 8, 1e-5), norm(8, 1e-5)
    assert list(layer.state_dict()) == list(whole.state_dict())
    x = torch.randn(3, 1, 8)
    assert torch.equal(layer(x), whole(x)) and torch.equal(layer((x, BESIDE)), whole(x))
    assert norm_pipe(norm) is type(layer)
