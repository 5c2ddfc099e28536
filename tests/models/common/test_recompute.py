"""Recompute in every family: the bits of no recompute, and the memory that each switch promises."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatron import device
from tests.helpers.harness import run_ranks
from tests.helpers.model_samples import BATCH, SEQ, SMALL
from tests.helpers.recomputed import FAMILIES, NUM_LAYERS, loss_and_grads, make_model, measure_saved_bytes
from tests.helpers.t5_samples import S_D, S_E
from tests.helpers.whole import group_of_all_ranks

STORAGE_SWITCHES = ("partition_activations", "checkpoint_in_cpu", "contiguous_checkpointing")
SWITCHES: list[dict[str, Any]] = [
    {
        "checkpoint_activations": True,
        "checkpoint_num_layers": interval,
        **dict(zip(STORAGE_SWITCHES, enabled, strict=True)),
    }
    for interval in (1, 2)
    for enabled in itertools.product((False, True), repeat=len(STORAGE_SWITCHES))
] + [{"recompute_attention": True}]
QUICK_SWITCHES = [SWITCHES[0], SWITCHES[7], SWITCHES[11], SWITCHES[-1]]
"""As it comes; cut, on the host, in a buffer; every second layer, on the host, in a buffer; the attention alone."""
RECOMPUTE = {"checkpoint_activations": True}
INPUT_BYTES = SEQ * BATCH * SMALL["hidden_size"] * 4


def bitwise_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(actual) == len(expected) and all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_recompute_is_bitwise_equal(family, switch_sets=QUICK_SWITCHES):
    expected = loss_and_grads(make_model(family))
    assert not bitwise_equal(loss_and_grads(make_model(family, attention_dropout=0.0)), expected), "dropout must act"
    for switches in switch_sets:
        assert bitwise_equal(loss_and_grads(make_model(family, **switches)), expected), switches


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_recompute_switch_is_bitwise_equal(family):
    test_recompute_is_bitwise_equal(family, SWITCHES)


def find_differences(rank: int, size: int, families: tuple[str, ...], switch_sets: list[dict[str, Any]]) -> list[Any]:
    """Return what does not give the bits of no recompute."""
    group, differences = group_of_all_ranks(rank, size), []
    for family in families:
        expected = loss_and_grads(make_model(family, group, torch.float64))
        for switches in switch_sets:
            if not bitwise_equal(loss_and_grads(make_model(family, group, torch.float64, **switches)), expected):
                differences.append((family, switches))
    return differences


def test_two_tensor_ranks_gather_partitioned_inputs():
    assert run_ranks(2, find_differences, 2, ("gpt2", "t5"), QUICK_SWITCHES) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_all_families_gather_partitioned_inputs(size):
    """Four ranks do not divide 3 samples of 11 words evenly; LLaMA has two groups of heads for two ranks."""
    families = FAMILIES if size == 2 else tuple(family for family in FAMILIES if family != "llama")
    assert run_ranks(size, find_differences, size, families, SWITCHES) == [[]] * size


def test_recompute_memory_matches_formula(monkeypatch):
    """An input has n bytes; without a switch L of them wait on the device, every k layers ceil(L / k)."""
    on_host: list[int] = []
    original_host_memory = device.host_memory

    def recording_host_memory(*alloc_args: Any) -> torch.Tensor:
        buffer = original_host_memory(*alloc_args)
        on_host.append(buffer.nbytes)
        return buffer

    monkeypatch.setattr(device, "host_memory", recording_host_memory)
    input_bytes = INPUT_BYTES
    plain, base = measure_saved_bytes(make_model("gpt2")), measure_saved_bytes(make_model("gpt2", **RECOMPUTE))
    other_bytes = base - NUM_LAYERS * input_bytes
    assert 0 < other_bytes < base < plain / 2
    assert (
        measure_saved_bytes(make_model("gpt2", **RECOMPUTE, checkpoint_num_layers=2)) == other_bytes + 2 * input_bytes
    )
    assert (
        measure_saved_bytes(make_model("gpt2", **RECOMPUTE, contiguous_checkpointing=True))
        == other_bytes + NUM_LAYERS * input_bytes
    )
    assert not on_host
    assert measure_saved_bytes(make_model("gpt2", **RECOMPUTE, checkpoint_in_cpu=True)) - sum(on_host) == other_bytes
    assert on_host == [input_bytes] * NUM_LAYERS
    on_host.clear()
    offload_switches = {"checkpoint_in_cpu": True, "contiguous_checkpointing": True}
    assert measure_saved_bytes(make_model("gpt2", **RECOMPUTE, **offload_switches)) - sum(on_host) == other_bytes
    assert on_host == [NUM_LAYERS * input_bytes], "one buffer"


def saved_bytes_by_rank(rank: int, size: int, family: str, switches: list[dict[str, Any]]) -> list[int]:
    return [
        measure_saved_bytes(make_model(family, group_of_all_ranks(rank, size), **switch_set)) for switch_set in switches
    ]


def test_tensor_ranks_store_partitioned_inputs():
    cases = [
        RECOMPUTE,
        {**RECOMPUTE, STORAGE_SWITCHES[0]: True},
        {**RECOMPUTE, STORAGE_SWITCHES[0]: True, STORAGE_SWITCHES[2]: True},
    ]
    for plain, partitioned, contiguous in run_ranks(2, saved_bytes_by_rank, 2, "gpt2", cases):
        assert plain - partitioned == plain - contiguous == NUM_LAYERS * INPUT_BYTES // 2


def test_encoder_output_is_stored_once_for_all_decoder_layers():
    encoder_bytes, decoder_bytes = (length * BATCH * SMALL["hidden_size"] * 4 for length in (S_E, S_D))
    cases = [RECOMPUTE, {**RECOMPUTE, STORAGE_SWITCHES[0]: True}]
    partitionable_bytes = NUM_LAYERS * (encoder_bytes + decoder_bytes) + encoder_bytes
    for plain, partitioned in run_ranks(2, saved_bytes_by_rank, 2, "t5", cases):
        assert plain - partitioned == partitionable_bytes // 2


@pytest.mark.parametrize("family", FAMILIES)
def test_selective_recompute_saves_between_full_and_none(family):
    """On a CPU dropout of attention keeps matrices of probabilities, which are what is made again."""
    full, selective, none = (
        measure_saved_bytes(make_model(family, **switch_set))
        for switch_set in (RECOMPUTE, {"recompute_attention": True}, {})
    )
    assert full < selective < none


def test_stored_inputs_are_freed_after_backward():
    model = make_model("gpt2", **RECOMPUTE, contiguous_checkpointing=True)
    storage = model.recompute.storage
    byte_counts = []
    for _ in range(3):
        loss_and_grads(model)
        byte_counts.append((storage.stored_bytes(), storage.buffer_bytes()))
    assert byte_counts == [(0, NUM_LAYERS * INPUT_BYTES)] * 3
