"""Samples that are split into shorter ones: every token is a label once, in the order of the full samples."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.batch_rampup import BatchSizes
from megatron.config.seq_length import SeqLengths
from megatron.data import DataLoader
from megatron.data.collate import split_windows, truncate_windows
from megatron.errors import SampleError

FULL_LENGTH = 12
SCHEDULE = SeqLengths(FULL_LENGTH, ((0, 3), (4 * FULL_LENGTH, 6), (9 * FULL_LENGTH, FULL_LENGTH)))


class ConsecutiveSamples:
    """Consecutive windows over the tokens 0, 1, 2, ...: sample i has the tokens L i ... L i + L."""

    def __init__(self, *extra_keys: str) -> None:
        self.extra_keys = extra_keys

    def __getitem__(self, index: int) -> Any:
        tokens = np.arange(index * FULL_LENGTH, (index + 1) * FULL_LENGTH + 1, dtype=np.int64)
        return (
            {"text": tokens, **{key: -tokens.astype(np.int32) for key in self.extra_keys}}
            if self.extra_keys
            else tokens
        )


def make_loader(dataset: Any, lengths: SeqLengths | None = SCHEDULE, **overrides: Any) -> DataLoader:
    options = {"micro_batch_size": 2, "num_micro_batches": 1, "data_rank": 0, "data_size": 1, **overrides}
    return DataLoader(dataset, lengths=lengths, **options)


@pytest.mark.parametrize("length", [1, 3, 4, 12])
def test_split_windows_share_boundary_token(length: int) -> None:
    windows = torch.randint(99, (3, FULL_LENGTH + 1))
    split = split_windows("text", windows, length)
    expected = [
        row[idx * length : idx * length + length + 1] for row in windows for idx in range(FULL_LENGTH // length)
    ]
    assert torch.equal(split, torch.stack(expected)) and split.is_contiguous()


@settings(max_examples=40, deadline=None)
@given(
    starts=st.lists(st.integers(1, 30 * FULL_LENGTH), max_size=3, unique=True),
    lengths=st.sets(st.sampled_from([1, 2, 3, 4, 6]), max_size=3),
    replicas=st.sampled_from([1, 2]), micro=st.sampled_from([1, 2]), consumed=st.integers(0, 9),
)  # fmt: skip
def test_every_token_is_label_once_for_any_schedule(
    starts: list[int], lengths: set[int], replicas: int, micro: int, consumed: int
) -> None:
    """Labels are the tokens 1, 2, 3, ... in order; the length of a slice is that of the start of its step."""
    increasing_lengths = [*sorted(lengths)[: len(starts)], FULL_LENGTH]
    schedule = SeqLengths(FULL_LENGTH, tuple(zip([0, *sorted(starts)], increasing_lengths, strict=False)))
    batch_sizes = BatchSizes.ramp(8, 4, 4, 24)
    loaders = [
        iter(
            make_loader(
                ConsecutiveSamples(), schedule, micro_batch_size=micro, num_micro_batches=8 // micro // replicas,
                data_rank=rank, data_size=replicas, samples_consumed=4 * consumed, batch_sizes=batch_sizes,
            )
        )
        for rank in range(replicas)
    ]  # fmt: skip
    num_samples, labels = 4 * consumed, []
    for _ in range(4):
        num_micro_batches = batch_sizes.at(num_samples) // micro // replicas
        micro_batches = [next(loader)["text"] for loader in loaders for _ in range(num_micro_batches)]
        length = schedule.at(num_samples * FULL_LENGTH)
        assert {micro_batch.shape for micro_batch in micro_batches} == {(micro * FULL_LENGTH // length, length + 1)}
        labels += [micro_batch[:, 1:].flatten() for micro_batch in micro_batches]
        assert all(torch.equal(micro_batch[:, :-1] + 1, micro_batch[:, 1:]) for micro_batch in micro_batches), (
            "each input precedes its label"
        )
        num_samples += batch_sizes.at(num_samples)
    assert torch.equal(torch.cat(labels), torch.arange(4 * consumed * FULL_LENGTH, num_samples * FULL_LENGTH) + 1)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_prefetching_matches_direct_loading_through_length_changes() -> None:
    dataset = ConsecutiveSamples("segments")
    prefetch_iterator = iter(make_loader(dataset, num_workers=2))
    pairs = list(islice(zip(make_loader(dataset), prefetch_iterator, strict=False), 8))
    prefetch_iterator.close()  # type: ignore[attr-defined]
    assert [tuple(direct["text"].shape) for direct, _ in pairs] == [(8, 4)] * 2 + [(4, 7)] * 3 + [(2, 13)] * 3
    for direct, prefetched in pairs:
        assert direct.keys() == prefetched.keys() == {"text", "segments"}
        assert all(torch.equal(direct[key], prefetched[key]) for key in direct)
        assert torch.equal(direct["segments"], -direct["text"].int())


def test_full_length_samples_are_unchanged() -> None:
    """Also for a data set whose samples have another form and could not be split."""

    class WeightedSamples(ConsecutiveSamples):
        def __getitem__(self, index: int) -> Any:
            return {"text": super().__getitem__(index), "weight": np.float32(index)}

    full_length_loader = make_loader(WeightedSamples(), SeqLengths(FULL_LENGTH, ((0, FULL_LENGTH),)))
    assert next(iter(full_length_loader))["weight"].tolist() == [0.0, 1.0]
    with pytest.raises(SampleError, match=r"--seq-length \+ 1 tokens.*got 'weight' of shape \(2,\)"):
        next(iter(make_loader(WeightedSamples())))


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_curriculum_keeps_first_tokens_of_every_key(num_workers: int) -> None:
    """Steps 3, 4, ... of a run, whose lengths follow the number of the step, not the samples consumed."""
    lengths = SeqLengths(FULL_LENGTH, curriculum=((1, 3), (4, 5), (5, FULL_LENGTH)))
    loader = make_loader(
        ConsecutiveSamples("mask"), lengths, samples_consumed=20, steps_taken=2, num_workers=num_workers
    )
    for step, (batch, length) in enumerate(zip(loader, (3, 5, FULL_LENGTH, FULL_LENGTH), strict=False)):
        first = torch.tensor([[20 + 2 * step], [21 + 2 * step]]) * FULL_LENGTH
        expected = first + torch.arange(length + 1)
        assert torch.equal(batch["text"], expected) and torch.equal(batch["mask"], -expected.int())
        assert batch["text"].is_contiguous()
        if step == 3:
            break


def test_curriculum_rejects_samples_without_a_label() -> None:
    with pytest.raises(SampleError, match="--seq-length-curriculum needs samples with --seq-length"):
        truncate_windows("text", torch.zeros(2, 4), 4)
