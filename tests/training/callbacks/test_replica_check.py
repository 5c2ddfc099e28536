"""Copies of experts, which are replicated over fewer ranks than other weights, are compared where they are held."""

from __future__ import annotations

import torch

from megatron.checkpoint import named_parameters
from megatron.models.common.decoder import DecoderModel
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.groups import build_grid
from megatron.mpu.topology import Topology
from megatron.training.callbacks.replica_check import check_replicas, find_copies
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import filled, small_sizes

EXPERT = "layers.0.mlp.experts.{}.up.weight"


def mismatches(rank: int) -> list[list[str]]:
    """Return the mismatches of sound copies, and those after one bit of an expert has flipped on rank 2."""
    grid = build_grid(Topology(pipe=1, data=4, tensor=1, expert=2), rank)
    sizes = small_sizes(num_experts=2, moe_ffn_hidden_size=8, hidden_bias=False)
    model = filled(DecoderModel(sizes, ParallelContext(grid.tensor, expert=grid.expert)))
    copies, found = find_copies(model, grid), []
    for is_flipped in (False, True):
        if is_flipped and rank == 2:
            weight = dict(named_parameters(model))[EXPERT.format(0)]
            weight.detach().view(torch.int32).view(-1)[3] ^= 1
        found.append([each.text for each in check_replicas(model, copies)])
    return found


def test_a_flipped_bit_of_an_expert_is_found_among_the_ranks_that_hold_it() -> None:
    """Of four replicas and two experts, ranks 0 and 2 hold expert 0, ranks 1 and 3 expert 1."""
    for rank, (sound, flipped) in enumerate(run_ranks(4, mismatches)):
        assert sound == []
        assert flipped == ([] if rank % 2 else [f"{EXPERT.format(0)} differs among ranks 0, 2"])
