"""Which contenders keep freed memory: our engine and what it is measured by, the others if asked."""

from __future__ import annotations

import pytest

from benchmarks.pipe import contenders
from benchmarks.pipe.case import Case, Contender
from benchmarks.sizes import GPTSizes

CASE = Case(
    name="toy", sizes=GPTSizes(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=32, seq_length=8)
)


@pytest.mark.parametrize(
    ("kind", "by_itself"),
    [("alone", True), ("side by side", True), ("ours", True), ("stock", False), ("dualpipev", False), ("torch", False)],
)
def test_the_yardstick_keeps_what_our_engine_keeps(monkeypatch: pytest.MonkeyPatch, kind: str, by_itself: bool) -> None:
    asked: list[str] = []
    monkeypatch.setattr(contenders, "keep_freed", lambda: asked.append(kind))
    for maker in ("_plain", "_deepspeed", "_torch", "_ours"):
        monkeypatch.setattr(contenders, maker, lambda *_: None)
    for is_asked in (False, True):
        asked.clear()
        contenders.build(Contender(name=kind, kind=kind, keeps_freed=is_asked), contenders.Seat(CASE, 0, 0))
        assert len(asked) == (by_itself or is_asked)
