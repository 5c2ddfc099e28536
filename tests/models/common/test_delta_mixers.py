"""Gated DeltaNet and Kimi Delta Attention: tensor, sequence and context parallelism, documents, caches, matrices."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from megatron.models.common.cache_slots import KVCacheSlots
from megatron.models.common.delta_mixer import l2_norm
from megatron.models.common.gated_delta_net import GatedDeltaNet
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import initialize
from megatron.models.common.recurrent_cache import RecurrentCache
from megatron.mpu.context_parallel import gather_rows, split_along_context
from megatron.mpu.groups import Group, build_grid
from megatron.mpu.mappings import all_reduce
from megatron.mpu.matrices import matrices_of
from megatron.mpu.shard import is_partial
from megatron.mpu.topology import Topology
from megatron.optim.param_groups import decay_groups
from tests.helpers.delta_samples import VARIANTS, delta_model_args, make_mixer
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import get_sharded_grads, join_shards, worst_relative_error
from tests.helpers.recurrent_samples import make_starts
from tests.helpers.whole import random_tensor

LENGTH, BATCH, HIDDEN = 16, 2, 16
TOLERANCE = 1e-12
DOCUMENTS = {
    "one document": None,
    "documents": [[0, 3, 4, 11], [0, 9]],
    "documents at chunk bounds": [[0, 4, 8, 12], [0, 2, 6, 14]],
}
"""Indices of the first tokens of the documents of each row."""


class Layout(NamedTuple):
    tensor: int = 1
    context: int = 1
    sequence_parallel: bool = False


def document_starts(documents: str) -> torch.Tensor | None:
    """Return the document starts of a case of ``DOCUMENTS``."""
    rows = DOCUMENTS[documents]
    return None if rows is None else make_starts(LENGTH, rows)


def run_mixer(
    rank: int, variant: str, layout: Layout, documents: str, overrides: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return output and gradient of the input for the full sequence, and the gradients of this rank's weights."""
    grid = build_grid(Topology(pipe=1, data=1, tensor=layout.tensor, context=layout.context), rank)
    parallel = ParallelContext(grid.tensor, sequence_parallel=layout.sequence_parallel, context=grid.context)
    mixer = make_mixer(variant, parallel, **overrides)

    def shard_tokens(full: torch.Tensor) -> torch.Tensor:
        return parallel.shard_sequence(split_along_context(full, grid.context, dim=0))

    def join_tokens(shard: torch.Tensor) -> torch.Tensor:
        if layout.sequence_parallel:
            shard = torch.cat(grid.tensor.gather_objects(shard))
        return gather_rows(shard, grid.context)

    x = shard_tokens(random_tensor(0, LENGTH, BATCH, HIDDEN)).clone().requires_grad_()
    output = mixer(x, starts=document_starts(documents))
    output.backward(shard_tokens(random_tensor(1, LENGTH, BATCH, HIDDEN)))
    for parameter in mixer.parameters():
        assert parameter.grad is not None
        all_reduce(parameter.grad, grid.context)
        if is_partial(parameter):
            all_reduce(parameter.grad, grid.tensor)
    assert x.grad is not None
    return join_tokens(output.detach()), join_tokens(x.grad), get_sharded_grads(mixer)


def check_layout(variant: str, layout: Layout, documents: str, **overrides: Any) -> None:
    """Compare a layout with one process: output, gradient of the input, gradients of all weights."""
    ((expected, expected_grad, expected_grads),) = run_ranks(1, run_mixer, variant, Layout(), documents, {}, init=False)
    ranks = run_ranks(layout.tensor * layout.context, run_mixer, variant, layout, documents, overrides)
    for output, grad, _ in ranks:
        torch.testing.assert_close(output, expected, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=TOLERANCE)
    grads = join_shards([rank_grads for *_, rank_grads in ranks[: layout.tensor]])
    error, name = worst_relative_error(grads, {name: grad for name, (_, grad) in expected_grads.items()})
    assert error <= 1e-11, name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_match_one_process(variant: str, sequence_parallel: bool) -> None:
    check_layout(variant, Layout(tensor=2, sequence_parallel=sequence_parallel), "documents")


@pytest.mark.parametrize("variant", ["gdn", "kda"])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("context", [2, 4])
def test_context_ranks_match_one_process(variant: str, documents: str, context: int) -> None:
    """With 4 ranks, a chunk has 2 tokens: fewer than the convolution reads before it."""
    check_layout(variant, Layout(context=context), documents)


