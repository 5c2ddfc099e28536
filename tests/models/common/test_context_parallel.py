"""Every family with its sequences cut over the context ranks: losses and gradients of one process, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from megatron.costs.decoder_cost import DecoderCosts
from megatron.models.bert.model import BertModel
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.parallel_context import ParallelContext, get_parallel_context
from megatron.mpu.context_parallel import split_batch
from megatron.mpu.groups import Grid, build_grid, single_grid
from megatron.mpu.mappings import all_reduce
from megatron.mpu.philox_dropout import PhiloxDropout
from megatron.mpu.shard import is_partial
from megatron.mpu.topology import Topology
from megatron.ops import document_attention
from megatron.optim.gradients.sum_group import SumGroup
from megatron.planner.layout import Layout
from megatron.planner.machine import gpu_machine
from megatron.planner.time_model import CommunicationModel
from tests.helpers.bert_samples import bert_model_args, make_bert_batch
from tests.helpers.count_bytes import count_saved_bytes, count_sent_bytes
from tests.helpers.harness import run_ranks
from tests.helpers.latent_samples import latent_model_args
from tests.helpers.llama_samples import llama_model_args
from tests.helpers.model_samples import (
    BATCH,
    VOCAB,
    fill_weights,
    get_sharded_grads,
    join_shards,
    small_model_args,
    worst_relative_error,
)
from tests.helpers.mpt_samples import mpt_model_args

LENGTH, LONG_LENGTH = 16, 64
DROPOUT_RATES = {"attention_dropout": 0.2, "hidden_dropout": 0.2}
GROUPED_ARGS = {"num_query_groups": 4, "num_attention_heads": 8, "kv_hidden_size": 4}
"""For every size of the tensor and of the context group."""


class Case(NamedTuple):
    """A model of ``model_class`` and ``args``, and the fields that it is given."""

    model_class: Callable[..., Any]
    args: Any
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
    document_fields = decoder_fields(has_documents=True, has_positions=True)
    plain_fields, segment_fields = (
        decoder_fields(has_documents=has_documents, has_positions=False) for has_documents in (False, True)
    )
    length_args = {"max_position_embeddings": LENGTH}
    softcap_args = {"attn_logit_softcapping": 1.5, "window_size": 5, "window_attn_skip_freq": "2", "num_layers": 3}
    sink_args = {
        "softmax_type": "learnable", "attention_output_gate": True, "window_size": 5, "window_attn_skip_freq": "2",
        "no_rope_freq": "2",
    }  # fmt: skip
    return {
        "gpt2": Case(DecoderModel, small_model_args(**length_args), plain_fields),
        "gpt2 with documents": Case(DecoderModel, small_model_args(**length_args, **DROPOUT_RATES), document_fields),
        "gpt2, dropped and recomputed": Case(
            DecoderModel, small_model_args(**length_args, **DROPOUT_RATES, checkpoint_activations=True), plain_fields
        ),
        "llama": Case(DecoderModel, llama_model_args(**GROUPED_ARGS), plain_fields),
        "llama with documents": Case(DecoderModel, llama_model_args(**DROPOUT_RATES, **GROUPED_ARGS), document_fields),
        "llama, recomputed": Case(
            DecoderModel, llama_model_args(**GROUPED_ARGS, recompute_attention=True), segment_fields
        ),
        "gemma": Case(DecoderModel, llama_model_args(**softcap_args, **GROUPED_ARGS), plain_fields),
        "gemma with documents": Case(
            DecoderModel, llama_model_args(**softcap_args, **DROPOUT_RATES, **GROUPED_ARGS), document_fields
        ),
        "gemma, documents by starts": Case(
            DecoderModel, llama_model_args(**softcap_args, **GROUPED_ARGS), document_fields
        ),
        "sinks": Case(DecoderModel, llama_model_args(**sink_args, **GROUPED_ARGS), plain_fields),
        "sinks with documents": Case(
            DecoderModel, llama_model_args(**sink_args, **DROPOUT_RATES, **GROUPED_ARGS), document_fields
        ),
        "sinks, documents by starts": Case(
            DecoderModel, llama_model_args(**sink_args, **GROUPED_ARGS, recompute_attention=True), document_fields
        ),
        "latents": Case(DecoderModel, latent_model_args(), plain_fields),
        "latents with documents": Case(
            DecoderModel,
            latent_model_args(q_lora_rank=0, v_head_dim=9, attention_output_gate=True, **DROPOUT_RATES),
            document_fields,
        ),
        "latents, documents by starts": Case(DecoderModel, latent_model_args(window_size=5), document_fields),
        "latents, recomputed": Case(DecoderModel, latent_model_args(recompute_attention=True), segment_fields),
        "mpt": Case(DecoderModel, mpt_model_args(), plain_fields),
        "mpt, documents by starts": Case(DecoderModel, mpt_model_args(window_size=7), segment_fields),
        "mpt with documents": Case(DecoderModel, mpt_model_args(**DROPOUT_RATES, window_size=7), segment_fields),
        "bert": Case(BertModel, bert_model_args(**DROPOUT_RATES), vars(make_bert_batch(num_rows=BATCH, length=LENGTH))),
        "bert, documents by starts": Case(
            BertModel, bert_model_args(), vars(make_bert_batch(num_rows=BATCH, length=LENGTH))
        ),
    }


def run_case(case: Case, grid: Grid, comm: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return (sum, count) of the loss over the context ranks, and the gradients that they make up. Collective."""
    is_sequence_parallel, streams = (
        grid.tensor.size > 1,
        PhiloxDropout(BATCH, 5, tensor=grid.tensor, context=grid.context),
    )
    parallel = ParallelContext(
        grid.tensor, streams, is_sequence_parallel, grid.context, comm, grid.context_inner, grid.context_outer
    )
    model = fill_weights(case.model_class(case.args, parallel).double())
    loss = model(**split_batch(case.fields, grid.context))
    total, count = loss["loss"] if isinstance(loss, dict) else loss
    total.backward()
    for parameter in model.parameters():
        all_reduce(parameter.grad, grid.context)
    sum_group = SumGroup(grid.tensor, is_partial)
    for parameter in model.parameters():
        sum_group.register(parameter)
    sum_group.sum(lambda parameter: parameter.grad)
    totals = all_reduce(torch.stack([total.detach(), count.double()]), grid.context)
    return totals[0], totals[1], get_sharded_grads(model)


