"""Mutants of Mamba-2: shards, sums of gradients, documents, padding, and the order of norm and gate."""

from __future__ import annotations

from typing import Any

import torch

from megatron.mpu.shard import set_shard, shard_of
from tests.mutants.mutant import call_after_init, mutant

MODULE = "tests/models/common/test_mamba2.py"
TENSOR_RANKS = f"{MODULE}::test_tensor_ranks_match_one_process[2-False]"
FOUR_RANKS = f"{MODULE}::test_tensor_ranks_match_one_process[4-True]"
DOCUMENTS = f"{MODULE}::test_packed_documents_match_separate_documents"
CACHE = f"{MODULE}::test_cached_passes_match_full_pass"
TRANSFORMERS = f"{MODULE}::test_mixer_matches_transformers[{{}}-fp64]"
OPERATOR = "tests/ops/test_state_space.py"


@mutant("megatron.models.common.mamba2_parts:Mamba2Parts._mark", TENSOR_RANKS)
def gradients_of_shared_b_and_c_are_not_summed(original: Any) -> Any:
    return lambda self, part, parameter: parameter


@mutant("megatron.models.common.gated_group_norm:GatedGroupNorm._sum_over_ranks", FOUR_RANKS)
def group_norm_covers_the_shard_only(original: Any) -> Any:
    return lambda self, sums: sums * (self.group.size // self.num_groups)


@mutant("megatron.models.common.mamba2:Mamba2.__init__", TENSOR_RANKS)
def decay_rates_are_in_the_wrong_shard(original: Any) -> Any:
    def move(mixer: Any) -> None:
        group, parameter = mixer.parallel.group, mixer.A_log
        shard = shard_of(parameter)
        next_rank = (group.rank + 1) % group.size
        set_shard(parameter, type(shard)(shard.global_shape, 0, next_rank * shard.length, shard.length))

    return call_after_init(original, move)


@mutant("megatron.optim.param_groups:decay_groups", f"{MODULE}::test_head_parameters_and_biases_have_no_weight_decay")
def weight_decay_applies_to_dt_bias(original: Any) -> Any:
    def groups(parameters: Any, weight_decay: float) -> Any:
        decayed, others = original(parameters, weight_decay)
        is_head_parameter = [parameter.dim() == 1 for parameter in others["params"]]
        moved = [p for p, is_moved in zip(others["params"], is_head_parameter, strict=True) if is_moved]
        return [{**decayed, "params": decayed["params"] + moved}, {**others, "params": []}]

    return groups


@mutant("megatron.ops.state_space:_document_masks", f"{OPERATOR}::test_packed_documents_match_separate_documents")
def state_is_carried_over_a_document(original: Any) -> Any:
    return lambda starts, *sizes: original(None, *sizes)


@mutant("megatron.models.common.mamba2_weights:Mamba2Convolution.forward", DOCUMENTS)
def convolution_reads_the_previous_document(original: Any) -> Any:
    return lambda self, packed, starts=None, left=None: original(self, packed, None, left)


@mutant("megatron.models.common.recurrent_cache:RecurrentCache.is_padding", CACHE)
def padding_changes_the_state(original: Any) -> Any:
    return lambda self, length: None


@mutant("megatron.models.common.gated_group_norm:GatedGroupNorm.__init__", TRANSFORMERS.format("mamba2"))
def gate_is_applied_after_the_norm(original: Any) -> Any:
    def swap(norm: Any) -> None:
        norm.is_gated_first = not norm.is_gated_first

    return call_after_init(original, swap)


@mutant("megatron.models.common.mamba2:Mamba2._positive_time_step", TRANSFORMERS.format("mamba2"))
def time_step_ignores_its_limits(original: Any) -> Any:
    def time_step(self: Any, projected: torch.Tensor) -> torch.Tensor:
        self.time_step_limits = 0.0, torch.inf
        return original(self, projected)

    return time_step


@mutant(
    "megatron.ops.state_space:ChunkedStateSpace.transition_and_state",
    f"{OPERATOR}::test_last_state_is_affine_in_initial_state",
)  # noqa: E501
def transition_ignores_document_starts(original: Any) -> Any:
    def transition(self: Any) -> Any:
        factor, state = original(self)
        return torch.where(factor == 0, torch.ones_like(factor), factor), state

    return transition
