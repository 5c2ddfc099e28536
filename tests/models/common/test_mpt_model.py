"""What the common decoder is with the settings of MPT: its parameters, its slopes, the bias that layers share."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from megatron.models.common import masks
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.masks import Masks
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.groups import Group
from megatron.ops.positions import alibi_slopes
from tests.helpers.model_samples import SEQ, VOCAB, fill_weights, make_batch
from tests.helpers.mpt_samples import mpt_model_args


def test_mpt_has_no_biases_or_position_table() -> None:
    names = [name for name, _ in DecoderModel(mpt_model_args()).named_parameters()]
    assert len(names) == 2 + 6 * 2
    assert not [name for name in names if not name.endswith(".weight") or "position" in name]


@torch.no_grad()
def test_sequences_can_exceed_max_position_embeddings() -> None:
    model = fill_weights(DecoderModel(mpt_model_args(max_position_embeddings=4)).double())
    tokens = make_batch().tokens
    assert model(tokens).shape == (SEQ, len(tokens), VOCAB)
    torch.testing.assert_close(model(tokens)[:4], model(tokens[:, :4]), rtol=1e-12, atol=1e-12)


def test_tensor_ranks_use_slopes_of_their_heads() -> None:
    args = mpt_model_args(num_attention_heads=12)
    rank_slopes = [Masks(args, ParallelContext(Group((0, 1, 2, 3), rank))).slopes or [] for rank in range(4)]
    assert sum(rank_slopes, []) == alibi_slopes(12)


def test_layers_share_one_bias_per_batch_and_length() -> None:
    shared_masks: Any = Masks(mpt_model_args(attention_dropout=0.1), ParallelContext())
    x, segments = torch.zeros(SEQ, 3, 16), make_batch(with_documents=True).segment_ids
    assert segments is not None
    with patch.object(masks, "alibi_bias", wraps=masks.alibi_bias) as bias_fn:
        first = shared_masks.get_mask(x, segments)
        assert shared_masks.get_mask(x, segments) is first
        assert shared_masks.get_mask(x) is shared_masks.get_mask(x)
        assert bias_fn.call_count == 1
        flipped = shared_masks.get_mask(x, segments.flip(0))
        assert not flipped.equal(first) and flipped.equal(first.flip(0))
        assert shared_masks.get_mask(x, segments).equal(first)
        segments.zero_()
        assert shared_masks.get_mask(x, segments).equal(shared_masks.get_mask(x).expand_as(first)), (
            "the ids were overwritten"
        )
        assert shared_masks.get_mask(x[:5], segments[:, :5]).shape == (3, 4, 5, 5)
        assert shared_masks.get_mask(x[:5].double(), segments[:, :5]).dtype == torch.float64
        assert bias_fn.call_count == 3
        segments = segments[:, :5]
        assert shared_masks.get_mask(x[:5].double(), segments).dtype == torch.float64
        assert shared_masks.get_mask(x[:5], segments).dtype == torch.float32, (
            "the ids are the same, the numbers are not"
        )