def run_cases(rank: int, tensor: int, context: int, comm: Any, names: list[str]) -> dict[str, Any]:
    document_attention.TILE = 3  # several blocks in a chunk
    inner = 2 if "a2a+p2p" in comm else 1
    grid = build_grid(Topology(pipe=1, data=1, tensor=tensor, context=context, context_inner=inner), rank)
    all_cases = cases()
    return {name: run_case(all_cases[name], grid, comm) for name in names}


def check_matches_one_process(tensor: int, context: int, comm: Any, names: list[str]) -> None:
    """Compare the cases of these ``names`` with one process."""
    ranks, all_cases = run_ranks(tensor * context, run_cases, tensor, context, comm, names), cases()
    for name in names:
        total, count, gradients = run_case(all_cases[name], single_grid(), comm)
        expected = {key: shard.unpadded(gradient) for key, (shard, gradient) in gradients.items()}
        for rank_results in ranks:
            assert abs(rank_results[name][0] - total) <= 1e-12 * abs(total), name
            assert rank_results[name][1] == count, name
        for first_rank in range(0, len(ranks), tensor):
            rank_grads = [rank_results[name][2] for rank_results in ranks[first_rank : first_rank + tensor]]
            worst = worst_relative_error(join_shards(rank_grads), expected)
            assert worst[0] <= 1e-11, (name, worst)


def test_every_family_matches_one_process_with_same_masks() -> None:
    """Rows E01 and E06 of a single step."""
    check_matches_one_process(1, 2, "all_gather", list(cases()))


def test_all_to_all_matches_one_process() -> None:
    names = [
        "llama with documents",
        "mpt with documents",
        "mpt, documents by starts",
        "sinks, documents by starts",
        "latents with documents",
    ]
    check_matches_one_process(1, 2, "a2a", names)


def test_hierarchical_form_and_types_by_layer_match_one_process() -> None:
    """All-to-all within two pairs of ranks, and keys and values of two such pairs; then the same in one layer only."""
    names = ["gpt2 with documents", "llama", "mpt, documents by starts", "sinks, documents by starts", "latents"]
    check_matches_one_process(1, 4, "a2a+p2p", names)
    check_matches_one_process(1, 4, ("a2a+p2p", "all_gather"), names[:3])


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "context"), [(1, 4), (2, 4)])
def test_every_family_matches_one_process_with_hierarchical_form(tensor: int, context: int) -> None:
    check_matches_one_process(tensor, context, "a2a+p2p", list(cases()))


@pytest.mark.slow
@pytest.mark.parametrize("comm", [("a2a", "all_gather"), ("all_gather", "a2a+p2p"), ("a2a", "a2a+p2p", "p2p")])
def test_every_decoder_matches_one_process_with_types_by_layer(comm: tuple[str, ...]) -> None:
    check_matches_one_process(1, 4, comm, [name for name in cases() if not name.startswith("bert")])


@pytest.mark.slow
@pytest.mark.parametrize("comm", ["all_gather", "p2p", "a2a"])
@pytest.mark.parametrize(("tensor", "context"), [(1, 2), (1, 4), (2, 2)])
def test_every_family_matches_one_process_with_more_ranks(tensor: int, context: int, comm: str) -> None:
    """With two tensor ranks the hidden states are cut over them, too."""
    check_matches_one_process(tensor, context, comm, list(cases()))


