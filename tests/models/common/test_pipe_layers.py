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
from megatron.models.common.pipeline import TransformerLayerPipe, make_embedding_pipe, make_layer_pipe, make_norm_pipe
from megatron.models.common.transformer import TransformerLayer
from megatron.ops.attention import document_mask
from megatron.ops.document_attention import document_starts

TOKENS = torch.tensor([[1, 2, 3]])
SEGMENTS = torch.zeros(1, 3, dtype=torch.int32)
MODEL_FIELDS = {
    "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16, "max_position_embeddings": 4,
    "kv_hidden_size": 4, "ff_hidden_size": 32,
}  # fmt: skip


@pytest.mark.parametrize(("position_type", "inputs"), [("rope", (TOKENS,)), ("learned_absolute", (TOKENS, TOKENS))])
def test_pipe_embedding_passes_extra_inputs_through(position_type, inputs):
    args, embedding = ModelArgs(**MODEL_FIELDS, position_embedding_type=position_type), Embedding
    layer = make_embedding_pipe(embedding, len(inputs))(args, ParallelContext()).eval()
    reference = embedding(args, ParallelContext()).eval()
    reference.load_state_dict(layer.state_dict())  # the same names
    hidden = layer(inputs)
    assert torch.equal(hidden, reference(*inputs))
    for extra_inputs in ((SEGMENTS,), (SEGMENTS, TOKENS)):
        x, *passed_on = layer((*inputs, *extra_inputs))
        assert torch.equal(x, hidden) and all(a is b for a, b in zip(passed_on, extra_inputs, strict=True))
    if len(inputs) == 1:
        assert torch.equal(layer(TOKENS), hidden)
    assert type(layer).__name__ == f"{embedding.__name__}Pipe"


def test_shared_table_embedding_matches_plain_embedding():
    args, inputs = BertModelArgs(**MODEL_FIELDS), (TOKENS, torch.zeros_like(TOKENS))
    reference = BertEmbedding(args, ParallelContext()).eval()
    for weight in reference.parameters():
        torch.nn.init.normal_(weight)
    layer = make_embedding_pipe(SharedWordEmbedding, 2)(args, ParallelContext()).eval()
    assert [*layer.state_dict(), "word.weight"] == list(reference.state_dict())
    layer.load_state_dict(reference.state_dict(), strict=False)
    object.__setattr__(layer, "word", reference.word)  # as a layer is given what it shares
    assert torch.equal(layer(inputs), reference(*inputs))
    x, passed_on = layer((*inputs, SEGMENTS))
    assert torch.equal(x, reference(*inputs)) and passed_on is SEGMENTS


@pytest.mark.parametrize(("layer_class", "args_class"), [(TransformerLayer, ModelArgs), (BertLayer, BertModelArgs)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_pipe_layer_masks_by_forwarded_segments(layer_class, args_class, dropout):
    torch.manual_seed(0)  # with some weights, every token attends to itself only
    model_args, segments = (
        args_class(**MODEL_FIELDS, attention_dropout=dropout),
        torch.tensor([[0, 0, 1]], dtype=torch.int32),
    )
    parallel = ParallelContext()
    if layer_class is BertLayer:
        mask = partial(padding_mask, args=model_args, parallel=parallel)
        layer = make_layer_pipe(layer_class)(model_args, parallel, 0, SharedMask(mask)).eval()
    else:
        make_mask = document_mask if dropout else document_starts
        mask = lambda ids, _: make_mask(ids)  # noqa: E731
        layer = TransformerLayerPipe(model_args, parallel, 0, Masks(model_args, parallel)).eval()
    reference = layer_class(model_args, ParallelContext(), 0).eval()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    reference.load_state_dict(layer.state_dict())  # the same names
    x = torch.randn(3, 1, 8)
    assert torch.equal(layer(x), reference(x))
    out, passed_on = layer((x, segments))
    assert torch.equal(out, reference(x, mask(segments, x))) and passed_on is segments
    assert not torch.equal(out, reference(x))
    assert type(layer).__name__ == f"{layer_class.__name__}Pipe"


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_final_norm_drops_extra_inputs(norm):
    layer, reference = make_norm_pipe(norm)(ParallelContext(), 8, 1e-5), norm(8, 1e-5)
    assert list(layer.state_dict()) == list(reference.state_dict())
    x = torch.randn(3, 1, 8)
    assert torch.equal(layer(x), reference(x)) and torch.equal(layer((x, SEGMENTS)), reference(x))
    assert make_norm_pipe(norm) is type(layer)