@pytest.mark.parametrize("variant", ["gdn", "kda"])
def test_tensor_and_context_ranks_with_recomputation_match_one_process(variant: str) -> None:
    check_layout(variant, Layout(tensor=2, context=2, sequence_parallel=True), "documents", recompute_attention=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_equal_separate_documents(variant: str) -> None:
    mixer = make_mixer(variant)
    x = random_tensor(0, LENGTH, 1, HIDDEN)
    starts = document_starts("documents")
    assert starts is not None
    packed = mixer(x, starts=starts[:1])
    separate = torch.cat([mixer(document) for document in x.split([3, 1, 7, 5])])
    torch.testing.assert_close(packed, separate, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_tokens_match_full_forward(variant: str) -> None:
    """Rows of a prompt have different lengths; then all rows continue by one, by three and by one token."""
    mixer = make_mixer(variant)
    x = random_tensor(0, LENGTH, BATCH, HIDDEN)
    expected = mixer(x)
    slots = KVCacheSlots(LENGTH)
    cache = RecurrentCache(slots)
    lengths, num_padded = torch.tensor([7, 4]), 8
    slots.lengths = lengths
    prompt = torch.stack([F.pad(x[:n, row], (0, 0, 0, num_padded - n), value=3.0) for row, n in enumerate(lengths)], 1)
    output = mixer(prompt, cache=cache)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(output[:length, row], expected[:length, row], rtol=0, atol=TOLERANCE)
    slots.lengths = None
    for num_tokens in (1, 3, 1):
        positions = lengths + torch.arange(num_tokens).unsqueeze(1)  # [n, b]
        output = mixer(x[positions, torch.arange(BATCH)], cache=cache)
        torch.testing.assert_close(output, expected[positions, torch.arange(BATCH)], rtol=0, atol=TOLERANCE)
        lengths = lengths + num_tokens


def test_tensor_rank_holds_parts_of_its_heads() -> None:
    """Queries, keys, values, gates and decays, and the convolution of each, are sharded separately."""
    full = dict(make_mixer("gdn").named_parameters())
    shards = dict(make_mixer("gdn", ParallelContext(Group((0, 1), 1))).named_parameters())
    for name, num_rows in {
        "projections.query": 24, "projections.value": 40, "projections.decay": 8, "convolution.key": 24, "A_log": 8,
        "dt_bias": 8,
    }.items():  # fmt: skip
        assert len(full[name]) == num_rows
        assert shards[name].equal(full[name][num_rows // 2 :]), name
    assert shards["output_norm.weight"].equal(full["output_norm.weight"])


def test_initial_decays_are_in_published_ranges_and_have_no_weight_decay() -> None:
    mixer = GatedDeltaNet(delta_model_args("gdn"), ParallelContext(), 0)
    initialize(mixer.named_parameters(), seed=1, rule=lambda name, shape: 0.02)
    rates, steps, taps = mixer.A_log.exp(), F.softplus(mixer.dt_bias), mixer.convolution.query
    assert rates.min() > 0.009 and 1 < rates.max() < 16
    assert 0.999e-3 < steps.min() < 0.03 < steps.max() < 0.1001
    assert 0.3 < taps.abs().max() <= 0.5
    without_decay = decay_groups(mixer.parameters(), 0.1)[1]["params"]
    assert {id(mixer.A_log), id(mixer.dt_bias), id(mixer.output_norm.weight)} == {id(p) for p in without_decay}


def test_each_projection_is_a_matrix() -> None:
    shapes = {
        name: matrices.split(heads=True).shapes(parameter.shape)
        for name, parameter in make_mixer("gdn").named_parameters()
        if (matrices := matrices_of(parameter)) is not None
    }
    assert shapes == {
        "projections.query": [(6, HIDDEN)] * 4,
        "projections.key": [(6, HIDDEN)] * 4,
        "projections.value": [(5, HIDDEN)] * 8,
        "projections.gate": [(5, HIDDEN)] * 8,
        "projections.beta": [(8, HIDDEN)],
        "projections.decay": [(8, HIDDEN)],
        "dense.weight": [(HIDDEN, 40)],
    }


def test_rejects_key_heads_shared_by_tensor_ranks() -> None:
    with pytest.raises(ValueError, match="--linear-num-key-heads must be a multiple of --model-parallel-size, got 1"):
        make_mixer("gdn", ParallelContext(Group((0, 1), 0)), linear_num_key_heads=1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decays_of_16_bit_inputs_are_fp32(variant: str) -> None:
    """Decays near 1 would be rounded to multiples of 2^-8, and the product of many decays would be wrong."""
    mixer = make_mixer(variant).to(torch.bfloat16)
    inputs = mixer.project(random_tensor(0, LENGTH, BATCH, HIDDEN).to(torch.bfloat16))
    assert inputs.log_decay.dtype == torch.float32
    assert inputs.qkv.dtype == inputs.gate.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_16_bit_queries_and_keys_are_computed_in_fp32(dtype: torch.dtype) -> None:
    x = (300.0 * random_tensor(0, 3, 8)).to(dtype)  # squares exceed the largest number of fp16
    normed = l2_norm(x)
    assert normed.dtype == torch.float32
    torch.testing.assert_close(normed.double(), l2_norm(x.double()), rtol=1e-6, atol=1e-7)
