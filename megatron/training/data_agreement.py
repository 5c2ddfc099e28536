"""Check that all ranks that read data read the same data sets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field

from megatron.data.blended_dataset import SampleOrder
from megatron.data.collate import Samples
from megatron.data.megatron_order.order import MegatronOrder
from megatron.data.sample_order import as_ordered

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class RankData:
    """A rank's data sets, described for comparison with other ranks.

    Args:
        problem: error message if the data could not be opened.
        reads_data: True if this rank reads data.
        identities: split -> text that identifies the data set.
        exclusion: digest of the documents that --exclude lists.
    """

    problem: str | None
    reads_data: bool
    fingerprint: str | None = None
    order: SampleOrder | None = None
    corpora: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    identities: Mapping[str, str] = field(default_factory=dict)
    exclusion: str | None = None

    @classmethod
    def from_datasets(cls, datasets: Mapping[str, Samples], reads_data: bool, failure: Exception | None) -> RankData:
        """Describe this rank's data sets, or the failure to open them."""
        if failure or not reads_data:
            return cls(str(failure) if failure else None, False)
        ordered = as_ordered(datasets.get("train"))
        return cls(
            problem=None,
            reads_data=True,
            fingerprint=_fingerprint(datasets.get("train")),
            order=None if ordered is None else ordered.order,
            corpora={split: weights for split, dataset in datasets.items() if len(weights := _weights(dataset)) > 1},
            identities={split: identity_text(dataset) for split, dataset in datasets.items()},
            exclusion=next(filter(None, (getattr(dataset, "exclusion", None) for dataset in datasets.values())), None),
        )


def _fingerprint(dataset: object) -> str | None:
    fingerprint = getattr(dataset, "fingerprint", None)
    return fingerprint if isinstance(fingerprint, str) else None


def _weights(dataset: object) -> dict[str, float]:
    """Return weights by name for corpora that an evaluation reads separately; may be empty.

    It is empty with --data-order megatron: as in Megatron, an evaluation then reads samples from the blend.
    """
    ordered = as_ordered(dataset)
    return {} if ordered is None or isinstance(ordered.order, MegatronOrder) else ordered.order.weights(0)


def identity_text(dataset: object) -> str:
    """Return a text that identifies ``dataset``: equal on ranks with the same samples in the same order."""
    ordered = as_ordered(dataset)
    text = f"fingerprint {_fingerprint(dataset)}"
    if exclusion := getattr(dataset, "exclusion", None):
        text += f" without the documents {exclusion}"
    if ordered is None:
        return f"{len(dataset)} samples and {text}" if isinstance(dataset, Sized) else text
    order = repr((ordered.order.corpora, ordered.order.schedule)).encode()
    return f"{text} and order {hashlib.sha256(order).hexdigest()[:8]}"


def find_disagreement(ranks_data: Sequence[RankData]) -> str | None:
    """Return an error message with the ranks that read different data, or None if all readers agree."""
    for split in SPLITS:
        ranks_by_identity: dict[str, list[int]] = {}
        for rank, rank_data in enumerate(ranks_data):
            if rank_data.reads_data:
                ranks_by_identity.setdefault(rank_data.identities.get(split, "none"), []).append(rank)
        if len(ranks_by_identity) > 1:
            listed = "; ".join(
                f"{identity} on rank{'s' * (len(readers) > 1)} {_format_ranges(readers)}"
                for identity, readers in ranks_by_identity.items()
            )
            return (
                f"all ranks must read the same data, got different {split} data: {listed}. Use the same files under "
                "the same paths on every node."
            )
    return None


def _format_ranges(ranks: Sequence[int]) -> str:
    """Format the ascending numbers 0, 1, 2, 3, 6 as "0-3, 6"."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    return ", ".join("-".join(map(str, rank_range)) for rank_range in ranges)
