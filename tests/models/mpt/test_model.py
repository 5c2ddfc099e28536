"""MPT on 2 and 4 tensor ranks against one process in fp64, and what its attention looks at."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.models.common import masks
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.masks import Masks
from megatron.models.common.model_args import ParallelContext
from megatron.mpu.groups import Group
from megatron.ops.positions import alibi_slopes
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import SEQ, VOCAB, batch_of, filled, gradients_of, joined, place_of, worst_relative
from tests.helpers.mpt_samples import mpt_sizes
from tests.helpers.whole import whole_world

VARIANTS = {
    "plain": {},
    "documents": {},
    "untied": {"untie_embeddings": True},
    "12 heads": {"num_attention_heads": 12},
    "clipped": {"clip_qkv": 0.5, "alibi_bias_max": 4},
    "recompute": {"checkpoint_activations": True},
}


def run(rank: int, size: int) -> dict[str, tuple]:
    """Return logits, loss sum, count and gradients of every variant."""
    group = whole_world(rank, size)
    return {name: one(group, name, changes) for name, changes in VARIANTS.items()}


def one(group: Group, name: str, changes: dict) -> tuple:
    model = filled(DecoderModel(mpt_sizes(**changes), place_of(group)).double())
    batch = vars(batch_of(with_documents=name in ("documents", "recompute")))
    del batch["position_ids"]
    with torch.no_grad():
        logits = model(batch["tokens"], None, batch["segment_ids"])
    loss, count = model(**batch)
    (loss / count).backward()
    return logits, loss.item(), count.item(), gradients_of(model)


@functools.cache
def seen(size: int) -> list:
    return run_ranks(size, run, size) if size > 1 else [run(0, 1)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_tensor_ranks_together_equal_one_process(name: str, size: int) -> None:
    logits, loss, count, gradients = seen(1)[0][name]
    ranks = [results[name] for results in seen(size)]
    together = torch.cat([rank[0] for rank in ranks], dim=-1)[..., :VOCAB]
    assert (together - logits[..., :VOCAB]).abs().max() <= 1e-12 * logits.abs().max()
    assert {rank[2] for rank in ranks} == {count}
    assert all(abs(rank[1] - loss) <= 1e-12 * loss for rank in ranks)
    worst, where = worst_relative(joined([rank[3] for rank in ranks]), joined([gradients]))
    assert worst <= 1e-11, where


@pytest.mark.parametrize("name", ["documents", "clipped", "12 heads"])
def test_every_variant_is_another_model(name: str) -> None:
    plain, other = (seen(1)[0][variant][0] for variant in ("plain", name))
    assert (plain - other).abs().max() > 1e-3 * plain.abs().max()


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


@torch.no_grad()
def test_each_document_is_read_as_if_it_stood_alone() -> None:
    model = filled(DecoderModel(mpt_sizes(num_attention_heads=6)).double())
    batch = batch_of(with_documents=True)
    assert batch.segment_ids is not None
    logits, parts = model(batch.tokens, None, batch.segment_ids), 0
    for row, ids in enumerate(batch.segment_ids):
        for document in ids.unique():
            at = ids == document
            alone = model(batch.tokens[row, at].unsqueeze(0))
            torch.testing.assert_close(logits[at, row], alone[:, 0], rtol=1e-12, atol=1e-12)
            parts += 1
    assert parts > len(batch.segment_ids)


def test_heads_of_a_tensor_rank_have_the_slopes_of_their_place() -> None:
    sizes = mpt_sizes(num_attention_heads=12)
    ranks = [Masks(sizes, ParallelContext(Group((0, 1, 2, 3), rank))).slopes or [] for rank in range(4)]
    assert sum(ranks, []) == alibi_slopes(12)


def test_all_layers_add_one_bias_and_another_batch_or_length_gets_its_own() -> None:
    made: Any = Masks(mpt_sizes(), ParallelContext())
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
