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
from tests.gpu.families import FAMILIES, build_model, build_reference, loss_of, make_inputs, named_gradients
from tests.gpu.near import assert_near, random_values

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
P = 0.3


def draw_mask(
    streams: DropoutStreams, torch_device: torch.device, layer: int = 0, site: str = "here", is_sharded: bool = False
):
    """Return which of [32, 3, 64] ones are left."""
    ones = torch.ones(32, 3, 64, device=torch_device)
    return streams.dropout(ones, P, training=True, layer=layer, site=site, is_sharded=is_sharded).cpu() != 0


def test_mask_repeats_for_key_and_differs_for_other_keys(torch_device: torch.device) -> None:
    streams = DropoutStreams(7)
    first = draw_mask(streams, torch_device)
    assert abs(float(first.float().mean()) - (1 - P)) < 0.03
    assert torch.equal(first, draw_mask(streams, torch_device)) and torch.equal(
        first, draw_mask(DropoutStreams(7), torch_device)
    )
    others = [
        draw_mask(streams, torch_device, layer=1),
        draw_mask(streams, torch_device, site="there"),
        draw_mask(DropoutStreams(8), torch_device),
    ]
    for position in (DropoutKey(1, 0), DropoutKey(0, 1)):
        with streams.at(position):
            others.append(draw_mask(streams, torch_device))
    assert not any(torch.equal(first, other) for other in others)


def test_retained_values_and_gradients_are_scaled_up(torch_device: torch.device) -> None:
    x = random_values(1, 8, 3, 16).float().to(torch_device).requires_grad_()
    out = DropoutStreams(7).dropout(x, P, training=True, layer=0, site="here")
    out.sum().backward()
    factor = (out.detach() / x.detach()).cpu()
    assert set(factor.mul(1000).round().flatten().tolist()) == {0.0, round(1000 / (1 - P))}
    assert x.grad is not None and torch.allclose(x.grad.cpu(), factor, rtol=1e-5)
    assert DropoutStreams(7).dropout(x, P, training=False, layer=0, site="here") is x


def test_tensor_ranks_share_masks_only_for_replicated_tensors(torch_device: torch.device) -> None:
    ranks = [DropoutStreams(7, tensor=Group((0, 1), rank)) for rank in range(2)]
    copies = [draw_mask(streams, torch_device) for streams in ranks]
    slices = [draw_mask(streams, torch_device, is_sharded=True) for streams in ranks]
    assert torch.equal(*copies) and not torch.equal(*slices)
    replicas = [draw_mask(DropoutStreams(7, data=Group((0, 1), rank)), torch_device) for rank in range(2)]
    assert not torch.equal(*replicas)


def test_keyed_masks_do_not_advance_default_generator(torch_device: torch.device) -> None:
    device.seed(3)
    states = device.rng_states(torch_device.type)
    assert set(states) == {"cpu", torch_device.type} and all(state.device.type == "cpu" for state in states.values())
    first_draw = torch.rand(100, device=torch_device)
    device.seed(3)
    draw_mask(DropoutStreams(7), torch_device)
    assert torch.equal(torch.rand(100, device=torch_device), first_draw)
    later_draw = torch.rand(100, device=torch_device)
    assert not torch.equal(later_draw, first_draw)
    device.set_rng_states(states)
    assert torch.equal(torch.rand(100, device=torch_device), first_draw) and torch.equal(
        torch.rand(100, device=torch_device), later_draw
    )
    device.seed(4)
    assert not torch.equal(torch.rand(100, device=torch_device), first_draw)


def test_layout_independent_masks_are_bitwise_cpu_masks(torch_device: torch.device) -> None:
    for tensor, is_sharded in ((Group((0,), 0), False), (Group((0, 1), 1), True)):
        streams = PhiloxDropout(3, 7, tensor=tensor)
        for position in (DropoutKey(), DropoutKey(5, 1, 4)):
            with streams.at(position):
                for site in ("mlp output", "embedding"):
                    masks = [
                        draw_mask(streams, mask_device, 2, site, is_sharded) for mask_device in (torch_device, CPU)
                    ]
                    assert torch.equal(*masks) and 0.6 < float(masks[0].float().mean()) < 0.8


def test_layout_independent_probability_masks_are_bitwise_cpu_masks(torch_device: torch.device) -> None:
    """Large enough to be made in several blocks on a CPU."""
    masks = []
    for mask_device in (torch_device, CPU):
        streams = PhiloxDropout(2, 7)
        recorded: list[torch.Tensor] = []

        def record_mask(x: torch.Tensor, *, drop, recorded: list[torch.Tensor] = recorded) -> torch.Tensor:
            recorded.append(drop(torch.ones_like(x)).cpu() != 0)
            return x

        x = torch.ones(2, 4, 96, 96, device=mask_device)
        streams.attend(partial(record_mask, x), P, device=mask_device, layer=1, site="attention", is_sharded=False)
        masks.append(recorded[0])
    assert torch.equal(*masks) and 0.6 < float(masks[0].float().mean()) < 0.8


@pytest.mark.parametrize("name", ["gpt2", "t5", "llama", "mpt", "bert"])
def test_layout_independent_dropout_matches_cpu_loss_and_gradients(name: str, torch_device: torch.device) -> None:
    rates = {"hidden_dropout": P, "attention_dropout": P}
    family, results = FAMILIES[name], []
    dtype = torch.float32
    for make_model, run_device in (
        (partial(build_model, torch_device=torch_device), torch_device),
        (build_reference, CPU),
    ):
        model = make_model(family, dtype, where=ParallelContext(streams=PhiloxDropout(3, 11)), **rates)
        loss = loss_of(model(**make_inputs(family, run_device)))
        loss.backward()
        results.append(({"loss": loss.detach()}, named_gradients(model)))
    assert_near(results[0][0], results[1][0], dtype)
    assert_near(results[0][1], results[1][1], dtype)


@pytest.mark.parametrize("changes", [{"checkpoint_activations": True}, {"recompute_attention": True}], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "t5", "llama", "mpt", "bert"])
def test_recompute_draws_forward_dropout_masks(name: str, changes: dict[str, bool], torch_device: torch.device) -> None:
    """With another mask in the second forward gradients would be off by tens of per cent."""
    family, results = FAMILIES[name], []
    for options in ({}, changes):
        parallel = ParallelContext(streams=DropoutStreams(11))
        model = build_model(
            family, torch.float32, torch_device, parallel, hidden_dropout=P, attention_dropout=P, **options
        )
        loss = loss_of(model(**make_inputs(family, torch_device)))
        device.seed(len(results))  # what the default generator would draw in backward
        loss.backward()
        results.append((loss.item(), named_gradients(model)))
    assert results[0][0] == results[1][0]
    assert_near(results[1][1], {key: value.cpu() for key, value in results[0][1].items()}, torch.float32)


def test_kernel_dropout_is_keyed(torch_device: torch.device) -> None:
    q, k, v = (random_values(i, 2, 4, 64, 32).to(torch_device, torch.bfloat16) for i in range(3))
    streams = DropoutStreams(7)

    def draw(layer: int) -> torch.Tensor:
        run = partial(attention, q, k, v, is_causal=True)
        return streams.attend(run, P, device=torch_device, layer=layer, site="attention", is_sharded=False)

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
