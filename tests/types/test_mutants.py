"""Mutants that the types detect; docs/types.md has a table of them.

``tests/mutants/test_mutants.py`` shows that the numerical tests detect all mutants.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron.models.common.model_args import ModelArgs
from megatron.mpu.topology import Topology
from tests.helpers.delta_samples import delta_model_args
from tests.helpers.harness import run_ranks
from tests.helpers.latent_samples import latent_model_args
from tests.helpers.llama_samples import llama_model_args
from tests.helpers.mamba_samples import mamba_model_args
from tests.helpers.model_samples import small_model_args
from tests.mutants.mutant import apply_mutant, load_mutants
from tests.types.optional import DEADLINE_S, NEEDS_SPMD_TYPES
from tests.types.test_decoders import EXPERTS

pytestmark = NEEDS_SPMD_TYPES

MIXED = "Invariant type on axis"
"""Start of the package's message on a complete value and a summand or a shard in one operation."""
DETECTED = {
    "mpu.row_parallel_output_is_not_summed": "mappings._Reduce: the result of forward must be I on axis tensor",
    "mpu.gradient_of_a_copied_input_is_not_summed": "mappings._Copy: the gradient of argument 0 must be I",
    "mpu.column_parallel_input_gradient_is_not_summed": "start_all_reduce: the result must be R on axis tensor",
    "mpu.sequence_parallel_input_gradient_is_not_summed": "start_reduce_scatter: the result must be V on axis tensor",
    "mpu.weight_gradient_sees_the_local_sequence_shard_only": "start_all_gather: the result must be R on axis tensor",
    "mpu.reduce_scatter_does_not_sum": "mappings._ReduceScatterRows: the result of forward must be V on axis tensor",
    "mpu.row_parallel_bias_is_added_on_every_rank": MIXED,
    "mpu.row_parallel_bias_gradient_is_not_marked_as_partial": MIXED,
    "mpu.largest_logit_is_each_ranks_own": "all_reduce: the result must be R on axis tensor, but is V",
    "mpu.chunked_softmax_ignores_other_tensor_ranks": "_LinearCrossEntropy: the result of forward must be I on axis",
    "mpu.tensor_and_pipeline_axes_are_swapped": MIXED,
    "mpu.expert_groups_and_their_replicas_are_swapped": "a gradient that is summed must be P on axis data x context 0",
    "mpu.gradient_of_gathered_keys_is_not_summed": "context_parallel._Gather: the gradient of argument 0 must be V",
    "delta.gradient_of_output_norm_lacks_heads_of_other_tensor_ranks": MIXED,
    "latent.gradient_of_the_shared_rotated_key_is_counted_by_every_tensor_rank": "_Copy: the input must be I on axis",
    "latent.gradient_of_the_shared_rotated_key_is_partial": MIXED,
    "latent.gradients_of_latent_norms_are_counted_by_every_tensor_rank": MIXED,
    "latent.gradients_of_latent_norms_lack_the_tokens_of_other_ranks": MIXED,
    "mamba.gradients_of_shared_b_and_c_are_not_summed": "a weight of a column-parallel layer must be V or R on axis",
    "models.gradient_of_the_heads_input_is_not_summed": MIXED,
    "models.gradient_of_the_mean_over_all_heads_is_not_summed": MIXED,
    "models.gradients_of_different_experts_are_summed": "but ranks 0 and 2 hold different weights or shards",
    "models.gradients_of_sequence_parallel_norms_are_not_marked_as_partial": MIXED,
    "models.sinks_are_not_marked_as_shards": MIXED,
    "mtp.sequence_ranks_keep_only_their_gradient": MIXED,
}
"""Mutants that the types detect -> part of the message. All other mutants of ``tests/mutants/mpu.py`` type-check."""
WITH_EXPERTS = llama_model_args(num_layers=1, mtp_num_layers=1, hidden_bias=True, **EXPERTS)
DECODERS: list[tuple[ModelArgs, dict[str, Any]]] = [
    (small_model_args(num_layers=1, z_loss=1e-3, qk_norm="all"), {}),
    (
        llama_model_args(num_layers=1, mtp_num_layers=1, loss_chunk_tokens=5, moe_aux_loss_coeff=0.1, **EXPERTS),
        {"has_documents": True, "sequence_parallel": True},
    ),
    (WITH_EXPERTS, {}),
    (latent_model_args(num_layers=1), {"cp_comm_type": "a2a"}),
    (latent_model_args(num_layers=1), {"sequence_parallel": True}),
    (llama_model_args(num_layers=1, softmax_type="learnable"), {}),
]
"""Decoders that call every function that communicates, with their options."""
HYBRIDS: list[tuple[ModelArgs, dict[str, Any]]] = [
    (delta_model_args("gdn", num_layers=1), {}),
    (mamba_model_args(num_layers=1, mamba_num_groups=1), {}),
]
"""Decoders for the mutants of recurrent mixers."""
MUTANTS = load_mutants()


def find_type_error(rank: int, mutant: str) -> str:
    """Apply a mutant and return the first type error; "" if there is none."""
    import spmd_types as spmd

    from tests.types import typed_functions
    from tests.types.check import check_decoder
    from tests.types.declarations import check_declarations

    apply_mutant(MUTANTS[mutant])
    typed_functions.install()
    topology = Topology(pipe=1, data=2, tensor=2, context=2, expert=2)
    try:
        for args, options in HYBRIDS if mutant.startswith(("delta.", "mamba.")) else DECODERS:
            check_decoder(args, topology, **options)
        check_declarations(WITH_EXPERTS, topology)
    except spmd.SpmdTypeError as error:
        return str(error)
    except Exception:  # a mutant that fails in another way: no type error
        return ""
    return ""


@pytest.mark.parametrize("name", sorted({*DETECTED, *(name for name in MUTANTS if name.startswith("mpu."))}))
def test_types_detect_mutants_of_table_and_no_others(name: str) -> None:
    if not MUTANTS[name].can_be_applied:
        pytest.skip(f"{MUTANTS[name].needs} is not installed")
    (error,) = run_ranks(1, find_type_error, name, init=False, deadline_s=DEADLINE_S)
    if name in DETECTED:
        assert DETECTED[name] in error
    else:
        assert error == ""
