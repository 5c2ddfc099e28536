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
from tests.helpers.model_samples import fill_weights, small_model_args

EXPERT = "layers.0.mlp.experts.{}.up.weight"


def find_mismatches(rank: int) -> list[list[str]]:
    """Return the mismatches of sound copies, and those after one bit of an expert has flipped on rank 2."""
    grid = build_grid(Topology(pipe=1, data=4, tensor=1, expert=2), rank)
    args = small_model_args(num_experts=2, moe_ffn_hidden_size=8, hidden_bias=False)
    model = fill_weights(DecoderModel(args, ParallelContext(grid.tensor, expert=grid.expert)))
    copies, texts = find_copies(model, grid), []
    for is_flipped in (False, True):
        if is_flipped and rank == 2:
            weight = dict(named_parameters(model))[EXPERT.format(0)]
            weight.detach().view(torch.int32).view(-1)[3] ^= 1
        texts.append([mismatch.text for mismatch in check_replicas(model, copies)])
    return texts


def test_flipped_expert_bit_is_reported_on_ranks_with_copies() -> None:
    """Of four replicas and two experts, ranks 0 and 2 hold expert 0, ranks 1 and 3 expert 1."""
    for rank, (healthy, flipped) in enumerate(run_ranks(4, find_mismatches)):
        assert healthy == []
        assert flipped == ([] if rank % 2 else [f"{EXPERT.format(0)} differs among ranks 0, 2"])
