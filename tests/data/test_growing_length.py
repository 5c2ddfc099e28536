"""Samples that are cut into shorter ones: every token is a label once, in the order of the whole samples."""

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
from megatron.data.collate import cut
from megatron.errors import SampleError

FULL = 12
SCHEDULE = SeqLengths(FULL, ((0, 3), (4 * FULL, 6), (9 * FULL, FULL)))


class Windows:
    """Windows over the numbers 0, 1, 2, ...: sample i is L i ... L i + L, as they lie end to end."""

    def __init__(self, *more: str) -> None:
        self.more = more

    def __getitem__(self, index: int) -> Any:
        tokens = np.arange(index * FULL, (index + 1) * FULL + 1, dtype=np.int64)
        return {"text": tokens, **{key: -tokens.astype(np.int32) for key in self.more}} if self.more else tokens


def loader(dataset: Any, lengths: SeqLengths | None = SCHEDULE, **others: Any) -> DataLoader:
    given = {"micro_batch_size": 2, "num_micro_batches": 1, "data_rank": 0, "data_size": 1, **others}
    return DataLoader(dataset, lengths=lengths, **given)


@pytest.mark.parametrize("length", [1, 3, 4, 12])
def test_a_cut_is_slices_that_share_one_token(length: int) -> None:
    windows = torch.randint(99, (3, FULL + 1))
    pieces = cut("text", windows, length)
    by_hand = [row[k * length : k * length + length + 1] for row in windows for k in range(FULL // length)]
    assert torch.equal(pieces, torch.stack(by_hand)) and pieces.is_contiguous()


@settings(max_examples=40, deadline=None)
@given(
    starts=st.lists(st.integers(1, 30 * FULL), max_size=3, unique=True),
    lengths=st.sets(st.sampled_from([1, 2, 3, 4, 6]), max_size=3),
    replicas=st.sampled_from([1, 2]), micro=st.sampled_from([1, 2]), consumed=st.integers(0, 9),
)  # fmt: skip
def test_every_token_is_a_label_once_whatever_the_schedule(
    starts: list[int], lengths: set[int], replicas: int, micro: int, consumed: int
) -> None:
    """Labels are the tokens 1, 2, 3, ... in their order; a piece has the length that its step begins with."""
    rising = [*sorted(lengths)[: len(starts)], FULL]
    schedule = SeqLengths(FULL, tuple(zip([0, *sorted(starts)], rising, strict=False)))
    sizes = BatchSizes(8, 4, 4, 24)
    readers = [
        iter(
            loader(
                Windows(), schedule, micro_batch_size=micro, num_micro_batches=8 // micro // replicas,
                data_rank=rank, data_size=replicas, samples_consumed=4 * consumed, sizes=sizes,
            )
        )
        for rank in range(replicas)
    ]  # fmt: skip
    at, labels = 4 * consumed, []
    for _ in range(4):
        number = sizes.at(at) // micro // replicas
        parts = [next(reader)["text"] for reader in readers for _ in range(number)]
        wanted = schedule.at(at * FULL)
        assert {part.shape for part in parts} == {(micro * FULL // wanted, wanted + 1)}
        labels += [part[:, 1:].flatten() for part in parts]
        assert all(torch.equal(part[:, :-1] + 1, part[:, 1:]) for part in parts), "inputs are their neighbours"
        at += sizes.at(at)
    assert torch.equal(torch.cat(labels), torch.arange(4 * consumed * FULL, at * FULL) + 1)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_processes_that_read_ahead_give_the_same_through_every_switch() -> None:
    dataset = Windows("segments")
    reading = iter(loader(dataset, num_workers=2))
    pairs = list(islice(zip(loader(dataset), reading, strict=False), 8))
    reading.close()  # type: ignore[attr-defined]
    assert [tuple(here["text"].shape) for here, _ in pairs] == [(8, 4)] * 2 + [(4, 7)] * 3 + [(2, 13)] * 3
    for here, there in pairs:
        assert here.keys() == there.keys() == {"text", "segments"}
        assert all(torch.equal(here[key], there[key]) for key in here)
        assert torch.equal(here["segments"], -here["text"].int())


def test_a_step_of_the_whole_length_is_left_as_it_is() -> None:
    """Also of a data set whose samples are of another form, which could not be cut."""

    class Own(Windows):
        def __getitem__(self, index: int) -> Any:
            return {"text": super().__getitem__(index), "weight": np.float32(index)}

    whole = loader(Own(), SeqLengths(FULL, ((0, FULL),)))
    assert next(iter(whole))["weight"].tolist() == [0.0, 1.0]
    with pytest.raises(SampleError, match=r"--seq-length \+ 1 tokens.*got 'weight' of shape \(2,\)"):
        next(iter(loader(Own())))
