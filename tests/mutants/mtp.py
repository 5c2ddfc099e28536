"""Mutants of multi-token prediction: known faults of other trainers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron.models.common.mtp import FutureTokens, MTPLayer
from megatron.mpu.groups import SINGLE
from tests.mutants.mutant import mutant

ONE_PROCESS = "tests/models/common/test_mtp.py"
LOOPS = f"{ONE_PROCESS}::test_losses_and_gradients_match_loops_over_positions[LLaMA-True]"
MEANS = f"{ONE_PROCESS}::test_loss_is_the_mean_over_targets[token]"
GRIDS = "tests/parity/test_mtp.py::test_every_grid_equals_single_process"
CONTEXT = f"{GRIDS}[experts-1-1-2-2-plain]"
MICRO_BATCHES = "tests/parity/test_mtp.py::test_number_of_micro_batches_does_not_change_training[8]"


@mutant("megatron.models.common.mtp:with_mtp_losses", CONTEXT)
def loss_is_divided_by_context_size(original: Any) -> Any:
    """Megatron-LM #3959."""

    def losses(*args: Any, **kwargs: Any) -> Any:
        factor = kwargs["args"].mtp_loss_scaling_factor / kwargs["parallel"].context.size
        return original(*args, **{**kwargs, "args": replace(kwargs["args"], mtp_loss_scaling_factor=factor)})

    return losses


@mutant("megatron.models.common.mtp:_target_weights", LOOPS, MEANS)
def targets_have_the_weight_of_main_tokens(original: Any) -> Any:
    """Megatron-LM #2417, repaired by #3159: layers with fewer targets had a smaller weight."""
    return lambda mask, target_mask, loss_average: torch.ones_like(mask[:, :1])


@mutant("megatron.models.common.mtp:_target_weights", MICRO_BATCHES)
def weights_depend_on_the_micro_batch(original: Any) -> Any:
    """As in Megatron-LM, in which layouts with other micro-batches train with other weights."""
    return lambda mask, target_mask, loss_average: original(mask, target_mask, "micro-batch")


@mutant("megatron.models.common.mtp:future_tokens", LOOPS, f"{ONE_PROCESS}::test_padding_and_its_labels_have_no_effect")
def padding_has_targets(original: Any) -> Any:
    """Megatron-Bridge #6103."""

    def tokens(labels: Any, loss_mask: Any, segment_ids: Any, args: Any, parallel: Any) -> list[FutureTokens]:
        return original(labels.clamp(min=0), torch.ones_like(loss_mask), segment_ids, args, parallel)

    return tokens


@mutant("megatron.models.common.mtp:_is_same_document", LOOPS)
def targets_cross_documents(original: Any) -> Any:
    return lambda segments, like, distance: original(None, like, distance)


@mutant(
    "megatron.models.common.mtp:future_tokens",
    f"{ONE_PROCESS}::test_context_ranks_have_their_chunks_of_future_tokens[2]",
    CONTEXT,
)
def context_ranks_shift_only_their_own_tokens(original: Any) -> Any:
    def tokens(labels: Any, loss_mask: Any, segment_ids: Any, args: Any, parallel: Any) -> list[FutureTokens]:
        return original(labels, loss_mask, segment_ids, args, replace(parallel, context=SINGLE))

    return tokens


@mutant(
    "megatron.models.common.transformer:Recompute.__call__",
    f"{ONE_PROCESS}::test_recompute_is_bitwise_equal_and_repeats_each_layer[offload0-1]",
)
def recomputed_layers_lose_their_mask(original: Any) -> Any:
    """Megatron-LM #4933 lost an argument of the recomputed forward."""

    def call(self: Any, function: Any, *inputs: Any) -> Any:
        return original(self, function, *(inputs[:3] if isinstance(function, MTPLayer) else inputs))

    return call


@mutant("megatron.models.common.mtp:MTPLayer.embed", LOOPS)
def embedding_gets_no_gradient_of_future_tokens(original: Any) -> Any:
    return lambda self, word, tokens: original(self, word, tokens).detach()


@mutant("megatron.models.common.mtp:scatter_to_sequence_region", f"{GRIDS}[llama-2-2-1-1-sequence-parallel]")
def sequence_ranks_keep_only_their_gradient(original: Any) -> Any:
    return lambda x, group: x.chunk(group.size)[group.rank].contiguous()
