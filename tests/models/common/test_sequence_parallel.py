"""Every family with its sequence cut over the tensor ranks: losses and gradients of one process, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

from megatron.models.bert.model import BertModel
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.t5.model import T5Model
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.philox_dropout import PhiloxDropout
from megatron.mpu.random import DropoutStreams
from megatron.mpu.shard import is_partial, shard_of
from megatron.optim.gradients.sum_group import SumGroup
from megatron.training.compile import compile_layers
from tds.engine.weight_grad_store import WeightGradStore
from tests.helpers.bert_samples import bert_batch, bert_sizes
from tests.helpers.harness import run_ranks
from tests.helpers.llama_samples import llama_sizes
from tests.helpers.model_samples import BATCH, SEQ, batch_of, filled, gradients_of, joined, small_sizes, worst_relative
from tests.helpers.mpt_samples import mpt_sizes
from tests.helpers.t5_samples import KINDS, t5_batch, t5_sizes
from tests.helpers.whole import whole_world

RATES = {"attention_dropout": 0.2, "hidden_dropout": 0.2}
RECOMPUTED = {**RATES, "checkpoint_activations": True}
EXPERTS = {
    "num_experts": 4, "moe_ffn_hidden_size": 12, "hidden_bias": False, "moe_shared_expert_intermediate_size": 8,
    "moe_shared_expert_gate": True, "moe_aux_loss_coeff": 0.1,
}  # fmt: skip
LENGTHS = {"encoder": 8, "decoder": 4}
"""Of T5's samples, so that 4 ranks divide them."""


class Case(NamedTuple):
    """A model of ``kind`` and ``sizes``, and the fields that it is given."""

    kind: Callable[..., Any]
    sizes: Any
    fields: dict[str, Any]


def t5_fields(**how: Any) -> dict[str, Any]:
    """Return T5's samples cut to ``LENGTHS``."""
    lengths = {"enc": LENGTHS["encoder"], "dec": LENGTHS["decoder"], "lab": LENGTHS["decoder"]}
    fields = vars(t5_batch(**how))
    return {name: None if x is None else x[:, : lengths.get(name[:3], 4)] for name, x in fields.items()}


def decoder_fields(*names: str, **how: Any) -> dict[str, Any]:
    """Return the named fields of a decoder's samples, with what its loss takes."""
    fields = vars(batch_of(**how))
    return {name: fields[name] for name in (*names, "labels", "loss_mask")}


def cases() -> dict[str, Case]:
    """Return every family; all four ways to embed, gated and plain, with documents, recomputed."""
    bert = vars(bert_batch(rows=BATCH, length=SEQ))
    groups = {"num_query_groups": 4}  # for 4 ranks
    apart = {"with_documents": True}
    return {
        "gpt2": Case(DecoderModel, small_sizes(**RATES), vars(batch_of(with_documents=True))),
        "gpt2, norms in the residual": Case(
            DecoderModel,
            small_sizes(**RECOMPUTED, apply_residual_connection_post_layernorm=True, untie_embeddings=True),
            vars(batch_of()),
        ),
        "llama": Case(
            DecoderModel,
            llama_sizes(**RATES, **groups),
            decoder_fields("tokens", "position_ids", "segment_ids", **apart),
        ),
        "mpt": Case(DecoderModel, mpt_sizes(**RATES), decoder_fields("tokens", "segment_ids", **apart)),
        "llama, experts": Case(DecoderModel, small_sizes(**EXPERTS), vars(batch_of())),
        "bert": Case(BertModel, bert_sizes(**RATES), bert),
        "t5": Case(T5Model, t5_sizes(**{**KINDS["T5 v1.1"], **RECOMPUTED}), t5_fields(with_documents=True)),
        "t5 as CPM": Case(T5Model, t5_sizes(**{**KINDS["as CPM"], **RATES}), t5_fields(with_documents=True)),
    }


