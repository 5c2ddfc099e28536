"""Masks of dropout on the device: keyed ones repeat, and layout-independent ones are the CPU's to the bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron import device
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.groups import Group
from megatron.mpu.philox_dropout import PhiloxDropout
from megatron.mpu.random import DropoutKey, DropoutStreams
from megatron.ops.attention import attention
from tests.gpu.families import FAMILIES, built, given, gradients, loss_of, reference_of
from tests.gpu.near import assert_near, noise

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
P = 0.3


def mask_of(streams: DropoutStreams, place: torch.device, layer: int = 0, site: str = "here", is_cut: bool = False):
    """Return which of [32, 3, 64] ones are left."""
    ones = torch.ones(32, 3, 64, device=place)
    return streams.dropout(ones, P, training=True, layer=layer, site=site, is_cut=is_cut).cpu() != 0


def test_a_mask_is_the_same_for_a_key_and_another_for_any_other(place: torch.device) -> None:
    streams = DropoutStreams(7)
    first = mask_of(streams, place)
    assert abs(float(first.float().mean()) - (1 - P)) < 0.03
    assert torch.equal(first, mask_of(streams, place)) and torch.equal(first, mask_of(DropoutStreams(7), place))
    others = [
        mask_of(streams, place, layer=1),
        mask_of(streams, place, site="there"),
        mask_of(DropoutStreams(8), place),
    ]
    for position in (DropoutKey(1, 0), DropoutKey(0, 1)):
        with streams.at(position):
            others.append(mask_of(streams, place))
    assert not any(torch.equal(first, other) for other in others)


def test_what_is_left_is_scaled_up_and_the_gradient_goes_there_alone(place: torch.device) -> None:
    x = noise(1, 8, 3, 16).float().to(place).requires_grad_()
    out = DropoutStreams(7).dropout(x, P, training=True, layer=0, site="here")
    out.sum().backward()
    factor = (out.detach() / x.detach()).cpu()
    assert set(factor.mul(1000).round().flatten().tolist()) == {0.0, round(1000 / (1 - P))}
    assert x.grad is not None and torch.allclose(x.grad.cpu(), factor, rtol=1e-5)
    assert DropoutStreams(7).dropout(x, P, training=False, layer=0, site="here") is x


def test_tensor_ranks_draw_alike_for_copies_and_otherwise_for_their_slices(place: torch.device) -> None:
    ranks = [DropoutStreams(7, tensor=Group((0, 1), rank)) for rank in range(2)]
    copies = [mask_of(streams, place) for streams in ranks]
    slices = [mask_of(streams, place, is_cut=True) for streams in ranks]
    assert torch.equal(*copies) and not torch.equal(*slices)
    replicas = [mask_of(DropoutStreams(7, data=Group((0, 1), rank)), place) for rank in range(2)]
    assert not torch.equal(*replicas)


def test_keyed_masks_leave_the_default_generator_alone_and_its_state_comes_back(place: torch.device) -> None:
    device.seed(3)
    states = device.rng_states(place.type)
    assert set(states) == {"cpu", place.type} and all(each.device.type == "cpu" for each in states.values())
    first = torch.rand(100, device=place)
    device.seed(3)
    mask_of(DropoutStreams(7), place)
    assert torch.equal(torch.rand(100, device=place), first)
    later = torch.rand(100, device=place)
    assert not torch.equal(later, first)
    device.set_rng_states(states)
    assert torch.equal(torch.rand(100, device=place), first) and torch.equal(torch.rand(100, device=place), later)
    device.seed(4)
    assert not torch.equal(torch.rand(100, device=place), first)


def test_masks_of_any_layout_are_the_cpus_to_the_bit(place: torch.device) -> None:
    for tensor, is_cut in ((Group((0,), 0), False), (Group((0, 1), 1), True)):
        streams = PhiloxDropout(3, 7, tensor=tensor)
        for position in (DropoutKey(), DropoutKey(5, 1, 4)):
            with streams.at(position):
                for site in ("mlp output", "embedding"):
                    found = [mask_of(streams, where, 2, site, is_cut) for where in (place, CPU)]
                    assert torch.equal(*found) and 0.6 < float(found[0].float().mean()) < 0.8


def test_masks_of_probabilities_in_any_layout_are_the_cpus_to_the_bit(place: torch.device) -> None:
    """Large enough to be made in several blocks on a CPU."""
    seen = []
    for where in (place, CPU):
        streams = PhiloxDropout(2, 7)
        drawn: list[torch.Tensor] = []

        def spy(x: torch.Tensor, *, drop, drawn: list[torch.Tensor] = drawn) -> torch.Tensor:
            drawn.append(drop(torch.ones_like(x)).cpu() != 0)
            return x

        x = torch.ones(2, 4, 96, 96, device=where)
        streams.attend(partial(spy, x), P, device=where, layer=1, site="attention", is_cut=False)
        seen.append(drawn[0])
    assert torch.equal(*seen) and 0.6 < float(seen[0].float().mean()) < 0.8


@pytest.mark.parametrize("name", ["gpt2", "t5", "llama", "mpt", "bert"])
def test_a_model_with_layout_independent_dropout_has_the_cpus_loss_and_gradients(
    name: str, place: torch.device
) -> None:
    rates = {"hidden_dropout": P, "attention_dropout": P}
    family, found = FAMILIES[name], []
    dtype = torch.float32
    for make, where in ((partial(built, place=place), place), (reference_of, CPU)):
        model = make(family, dtype, where=ParallelContext(streams=PhiloxDropout(3, 11)), **rates)
        loss = loss_of(model(**given(family, where)))
        loss.backward()
        found.append(({"loss": loss.detach()}, gradients(model)))
    assert_near(found[0][0], found[1][0], dtype)
    assert_near(found[0][1], found[1][1], dtype)


@pytest.mark.parametrize("changes", [{"checkpoint_activations": True}, {"recompute_attention": True}], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "t5", "llama", "mpt", "bert"])
def test_what_is_recomputed_drops_what_the_forward_dropped(
    name: str, changes: dict[str, bool], place: torch.device
) -> None:
    """With another mask in the second forward gradients would be off by tens of per cent."""
    family, found = FAMILIES[name], []
    for more in ({}, changes):
        where = ParallelContext(streams=DropoutStreams(11))
        model = built(family, torch.float32, place, where, hidden_dropout=P, attention_dropout=P, **more)
        loss = loss_of(model(**given(family, place)))
        device.seed(len(found))  # what the default generator would draw in backward
        loss.backward()
        found.append((loss.item(), gradients(model)))
    assert found[0][0] == found[1][0]
    assert_near(found[1][1], {key: value.cpu() for key, value in found[0][1].items()}, torch.float32)


def test_dropped_probabilities_are_drawn_within_torchs_kernel_by_the_key(place: torch.device) -> None:
    q, k, v = (noise(i, 2, 4, 64, 32).to(place, torch.bfloat16) for i in range(3))
    streams = DropoutStreams(7)

    def drawn(layer: int) -> torch.Tensor:
        run = partial(attention, q, k, v, is_causal=True)
        return streams.attend(run, P, device=place, layer=layer, site="attention", is_cut=False)

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
