"""A forward beside a backward gives the same numbers, and each waits for what is its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tds.engine.overlapped import OverlappingStage
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, check_equal, run_toys

ON = {"overlap_forward_backward": True}
IN_A_LOOP = {"chunks": 2}
IN_A_V = {"chunks": 2, "placement": "v"}


def toy_of(schedule: str, micro_batches: int = 6, **more: Any) -> Toy:
    options = IN_A_LOOP if schedule == "interleaved" else IN_A_V if schedule in ("zb-v", "dualpipev") else {}
    layers = 8 if options else 5
    pipeline = {"schedule": schedule, **ON}
    return Toy(layers=layers, micro_batches=micro_batches, options=options, pipeline=pipeline, **more)


class _Seen:
    """Counts the pairs of a rank, and those in which both passes ran layers at one time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.pairs = 0
        own = OverlappingStage._do_pair

        def counted(stage: Any, *args: Any) -> None:
            self.pairs += 1
            own(stage, *args)

        OverlappingStage._do_pair = counted  # type: ignore[method-assign]


def _both(rank: int, toys: list[Toy], num_stages: int) -> tuple[list[Any], list[Any], int]:
    """Return what the toys give with pairs and without, and the pairs."""
    seen = _Seen()
    off = [replace(toy, pipeline={"schedule": toy.pipeline["schedule"]}) for toy in toys]
    return run_toys(rank, toys, num_stages), run_toys(rank, off, num_stages), seen.pairs


def check_same(ranks: list[Any], toys: list[Toy]) -> None:
    """Compare with the same ranks without pairs, to the bit, and with one process."""
    for number, toy in enumerate(toys):
        check_equal([on[number] for on, _, _ in ranks], toy, tolerance=1e-12 if toy.dtype is torch.float64 else 1e-4)
        for on, off, _ in ranks:
            (loss, got, norm), (wanted_loss, wanted, wanted_norm) = on[number], off[number]
            assert torch.equal(loss, wanted_loss) and norm == wanted_norm, toy
            assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in got), toy


QUICK = [toy_of("1f1b", loss="pair"), toy_of("dualpipev", 5)]
SLOW = [
    *(
        toy_of(name, m, kind=kind)
        for name in ("1f1b", "interleaved", "zb-v", "dualpipev")
        for m in (1, 2, 4, 7)
        for kind in ("chain", "tied")
    ),
    *(toy_of("1f1b", m, kind="many") for m in (3, 8)),
    toy_of("1f1b", 8, kind="sharing", dtype=torch.float32),
]


def test_pairs_give_what_passes_in_turn_give_to_the_bit() -> None:
    ranks = run_ranks(2, _both, QUICK, 2)
    check_same(ranks, QUICK)
    assert all(pairs >= 6 for *_, pairs in ranks), [pairs for *_, pairs in ranks]


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 4])
def test_pairs_of_every_schedule_give_what_passes_in_turn_give_to_the_bit(num_stages: int) -> None:
    ranks = run_ranks(num_stages, _both, SLOW, num_stages, deadline_s=300.0)
    check_same(ranks, SLOW)
    assert all(pairs >= 10 for *_, pairs in ranks), [pairs for *_, pairs in ranks]
