"""Mutants of faults in threads of other trainers that the files of the packages do not have.

| fault | known from |
|---|---|
| logits that are gathered enter the vocabulary-parallel loss | Megatron-LM #7452, finding 2 |
| keys and values of cross-attention are sharded over another group | Megatron-LM #7452, finding 6 |
| context ranks divide the loss by their own tokens | Megatron-LM #7452, finding 9 |
| an all-reduce overwrites counts that are read afterwards | Megatron-LM #7452, finding 10 |
| a replicated norm of heads keeps the gradient of the rank's own heads | Megatron-LM #7452, finding 11 |
| gradients of experts are divided by the number of expert ranks | NeMo Automodel #1260, megablocks #20 |
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron import mpu
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.mappings import all_reduce
from tds.gradients import is_reduced_by_optimizer
from tests.mutants.mutant import call_after_init, mutant

TENSOR_RANKS = "tests/models/common/test_tensor_ranks.py::test_tensor_ranks_match_one_process"
CONTEXT_COUNT = "tests/parity/test_loss_average.py::test_context_ranks_share_count_of_micro_batch[]"
EXPERTS = "tests/parity/test_experts.py::test_every_layout_equals_single_process[balanced-1-1-2-ep-2-1]"


@mutant(
    "megatron.mpu.cross_entropy:_check_columns",
    "tests/mpu/test_vocabulary.py::test_logits_that_are_not_own_shard_are_rejected",
)
def gathered_logits_are_accepted(original: Any) -> Any:
    return lambda *sizes: None


@mutant(
    "megatron.models.t5.layers:CrossAttention.__init__",
    "tests/parity/test_t5_layouts.py::test_every_layout_equals_single_process[2-1-2]",
)
def cross_attention_is_sharded_over_the_data_axis(original: Any) -> Any:
    def shard_over_data(self: Any) -> None:
        if self.key_value.group.size != 2 or dist.get_world_size() != 4:
            return
        ranks_of_groups = [(0, 2), (1, 3)]
        handles = [dist.new_group(list(ranks)) for ranks in ranks_of_groups]
        replica, tensor_rank = divmod(dist.get_rank(), 2)
        data = Group(ranks_of_groups[tensor_rank], replica, handles[tensor_rank])
        local_size, inputs = self.key_value.weight.shape
        bias = self.key_value.bias is not None
        self.key_value = mpu.ColumnParallelLinear(inputs, 2 * local_size, bias=bias, group=data)

    return call_after_init(original, shard_over_data)


@mutant("megatron.training.loss_forms:mean_of_micro_batch", CONTEXT_COUNT)
def context_ranks_divide_by_their_own_tokens(original: Any) -> Any:
    return lambda loss, context=SINGLE: original(loss)


@mutant(
    "megatron.mpu.mappings:_Reduce.forward",
    "tests/mpu/test_mappings.py::test_reduce_all_reduces_input_and_preserves_gradient[2]",
)
def all_reduce_overwrites_its_input(original: Any) -> Any:
    def forward(ctx: Any, x: torch.Tensor, group: Group, in_place: bool) -> torch.Tensor:
        return all_reduce(x, group).clone()

    return forward


@mutant("megatron.models.common.norms:make_head_norm", f"{TENSOR_RANKS}[2-q/k norm, head, rms]")
def gradients_of_head_norms_are_those_of_the_ranks_own_heads(original: Any) -> Any:
    def make(args: Any, parallel: Any, num_heads: int) -> Any:
        return original(args, replace(parallel, group=SINGLE) if args.qk_norm == "head" else parallel, num_heads)

    return make


@mutant("megatron.optim.gradients.reducer:GradReducer.sum_over_groups", EXPERTS)
def expert_gradients_are_divided_by_the_expert_ranks(original: Any) -> Any:
    def sum_over_groups(self: Any) -> None:
        is_summed = self._are_groups_summed
        original(self)
        for parameter in () if is_summed else filter(is_reduced_by_optimizer, self._store.main_params):
            self.grad(parameter).div_(mpu.get_grid().expert.size)

    return sum_over_groups
