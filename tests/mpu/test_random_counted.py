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
from tests.mpu.test_random import N, are_unrelated, small_stack

KNOWN = [  # counter, key, output: Random123's kat_vectors for philox4x32-10
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SAMPLES, LENGTH, WIDTH, HEADS = 8, 5, 24, 4  # of the whole global batch
PLACE = {"layer": 5, "site": "mlp output"}


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_philox_gives_the_known_answers(counter, key, output):
    words = philox(tuple(torch.tensor([word]) for word in counter), key[0] | key[1] << 32)
    assert tuple(int(word) for word in words) == output


def test_a_counter_of_coordinates_gives_what_one_that_is_written_out_gives():
    shapes = (7,), (5, 1), (3, 1, 1), (1, 1)
    counter = [torch.randint(2**32, shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    whole = philox(tuple(word.expand(3, 5, 7).contiguous() for word in counter), 2**63 + 12345)
    assert all(torch.equal(a, b) for a, b in zip(philox(tuple(counter), 2**63 + 12345), whole, strict=True))


def streams_of(*, data=(0, 1), tensor=(0, 1), micro=(0, 1), seed=1, step=3):
    """Return the streams of a rank at a micro-batch; each of the three is (number, how many)."""
    groups = [Group(tuple(range(size)), rank) for rank, size in (data, tensor)]
    streams = PhiloxDropout(SAMPLES // (data[1] * micro[1]), seed, *groups)
    streams.position = DropoutKey(step, micro[0], data[0] * micro[1])
    return streams


def hidden_mask(*, width=WIDTH, length=LENGTH, probability=0.5, place=PLACE, **at):
    """Return which elements of this rank's hidden states [s, b, h or h/t] are kept."""
    streams, t = streams_of(**at), at.get("tensor", (0, 1))[1]
    ones = torch.ones(length, streams.micro_batch_size, width // t)
    return streams.dropout(ones, probability, training=True, **place, is_cut=t > 1) != 0


def attention_mask(*, heads=HEADS, keys=6, probability=0.5, place=PLACE, **at):
    """Return which of this rank's probabilities [b, a or a/t, s, s_k] are kept."""
    streams, t = streams_of(**at), at.get("tensor", (0, 1))[1]
    ones = torch.ones(streams.micro_batch_size, heads // t, LENGTH, keys)
    given = streams.attend(lambda drop: drop(ones), probability, device=ones.device, **place, is_cut=t > 1)
    return given != 0


def layouts():
    """Return a strategy of (replica, of how many), (micro-batch, of how many), (tensor rank, of how many)."""
    each = st.sampled_from([1, 2, 4]).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))
    return st.tuples(each, each, each).filter(lambda at: at[0][1] * at[1][1] <= SAMPLES)


@given(layouts(), st.sampled_from([4, 8, 12, 20, 24]))
@settings(max_examples=40, deadline=None)
def test_every_rank_draws_its_part_of_the_mask_of_one_process(at, width):
    """Widths whose parts begin in the midst of four columns are among them."""
    (replica, replicas), (micro, micros), (rank, ranks) = at
    size = SAMPLES // (replicas * micros)
    first = (replica * micros + micro) * size
    samples = slice(first, first + size)
    place = {"data": (replica, replicas), "micro": (micro, micros)}
    assert torch.equal(hidden_mask(width=width, **place), hidden_mask(width=width)[:, samples])
    columns = slice(rank * width // ranks, (rank + 1) * width // ranks)
    part = hidden_mask(width=width, tensor=(rank, ranks), **place)
    assert torch.equal(part, hidden_mask(width=width)[:, samples, columns])
    heads = slice(rank * HEADS // ranks, (rank + 1) * HEADS // ranks)
    part = attention_mask(keys=width + 1, tensor=(rank, ranks), **place)
    assert torch.equal(part, attention_mask(keys=width + 1)[samples, heads])


def test_working_in_blocks_changes_no_mask(monkeypatch):
    hidden, attention = hidden_mask(), attention_mask()
    monkeypatch.setitem(philox_dropout.BLOCK, "cpu", 1)
    assert torch.equal(hidden_mask(), hidden) and torch.equal(attention_mask(), attention)


def test_tensor_ranks_share_the_mask_of_what_they_all_hold():
    streams = streams_of(tensor=(1, 2))
    kept = streams.dropout(torch.ones(LENGTH, SAMPLES, WIDTH), 0.5, training=True, **PLACE) != 0
    assert torch.equal(kept, hidden_mask())


@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"step": 4}, {"place": {**PLACE, "layer": 6}}, {"place": {**PLACE, "site": "attention output"}}],
    ids=str,
)
@pytest.mark.parametrize("mask", [hidden_mask, attention_mask])
def test_every_other_difference_of_place_gives_another_mask(mask, change):
    sizes = {"width": N // (SAMPLES * LENGTH)} if mask is hidden_mask else {"keys": N // (SAMPLES * LENGTH * HEADS)}
    assert are_unrelated(mask(**sizes), mask(**sizes, **change))


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_elements_along_any_axis_are_unrelated(lag):
    """Row E13: also those of two replicas or micro-batches, which hold different samples."""
    for kept in (hidden_mask(width=N), attention_mask(heads=8, keys=N)):
        for axis in range(kept.dim()):
            if kept.shape[axis] > lag:
                lined = kept.movedim(axis, 0)
                assert are_unrelated(lined[lag:], lined[:-lag]), (kept.dim(), axis)


@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("mask", [hidden_mask, attention_mask])
def test_the_rate_of_kept_elements_is_right(mask, probability):
    """Row E13: within four standard deviations, over all and in each quarter."""
    kept = mask(probability=probability, **({"width": 2500} if mask is hidden_mask else {"keys": 625})).double()
    for part in (kept, *kept.flatten().chunk(4)):
        sigma = math.sqrt(probability * (1 - probability) / part.numel())
        assert abs(part.mean().item() - (1 - probability)) <= 4 * sigma


def test_kept_elements_are_scaled_up_and_dropped_ones_pass_no_gradient():
    x = torch.ones(LENGTH, SAMPLES, WIDTH, dtype=torch.float64, requires_grad=True)
    y = streams_of().dropout(x, 0.2, training=True, **PLACE)
    y.sum().backward()
    assert torch.equal(y.detach().unique(), torch.tensor([0.0, 1.25], dtype=torch.float64))
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("moved", [DropoutKey(3, 1), DropoutKey(4, 0)], ids=["micro-batch", "step"])
def test_attention_keeps_the_place_where_it_began(moved):
    """A function that drops when backward computes again comes to it later."""
    streams, ones = streams_of(micro=(0, 2)), torch.ones(SAMPLES // 2, HEADS, LENGTH, 6)

    def later(drop):
        streams.position = moved
        return drop(ones)

    found = streams.attend(later, 0.5, device=ones.device, **PLACE, is_cut=False)
    assert torch.equal(found != 0, attention_mask(micro=(0, 2)))


def test_recomputing_draws_the_same_masks_even_when_the_position_has_moved_on():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(16, 16, generator=generator) for _ in range(2)]
    x = torch.randn(3, 4, 16, generator=generator)
    expected = small_stack(PhiloxDropout(4, 3), weights, x, recompute=False, moves_on=False)
    for moves_on in (False, True):
        found = small_stack(PhiloxDropout(4, 3), weights, x, recompute=True, moves_on=moves_on)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_outside_training_and_at_rate_zero_nothing_happens():
    x = torch.ones(9)
    assert PhiloxDropout(1).dropout(x, 0.5, training=False, **PLACE) is x
    assert PhiloxDropout(1).dropout(x, 0.0, training=True, **PLACE) is x


@pytest.mark.parametrize("shape", [(4, 3), (4, 2, 6), (4, 3, 6, 1)])
def test_a_tensor_whose_samples_are_not_known_is_refused(shape):
    with pytest.raises(ValueError, match=r"must be \[sequence, micro-batch, hidden\].*--batch-size 3"):
        PhiloxDropout(3).dropout(torch.ones(shape), 0.5, training=True, **PLACE)


def test_a_generator_is_refused():
    with pytest.raises(RuntimeError, match="Use streams.dropout"):
        PhiloxDropout(3).generator(torch.device("cpu"), 0, "embedding", False)
