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
from tests.helpers.bert_samples import bert_model_args, make_bert_batch
from tests.helpers.harness import run_ranks
from tests.helpers.llama_samples import llama_model_args
from tests.helpers.model_samples import (
    BATCH,
    SEQ,
    fill_weights,
    get_sharded_grads,
    join_shards,
    make_batch,
    small_model_args,
    worst_relative_error,
)
from tests.helpers.mpt_samples import mpt_model_args
from tests.helpers.t5_samples import MODEL_VARIANTS, make_t5_batch, t5_model_args
from tests.helpers.whole import group_of_all_ranks

DROPOUT_RATES = {"attention_dropout": 0.2, "hidden_dropout": 0.2}
RECOMPUTED_ARGS = {**DROPOUT_RATES, "checkpoint_activations": True}
EXPERT_ARGS = {
    "num_experts": 4, "moe_ffn_hidden_size": 12, "hidden_bias": False, "moe_shared_expert_intermediate_size": 8,
    "moe_shared_expert_gate": True, "moe_aux_loss_coeff": 0.1,
}  # fmt: skip
RESIDUAL_EXPERT_ARGS = {
    "num_experts": 4, "moe_ffn_hidden_size": 12, "hidden_bias": False, "moe_use_residual": True,
}  # fmt: skip
T5_LENGTHS = {"encoder": 8, "decoder": 4}
"""Of T5's samples, so that 4 ranks divide them."""


class Case(NamedTuple):
    """A model of ``model_class`` and ``args``, and the fields that it is given."""

    model_class: Callable[..., Any]
    args: Any
    fields: dict[str, Any]


def t5_fields(**batch_kwargs: Any) -> dict[str, Any]:
    """Return T5's samples cut to ``T5_LENGTHS``."""
    lengths = {"enc": T5_LENGTHS["encoder"], "dec": T5_LENGTHS["decoder"], "lab": T5_LENGTHS["decoder"]}
    fields = vars(make_t5_batch(**batch_kwargs))
    return {name: None if x is None else x[:, : lengths.get(name[:3], 4)] for name, x in fields.items()}


def decoder_fields(*names: str, **batch_kwargs: Any) -> dict[str, Any]:
    """Return the named fields of a decoder's samples, with what its loss takes."""
    fields = vars(make_batch(**batch_kwargs))
    return {name: fields[name] for name in (*names, "labels", "loss_mask")}


def cases() -> dict[str, Case]:
    """Return every family; all four ways to embed, gated and plain, with documents, recomputed."""
    bert_fields = vars(make_bert_batch(num_rows=BATCH, length=SEQ))
    group_args = {"num_query_groups": 4}  # for 4 ranks
    document_kwargs = {"with_documents": True}
    return {
        "gpt2": Case(DecoderModel, small_model_args(**DROPOUT_RATES), vars(make_batch(with_documents=True))),
        "gpt2, norms in the residual": Case(
            DecoderModel,
            small_model_args(**RECOMPUTED_ARGS, apply_residual_connection_post_layernorm=True, untie_embeddings=True),
            vars(make_batch()),
        ),
        "llama": Case(
            DecoderModel,
            llama_model_args(**DROPOUT_RATES, **group_args),
            decoder_fields("tokens", "position_ids", "segment_ids", **document_kwargs),
        ),
        "mpt": Case(
            DecoderModel, mpt_model_args(**DROPOUT_RATES), decoder_fields("tokens", "segment_ids", **document_kwargs)
        ),
        "llama, experts": Case(DecoderModel, small_model_args(**EXPERT_ARGS), vars(make_batch())),
        "gpt2, residual experts": Case(DecoderModel, small_model_args(**RESIDUAL_EXPERT_ARGS), vars(make_batch())),
        "bert": Case(BertModel, bert_model_args(**DROPOUT_RATES), bert_fields),
        "t5": Case(
            T5Model, t5_model_args(**{**MODEL_VARIANTS["T5 v1.1"], **RECOMPUTED_ARGS}), t5_fields(with_documents=True)
        ),
        "t5 as CPM": Case(
            T5Model, t5_model_args(**{**MODEL_VARIANTS["as CPM"], **DROPOUT_RATES}), t5_fields(with_documents=True)
        ),
    }


