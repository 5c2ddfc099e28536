"""The memory of blocked attention, against what the operation takes, and where it counts."""

from __future__ import annotations

import ctypes
from dataclasses import replace
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


class Elsewhere(DecoderCosts):
    """Whose attention works in no memory of its own."""

    def attention_work(self, *_: Any, **__: Any) -> int:
        return 0


@pytest.mark.parametrize(("length", "samples", "heads", "size"), [(64, 4, 4, 16), (512, 1, 17, 8), (600, 3, 5, 6)])
@pytest.mark.parametrize("threads", [1, 3])
def test_bytes_are_those_that_the_operation_takes(
    length: int, samples: int, heads: int, size: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert memory.CACHED == causal_attention.CACHED
    packed = torch.empty(length, samples, heads, 3, size, dtype=torch.float64)
    found = [room for _, room in causal_attention.rooms(causal_attention.RoomOfBackward, packed)]
    tensors = [each for room in found for each in vars(room).values() if isinstance(each, torch.Tensor)]
    storages = {each.untyped_storage() for each in tensors}
    taken = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert memory.backward_bytes(samples * heads, length, size, 8, threads) == sum(taken.values())


@pytest.mark.skipif(not causal_attention.is_built(), reason="needs a C++ compiler and AVX2 or AVX-512")
@pytest.mark.parametrize(("length", "size"), [(64, 16), (600, 6), (1, 5)])
def test_bytes_in_fp32_are_those_that_the_kernel_takes(length: int, size: int) -> None:
    library = causal_attention._library()
    assert library is not None
    numbers = library.causal_numbers(*map(ctypes.c_int64, (length, size)), ctypes.c_bool(True))
    assert memory.backward_bytes(6, length, size, 4, threads=4) == 4 * 4 * numbers
    assert memory.backward_bytes(3, length, size, 4, threads=4) == 4 * 3 * numbers, "no more rooms than heads"


def test_it_counts_by_what_its_layer_has_not_let_go() -> None:
    left = 5 * 64 - 2 * 64 - 2 * 256  # gradients; input of the norm, its output, feed-forward: numbers of a token
    assert BLOCKED.attention_work(1, 1, 4) == 4 * (9 * 64 * 64 + 2 * 64 * 64 + 64 * left) > 0
    wide = DecoderCosts(SMALL, 64, mask_bytes=0, is_blocked=True)
    room = 16 * (6 * 64 * 16 + 2 * 64 * 64 + 64 * 16) + 64 * 64
    assert wide.attention_work(4, 1, 8) == 8 * (room + 4 * 64 * left) > 0, "by blocks"
    assert BLOCKED.attention_work(1, 1, 2) == 0, "16 bits go by torch's kernel"
    assert replace(BLOCKED, is_blocked=False).attention_work(1, 1, 4) == 0
    long = DecoderCosts(replace(SMALL, hidden_size=256, kv_hidden_size=32, ff_hidden_size=1024), 256, is_blocked=True)
    assert long.attention_work(4, 1, 4) == 0, "the feed-forward layer's were more"


@pytest.mark.parametrize("recompute", [False, True])
def test_a_stage_holds_it_beside_its_layers_unless_its_logits_were_more(recompute: bool) -> None:
    bounds = BLOCKED.stage_bounds(2)
    first, last = (
        [
            costs.memory_per_stage(bounds, micro_batch_size=1, num_micro_batches=4, checkpoint_activations=recompute)[n]
            for costs in (BLOCKED, Elsewhere(**vars(BLOCKED)))
        ]
        for n in (0, 1)
    )
    work, layer = BLOCKED.attention_work(1, 1, 4), BLOCKED.unit_kept(1, 1, 4)[1].full
    assert first[0].activations - first[1].activations == work
    above = max(layer + work - last[0].logits, 0) - max(layer - last[0].logits, 0) if recompute else 0
    assert work < last[0].logits and last[0].activations - last[1].activations == above


def test_attention_is_blocked_on_a_cpu_where_nothing_drops() -> None:
    def is_blocked(flags: str, *, is_on_cpu: bool = True) -> bool:
        config = parse(f"--seq-length 96 --vocab-size 101 {flags}".split(), world_size=1, env={})
        costs = costs_of(config, is_on_cpu=is_on_cpu)
        assert isinstance(costs, DecoderCosts)
        return costs.is_blocked

    assert is_blocked("--attention-dropout 0")
    assert not is_blocked("--attention-dropout 0", is_on_cpu=False)
    assert not is_blocked("--attention-dropout 0.1")
    assert is_blocked("--attention-dropout 0 --reset-attention-mask")


def test_in_fp32_a_layer_keeps_two_numbers_of_each_query_beside_what_others_keep() -> None:
    others = replace(BLOCKED, is_blocked=False)
    for width, more in ((4, 2 * 4 * 3 * 64), (8, 0), (2, 0)):
        kept, usual = BLOCKED.unit_kept(3, 1, width)[1], others.unit_kept(3, 1, width)[1]
        assert (kept.full - usual.full, kept.core - usual.core) == (more, more)
