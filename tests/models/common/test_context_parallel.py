"""Every family with its sequences cut over the context ranks: losses and gradients of one process, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from megatron.costs.decoder_cost import DecoderCosts
from megatron.models.bert.model import BertModel
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.context_parallel import split_batch
from megatron.mpu.groups import Grid, build_grid, single_grid
from megatron.mpu.mappings import all_reduce
from megatron.mpu.philox_dropout import PhiloxDropout
from megatron.mpu.shard import is_partial
from megatron.mpu.topology import Topology
from megatron.ops import document_attention
from megatron.optim.gradients.sum_group import SumGroup
from megatron.planner.layout import Layout
from megatron.planner.machine import device
from megatron.planner.time_model import Messages
from tests.helpers.bert_samples import bert_batch, bert_sizes
from tests.helpers.count_bytes import bytes_kept, bytes_sent
from tests.helpers.harness import run_ranks
from tests.helpers.llama_samples import llama_sizes
from tests.helpers.model_samples import BATCH, VOCAB, filled, gradients_of, joined, small_sizes, worst_relative
from tests.helpers.mpt_samples import mpt_sizes

LENGTH, LONG = 16, 64
RATES = {"attention_dropout": 0.2, "hidden_dropout": 0.2}
GROUPED = {"num_query_groups": 4, "num_attention_heads": 8, "kv_hidden_size": 4}
"""For every size of the tensor and of the context group."""


class Case(NamedTuple):
    """A model of ``kind`` and ``sizes``, and the fields that it is given."""

    kind: Callable[..., Any]
    sizes: Any
    fields: dict[str, Any]


def decoder_fields(*, has_documents: bool, has_positions: bool) -> dict[str, Any]:
    """Return random tokens; documents of 1 to 9 tokens begin anywhere, and some tokens do not count."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
    fields = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": torch.ones(BATCH, LENGTH)}
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    if has_documents:
        starts = torch.rand(BATCH, LENGTH, generator=generator) < 0.25
        starts[:, 0] = True
        fields["segment_ids"] = starts.long().cumsum(dim=1)
        fields["loss_mask"] = (torch.rand(BATCH, LENGTH, generator=generator) < 0.7).float()
        positions = positions - torch.where(starts, positions, 0).cummax(dim=1).values
    return fields | ({"position_ids": positions} if has_positions else {})


def cases() -> dict[str, Case]:
    """Return every family; with documents and without, with kinds of masks, dropout, recomputed."""
    apart = decoder_fields(has_documents=True, has_positions=True)
    plain, uncounted = (decoder_fields(has_documents=has, has_positions=False) for has in (False, True))
    long = {"max_position_embeddings": LENGTH}
    capped = {"attn_logit_softcapping": 1.5, "window_size": 5, "window_attn_skip_freq": "2", "num_layers": 3}
    return {
        "gpt2": Case(DecoderModel, small_sizes(**long), plain),
        "gpt2 with documents": Case(DecoderModel, small_sizes(**long, **RATES), apart),
        "gpt2, dropped and recomputed": Case(
            DecoderModel, small_sizes(**long, **RATES, checkpoint_activations=True), plain
        ),
        "llama": Case(DecoderModel, llama_sizes(**GROUPED), plain),
        "llama with documents": Case(DecoderModel, llama_sizes(**RATES, **GROUPED), apart),
        "llama, recomputed": Case(DecoderModel, llama_sizes(**GROUPED, recompute_attention=True), uncounted),
        "gemma": Case(DecoderModel, llama_sizes(**capped, **GROUPED), plain),
        "gemma with documents": Case(DecoderModel, llama_sizes(**capped, **RATES, **GROUPED), apart),
        "gemma, documents by starts": Case(DecoderModel, llama_sizes(**capped, **GROUPED), apart),
        "mpt": Case(DecoderModel, mpt_sizes(), plain),
        "mpt, documents by starts": Case(DecoderModel, mpt_sizes(window_size=7), uncounted),
        "mpt with documents": Case(DecoderModel, mpt_sizes(**RATES, window_size=7), uncounted),
        "bert": Case(BertModel, bert_sizes(**RATES), vars(bert_batch(rows=BATCH, length=LENGTH))),
        "bert, documents by starts": Case(BertModel, bert_sizes(), vars(bert_batch(rows=BATCH, length=LENGTH))),
    }


