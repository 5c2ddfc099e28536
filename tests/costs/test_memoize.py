"""Memoized methods of cost models: each call owns its list, and a changed copy starts without cached values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.costs.memoize import memoized_list


@dataclass(frozen=True)
class Model:
    size: int

    @memoized_list
    def units(self, samples: int, *, width: int = 1) -> list[int]:
        return [self.size * samples * width]


def test_lists_are_independent_of_each_other() -> None:
    model = Model(3)
    model.units(2).append(0)
    assert model.units(2) == [6]


def test_results_depend_on_all_arguments_and_fields() -> None:
    model = Model(3)
    assert [model.units(2), model.units(4), model.units(2, width=5), replace(model, size=7).units(2)] == [
        [6], [12], [30], [14]
    ]  # fmt: skip
    assert model == Model(3) and hash(model) == hash(Model(3))
