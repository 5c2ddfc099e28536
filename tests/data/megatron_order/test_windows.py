"""The samples of one corpus in Megatron's order: against arrays that megatron-core 0.16.1 has built, and a reference.

tests/megatron_core/test_data_order.py compares the samples with the package itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import GPTDataset, gpt2_fields
from megatron.data.cache import IndexCache
from megatron.data.megatron_order import sample_windows
from megatron.data.megatron_order.epochs import EpochPlan, plan_epochs
from megatron.data.megatron_order.permutations import permuted_documents, permuted_samples
from megatron.data.megatron_order.sample_windows import MegatronWindows
from megatron.data.megatron_order.split_bounds import split_bounds

LENGTHS = [3, 0, 5, 2, 7, 1, 4, 6, 2, 9]
DOCUMENTS = (0, 8)
"""The training documents of --split 8,1,1; they have 28 tokens."""
RECORDED = {
    5: (
        EpochPlan(1, 6, 6), [2, 1, 6, 0, 4, 5, 3, 7], [0, 4, 3, 2, 5, 1], [4, 15, 11, 22, 9, 8],
    ),
    8: (
        EpochPlan(2, 13, 6), [2, 1, 6, 0, 4, 5, 3, 7, 5, 0, 3, 4, 2, 6, 1, 7],
        [1, 0, 3, 5, 2, 4, 9, 11, 8, 7, 12, 10, 6], [8, 4, 11, 9, 22, 15, 13, 7, 9, 18, 21, 17, 25],
    ),
    12: (
        EpochPlan(2, 13, 13), [5, 3, 0, 4, 6, 2, 2, 7, 1, 1, 0, 4, 5, 6, 3, 7],
        [7, 11, 2, 3, 1, 9, 5, 4, 0, 8, 12, 6, 10], [24, 19, 13, 17, 2, 11, 7, 22, 18, 28, 9, 6, 15],
    ),
}  # fmt: skip
"""Samples of the run -> epochs, document index, shuffle index, and first token of each sample, for seed 1234, L = 4."""


class FakeDocuments:
    """Documents of given sizes; the tokens count up from 1 through the file."""

    prefix, fingerprint = "sizes", "sizes"

    def __init__(self, lengths: list[int]) -> None:
        self.document_lengths = np.array(lengths, np.int32)
        self.starts = np.concatenate([[1], 1 + np.cumsum(self.document_lengths)])

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        assert length is not None and 0 < length <= self.document_lengths[document] - offset
        return self.starts[document] + offset + np.arange(length)


def make_windows(num_samples: int, **options: object) -> MegatronWindows:
    values = {"documents": DOCUMENTS, "seq_length": 4, "seed": 1234, **options}
    return MegatronWindows(FakeDocuments(LENGTHS), num_samples=num_samples, **values)  # type: ignore[arg-type]


def read_sample(windows: MegatronWindows, index: int) -> list[int]:
    return [token for part in windows.slices(index) for token in windows._source.read(*part).tolist()]


@pytest.mark.parametrize("num_samples", RECORDED)
def test_order_equals_recorded_order_of_megatron_core(num_samples: int) -> None:
    plan, document_order, sample_order, first_tokens = RECORDED[num_samples]
    windows, generator = make_windows(num_samples), np.random.RandomState(1234)
    assert windows.plan == plan and windows.plan.has_separate_last == (num_samples == 8)
    assert permuted_documents(*DOCUMENTS, plan, generator).tolist() == document_order
    assert permuted_samples(plan, generator).tolist() == sample_order
    assert [read_sample(windows, index)[0] for index in range(plan.num_samples)] == first_tokens


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 400), st.integers(0, 1))
def test_epochs_are_the_fewest_that_contain_the_samples(
    num_tokens: int, seq_length: int, num_samples: int, extra_tokens: int
) -> None:
    """The reference adds one epoch after another, as megatron-core does."""
    num_epochs = 1
    while num_epochs * num_tokens < num_samples * seq_length + extra_tokens:
        num_epochs += 1
    plan = plan_epochs(num_tokens, seq_length, num_samples, extra_tokens)
    assert (plan.num_epochs, plan.num_samples) == (num_epochs, (num_epochs * num_tokens - extra_tokens) // seq_length)
    num_from_last = num_samples - ((num_epochs - 1) * num_tokens - extra_tokens) // seq_length
    is_separate = num_epochs > 1 and num_from_last < int(0.8 * ((num_tokens - extra_tokens) // seq_length))
    assert plan.has_separate_last == is_separate


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_samples_are_consecutive_tokens_of_the_ordered_documents(data: st.DataObject) -> None:
    lengths = [*data.draw(st.lists(st.sampled_from([0, 0, 1, 2, 9, 30]), min_size=3, max_size=30)), 5]
    seq_length, extra_tokens = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 1))
    source, seed, num_samples = (
        FakeDocuments(lengths),
        data.draw(st.integers(0, 2**32 - 1)),
        data.draw(st.integers(1, 90)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_windows, "_STRIDE", 4)
        patch.setattr(sample_windows, "_BLOCK", 8)
        windows = MegatronWindows(
            source, documents=(1, len(lengths)), seq_length=seq_length, seed=seed, num_samples=num_samples,
            extra_tokens=extra_tokens,
        )  # fmt: skip
    generator = np.random.RandomState(seed)
    order = permuted_documents(1, len(lengths), windows.plan, generator)
    tokens = np.concatenate([np.arange(source.starts[i], source.starts[i + 1]) for i in order]).tolist()
    starts = permuted_samples(windows.plan, generator) * seq_length
    assert windows.plan.num_samples >= num_samples
    for index, start in enumerate(starts.tolist()):
        assert read_sample(windows, index) == tokens[start : start + seq_length + extra_tokens]


def test_epochs_are_permuted_completely_and_the_last_one_follows() -> None:
    plan = plan_epochs(1000, 10, 320)
    assert plan == EpochPlan(4, 399, 299)
    order = permuted_documents(5, 25, plan, np.random.RandomState(3))
    assert sorted(order[:60].tolist()) == sorted(3 * [*range(5, 25)]) and sorted(order[60:].tolist()) == [*range(5, 25)]
    samples = permuted_samples(plan, np.random.RandomState(3))
    assert sorted(samples[:299].tolist()) == [*range(299)] and sorted(samples[299:].tolist()) == [*range(299, 399)]
    assert len({tuple(order[begin : begin + 20].tolist()) for begin in range(0, 80, 20)}) == 4


def test_sample_without_extra_token_has_no_loss_at_its_last_token() -> None:
    source, options = FakeDocuments(LENGTHS), {"documents": DOCUMENTS, "seq_length": 4, "seed": 1234}
    data = GPTDataset(source, megatron_samples=12, has_extra_token=False, **options)  # type: ignore[arg-type]
    batch = {name: torch.from_numpy(value)[None] for name, value in data[3].items()}  # type: ignore[union-attr]
    fields = gpt2_fields(batch["text"], loss_mask=batch["loss_mask"])
    windows = make_windows(12, extra_tokens=0)
    assert fields["tokens"].tolist() == [read_sample(windows, 3)]
    assert fields["labels"].tolist() == [[*read_sample(windows, 3)[1:], 0]]
    assert fields["loss_mask"].tolist() == [[1, 1, 1, 0]]
    assert data.fingerprint != GPTDataset(source, megatron_samples=12, **options).fingerprint  # type: ignore[arg-type]


def test_index_outside_the_order_is_an_error() -> None:
    windows = make_windows(5)
    for index in (-1, 6):
        with pytest.raises(IndexError, match=f"6 ordered samples, got index {index}"):
            windows.slices(index)


def test_large_order_is_built_once_per_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_windows, "CACHED_FROM_ELEMENTS", 0)
    expected = [read_sample(make_windows(12), index) for index in range(13)]
    reader, writer = os.pipe()
    children = []
    for _ in range(3):
        if (pid := os.fork()) == 0:  # the child reports each computation, and whether its samples are right
            build = MegatronWindows._build

            def counted(self: MegatronWindows, build: object = build) -> Iterator[np.ndarray]:
                os.write(writer, b"b")
                return build(self)  # type: ignore[operator]

            monkeypatch.setattr(MegatronWindows, "_build", counted)
            windows = make_windows(12, cache=IndexCache(tmp_path))
            is_equal = [read_sample(windows, index) for index in range(13)] == expected
            os.write(writer, b"." if is_equal else b"x")
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    os.close(writer)
    report = os.read(reader, 100)
    os.close(reader)
    assert sorted(report) == sorted(b"b...")
    assert read_sample(make_windows(12, cache=IndexCache(tmp_path)), 3) == expected[3]


@pytest.mark.parametrize(
    ("num_documents", "split", "bounds"),
    [
        (800, "949,50,1", [0, 759, 799, 800]),
        (15, "70,20,10", [0, 10, 13, 15]),  # 10.5 is rounded to an even number, and 0.7 + 0.2 is less than 0.9
        (10, "8/1/1", [0, 8, 9, 10]),
        (7, "1", [0, 7, 7, 7]),
    ],
)
def test_split_has_megatrons_rounding(num_documents: int, split: str, bounds: list[int]) -> None:
    assert split_bounds(num_documents, split) == list(zip(bounds[:-1], bounds[1:], strict=True))
