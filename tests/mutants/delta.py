"""Mutants of recurrent mixers with the delta rule, among them faults of other trainers.

| fault | known from |
|---|---|
| the output norm's gradient lacks the heads of other tensor ranks | Megatron-LM #7452 |
| a packed matrix is split over the tensor ranks as if it were one part | Megatron-LM #1989 |
| documents leak through the state or through the convolution | prime-rl #3000, Automodel #2131 |
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron.mpu.groups import Group
from megatron.mpu.matrices import set_matrices
from megatron.mpu.shard import Shard, shard_of
from tds.param_info import info_of, set_info
from tests.mutants.mutant import call_after_init, mutant

MIXERS = "tests/models/common/test_delta_mixers.py"
TENSOR_RANKS = f"{MIXERS}::test_tensor_ranks_match_one_process[False-gdn]"
CONTEXT_RANKS = f"{MIXERS}::test_context_ranks_match_one_process[2-documents-gdn]"
DOCUMENTS = f"{MIXERS}::test_packed_documents_equal_separate_documents[kda]"
INITIAL = f"{MIXERS}::test_initial_decays_are_in_published_ranges_and_have_no_weight_decay"
CACHE = f"{MIXERS}::test_cached_tokens_match_full_forward[gdn]"
HUGGING_FACE = (
    "tests/models/common/test_delta_against_huggingface.py::test_output_and_gradients_match_transformers[True-Qwen3.5]"
)
MUON = (
    "tests/models/common/test_mixer_weights.py::test_vectors_have_no_weight_decay_and_only_projections_are_matrices"
    "[gated-delta-net-changes0]"
)
LOOP = "tests/ops/test_delta_rule.py::test_values_and_gradients_match_loop"


@mutant("megatron.models.common.gated_norm:GatedNorm.__init__", TENSOR_RANKS)
def gradient_of_output_norm_lacks_heads_of_other_tensor_ranks(original: Any) -> Any:
    def clear_partial(norm: Any) -> None:
        norm.weight.sequence_parallel = False
        set_info(norm.weight, replace(info_of(norm.weight), has_partial_grad=False))

    return call_after_init(original, clear_partial)


@mutant("megatron.models.common.delta_mixer:DeltaMixer.__init__", TENSOR_RANKS)
def decay_rates_are_those_of_another_tensor_rank(original: Any) -> Any:
    def shift_shard(mixer: Any) -> None:
        shard = shard_of(mixer.A_log)
        start = (shard.start + shard.length) % shard.global_shape[0]
        set_info(mixer.A_log, replace(info_of(mixer.A_log), shard=Shard(shard.global_shape, 0, start, shard.length)))

    return call_after_init(original, shift_shard)


@mutant("megatron.models.common.short_convolution:ShortConvolution.__init__", TENSOR_RANKS)
def convolution_has_the_channels_of_another_tensor_rank(original: Any) -> Any:
    def shift_shards(convolution: Any) -> None:
        for parameter in convolution.parameters():
            shard = shard_of(parameter)
            start = (shard.start + shard.length) % shard.global_shape[0]
            set_info(parameter, replace(info_of(parameter), shard=replace(shard, start=start)))

    return call_after_init(original, shift_shards)


@mutant("megatron.models.common.short_convolution:short_convolution", DOCUMENTS)
def convolution_reads_previous_document(original: Any) -> Any:
    return lambda x, weight, starts=None, left=None: original(x, weight, left=left)


@mutant("megatron.models.common.delta_mixer:gated_delta_rule", DOCUMENTS)
def state_continues_previous_document(original: Any) -> Any:
    return lambda *inputs, starts=None, **state: original(*inputs, **state)


@mutant("megatron.ops.delta_rule:_DocumentMasks.without_new_documents", LOOP)
def documents_within_a_chunk_read_the_state_before_it(original: Any) -> Any:
    return lambda self, x: x


@mutant("megatron.ops.delta_rule:_DocumentMasks.without_old_documents", LOOP)
def documents_that_end_within_a_chunk_write_the_state_after_it(original: Any) -> Any:
    return lambda self, x: x


@mutant("megatron.models.common.recurrent_context:gather_from_context_region", CONTEXT_RANKS)
def states_are_combined_in_the_order_of_ranks(original: Any) -> Any:
    def gather(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
        gathered = original(x, group, dim)
        by_rank = [idx for rank in range(group.size) for idx in (rank, 2 * group.size - 1 - rank)]
        return gathered[by_rank] if x.dim() == 3 else gathered  # [2, b, elements]: states; tokens have 4 dimensions

    return gather


@mutant("megatron.models.common.delta_mixer:prefix_states", CONTEXT_RANKS)
def late_chunk_starts_from_zero(original: Any) -> Any:
    def prefix(transition: torch.Tensor, state: torch.Tensor, group: Group) -> torch.Tensor:
        early, late = original(transition, state, group).chunk(2)
        return torch.cat((early, torch.zeros_like(late)))

    return prefix


@mutant("megatron.models.common.delta_mixer:left_tokens", CONTEXT_RANKS)
def convolution_of_a_chunk_lacks_the_tokens_before_it(original: Any) -> Any:
    return lambda x, num_tokens, group: None


@mutant("megatron.models.common.delta_mixer:chunk_starts", CONTEXT_RANKS)
def document_starts_are_not_relative_to_the_chunk(original: Any) -> Any:
    def starts_of(starts: Any, length: int, group: Group) -> Any:
        local = original(starts, length, group)
        return local if group.size == 1 or starts is None else starts[:, : length // 2].repeat(2, 1)

    return starts_of


@mutant("megatron.models.common.gated_norm:GatedNorm.forward", HUGGING_FACE)
def gate_is_applied_before_the_norm(original: Any) -> Any:
    def forward(self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gated = x * self.activation(gate)
        factor = (gated.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return gated * factor * self.weight

    return forward


@mutant("megatron.optim.param_groups:decay_groups", INITIAL)
def time_steps_have_weight_decay(original: Any) -> Any:
    def group(parameters: Any, weight_decay: float) -> Any:
        with_decay, without_decay = original(parameters, weight_decay)
        with_decay["params"] += [p for p in without_decay["params"] if info_of(p).initial_values is not None]
        without_decay["params"] = [p for p in without_decay["params"] if info_of(p).initial_values is None]
        return [with_decay, without_decay]

    return group


@mutant("megatron.models.common.short_convolution:ShortConvolution.__init__", MUON)
def muon_orthogonalizes_convolutions(original: Any) -> Any:
    def mark(convolution: Any) -> None:
        for name in convolution.names:
            set_matrices(getattr(convolution, name))

    return call_after_init(original, mark)


@mutant("megatron.models.common.recurrent_cache:RecurrentCache.is_padding", CACHE)
def padding_changes_the_cached_state(original: Any) -> Any:
    return lambda self, length: None
