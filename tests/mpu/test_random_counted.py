"""Masks by counter: of an element's place in the global batch, whoever holds it; as random as they ought to be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.mpu import philox_dropout
from megatron.mpu.groups import Group
from megatron.mpu.philox import philox
from megatron.mpu.philox_dropout import PhiloxDropout
from megatron.mpu.random import DropoutKey
from tests.mpu.test_random import N, are_unrelated, run_small_stack

KNOWN_VECTORS = [  # counter, key, output: Random123's kat_vectors for philox4x32-10
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SAMPLES, LENGTH, WIDTH, HEADS = 8, 5, 24, 4  # of the whole global batch
DROPOUT_SITE = {"layer": 5, "site": "mlp output"}


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_VECTORS)
def test_philox_matches_known_vectors(counter, key, output):
    words = philox(tuple(torch.tensor([word]) for word in counter), key[0] | key[1] << 32)
    assert tuple(int(word) for word in words) == output


def test_broadcast_counter_matches_expanded_counter():
    shapes = (7,), (5, 1), (3, 1, 1), (1, 1)
    counter = [torch.randint(2**32, shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    expected = philox(tuple(word.expand(3, 5, 7).contiguous() for word in counter), 2**63 + 12345)
    assert all(torch.equal(a, b) for a, b in zip(philox(tuple(counter), 2**63 + 12345), expected, strict=True))


def make_streams(*, data=(0, 1), tensor=(0, 1), micro=(0, 1), seed=1, step=3):
    """Return the streams of a rank at a micro-batch; each of the three is (number, how many)."""
    groups = [Group(tuple(range(size)), rank) for rank, size in (data, tensor)]
    streams = PhiloxDropout(SAMPLES // (data[1] * micro[1]), seed, *groups)
    streams.position = DropoutKey(step, micro[0], data[0] * micro[1])
    return streams


def hidden_mask(*, width=WIDTH, length=LENGTH, probability=0.5, place=DROPOUT_SITE, **layout):
    """Return which elements of this rank's hidden states [s, b, h or h/t] are kept."""
    streams, t = make_streams(**layout), layout.get("tensor", (0, 1))[1]
    ones = torch.ones(length, streams.micro_batch_size, width // t)
    return streams.dropout(ones, probability, training=True, **place, is_sharded=t > 1) != 0


def attention_mask(*, heads=HEADS, keys=6, probability=0.5, place=DROPOUT_SITE, **layout):
    """Return which of this rank's probabilities [b, a or a/t, s, s_k] are kept."""
    streams, t = make_streams(**layout), layout.get("tensor", (0, 1))[1]
    ones = torch.ones(streams.micro_batch_size, heads // t, LENGTH, keys)
    dropped = streams.attend(lambda drop: drop(ones), probability, device=ones.device, **place, is_sharded=t > 1)
    return dropped != 0


def layout_strategy():
    """Return a strategy of (replica, of how many), (micro-batch, of how many), (tensor rank, of how many)."""
    axis = st.sampled_from([1, 2, 4]).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))
    return st.tuples(axis, axis, axis).filter(lambda layout: layout[0][1] * layout[1][1] <= SAMPLES)


