"""Recompute in every family: the bits of no recompute, and the memory that each switch promises."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatron import device
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import BATCH, SEQ, SMALL
from tests.helpers.recomputed import FAMILIES, LAYERS, bits, kept_bytes, make
from tests.helpers.t5_samples import S_D, S_E
from tests.helpers.whole import whole_world

PLACES = ("partition_activations", "checkpoint_in_cpu", "contiguous_checkpointing")
SWITCHES: list[dict[str, Any]] = [
    {"checkpoint_activations": True, "checkpoint_num_layers": every, **dict(zip(PLACES, on, strict=True))}
    for every in (1, 2)
    for on in itertools.product((False, True), repeat=len(PLACES))
] + [{"recompute_attention": True}]
FEW = [SWITCHES[0], SWITCHES[7], SWITCHES[11], SWITCHES[-1]]
"""As it comes; cut, on the host, in a buffer; every second layer, on the host, in a buffer; the attention alone."""
RUN = {"checkpoint_activations": True}
INPUT_BYTES = SEQ * BATCH * SMALL["hidden_size"] * 4


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_recompute_leaves_the_bits_of_no_recompute(family, chosen=FEW):
    wanted = bits(make(family))
    assert not same(bits(make(family, attention_dropout=0.0)), wanted), "dropout must act"
    for switches in chosen:
        assert same(bits(make(family, **switches)), wanted), switches


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_switch_and_all_together_leave_the_bits_of_no_recompute(family):
    test_recompute_leaves_the_bits_of_no_recompute(family, SWITCHES)


def differing(rank: int, size: int, families: tuple[str, ...], chosen: list[dict[str, Any]]) -> list[Any]:
    """Return what does not give the bits of no recompute."""
    group, found = whole_world(rank, size), []
    for family in families:
        wanted = bits(make(family, group, torch.float64))
        for switches in chosen:
            if not same(bits(make(family, group, torch.float64, **switches)), wanted):
                found.append((family, switches))
    return found


def test_two_tensor_ranks_gather_what_each_has_kept_a_part_of():
    assert run_ranks(2, differing, 2, ("gpt2", "t5"), FEW) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_ranks_of_all_families_gather_what_each_has_kept_a_part_of(size):
    """Four ranks do not divide 3 samples of 11 words evenly; LLaMA has two groups of heads for two ranks."""
    families = FAMILIES if size == 2 else tuple(family for family in FAMILIES if family != "llama")
    assert run_ranks(size, differing, size, families, SWITCHES) == [[]] * size


def test_a_switch_changes_memory_as_its_formula_says(monkeypatch):
    """An input has n bytes; without a switch L of them wait on the device, every k layers ceil(L / k)."""
    on_host: list[int] = []
    memory = device.host_memory

    def counting(*how: Any) -> torch.Tensor:
        made = memory(*how)
        on_host.append(made.nbytes)
        return made

    monkeypatch.setattr(device, "host_memory", counting)
    n = INPUT_BYTES
    plain, base = kept_bytes(make("gpt2")), kept_bytes(make("gpt2", **RUN))
    rest = base - LAYERS * n
    assert 0 < rest < base < plain / 2
    assert kept_bytes(make("gpt2", **RUN, checkpoint_num_layers=2)) == rest + 2 * n
    assert kept_bytes(make("gpt2", **RUN, contiguous_checkpointing=True)) == rest + LAYERS * n
    assert not on_host
    assert kept_bytes(make("gpt2", **RUN, checkpoint_in_cpu=True)) - sum(on_host) == rest
    assert on_host == [n] * LAYERS
    on_host.clear()
    both = {"checkpoint_in_cpu": True, "contiguous_checkpointing": True}
    assert kept_bytes(make("gpt2", **RUN, **both)) - sum(on_host) == rest
    assert on_host == [LAYERS * n], "one buffer"


def kept_by_rank(rank: int, size: int, family: str, switches: list[dict[str, Any]]) -> list[int]:
    return [kept_bytes(make(family, whole_world(rank, size), **each)) for each in switches]


def test_each_tensor_rank_keeps_its_part_of_the_inputs():
    cases = [RUN, {**RUN, PLACES[0]: True}, {**RUN, PLACES[0]: True, PLACES[2]: True}]
    for plain, cut, contiguous in run_ranks(2, kept_by_rank, 2, "gpt2", cases):
        assert plain - cut == plain - contiguous == LAYERS * INPUT_BYTES // 2


def test_the_output_of_the_encoder_is_kept_once_for_all_layers_of_the_decoder():
    n_e, n_d = (length * BATCH * SMALL["hidden_size"] * 4 for length in (S_E, S_D))
    cases = [RUN, {**RUN, PLACES[0]: True}]
    half = LAYERS * (n_e + n_d) + n_e
    for plain, cut in run_ranks(2, kept_by_rank, 2, "t5", cases):
        assert plain - cut == half // 2


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_alone_keeps_less_than_all_and_more_than_whole_layers(family):
    """On a CPU dropout of attention keeps matrices of probabilities, which are what is made again."""
    whole, core, none = (kept_bytes(make(family, **each)) for each in (RUN, {"recompute_attention": True}, {}))
    assert whole < core < none


def test_what_waits_is_given_back_after_backward():
    model = make("gpt2", **RUN, contiguous_checkpointing=True)
    keeper = model.recompute.keeper
    sizes = []
    for _ in range(3):
        bits(model)
        sizes.append((keeper.waiting_bytes(), keeper.buffer_bytes()))
    assert sizes == [(0, LAYERS * INPUT_BYTES)] * 3