def run_case(case: Case, group: Group, *, is_sequence_parallel: bool) -> tuple[torch.Tensor, Any]:
    """Return the loss and the gradients of this rank, with masks that belong to elements. Collective."""
    parallel = ParallelContext(group, PhiloxDropout(BATCH, 5, tensor=group), sequence_parallel=is_sequence_parallel)
    model = fill_weights(case.model_class(case.args, parallel).double())
    lengths = [*T5_LENGTHS.values()] if case.model_class is T5Model else [SEQ]
    layer_lengths: list[int] = []
    layers = [layer for name, layer in model.named_modules() if name.rpartition(".")[0].endswith("layers")]
    for layer in layers:
        layer.register_forward_hook(lambda _, inputs, output: layer_lengths.extend([len(inputs[0]), len(output)]))
    loss = model(**case.fields)
    loss = loss["loss"] if isinstance(loss, dict) else loss
    loss[0].backward()
    num_shards = group.size if is_sequence_parallel else 1
    assert set(layer_lengths) == {length // num_shards for length in lengths}, "layers hand parts on"
    sum_group = SumGroup(group, is_partial)
    for parameter in model.parameters():
        sum_group.register(parameter)
    sum_group.sum(lambda parameter: parameter.grad)
    return loss[0].detach(), get_sharded_grads(model)


def run_cases(rank: int, size: int) -> dict[str, Any]:
    return {
        name: run_case(case, group_of_all_ranks(rank, size), is_sequence_parallel=True)
        for name, case in cases().items()
    }


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_family_matches_one_process_with_same_masks(size: int) -> None:
    """Rows E01 and E06 of a single step; replicated weights have one gradient on all ranks."""
    ranks = run_ranks(size, run_cases, size)
    for name, case in cases().items():
        loss, gradients = run_case(case, SINGLE, is_sequence_parallel=False)
        expected = {key: shard.unpadded(gradient) for key, (shard, gradient) in gradients.items()}
        for rank_results in ranks:
            assert abs(rank_results[name][0] - loss) <= 1e-12 * abs(loss), name
        worst = worst_relative_error(join_shards([rank_results[name][1] for rank_results in ranks]), expected)
        assert worst[0] <= 1e-11, (name, worst)


def test_replicated_parameters_have_partial_gradients() -> None:
    group = Group((0, 1), 0)
    for name, case in cases().items():
        model = case.model_class(case.args, ParallelContext(group, sequence_parallel=True))
        for key, parameter in model.named_parameters():
            is_replicated = not shard_of(parameter).is_partitioned and not key.startswith("next_sentence.")
            assert is_partial(parameter) == is_replicated, (name, key)
        assert not any(map(is_partial, case.model_class(case.args, ParallelContext(group)).parameters())), name


def saved_bytes(rank: int, size: int, mode: str) -> list[int]:
    """Return the bytes that the graph of a layer keeps, its weights aside: of whole sequences, and of parts.

    Args:
        mode: "plain", "split" as a schedule that puts weights' gradients off, "compiled".
    """
    group, totals = group_of_all_ranks(rank, size), []
    for is_sequence_parallel in (False, True):
        streams = DropoutStreams(5, tensor=group)
        model = fill_weights(
            DecoderModel(small_model_args(hidden_dropout=0.2), ParallelContext(group, streams, is_sequence_parallel))
        )
        if mode == "compiled":
            compile_layers(model, streams, torch.device("cpu"), backend="aot_eager")
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved: dict[int, torch.Tensor] = {}

        def record(
            x: torch.Tensor, weights: set[int] = weights, saved: dict[int, torch.Tensor] = saved
        ) -> torch.Tensor:
            if x.untyped_storage().data_ptr() not in weights:
                saved[x.untyped_storage().data_ptr()] = x
            return x

        x = torch.randn(SEQ // (size if is_sequence_parallel else 1), BATCH, 16, requires_grad=True)
        context = WeightGradStore().active() if mode == "split" else nullcontext()
        with context, torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
            y = model.layers[0](x)
        totals.append(sum(rank_results.untyped_storage().nbytes() for rank_results in saved.values()))
        del y
    return totals


@pytest.mark.parametrize(
    ("mode", "num_gathered"), [("plain", 0), ("split", 2), pytest.param("compiled", 2, marks=pytest.mark.slow)]
)
def test_layer_saves_sharded_activations(mode: str, num_gathered: int) -> None:
    """Between the products are the inputs of 2 norms and what these return, 2 masks, 2 times 2 statistics a token.

    What norms return is ``join_shards`` where plain functions make the products.
    """
    for full, sharded in run_ranks(2, saved_bytes, 2, mode):
        num_values = SEQ * BATCH * 16
        shardable_bytes = 4 * ((6 - num_gathered) * num_values + 4 * SEQ * BATCH)  # all in fp32, on a CPU the masks too
        assert full - sharded == shardable_bytes // 2, (full, sharded, shardable_bytes)
