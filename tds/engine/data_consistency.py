"""Check that all reading ranks have data, equally much of it, and on request the same.

Without it a rank whose loader ends first leaves, and the others wait for it. So each call begins with one small
message of every rank to all others, and ends with another one:

| when | what each rank says | if they differ |
|---|---|---|
| ahead of the first micro-batch | whether its iterator has one | all ended: StopIteration everywhere; some: DataEnded |
| behind the last one, ahead of the update | at which its iterator ended; checksums | DataEnded; DataDisagreement |

A rank whose iterator ends within a call goes on with its last micro-batch up to the end of the call, so that nobody
waits for it; what was computed is thrown away.
"""  # noqa: E501

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tds.p2p.collective_scope import collective_scope

NO_READER, ENDED, READY = 0, 1, 2
NOWHERE = -1


class DataEnded(RuntimeError):
    """The data of some ranks ended ahead of the others', or in the middle of a global batch."""


class DataDisagreement(ValueError):
    """Ranks of one replica have read different micro-batches."""


class DataConsistency:
    """Makes all ranks of an engine decide alike about their data.

    Args:
        group: all ranks of the engine.
        name_of: a rank in words, by its number in the group.
        compares: also compare checksums of what the ranks of a replica have read.
    """

    def __init__(
        self, group: Any, *, stage: int, replica: int, device: torch.device, name_of: Callable[[int], str],
        compares: bool,
    ) -> None:  # fmt: skip
        self.compares = compares
        self._group, self._stage, self._replica = group, stage, replica
        self._device, self._name_of = device, name_of

    def begin(self, state: int) -> None:
        """See that the iterators of all ranks have a first micro-batch. Collective.

        Args:
            state: of this rank: NO_READER, ENDED or READY.

        Raises:
            StopIteration: the data of all ranks that read have ended.
            DataEnded: those of some.
        """
        states = [row[0] for row in self._gather([state], "agreeing on whether there is data")]
        ended, ready = ([rank for rank, each in enumerate(states) if each == kind] for kind in (ENDED, READY))
        if ended and ready:
            raise DataEnded(
                "the data must last equally long on all ranks that read, got none for this call on "
                f"{self._format_ranks(ended)}, and more on {self._format_ranks(ready)}. {_ADVICE}"
            )
        if ended:
            raise StopIteration

    def end(self, ended_at: int | None, checksums: Sequence[int], num_micro_batches: int) -> None:
        """See that the data of no rank have ended within the call, and that replicas have read alike. Collective.

        Args:
            checksums: of this rank's micro-batches; none where it has read none.

        Raises:
            DataEnded: ``ended_at`` is a micro-batch on some rank.
            DataDisagreement: checksums of the ranks of one replica differ.
        """
        own = [NOWHERE if ended_at is None else ended_at, self._replica]
        if self.compares:
            own += list(checksums) or [NOWHERE] * num_micro_batches
        rows = self._gather(own, "agreeing on the data that were read")
        ended = {rank: row[0] for rank, row in enumerate(rows) if row[0] != NOWHERE}
        if ended:
            raise DataEnded(
                f"a global batch needs {num_micro_batches} micro-batches, got "
                f"{', '.join(f'{number} on {self._name_of(rank)}' for rank, number in ended.items())}, where the data "
                f"ended. {_ADVICE}"
            )
        if self.compares:
            self._compare([(row[1], row[2:]) for row in rows])

    def _compare(self, rows: Sequence[tuple[int, list[int]]]) -> None:
        first_of: dict[int, int] = {}
        for rank, (replica, checksums) in enumerate(rows):
            if NOWHERE in checksums:
                continue
            other = first_of.setdefault(replica, rank)
            for micro_batch, (one, two) in enumerate(zip(rows[other][1], checksums, strict=True)):
                if one != two:
                    raise DataDisagreement(
                        "all ranks of a replica that read must read the same micro-batches, got different ones of "
                        f"number {micro_batch}: checksum {one:08x} on {self._name_of(other)}, {two:08x} on "
                        f"{self._name_of(rank)}. Give the first and the last stage the same loader with the same "
                        "seed, and a sampler by replica (data-parallel rank), not by rank"
                    )

    def _gather(self, numbers: Sequence[int], doing: str) -> list[list[int]]:
        own = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        everyone = own.new_empty(dist.get_world_size(self._group) * len(own))
        with collective_scope(self._stage, doing):
            dist.all_gather_into_tensor(everyone, own, group=self._group)
        rows: list[list[int]] = everyone.view(-1, len(own)).tolist()
        return rows

    def _format_ranks(self, ranks: Sequence[int]) -> str:
        shown = [self._name_of(rank) for rank in ranks[:4]]
        return ", ".join(shown) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


_ADVICE = (
    "Give every rank that reads the same number of micro-batches, a multiple of gradient_accumulation_steps "
    "(drop_last=True), or let the loader begin anew (deepspeed.utils.RepeatingLoader)"
)


def checksum(value: Any, before: int = 0) -> int:
    """Return a checksum over all tensors of ``value``, their types and shapes, and how they are nested."""
    if isinstance(value, torch.Tensor):
        header_crc = zlib.crc32(f"{value.dtype}{list(value.shape)}".encode(), before)
        flat = value.detach().cpu().contiguous().reshape(-1)
        return zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), header_crc)
    if isinstance(value, Mapping):
        value = [part for key in value for part in (str(key), value[key])]
    if isinstance(value, (tuple, list)):
        before = zlib.crc32(f"{len(value)}(".encode(), before)
        for each in value:
            before = checksum(each, before)
        return before
    return zlib.crc32(repr(value).encode(), before)
