"""A document has the logits that it would have alone, whatever tells its tokens their places."""

from __future__ import annotations

import pytest
import torch

from megatron.models.common.decoder import DecoderModel
from megatron.models.common.model_args import ModelArgs
from tests.helpers.llama_samples import llama_sizes
from tests.helpers.model_samples import batch_of, filled, small_sizes
from tests.helpers.mpt_samples import mpt_sizes


@pytest.mark.parametrize(
    ("sizes", "is_reset"),
    [
        pytest.param(small_sizes(), True, id="a table of positions"),
        pytest.param(llama_sizes(), True, id="angles"),
        pytest.param(llama_sizes(), False, id="angles that go on: both are turned alike, distances stay"),
        pytest.param(mpt_sizes(num_attention_heads=6), False, id="ALiBi"),
    ],
)
@torch.no_grad()
def test_each_document_is_read_as_if_it_stood_alone(sizes: ModelArgs, is_reset: bool) -> None:
    model, batch = filled(DecoderModel(sizes).double()), batch_of(with_documents=True)
    assert batch.segment_ids is not None
    logits, parts = model(batch.tokens, batch.position_ids if is_reset else None, batch.segment_ids), 0
    for row, ids in enumerate(batch.segment_ids):
        for document in ids.unique():
            at = ids == document
            alone = model(batch.tokens[row, at].unsqueeze(0))
            assert (logits[at, row] - alone[:, 0]).abs().max() <= 1e-12 * alone.abs().max()
            parts += 1
    assert parts > len(batch.segment_ids)
