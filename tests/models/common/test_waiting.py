"""What is estimated of recompute's inputs: every k layers, in parts, on the host."""

from __future__ import annotations

import pytest

from megatron.config import parse
from megatron.costs.memory import Kept, Memory, SavedActivations, waiting_of
from megatron.models import registry

LINE = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --batch-size 2 --fp32"
INPUT = 16 * 2 * 32 * 4  # s b h in fp32


def estimated(extra: str) -> Memory:
    config = parse(f"{LINE} {extra}".split(), world_size=2, env={})
    (memory,) = registry.costs_of(config).memory_per_stage(
        [0, 7], micro_batch_size=2, tensor=config.parallel.model_parallel_size,
        checkpoint_activations=config.parallel.checkpoint_activations, waiting=waiting_of(config),
    )  # fmt: skip
    return memory


@pytest.mark.parametrize(
    ("extra", "waits", "runs", "on_host"),
    [
        ("", 4 * INPUT, 1, 0),
        ("--checkpoint-num-layers 3", 2 * INPUT, 3, 0),
        ("--partition-activations", 2 * INPUT, 1, 0),
        ("--checkpoint-in-cpu", 0, 1, 4 * INPUT),
        (
            "--checkpoint-in-cpu --partition-activations --checkpoint-num-layers 2 --contigious-checkpointing",
            0,
            2,
            INPUT,
        ),
    ],
)
def test_inputs_wait_where_the_flags_say(extra: str, waits: int, runs: int, on_host: int) -> None:
    plain = estimated("--model-parallel-size 2")
    ends = 2 * INPUT + INPUT // 4  # what norm and head read, and the mask of the embedding
    again = max(runs * (plain.activations - ends) // 4 - plain.logits, 0)
    found = estimated(f"--model-parallel-size 2 --checkpoint-activations {extra}")
    assert again > 0 and (found.activations - again - ends, found.host) == (waits, on_host)


def test_a_stage_keeps_the_forwards_in_flight_and_makes_the_largest_run_again() -> None:
    pieces = [[Kept(), Kept(100, 10), Kept(80, 10)], [Kept(90, 10), Kept(5)]]
    memory = SavedActivations(every=2).placed(Memory(0, 0, 0, 999, 30), pieces, 3.0, read=7)
    assert memory.activations == 3 * (10 + 10) + 3 * (7 + 5) + 180 - 30