def result(case: Case, grid: Grid, comm: str) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return (sum, count) of the loss over the context ranks, and the gradients that they make up. Collective."""
    cuts, streams = grid.tensor.size > 1, PhiloxDropout(BATCH, 5, tensor=grid.tensor, context=grid.context)
    place = ParallelContext(grid.tensor, streams, cuts, grid.context, comm)
    model = filled(case.kind(case.sizes, place).double())
    loss = model(**split_batch(case.fields, grid.context))
    total, count = loss["loss"] if isinstance(loss, dict) else loss
    total.backward()
    for parameter in model.parameters():
        all_reduce(parameter.grad, grid.context)
    partial = SumGroup(grid.tensor, is_partial)
    for parameter in model.parameters():
        partial.register(parameter)
    partial.sum(lambda parameter: parameter.grad)
    pair = all_reduce(torch.stack([total.detach(), count.double()]), grid.context)
    return pair[0], pair[1], gradients_of(model)


def results(rank: int, tensor: int, context: int, comm: str, names: list[str]) -> dict[str, Any]:
    document_attention.TILE = 3  # several blocks in a piece
    grid = build_grid(Topology(pipe=1, data=1, tensor=tensor, context=context), rank)
    every = cases()
    return {name: result(every[name], grid, comm) for name in names}


def check(tensor: int, context: int, comm: str, names: list[str]) -> None:
    """Compare the cases of these ``names`` with one process."""
    ranks, every = run_ranks(tensor * context, results, tensor, context, comm, names), cases()
    for name in names:
        total, count, gradients = result(every[name], single_grid(), comm)
        wanted = {key: shard.unpadded(gradient) for key, (shard, gradient) in gradients.items()}
        for each in ranks:
            assert abs(each[name][0] - total) <= 1e-12 * abs(total), name
            assert each[name][1] == count, name
        for first in range(0, len(ranks), tensor):
            parts = [each[name][2] for each in ranks[first : first + tensor]]
            worst = worst_relative(joined(parts), wanted)
            assert worst[0] <= 1e-11, (name, worst)


def test_every_family_equals_one_process_with_the_same_masks() -> None:
    """Rows E01 and E06 of a single step."""
    check(1, 2, "all_gather", list(cases()))


def test_heads_go_to_context_ranks_and_come_back() -> None:
    check(1, 2, "a2a", ["llama with documents", "mpt with documents", "mpt, documents by starts"])


@pytest.mark.slow
@pytest.mark.parametrize("comm", ["all_gather", "p2p", "a2a"])
@pytest.mark.parametrize(("tensor", "context"), [(1, 2), (1, 4), (2, 2)])
def test_every_family_with_more_ranks(tensor: int, context: int, comm: str) -> None:
    """With two tensor ranks the hidden states are cut over them, too."""
    check(tensor, context, comm, list(cases()))


def kept_bytes(rank: int, context: int, comm: str, length: int) -> int:
    """Return the bytes that the graph of a layer keeps, its weights aside."""
    grid = build_grid(Topology(pipe=1, data=1, tensor=1, context=context), rank)
    place = ParallelContext(context=grid.context, cp_comm_type=comm)
    model = filled(DecoderModel(llama_sizes(**GROUPED, max_position_embeddings=length), place))
    x = torch.randn(length // context, BATCH, 16, requires_grad=True)
    mask = model.masks.of(x, None)
    with bytes_kept(model) as kept:
        y = model.layers[0](x, mask, None, None, None)
    del y
    return sum(kept.values())


@pytest.mark.parametrize("comm", ["all_gather", "a2a"])
def test_what_a_layer_keeps_falls_as_one_over_the_context_ranks(comm: str) -> None:
    """Keys and values of other ranks are gathered anew for the backward, and nobody has a mask."""
    two, four = (run_ranks(size, kept_bytes, size, comm, LONG) for size in (2, 4))
    assert {4 * each for each in four} == {2 * each for each in two}
    how: Any = {"mask_bytes": 0, "context": 2, "cuts_heads": comm == "a2a"}
    planned = DecoderCosts(llama_sizes(**GROUPED), LONG, **how).unit_kept(BATCH, 1, 4)[1].full
    assert abs(planned - two[0]) <= 0.1 * two[0], (planned, two)


def sent_bytes(rank: int, comm: str) -> float:
    """Return the bytes that a rank sends over the context group in a forward and a backward of one layer."""
    grid = build_grid(Topology(pipe=1, data=1, tensor=1, context=2), rank)
    place = ParallelContext(context=grid.context, cp_comm_type=comm)
    model = filled(DecoderModel(llama_sizes(**GROUPED, max_position_embeddings=LONG), place))
    x = torch.randn(LONG // 2, BATCH, 16, requires_grad=True)
    with bytes_sent(2) as sent:
        model.layers[0](x, model.masks.of(x, None), None, None, None).sum().backward()
    return sum(sent)


@pytest.mark.parametrize("comm", ["all_gather", "a2a"])
def test_a_layer_sends_what_the_planner_says(comm: str) -> None:
    cuts, machine = comm == "a2a", device("h100-80g")
    costs = DecoderCosts(llama_sizes(**GROUPED), LONG, context=2, cuts_heads=cuts)
    layout = Layout(context=2, cuts_heads=cuts, micro_batch_size=BATCH, dtype="fp32")
    assert run_ranks(2, sent_bytes, comm) == [Messages(costs, machine).context(layout).bytes] * 2
