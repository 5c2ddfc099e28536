"""What is estimated of recompute's inputs: every k layers, in parts, on the host."""

from __future__ import annotations

import pytest

from megatron.config import parse
from megatron.costs.memory import Memory, SavedActivations, SavedBytes, saved_activations_of
from megatron.models import registry

BASE_FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --batch-size 2 --fp32"
)
INPUT_BYTES = 16 * 2 * 32 * 4  # s b h in fp32


def estimate_memory(extra: str) -> Memory:
    config = parse(f"{BASE_FLAGS} {extra}".split(), world_size=2, env={})
    (memory,) = registry.costs_of(config).memory_per_stage(
        [0, 7], micro_batch_size=2, tensor=config.parallel.model_parallel_size,
        checkpoint_activations=config.parallel.checkpoint_activations, waiting=saved_activations_of(config),
    )  # fmt: skip
    return memory


@pytest.mark.parametrize(
    ("extra", "stored_bytes", "layers_per_run", "host_bytes"),
    [
        ("", 4 * INPUT_BYTES, 1, 0),
        ("--checkpoint-num-layers 3", 2 * INPUT_BYTES, 3, 0),
        ("--partition-activations", 2 * INPUT_BYTES, 1, 0),
        ("--checkpoint-in-cpu", 0, 1, 4 * INPUT_BYTES),
        (
            "--checkpoint-in-cpu --partition-activations --checkpoint-num-layers 2 --contigious-checkpointing",
            0,
            2,
            INPUT_BYTES,
        ),
    ],
)
def test_recompute_inputs_are_stored_where_flags_set(
    extra: str, stored_bytes: int, layers_per_run: int, host_bytes: int
) -> None:
    plain = estimate_memory("--model-parallel-size 2")
    boundary_bytes = 2 * INPUT_BYTES + INPUT_BYTES // 4  # what norm and head read, and the mask of the embedding
    recompute_bytes = max(layers_per_run * (plain.activations - boundary_bytes) // 4 - plain.logits, 0)
    memory = estimate_memory(f"--model-parallel-size 2 --checkpoint-activations {extra}")
    assert recompute_bytes > 0 and (memory.activations - recompute_bytes - boundary_bytes, memory.host) == (
        stored_bytes,
        host_bytes,
    )


def test_stage_stores_forwards_in_flight_and_recomputes_largest_run() -> None:
    chunks = [[SavedBytes(), SavedBytes(100, 10), SavedBytes(80, 10)], [SavedBytes(90, 10), SavedBytes(5)]]
    memory = SavedActivations(every=2).apply_to(Memory(0, 0, 0, 999, 30), chunks, 3.0, shared_bytes=7)
    assert memory.activations == 3 * (10 + 10) + 3 * (7 + 5) + 180 - 30
