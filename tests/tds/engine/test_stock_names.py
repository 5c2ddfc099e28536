"""What programs written for DeepSpeed's engine read and call."""

from __future__ import annotations

from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine


def _resize_micro_batch(rank: int) -> tuple[int, ...]:
    toy = Toy("chain")
    engine = make_engine(toy, 2)
    engine.set_train_micro_batch_size(toy.micro_batch_size + 2)
    engine.train_batch(
        iter([toy.make_batch(i, num_rows=toy.micro_batch_size + 2) for i in range(toy.num_micro_batches)])
    )
    return (
        engine.micro_batch_size,
        engine.train_micro_batch_size_per_gpu(),
        engine.train_batch_size(),
        engine.micro_batches,
    )


def test_changed_micro_batch_size_is_reported_by_all_accessors() -> None:
    assert run_ranks(2, _resize_micro_batch) == [(5, 5, 20, 4)] * 2