def make_parallel_context(rank: int, context: int, comm: str) -> ParallelContext:
    inner = 2 if comm == "a2a+p2p" else 1
    grid = build_grid(Topology(pipe=1, data=1, tensor=1, context=context, context_inner=inner), rank)
    return ParallelContext(
        context=grid.context,
        cp_comm_type=comm,
        context_inner=grid.context_inner,
        context_outer=grid.context_outer,
    )


def saved_bytes(rank: int, context: int, comm: str, length: int) -> int:
    """Return the bytes that the graph of a layer keeps, its weights aside."""
    parallel = make_parallel_context(rank, context, comm)
    model = fill_weights(DecoderModel(llama_model_args(**GROUPED_ARGS, max_position_embeddings=length), parallel))
    x = torch.randn(length // context, BATCH, 16, requires_grad=True)
    mask = model.masks.get_mask(x, None)
    with count_saved_bytes(model) as saved:
        y = model.layers[0](x, mask, None, None, None)
    del y
    return sum(saved.values())


@pytest.mark.parametrize("comm", ["all_gather", "a2a"])
def test_saved_bytes_scale_inversely_with_context_ranks(comm: str) -> None:
    """Keys and values of other ranks are gathered anew for the backward, and nobody has a mask."""
    bytes_on_two, bytes_on_four = (run_ranks(size, saved_bytes, size, comm, LONG_LENGTH) for size in (2, 4))
    assert {4 * num_bytes for num_bytes in bytes_on_four} == {2 * num_bytes for num_bytes in bytes_on_two}
    cost_kwargs: Any = {"mask_bytes": 0, "context": 2, "head_ranks": (2 if comm == "a2a" else 1,)}
    estimated = (
        DecoderCosts(llama_model_args(**GROUPED_ARGS), LONG_LENGTH, **cost_kwargs).unit_saved_bytes(BATCH, 1, 4)[1].full
    )
    assert abs(estimated - bytes_on_two[0]) <= 0.1 * bytes_on_two[0], (estimated, bytes_on_two)


def sent_bytes(rank: int, comm: str, context: int) -> float:
    """Return the bytes that a rank sends over groups of 2 context ranks in a forward and a backward of one layer."""
    parallel = make_parallel_context(rank, context, comm)
    model = fill_weights(DecoderModel(llama_model_args(**GROUPED_ARGS, max_position_embeddings=LONG_LENGTH), parallel))
    x = torch.randn(LONG_LENGTH // context, BATCH, 16, requires_grad=True)
    with count_sent_bytes(2) as sent:
        model.layers[0](x, model.masks.get_mask(x, None), None, None, None).sum().backward()
    return sum(sent)


@pytest.mark.slow
def test_saved_bytes_of_hierarchical_form_match_costs() -> None:
    costs = DecoderCosts(
        llama_model_args(**GROUPED_ARGS), LONG_LENGTH, mask_bytes=0, context=4, head_ranks=(2,)
    )  # fmt: skip
    estimated = costs.unit_saved_bytes(BATCH, 1, 4)[1].full
    for num_bytes in run_ranks(4, saved_bytes, 4, "a2a+p2p", LONG_LENGTH):
        assert abs(estimated - num_bytes) <= 0.1 * num_bytes, (estimated, num_bytes)


@pytest.mark.parametrize("comm", ["all_gather", "a2a", pytest.param("a2a+p2p", marks=pytest.mark.slow)])
def test_layer_traffic_matches_planner(comm: str) -> None:
    machine, head_ranks, context = gpu_machine("h100-80g"), (1 if comm == "all_gather" else 2,), 2
    if comm == "a2a+p2p":
        context = 4
    costs = DecoderCosts(llama_model_args(**GROUPED_ARGS), LONG_LENGTH, context=context, head_ranks=head_ranks)
    layout = Layout(context=context, micro_batch_size=BATCH, dtype="fp32")
    expected = CommunicationModel(costs, machine).context_traffic(layout).bytes
    assert run_ranks(context, sent_bytes, comm, context) == [expected] * context


def test_parallel_context_has_former_names() -> None:
    parallel, x = ParallelContext(), torch.arange(4.0)
    with pytest.warns(DeprecationWarning, match="ParallelContext.cut is now layer_kwargs"):
        assert parallel.cut == parallel.layer_kwargs
    with pytest.warns(DeprecationWarning, match="ParallelContext"):
        former = parallel.part(x), parallel.on_part(torch.nn.Identity()), parallel.length(x)
    assert torch.equal(former[0], x) and isinstance(former[1], torch.nn.Identity)
    assert former[2] == parallel.full_length(x) == 4


def test_layer_with_former_attribute_name_is_recognized() -> None:
    layer, parallel = torch.nn.Identity(), ParallelContext()
    assert get_parallel_context(layer) is None
    layer.place = parallel  # type: ignore[assignment]
    with pytest.warns(DeprecationWarning, match="Identity.place is now parallel"):
        assert get_parallel_context(layer) is parallel
