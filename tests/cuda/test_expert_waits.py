"""Waits of the host for the device in forward and backward of a MoE layer."""

from __future__ import annotations

import pytest

from tests.cuda.worker import CostCase, Worker

EXPERT_PARALLEL = "--expert-model-parallel-size 2"
CAPACITY = "--moe-expert-capacity-factor 1.25"
MAX_WAITS = {
    "bf16": ("", 0),
    "bf16, capacity": (CAPACITY, 0),
    "ep 2": (EXPERT_PARALLEL, 1),  # the sizes of messages
    "ep 2, capacity": (f"{EXPERT_PARALLEL} {CAPACITY}", 1),
    "fp16": ("--fp16", 1),  # the number of rows of each expert, because there is no grouped product
    "fp16, capacity": (f"--fp16 {CAPACITY}", 1),
    "fp16, ep 2": (f"--fp16 {EXPERT_PARALLEL}", 1),  # both in one copy
}
"""Case -> flags and maximum number of waits per layer and micro-batch."""


@pytest.mark.parametrize("name", MAX_WAITS)
def test_host_waits_of_moe_layer(worker: Worker, name: str) -> None:
    flags, max_waits = MAX_WAITS[name]
    (cost,) = worker.run(CostCase("moe", flags))
    assert cost.reads.total() == max_waits, cost.reads
    assert cost.forward.num_products and cost.backward.num_products