@given(layout_strategy(), st.sampled_from([4, 8, 12, 20, 24]))
@settings(max_examples=40, deadline=None)
def test_every_rank_draws_its_slice_of_global_mask(layout, width):
    """Widths whose parts begin in the midst of four columns are among them."""
    (replica, replicas), (micro, micros), (rank, ranks) = layout
    num_samples = SAMPLES // (replicas * micros)
    first_sample = (replica * micros + micro) * num_samples
    samples = slice(first_sample, first_sample + num_samples)
    position_kwargs = {"data": (replica, replicas), "micro": (micro, micros)}
    assert torch.equal(hidden_mask(width=width, **position_kwargs), hidden_mask(width=width)[:, samples])
    columns = slice(rank * width // ranks, (rank + 1) * width // ranks)
    local_mask = hidden_mask(width=width, tensor=(rank, ranks), **position_kwargs)
    assert torch.equal(local_mask, hidden_mask(width=width)[:, samples, columns])
    heads = slice(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
    local_mask = attention_mask(keys=width + 1, tensor=(rank, ranks), **position_kwargs)
    assert torch.equal(local_mask, attention_mask(keys=width + 1)[samples, heads])


def test_block_size_does_not_change_masks(monkeypatch):
    hidden, attention = hidden_mask(), attention_mask()
    monkeypatch.setitem(philox_dropout.CHUNK_COUNTERS, "cpu", 1)
    assert torch.equal(hidden_mask(), hidden) and torch.equal(attention_mask(), attention)


def test_tensor_ranks_share_masks_of_replicated_tensors():
    streams = make_streams(tensor=(1, 2))
    is_kept = streams.dropout(torch.ones(LENGTH, SAMPLES, WIDTH), 0.5, training=True, **DROPOUT_SITE) != 0
    assert torch.equal(is_kept, hidden_mask())


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"step": 4},
        {"place": {**DROPOUT_SITE, "layer": 6}},
        {"place": {**DROPOUT_SITE, "site": "attention output"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", [hidden_mask, attention_mask])
def test_every_key_field_changes_mask(mask, change):
    shape_args = (
        {"width": N // (SAMPLES * LENGTH)} if mask is hidden_mask else {"keys": N // (SAMPLES * LENGTH * HEADS)}
    )
    assert are_unrelated(mask(**shape_args), mask(**shape_args, **change))


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_elements_along_any_axis_are_unrelated(lag):
    """Row E13: also those of two replicas or micro-batches, which hold different samples."""
    for is_kept in (hidden_mask(width=N), attention_mask(heads=8, keys=N)):
        for axis in range(is_kept.dim()):
            if is_kept.shape[axis] > lag:
                aligned = is_kept.movedim(axis, 0)
                assert are_unrelated(aligned[lag:], aligned[:-lag]), (is_kept.dim(), axis)


@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("mask", [hidden_mask, attention_mask])
def test_keep_rate_is_correct(mask, probability):
    """Row E13: within four standard deviations, over all and in each quarter."""
    is_kept = mask(probability=probability, **({"width": 2500} if mask is hidden_mask else {"keys": 625})).double()
    for chunk in (is_kept, *is_kept.flatten().chunk(4)):
        sigma = math.sqrt(probability * (1 - probability) / chunk.numel())
        assert abs(chunk.mean().item() - (1 - probability)) <= 4 * sigma


def test_dropout_scales_survivors_and_zeroes_dropped_gradients():
    x = torch.ones(LENGTH, SAMPLES, WIDTH, dtype=torch.float64, requires_grad=True)
    y = make_streams().dropout(x, 0.2, training=True, **DROPOUT_SITE)
    y.sum().backward()
    assert torch.equal(y.detach().unique(), torch.tensor([0.0, 1.25], dtype=torch.float64))
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("position", [DropoutKey(3, 1), DropoutKey(4, 0)], ids=["micro-batch", "step"])
def test_attention_uses_position_at_call(position):
    """A function that drops when backward computes again comes to it later."""
    streams, ones = make_streams(micro=(0, 2)), torch.ones(SAMPLES // 2, HEADS, LENGTH, 6)

    def move_then_drop(drop):
        streams.position = position
        return drop(ones)

    actual = streams.attend(move_then_drop, 0.5, device=ones.device, **DROPOUT_SITE, is_sharded=False)
    assert torch.equal(actual != 0, attention_mask(micro=(0, 2)))


def test_recompute_draws_same_masks_after_position_moved():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(16, 16, generator=generator) for _ in range(2)]
    x = torch.randn(3, 4, 16, generator=generator)
    expected = run_small_stack(PhiloxDropout(4, 3), weights, x, recompute=False, advances_position=False)
    for advances_position in (False, True):
        actual = run_small_stack(PhiloxDropout(4, 3), weights, x, recompute=True, advances_position=advances_position)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_dropout_is_identity_in_eval_and_at_rate_zero():
    x = torch.ones(9)
    assert PhiloxDropout(1).dropout(x, 0.5, training=False, **DROPOUT_SITE) is x
    assert PhiloxDropout(1).dropout(x, 0.0, training=True, **DROPOUT_SITE) is x


@pytest.mark.parametrize("shape", [(4, 3), (4, 2, 6), (4, 3, 6, 1)])
def test_rejects_tensor_without_sample_dimension(shape):
    with pytest.raises(ValueError, match=r"must have the shape \[sequence, micro-batch, hidden\].*--batch-size 3"):
        PhiloxDropout(3).dropout(torch.ones(shape), 0.5, training=True, **DROPOUT_SITE)


def test_generator_raises():
    with pytest.raises(RuntimeError, match="Call streams.dropout"):
        PhiloxDropout(3).generator(torch.device("cpu"), 0, "embedding", False)
