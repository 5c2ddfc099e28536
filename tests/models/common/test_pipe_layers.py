"""Embeddings, transformer layers and norms in a pipeline: what travels beside hidden states, names of parameters."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron.models.bert.model import BertEmbedding, BertLayer, BertModelArgs, SharedWordEmbedding, padding_mask
from megatron.models.common.language_model import Embedding
from megatron.models.common.masks import Masks, SharedMask
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.norms import LayerNorm, RMSNorm
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.pipeline import TransformerLayerPipe, embedding_pipe, layer_pipe, norm_pipe
from megatron.models.common.transformer import TransformerLayer
from megatron.ops.attention import document_mask
from megatron.ops.document_attention import document_starts

TOKENS = torch.tensor([[1, 2, 3]])
BESIDE = torch.zeros(1, 3, dtype=torch.int32)
SIZES = {
    "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16, "max_position_embeddings": 4,
    "kv_hidden_size": 4, "ff_hidden_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "inputs"), [("rope", (TOKENS,)), ("learned_absolute", (TOKENS, TOKENS))])
def test_an_embedding_takes_its_inputs_and_hands_on_the_rest(kind, inputs):
    sizes, embedding = ModelArgs(**SIZES, position_embedding_type=kind), Embedding
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


def test_an_embedding_by_a_shared_table_equals_one_with_its_own():
    sizes, inputs = BertModelArgs(**SIZES), (TOKENS, torch.zeros_like(TOKENS))
    whole = BertEmbedding(sizes, ParallelContext()).eval()
    for weight in whole.parameters():
        torch.nn.init.normal_(weight)
    layer = embedding_pipe(SharedWordEmbedding, 2)(sizes, ParallelContext()).eval()
    assert [*layer.state_dict(), "word.weight"] == list(whole.state_dict())
    layer.load_state_dict(whole.state_dict(), strict=False)
    object.__setattr__(layer, "word", whole.word)  # as a layer is given what it shares
    assert torch.equal(layer(inputs), whole(*inputs))
    x, beside = layer((*inputs, BESIDE))
    assert torch.equal(x, whole(*inputs)) and beside is BESIDE


@pytest.mark.parametrize(("kind", "args"), [(TransformerLayer, ModelArgs), (BertLayer, BertModelArgs)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_masks_by_the_segments_that_it_hands_on(kind, args, dropout):
    sizes, segments = args(**SIZES, attention_dropout=dropout), torch.tensor([[0, 0, 1]], dtype=torch.int32)
    place = ParallelContext()
    if kind is BertLayer:
        mask = partial(padding_mask, sizes=sizes, place=place)
        layer = layer_pipe(kind)(sizes, place, 0, SharedMask(mask)).eval()
    else:
        made = document_mask if dropout else document_starts
        mask = lambda ids, _: made(ids)  # noqa: E731
        layer = TransformerLayerPipe(sizes, place, 0, Masks(sizes, place)).eval()
    whole = kind(sizes, ParallelContext(), 0).eval()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    whole.load_state_dict(layer.state_dict())  # the same names
    x = torch.randn(3, 1, 8)
    assert torch.equal(layer(x), whole(x))
    out, beside = layer((x, segments))
    assert torch.equal(out, whole(x, mask(segments, x))) and beside is segments
    assert not torch.equal(out, whole(x))
    assert type(layer).__name__ == f"{kind.__name__}Pipe"


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_a_last_norm_ends_what_travels_beside(norm):
    layer, whole = norm_pipe(norm)(ParallelContext(), 8, 1e-5), norm(8, 1e-5)
    assert list(layer.state_dict()) == list(whole.state_dict())
    x = torch.randn(3, 1, 8)
    assert torch.equal(layer(x), whole(x)) and torch.equal(layer((x, BESIDE)), whole(x))
    assert norm_pipe(norm) is type(layer)
