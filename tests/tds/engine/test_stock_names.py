"""What programs written for DeepSpeed's engine read and call."""

from __future__ import annotations

from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine


def _resized(rank: int) -> tuple[int, ...]:
    toy = Toy("chain")
    engine = make_engine(toy, 2)
    engine.set_train_micro_batch_size(toy.rows + 2)
    engine.train_batch(iter([toy.batch(i, wide_rows=toy.rows + 2) for i in range(toy.micro_batches)]))
    return (
        engine.micro_batch_size,
        engine.train_micro_batch_size_per_gpu(),
        engine.train_batch_size(),
        engine.micro_batches,
    )


def test_another_micro_batch_size_is_told_in_every_place() -> None:
    assert run_ranks(2, _resized) == [(5, 5, 20, 4)] * 2
