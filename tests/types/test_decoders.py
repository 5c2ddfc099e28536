"""Decoders of every kind type-check on 8 ranks, among others 2 tensor x 2 context x 2 data with experts over 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from megatron.models.common.model_args import ModelArgs
from megatron.mpu.topology import Topology
from tests.helpers.delta_samples import delta_model_args
from tests.helpers.harness import run_ranks
from tests.helpers.latent_samples import latent_model_args
from tests.helpers.llama_samples import llama_model_args
from tests.helpers.mamba_samples import FALCON_FIELDS, NEMOTRON_FIELDS, mamba_model_args
from tests.helpers.model_samples import small_model_args
from tests.helpers.mpt_samples import mpt_model_args
from tests.types.optional import DEADLINE_S, NEEDS_SPMD_TYPES

pytestmark = NEEDS_SPMD_TYPES

EIGHT_HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_query_groups": 4}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8}
ROUTING: dict[str, Any] = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": 2,
    "moe_router_group_topk": 1, "moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True,
}  # fmt: skip
LAYOUTS = {
    "tp2 cp2 ep2": Topology(pipe=1, data=2, tensor=2, context=2, expert=2),
    "tp2 ep2": Topology(pipe=1, data=4, tensor=2, expert=2),
    "cp2 ep4": Topology(pipe=1, data=4, tensor=1, context=2, expert=4),
}


class Case(NamedTuple):
    """A decoder, and options of ``check_decoder``."""

    args: ModelArgs
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    expert_tensor: int = 0

    def with_experts(self, topology: Topology) -> Topology:
        """Return ``topology`` with the tensor ranks that shard an expert."""
        is_changed = self.expert_tensor and topology.tensor > 1
        return replace(topology, expert_tensor=self.expert_tensor) if is_changed else topology


CASES = {
    "GPT-2": Case(small_model_args()),
    "GPT-2, documents, untied": Case(small_model_args(untie_embeddings=True), {"has_documents": True}),
    "GPT-2, z-loss": Case(small_model_args(z_loss=1e-3)),
    "GPT-2, loss in chunks": Case(small_model_args(loss_chunk_tokens=5)),
    "GPT-2, z-loss in chunks": Case(small_model_args(loss_chunk_tokens=5, z_loss=1e-3)),
    "GPT-2, recompute": Case(small_model_args(checkpoint_activations=True)),
    "GPT-2, q/k norm over all heads": Case(small_model_args(qk_norm="all")),
    "MPT": Case(mpt_model_args()),
    "LLaMA, 2 groups": Case(llama_model_args()),
    "LLaMA, selective recompute": Case(llama_model_args(recompute_attention=True), {"has_documents": True}),
    "LLaMA, all-to-all": Case(llama_model_args(**EIGHT_HEADS), {"cp_comm_type": "a2a"}),
    "LLaMA, window, norms on both sides": Case(llama_model_args(window_size=4, norm_placement="both")),
    "LLaMA, xIELU": Case(llama_model_args(activation="xielu")),
    "LLaMA, output gate, parallel": Case(
        llama_model_args(attention_output_gate=True, parallel_residual="separate-norms", qk_norm="per-head")
    ),
    "sinks": Case(llama_model_args(softmax_type="learnable")),
    "sinks, documents, all-to-all": Case(
        llama_model_args(softmax_type="learnable", **EIGHT_HEADS), {"cp_comm_type": "a2a", "has_documents": True}
    ),
    "latents": Case(latent_model_args()),
    "latents, direct queries, documents": Case(latent_model_args(q_lora_rank=0), {"has_documents": True}),
    "latents, all-to-all": Case(latent_model_args(), {"cp_comm_type": "a2a"}),
    "experts": Case(llama_model_args(**EXPERTS, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.1)),
    "experts with biases": Case(llama_model_args(**EXPERTS, hidden_bias=True)),
    "experts on every tensor rank": Case(llama_model_args(**EXPERTS), expert_tensor=1),
    "experts, sigmoid router, shared expert": Case(llama_model_args(**EXPERTS, **ROUTING, moe_aux_loss_coeff=0.1)),
    "experts, capacity": Case(llama_model_args(**EXPERTS, moe_expert_capacity_factor=1.0)),
    "experts, recompute": Case(llama_model_args(**EXPERTS, checkpoint_activations=True)),
    "multi-token prediction": Case(llama_model_args(mtp_num_layers=2)),
    "multi-token prediction, experts, documents": Case(
        llama_model_args(mtp_num_layers=1, **EXPERTS), {"has_documents": True}
    ),
    "multi-token prediction, z-loss in chunks": Case(
        llama_model_args(mtp_num_layers=1, loss_chunk_tokens=5, z_loss=1e-3)
    ),
    "Gated DeltaNet": Case(delta_model_args("gdn")),
    "Gated DeltaNet and attention, documents, experts": Case(
        delta_model_args("gdn", linear_attention_freq="2", **EXPERTS), {"has_documents": True}
    ),
    "Gated DeltaNet, recompute": Case(delta_model_args("gdn", checkpoint_activations=True)),
    "Kimi Delta Attention, selective recompute": Case(delta_model_args("kda", recompute_attention=True)),
    "Kimi Delta Attention, full gates, documents": Case(delta_model_args("kda, full gates"), {"has_documents": True}),
    "Mamba-2, documents": Case(mamba_model_args(), {"has_documents": True}),
    "Mamba-2, shared group": Case(mamba_model_args(mamba_num_groups=1, mamba_norm_groups=1, mamba_proj_bias=True)),
    "parallel heads of Mamba-2 and attention": Case(mamba_model_args(**FALCON_FIELDS)),
    "Mamba-2 in a layer pattern": Case(mamba_model_args(**NEMOTRON_FIELDS)),
}


def check_layouts(rank: int, name: str) -> None:
    """Check a decoder in every layout: on the first rank, and with sequence parallelism on the last one."""
    from tests.types import typed_functions
    from tests.types.check import check_decoder

    typed_functions.install()
    case = CASES[name]
    for topology in map(case.with_experts, LAYOUTS.values()):
        if not topology.expert_tensor:
            check_decoder(case.args, topology, rank=0, **case.options)
        if topology.tensor > 1:
            last_rank = topology.world_size - 1
            check_decoder(case.args, topology, rank=last_rank, sequence_parallel=True, **case.options)


@pytest.mark.parametrize("name", CASES)
def test_forward_backward_and_gradient_sums_type_check(name: str) -> None:
    run_ranks(1, check_layouts, name, init=False, deadline_s=DEADLINE_S)


def check_parameters(rank: int, name: str) -> None:
    """Check the declared types of a decoder's parameters in every layout."""
    from tests.types.declarations import check_declarations

    case = CASES[name]
    options = {key: value for key, value in case.options.items() if key != "has_documents"}
    for topology in map(case.with_experts, LAYOUTS.values()):
        check_declarations(case.args, topology, sequence_parallel=topology.tensor > 1, **options)


@pytest.mark.parametrize(
    "name", ["GPT-2, documents, untied", "latents", "experts with biases", "experts on every tensor rank"]
)
def test_parameters_declared_equal_are_the_same_shard(name: str) -> None:
    run_ranks(1, check_parameters, name, init=False, deadline_s=DEADLINE_S)
