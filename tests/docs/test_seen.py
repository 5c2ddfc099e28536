"""What the pages say was seen on a GPU is what benchmarks/gpu makes of the results in the repository."""

from __future__ import annotations

import pytest

from benchmarks.gpu import publish


@pytest.mark.parametrize("name", publish.PAGES)
def test_the_results_on_a_page_are_those_in_the_repository(name: str) -> None:
    text = (publish.ROOT / name).read_text(encoding="utf-8")
    results = publish.seen()
    assert publish.with_block(text, publish.block(name, results)) == text, "run python -m benchmarks.gpu.publish"
    says_nothing = any(words in text for words in ("Nothing yet", "nothing yet", "还没有：", "还没有。**"))
    assert says_nothing == (not results)
