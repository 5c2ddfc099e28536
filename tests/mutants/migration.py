"""Mistakes in what is recorded of other people's scripts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FILES = "tests/migration/test_files.py"

MIGRATION = (
    Mutant(
        "a script's micro-batches are those of another number of replicas",
        "tests/migration/scripts/mds-gpt.toml",
        "num_micro_batches = 2",
        "num_micro_batches = 4",
        (f"{FILES}::test_batch_sizes_multiply_to_the_global_batch",),
    ),
    Mutant(
        "a ramp-up ends a step early",
        "tests/migration/scripts/mds-gpt3-175b.toml",
        "rampup_iters = 19802",
        "rampup_iters = 19801",
        (f"{FILES}::test_samples_are_those_of_the_steps",),
    ),
)
