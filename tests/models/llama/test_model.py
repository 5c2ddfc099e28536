"""LLaMA on 2 and 4 tensor ranks against one process in fp64, and what its attention looks at."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron.models.common.decoder import DecoderModel
from megatron.mpu.groups import Group
from tests.helpers.harness import run_ranks
from tests.helpers.llama_samples import llama_sizes
from tests.helpers.model_samples import SEQ, VOCAB, batch_of, filled, gradients_of, joined, place_of, worst_relative
from tests.helpers.whole import whole_world

VARIANTS: dict[str, dict[str, Any]] = {
    "2 groups": {},
    "a group for each head": {"num_query_groups": 0},
    "documents": {"num_attention_heads": 8, "num_query_groups": 4},
    "tied": {"untie_embeddings": False, "num_query_groups": 4, "activation": "gated-gelu"},
    "biases": {"hidden_bias": True, "num_attention_heads": 8, "num_query_groups": 4, "rotary_base": 500.0},
    "recompute": {"checkpoint_activations": True, "num_query_groups": 4},
    "scaled": {"rotary_scaling": "linear", "rotary_scaling_factor": 3.0, "num_query_groups": 4},
}
OF_4 = [name for name, changes in VARIANTS.items() if changes.get("num_query_groups", 2) != 2]


def run(rank: int, size: int) -> dict[str, tuple[Any, ...]]:
    """Return logits, loss sum, count and gradients of every variant that can be cut so."""
    group = whole_world(rank, size)
    return {name: one(group, name, VARIANTS[name]) for name in (VARIANTS if size < 4 else OF_4)}


def one(group: Group, name: str, changes: dict[str, Any]) -> tuple[Any, ...]:
    model = filled(DecoderModel(llama_sizes(**changes), place_of(group)).double())
    batch = vars(batch_of(with_documents=name in ("documents", "recompute")))
    with torch.no_grad():
        logits = model(batch["tokens"], batch["position_ids"], batch["segment_ids"])
    loss, count = model(**batch)
    (loss / count).backward()
    return logits, loss.item(), count.item(), gradients_of(model)


@functools.cache
def seen(size: int) -> list[dict[str, tuple[Any, ...]]]:
    return run_ranks(size, run, size) if size > 1 else [run(0, 1)]


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in (2, 4) for name in (VARIANTS if size < 4 else OF_4)]
)
def test_tensor_ranks_together_equal_one_process(name: str, size: int) -> None:
    logits, loss, count, gradients = seen(1)[0][name]
    ranks = [results[name] for results in seen(size)]
    together = torch.cat([rank[0] for rank in ranks], dim=-1)[..., :VOCAB]
    assert (together - logits[..., :VOCAB]).abs().max() <= 1e-12 * logits.abs().max()
    assert {rank[2] for rank in ranks} == {count}
    assert all(abs(rank[1] - loss) <= 1e-12 * loss for rank in ranks)
    worst, where = worst_relative(joined([rank[3] for rank in ranks]), joined([gradients]))
    assert worst <= 1e-11, where


@pytest.mark.parametrize("name", ["a group for each head", "documents", "tied", "biases", "scaled"])
def test_every_variant_is_another_model(name: str) -> None:
    plain, other = (seen(1)[0][variant][0] for variant in ("2 groups", name))
    assert (plain - other).abs().max() > 1e-3 * plain.abs().max()


def test_groups_are_cut_whole_or_not_at_all() -> None:
    place = place_of(Group((0, 1, 2, 3), 1))
    with pytest.raises(ValueError, match="--num-query-groups must be a multiple of --model-parallel-size, got 2 and 4"):
        DecoderModel(llama_sizes(), place)
    with pytest.raises(ValueError, match="--num-attention-heads must be a multiple of --num-query-groups, got 4 and 3"):
        DecoderModel(llama_sizes(num_query_groups=3))


def test_there_is_no_bias_and_no_table_of_positions() -> None:
    shapes = {name: tuple(p.shape) for name, p in DecoderModel(llama_sizes()).named_parameters()}
    assert len(shapes) == 3 + 6 * 2 and all(name.endswith(".weight") for name in shapes)
    assert shapes["layers.0.attention.query_key_value.weight"] == ((4 + 2 * 2) * 4, 16)
    assert shapes["layers.0.mlp.up.weight"] == (2 * 24, 16) and shapes["head.weight"] == (VOCAB, 16)
    biased = [name for name, _ in DecoderModel(llama_sizes(hidden_bias=True)).named_parameters()]
    assert sum(name.endswith(".bias") for name in biased) == 4 * 2


@torch.no_grad()
def test_positions_count_from_0_where_none_are_given() -> None:
    model, batch = filled(DecoderModel(llama_sizes()).double()), batch_of()
    assert model(batch.tokens).equal(model(batch.tokens, torch.arange(SEQ).expand_as(batch.tokens)))
    scattered = 3 * torch.arange(SEQ).expand_as(batch.tokens) % SEQ
    assert (model(batch.tokens) - model(batch.tokens, scattered)).abs().max() > 1e-3


@pytest.mark.parametrize("is_reset", [True, False])
@torch.no_grad()
def test_each_document_is_read_as_if_it_stood_alone(is_reset: bool) -> None:
    """Also with positions that go on: they turn queries and keys alike, so that distances stay."""
    model, batch = filled(DecoderModel(llama_sizes()).double()), batch_of(with_documents=True)
    assert batch.segment_ids is not None
    logits, parts = model(batch.tokens, batch.position_ids if is_reset else None, batch.segment_ids), 0
    for row, ids in enumerate(batch.segment_ids):
        for document in ids.unique():
            at = ids == document
            alone = model(batch.tokens[row, at].unsqueeze(0))
            torch.testing.assert_close(logits[at, row], alone[:, 0], rtol=1e-11, atol=1e-11)
            parts += 1
    assert parts > len(batch.segment_ids)


def test_positions_beyond_the_longest_are_refused():
    model, batch = filled(DecoderModel(llama_sizes())), batch_of()
    for wrong in (batch.position_ids + 1, batch.position_ids - 1):
        with pytest.raises(ValueError, match=r"position_ids must be from 0 to 11, got -?1 to 1[02]"):
            model(batch.tokens, wrong)
