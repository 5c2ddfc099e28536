"""Which contenders keep freed memory: our engine and what it is measured by, the others if asked."""

from __future__ import annotations

import pytest

from benchmarks.contenders import GPTSizes
from benchmarks.pipe import model
from benchmarks.pipe.cuts import all_cuts, best_cuts, line_up
from benchmarks.pipe.model import Case, Contender

CASE = Case(
    name="toy", sizes=GPTSizes(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=32, seq_length=8)
)


@pytest.mark.parametrize("kind", ["alone", "side by side", "ours", "stock", "dualpipev", "torch"])
def test_a_contender_keeps_freed_memory_where_it_says_so(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    asked: list[str] = []
    monkeypatch.setattr(model, "keep_freed", lambda: asked.append(kind))
    for maker in ("_plain", "_deepspeed", "_torch", "_ours"):
        monkeypatch.setattr(model, maker, lambda *_: None)
    for is_asked in (False, True):
        asked.clear()
        model.build(Contender(name=kind, kind=kind, keeps_freed=is_asked), model.Seat(CASE, 0, 0))
        assert len(asked) == is_asked


def test_the_yardstick_keeps_what_our_engine_keeps_and_others_are_cut_by_their_own_times() -> None:
    costs = [1.0, *[4.0] * 4, 1.0, 4.0]
    heavy = [*costs[:-1], 12.0]
    found = line_up(CASE, costs, 1, heavy)
    assert {each.kind for each in found if each.keeps_freed} == {"alone", "side by side"}
    (best,) = best_cuts(all_cuts(7, 2), costs, 2, 8, 1)
    (theirs,) = best_cuts(all_cuts(7, 2), heavy, 2, 8, 1)
    assert best != theirs
    assert {each.partition for each in found if each.schedule == "zb-h1" and each.chunks == 1} == {best}
    for name in ("torch", "ours 1f1b"):
        assert {each.partition for each in found if each.name.startswith(name)} >= {best, theirs}
