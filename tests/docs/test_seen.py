"""The tables of GPU results on the pages are generated from the results in the repository."""

from __future__ import annotations

import pytest

from benchmarks.gpu import publish


@pytest.mark.parametrize("name", publish.PAGES)
def test_gpu_result_tables_are_up_to_date(name: str) -> None:
    text = (publish.ROOT / name).read_text(encoding="utf-8")
    assert publish.replace_block(text, publish.page_block(name, publish.load_results())) == text, (
        "run python -m benchmarks.gpu.publish"
    )
