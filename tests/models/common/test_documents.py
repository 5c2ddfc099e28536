"""A document has the logits that it would have alone, whatever tells its tokens their places."""

from __future__ import annotations

import pytest
import torch

from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import ModelArgs
from tests.helpers.llama_samples import llama_model_args
from tests.helpers.model_samples import fill_weights, make_batch, small_model_args
from tests.helpers.mpt_samples import mpt_model_args


@pytest.mark.parametrize(
    ("args", "is_reset"),
    [
        pytest.param(small_model_args(), True, id="a table of positions"),
        pytest.param(llama_model_args(), True, id="angles"),
        pytest.param(llama_model_args(), False, id="angles that go on: both are turned alike, distances stay"),
        pytest.param(mpt_model_args(num_attention_heads=6), False, id="ALiBi"),
    ],
)
@torch.no_grad()
def test_document_logits_match_standalone_forward(args: ModelArgs, is_reset: bool) -> None:
    model, batch = fill_weights(DecoderModel(args).double()), make_batch(with_documents=True)
    assert batch.segment_ids is not None
    logits, num_documents = model(batch.tokens, batch.position_ids if is_reset else None, batch.segment_ids), 0
    for row, ids in enumerate(batch.segment_ids):
        for document in ids.unique():
            is_document = ids == document
            standalone = model(batch.tokens[row, is_document].unsqueeze(0))
            assert (logits[is_document, row] - standalone[:, 0]).abs().max() <= 1e-12 * standalone.abs().max()
            num_documents += 1
    assert num_documents > len(batch.segment_ids)
