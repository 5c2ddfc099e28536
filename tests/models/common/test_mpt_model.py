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
from tests.helpers.model_samples import SEQ, VOCAB, batch_of, filled
from tests.helpers.mpt_samples import mpt_sizes


def test_there_is_no_bias_and_no_table_of_positions() -> None:
    names = [name for name, _ in DecoderModel(mpt_sizes()).named_parameters()]
    assert len(names) == 2 + 6 * 2
    assert not [name for name in names if not name.endswith(".weight") or "position" in name]


@torch.no_grad()
def test_a_text_may_be_longer_than_the_model_was_made_for() -> None:
    model = filled(DecoderModel(mpt_sizes(max_position_embeddings=4)).double())
    tokens = batch_of().tokens
    assert model(tokens).shape == (SEQ, len(tokens), VOCAB)
    torch.testing.assert_close(model(tokens)[:4], model(tokens[:, :4]), rtol=1e-12, atol=1e-12)


def test_heads_of_a_tensor_rank_have_the_slopes_of_their_place() -> None:
    sizes = mpt_sizes(num_attention_heads=12)
    ranks = [Masks(sizes, ParallelContext(Group((0, 1, 2, 3), rank))).slopes or [] for rank in range(4)]
    assert sum(ranks, []) == alibi_slopes(12)


def test_all_layers_add_one_bias_and_another_batch_or_length_gets_its_own() -> None:
    made: Any = Masks(mpt_sizes(attention_dropout=0.1), ParallelContext())
    x, segments = torch.zeros(SEQ, 3, 16), batch_of(with_documents=True).segment_ids
    assert segments is not None
    with patch.object(masks, "alibi_bias", wraps=masks.alibi_bias) as making:
        first = made.of(x, segments)
        assert made.of(x, segments) is first
        assert made.of(x) is made.of(x)
        assert making.call_count == 1
        other = made.of(x, segments.flip(0))
        assert not other.equal(first) and other.equal(first.flip(0))
        assert made.of(x, segments).equal(first)
        segments.zero_()
        assert made.of(x, segments).equal(made.of(x).expand_as(first)), "the ids were overwritten"
        assert made.of(x[:5], segments[:, :5]).shape == (3, 4, 5, 5)
        assert made.of(x[:5].double(), segments[:, :5]).dtype == torch.float64
        assert making.call_count == 3
        segments = segments[:, :5]
        assert made.of(x[:5].double(), segments).dtype == torch.float64
        assert made.of(x[:5], segments).dtype == torch.float32, "the ids are the same, the numbers are not"
