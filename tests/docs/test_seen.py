"""The tables of GPU results on the pages are generated from the results in the repository."""

from __future__ import annotations

import pytest

from benchmarks.gpu import publish


@pytest.mark.parametrize("name", publish.PAGES)
def test_the_table_of_a_page_is_up_to_date(name: str) -> None:
    text = (publish.ROOT / name).read_text(encoding="utf-8")
    assert publish.with_block(text, publish.block(name, publish.seen())) == text, "run python -m benchmarks.gpu.publish"