def result(case: Case, group: Group, *, cuts: bool) -> tuple[torch.Tensor, Any]:
    """Return the loss and the gradients of this rank, with masks that belong to elements. Collective."""
    place = ParallelContext(group, PhiloxDropout(BATCH, 5, tensor=group), sequence_parallel=cuts)
    model = filled(case.kind(case.sizes, place).double())
    lengths = [*LENGTHS.values()] if case.kind is T5Model else [SEQ]
    seen: list[int] = []
    layers = [layer for name, layer in model.named_modules() if name.rpartition(".")[0].endswith("layers")]
    for layer in layers:
        layer.register_forward_hook(lambda _, inputs, output: seen.extend([len(inputs[0]), len(output)]))
    loss = model(**case.fields)
    loss = loss["loss"] if isinstance(loss, dict) else loss
    loss[0].backward()
    ranks = group.size if cuts else 1
    assert set(seen) == {length // ranks for length in lengths}, "layers hand parts on"
    partial = SumGroup(group, is_partial)
    for parameter in model.parameters():
        partial.register(parameter)
    partial.sum(lambda parameter: parameter.grad)
    return loss[0].detach(), gradients_of(model)


def results(rank: int, size: int) -> dict[str, Any]:
    return {name: result(case, whole_world(rank, size), cuts=True) for name, case in cases().items()}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_family_equals_one_process_with_the_same_masks(size: int) -> None:
    """Rows E01 and E06 of a single step; replicated weights have one gradient on all ranks."""
    ranks = run_ranks(size, results, size)
    for name, case in cases().items():
        loss, gradients = result(case, SINGLE, cuts=False)
        wanted = {key: shard.unpadded(gradient) for key, (shard, gradient) in gradients.items()}
        for each in ranks:
            assert abs(each[name][0] - loss) <= 1e-12 * abs(loss), name
        worst = worst_relative(joined([each[name][1] for each in ranks]), wanted)
        assert worst[0] <= 1e-11, (name, worst)


def test_what_every_rank_holds_whole_is_partial_but_for_what_follows_the_gathered_first_token() -> None:
    group = Group((0, 1), 0)
    for name, case in cases().items():
        model = case.kind(case.sizes, ParallelContext(group, sequence_parallel=True))
        for key, parameter in model.named_parameters():
            is_whole = not shard_of(parameter).is_partitioned and not key.startswith("next_sentence.")
            assert is_partial(parameter) == is_whole, (name, key)
        assert not any(map(is_partial, case.kind(case.sizes, ParallelContext(group)).parameters())), name


def kept_numbers(rank: int, size: int, way: str) -> list[int]:
    """Return the bytes that the graph of a layer keeps, its weights aside: of whole sequences, and of parts.

    Args:
        way: "plain", "split" as a schedule that puts weights' gradients off, "compiled".
    """
    group, found = whole_world(rank, size), []
    for cuts in (False, True):
        streams = DropoutStreams(5, tensor=group)
        model = filled(DecoderModel(small_sizes(hidden_dropout=0.2), ParallelContext(group, streams, cuts)))
        if way == "compiled":
            compile_layers(model, streams, torch.device("cpu"), backend="aot_eager")
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def keep(x: torch.Tensor, weights: set[int] = weights, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            if x.untyped_storage().data_ptr() not in weights:
                kept[x.untyped_storage().data_ptr()] = x
            return x

        x = torch.randn(SEQ // (size if cuts else 1), BATCH, 16, requires_grad=True)
        splitting = WeightGradStore().active() if way == "split" else nullcontext()
        with splitting, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            y = model.layers[0](x)
        found.append(sum(each.untyped_storage().nbytes() for each in kept.values()))
        del y
    return found


@pytest.mark.parametrize(
    ("way", "joined"), [("plain", 0), ("split", 2), pytest.param("compiled", 2, marks=pytest.mark.slow)]
)
def test_a_layer_keeps_a_part_of_all_that_was_whole(way: str, joined: int) -> None:
    """Between the products are the inputs of 2 norms and what these return, 2 masks, 2 times 2 statistics a token.

    What norms return is ``joined`` where plain functions make the products.
    """
    for whole, parts in run_ranks(2, kept_numbers, 2, way):
        numbers = SEQ * BATCH * 16
        between = 4 * ((6 - joined) * numbers + 4 * SEQ * BATCH)  # all in fp32, on a CPU the masks too
        assert whole - parts == between // 2, (whole, parts, between)
