"""The memory of blocked attention, against what the operation takes, and where it counts."""

from __future__ import annotations

import ctypes
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from megatron.config import ModelConfig, parse
from megatron.costs import memory
from megatron.costs.decoder_cost import DecoderCosts
from megatron.models.registry import costs_of
from megatron.ops import causal_attention

SMALL = ModelConfig(
    num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=512, max_position_embeddings=64, hidden_bias=True
)
BLOCKED = DecoderCosts(replace(SMALL, num_attention_heads=1, kv_hidden_size=64), 64, mask_bytes=0, is_blocked=True)
"""One head of 64 numbers: of many small ones the feed-forward layer has let more go than the kernel takes."""


class CostsWithoutWorkspace(DecoderCosts):
    """Whose attention works in no memory of its own."""

    def attention_scratch_bytes(self, *_: Any, **__: Any) -> int:
        return 0


@pytest.mark.parametrize(("length", "samples", "heads", "size"), [(64, 4, 4, 16), (512, 1, 17, 8), (600, 3, 5, 6)])
@pytest.mark.parametrize("threads", [1, 3])
def test_backward_bytes_equal_operation_allocations(
    length: int, samples: int, heads: int, size: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert memory.CACHED_SCORES == causal_attention.CACHED_SCORES
    packed = torch.empty(length, samples, heads, 3, size, dtype=torch.float64)
    buffers = [buffer for _, buffer in causal_attention.head_buffers(causal_attention.BackwardHeadBuffers, packed)]
    tensors = [tensor for buffer in buffers for tensor in vars(buffer).values() if isinstance(tensor, torch.Tensor)]
    storages = {tensor.untyped_storage() for tensor in tensors}
    allocated = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert memory.backward_bytes(samples * heads, length, size, 8, threads) == sum(allocated.values())


@pytest.mark.skipif(not causal_attention.is_built(), reason="needs a C++ compiler and AVX2 or AVX-512")
@pytest.mark.parametrize(("length", "size"), [(64, 16), (600, 6), (1, 5)])
def test_backward_bytes_equal_fp32_kernel_allocations(length: int, size: int) -> None:
    library = causal_attention._library()
    assert library is not None
    num_elements = library.causal_numbers(*map(ctypes.c_int64, (length, size)), ctypes.c_bool(True))
    assert memory.backward_bytes(6, length, size, 4, threads=4) == 4 * 4 * num_elements
    assert memory.backward_bytes(3, length, size, 4, threads=4) == 4 * 3 * num_elements, "no more rooms than heads"


def test_attention_workspace_counts_beyond_freed_layer_memory() -> None:
    num_freed = 5 * 64 - 2 * 64 - 2 * 256  # gradients; input of the norm, its output, feed-forward: numbers of a token
    assert BLOCKED.attention_scratch_bytes(1, 1, 4) == 4 * (9 * 64 * 64 + 2 * 64 * 64 + 64 * num_freed) > 0
    wide_costs = DecoderCosts(SMALL, 64, mask_bytes=0, is_blocked=True)
    buffer_elements = 16 * (6 * 64 * 16 + 2 * 64 * 64 + 64 * 16) + 64 * 64
    assert wide_costs.attention_scratch_bytes(4, 1, 8) == 8 * (buffer_elements + 4 * 64 * num_freed) > 0, "by blocks"
    assert BLOCKED.attention_scratch_bytes(1, 1, 2) == 0, "16 bits go by torch's kernel"
    assert replace(BLOCKED, is_blocked=False).attention_scratch_bytes(1, 1, 4) == 0
    long_costs = DecoderCosts(
        replace(SMALL, hidden_size=256, kv_hidden_size=32, ff_hidden_size=1024), 256, is_blocked=True
    )
    assert long_costs.attention_scratch_bytes(4, 1, 4) == 0, "the feed-forward layer's were more"


@pytest.mark.parametrize("recompute", [False, True])
def test_stage_memory_includes_workspace_unless_logits_dominate(recompute: bool) -> None:
    bounds = BLOCKED.stage_bounds(2)
    field_values = {field.name: getattr(BLOCKED, field.name) for field in fields(BLOCKED) if field.init}
    first, last = (
        [
            costs.memory_per_stage(bounds, micro_batch_size=1, num_micro_batches=4, checkpoint_activations=recompute)[
                stage_idx
            ]
            for costs in (BLOCKED, CostsWithoutWorkspace(**field_values))
        ]
        for stage_idx in (0, 1)
    )
    workspace, layer = BLOCKED.attention_scratch_bytes(1, 1, 4), BLOCKED.unit_saved_bytes(1, 1, 4)[1].full
    assert first[0].activations - first[1].activations == workspace
    extra = max(layer + workspace - last[0].logits, 0) - max(layer - last[0].logits, 0) if recompute else 0
    assert workspace < last[0].logits and last[0].activations - last[1].activations == extra


def test_attention_is_blocked_on_cpu_without_dropout() -> None:
    def is_blocked(flags: str, *, is_on_cpu: bool = True) -> bool:
        config = parse(f"--seq-length 96 --vocab-size 101 {flags}".split(), world_size=1, env={})
        costs = costs_of(config, is_on_cpu=is_on_cpu)
        assert isinstance(costs, DecoderCosts)
        return costs.is_blocked

    assert is_blocked("--attention-dropout 0")
    assert not is_blocked("--attention-dropout 0", is_on_cpu=False)
    assert not is_blocked("--attention-dropout 0.1")
    assert is_blocked("--attention-dropout 0 --reset-attention-mask")


def test_fp32_layer_stores_two_statistics_per_query() -> None:
    unblocked = replace(BLOCKED, is_blocked=False)
    for width, extra in ((4, 2 * 4 * 3 * 64), (8, 0), (2, 0)):
        blocked_memory, unblocked_memory = (
            BLOCKED.unit_saved_bytes(3, 1, width)[1],
            unblocked.unit_saved_bytes(3, 1, width)[1],
        )
        assert (blocked_memory.full - unblocked_memory.full, blocked_memory.core - unblocked_memory.core) == (
            extra,
            extra,
        )
