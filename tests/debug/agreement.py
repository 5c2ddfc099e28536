"""Two dumps agree: in all tensors, of all kinds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from megatron.debug.compare import compare, group_records
from megatron.debug.dump_files import read_dump
from tools import compare_dumps

TENSOR_TYPES = ("weight", "input", "output", "grad_output", "grad_input", "gradient")


def assert_dumps_agree(first: Path, second: Path, rtol: float | None = None) -> None:
    """Check that the dumps agree in all tensors of the first but those that only single-stage models have."""
    first_dump, second_dump = read_dump(first), read_dump(second)
    comparison = compare(first_dump, second_dump, rtol)
    assert comparison.first is None, compare_dumps.verdict(comparison)
    assert {key.name for key in comparison.only_first} <= {"encoder", "decoder"}
    counts = Counter(key.tensor_type for key in group_records(first_dump))
    assert min(counts[tensor_type] for tensor_type in TENSOR_TYPES) > 12
    assert not any(difference.differing_copies for difference in comparison.differences)
