"""The samples that each step of a run reads, and the ranks that process them: sample_history.jsonl in the run folder.

Each start and each rollback appends a line with its first step, its position in the samples, its batch sizes, its
layout, the steps of --iterations-to-skip, and the digest of --exclude, whose documents are in excluded-DIGEST.json.
Everything else follows from the order of the samples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron import files
from megatron.config import Config
from megatron.config.batch import share_of
from megatron.config.batch_rampup import BatchSizes
from megatron.config.seq_length import SeqLengths
from megatron.config.skipped_steps import SkippedSteps
from megatron.errors import DataError
from megatron.mpu.topology import Topology, chunk_indices

FILE_NAME = "sample_history.jsonl"


@dataclass(frozen=True)
class Stretch:
    """Steps with one layout and consecutive samples.

    Args:
        step: completed steps before the stretch.
        samples: samples consumed before it.
        stop_step: last step of the stretch; None: it continues.
        skipped_steps: steps of --iterations-to-skip, whose samples are not read.
        exclusion: digest of the documents of --exclude; None without the flag.
        curriculum: (first step, length) of --seq-length-curriculum, which truncates samples; () without one.
    """

    step: int
    samples: int
    micro_batch_size: int
    batch_sizes: BatchSizes
    is_interleaved: bool
    tokens_per_sample: int
    topology: Topology
    stop_step: int | None = None
    skipped_steps: SkippedSteps = SkippedSteps()
    exclusion: str | None = None
    curriculum: tuple[tuple[int, int], ...] = ()

    @property
    def stop_samples(self) -> int | None:
        """Samples consumed at the end of the stretch; None if it continues."""
        if self.stop_step is None:
            return None
        return self.batch_sizes.consumed_after(self.stop_step - self.step, self.samples)

    def samples_of(self, step: int) -> range:
        """Return the samples that ``step`` (counted from 1) consumes."""
        first = self.batch_sizes.consumed_after(step - 1 - self.step, self.samples)
        return range(first, first + self.batch_sizes.at(first))

    def tokens_read(self, step: int) -> int:
        """Count the inputs that ``step`` (counted from 1) reads from each sample."""
        if not self.curriculum:
            return self.tokens_per_sample
        return SeqLengths(self.tokens_per_sample, curriculum=self.curriculum).length_of_step(0, step - 1)

    def step_of(self, sample: int) -> int:
        """Return the step that consumes ``sample``, which must be in this stretch."""
        return self.step + self.batch_sizes.steps_until(sample + 1, self.samples)


class Reader(NamedTuple):
    """Ranks that process one sample of a step.

    Args:
        replica: data-parallel rank.
        micro_batch: index among the replica's micro-batches of the step, from 0.
        ranks: all ranks of the replica.
        chunks: rank -> its tokens (start, stop) of the sample, with context parallelism; otherwise empty.
    """

    replica: int
    micro_batch: int
    ranks: list[int]
    chunks: dict[int, list[tuple[int, int]]]


def append(
    folder: Path, config: Config, topology: Topology, step: int, samples: int, exclusion: str | None = None
) -> None:
    """Append a start or a rollback to the run folder's history. Called on rank 0.

    Args:
        exclusion: digest of the documents of --exclude; None without the flag.
    """
    sizes, curriculum = config.batch.batch_sizes(topology.data), config.batch.seq_lengths.curriculum
    entry = {
        "step": step,
        "samples": samples,
        "micro_batch_size": config.batch.batch_size,
        "batch_sizes": [sizes.full, sizes.starts, sizes.samples],
        "is_interleaved": config.data.has_megatron_order,
        "tokens_per_sample": config.tokens_per_sample,
        "layout": topology.axis_sizes(),
        **({"skipped_steps": config.batch.iterations_to_skip} if config.batch.skipped_steps else {}),
        **({"exclusion": exclusion} if exclusion else {}),
        **({"curriculum": curriculum} if curriculum else {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / FILE_NAME, "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def write_excluded(folder: Path, exclusion: str, excluded: Mapping[str, np.ndarray]) -> None:
    """Write the list of --exclude to the run folder, as ranges of documents by corpus.

    Args:
        exclusion: digest of the list, which is part of the file name.
        excluded: corpus -> int64, ascending documents.
    """
    ranges = {}
    for corpus, documents in excluded.items():
        is_first = np.diff(documents, prepend=-2) > 1
        is_last = np.append(is_first[1:], True)[: len(documents)]
        ranges[corpus] = np.stack([documents[is_first], documents[is_last]], axis=1).tolist()
    files.replace_bytes(_excluded_path(folder, exclusion), json.dumps(ranges).encode() + b"\n")


def read_excluded(folder: Path, exclusion: str, corpora: Sequence[str]) -> list[np.ndarray]:
    """Read the excluded documents of each corpus: int64[n, 2], first and last document of each range, ascending.

    Raises:
        DataError: the file cannot be read, or the run's corpora have other names now.
    """
    path = _excluded_path(folder, exclusion)
    try:
        ranges = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}, the documents that --exclude lists, cannot be read: {error}. Restore it from a copy of the run "
            "folder"
        ) from error
    if len(corpora) == 1 and len(ranges) == 1:
        ranges = {corpora[0]: next(iter(ranges.values()))}
    if renamed := [name for name, listed in ranges.items() if listed and name not in corpora]:
        raise DataError(
            f"{path} excludes documents of {', '.join(renamed)}, but the run's corpora are {', '.join(corpora)}. "
            "Correct the names in the file"
        )
    return [np.array(ranges.get(name, []), np.int64).reshape(-1, 2) for name in corpora]


def _excluded_path(folder: Path, exclusion: str) -> Path:
    return folder / f"excluded-{exclusion}.json"


def read_stretches(folder: Path) -> list[Stretch]:
    """Read the run's current history, in ascending steps. Steps that a later start or rollback repeats are left out.

    Raises:
        DataError: the folder has no history.
    """
    try:
        lines = (folder / FILE_NAME).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(
            f"{folder} has no {FILE_NAME}, which runs write since December 2026 ({error}). Name a run folder"
        ) from error
    stretches: list[Stretch] = []
    for line in lines:
        try:
            new = _decode(json.loads(line))
        except (ValueError, KeyError, TypeError):
            continue  # a line truncated by a kill
        stretches = [*_before(stretches, new.step), new]
    return stretches


def _decode(entry: dict[str, Any]) -> Stretch:
    layout = entry["layout"]
    return Stretch(
        entry["step"], entry["samples"], entry["micro_batch_size"], _batch_sizes(*entry["batch_sizes"]),
        entry["is_interleaved"], entry["tokens_per_sample"], Topology(**layout),
        skipped_steps=SkippedSteps.parse(entry.get("skipped_steps", "")), exclusion=entry.get("exclusion"),
        curriculum=tuple((first, length) for first, length in entry.get("curriculum", ())),
    )  # fmt: skip


def _batch_sizes(full: int, starts: Sequence[Sequence[int]], samples: int) -> BatchSizes:
    return BatchSizes(full, tuple((consumed, size) for consumed, size in starts), samples)


def _before(stretches: Sequence[Stretch], step: int) -> list[Stretch]:
    """End the stretches after ``step`` steps, and drop those that would be empty."""
    return [
        Stretch(**{**vars(stretch), "stop_step": step if stretch.stop_step is None else min(stretch.stop_step, step)})
        for stretch in stretches
        if stretch.step < step
    ]


def reader_of(stretch: Stretch, step: int, sample: int) -> Reader:
    """Find the ranks that process ``sample`` in ``step``."""
    samples, topology = stretch.samples_of(step), stretch.topology
    micro_batch_in_step = (sample - samples.start) // stretch.micro_batch_size
    num_micro_batches = len(samples) // stretch.micro_batch_size
    for replica in range(topology.data):
        share = share_of(num_micro_batches, topology.data, replica, is_interleaved=stretch.is_interleaved)
        micro_batch, remainder = divmod(micro_batch_in_step - share.first, share.spacing)
        if not remainder and 0 <= micro_batch < share.num_micro_batches:
            ranks = [rank for rank in range(topology.world_size) if topology.coordinate(rank).data == replica]
            return Reader(replica, micro_batch, ranks, _chunks(stretch, step, ranks))
    raise IndexError(f"step {step} reads the samples {samples.start} to {samples.stop - 1}, got {sample}")


def _chunks(stretch: Stretch, step: int, ranks: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Return the input tokens that each rank holds, if the sequence is sharded over context ranks."""
    context = stretch.topology.context
    if context == 1:
        return {}
    length = stretch.tokens_read(step) // (2 * context)
    return {
        rank: [
            (chunk * length, (chunk + 1) * length)
            for chunk in chunk_indices(stretch.topology.coordinate(rank).context, context)
        ]
        for rank in ranks
    }
