"""Two dumps agree: in all tensors, of all kinds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from megatron.debug.compare import compare, grouped
from megatron.debug.dump_files import read
from tools import compare_dumps

KINDS = ("weight", "input", "output", "grad_output", "grad_input", "gradient")


def assert_agree(first: Path, second: Path, rtol: float | None = None) -> None:
    """Check that the dumps agree in all tensors of the first but those that only single-stage models have."""
    one, other = read(first), read(second)
    found = compare(one, other, rtol)
    assert found.first is None, compare_dumps.verdict(found)
    assert {key.name for key in found.only_first} <= {"encoder", "decoder"}
    kinds = Counter(key.what for key in grouped(one))
    assert min(kinds[what] for what in KINDS) > 12
    assert not any(each.copies for each in found.differences)
