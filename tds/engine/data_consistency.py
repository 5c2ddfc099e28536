"""Check that all ranks that read data get the same number of micro-batches and, on request, the same data.

Without this check, a rank whose loader ends first would leave the step while the other ranks wait for it. Every call
therefore starts and ends with a small all-gather:

| when | what each rank sends | result |
|---|---|---|
| before the first micro-batch | whether its iterator has one | all ended: StopIteration everywhere; some: DataEnded |
| after the last one, before the update | where its iterator ended; checksums | DataEnded; DataDisagreement |

If an iterator ends during a call, its rank repeats the last micro-batch until the end of the call, so that no other
rank waits for it. The results of such a call are discarded.
"""  # noqa: E501

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tds.p2p.collective_scope import collective_scope

NO_READER, ENDED, READY = 0, 1, 2
NO_VALUE = -1


class DataEnded(RuntimeError):
    """Raised if the data ended on some ranks but not on others, or in the middle of a global batch."""


class DataDisagreement(ValueError):
    """Raised if ranks of one replica have read different micro-batches."""


class DataConsistency:
    """Collective checks of the data, with the same outcome on all ranks of an engine.

    Args:
        group: process group of all ranks of the engine.
        name_of: maps the index of a rank in ``group`` to its name for messages.
        should_compare: also compare checksums of the micro-batches that the ranks of a replica have read.
    """

    def __init__(
        self, group: Any, *, stage: int, replica: int, device: torch.device, name_of: Callable[[int], str],
        should_compare: bool,
    ) -> None:  # fmt: skip
        self.should_compare = should_compare
        self._group, self._stage, self._replica = group, stage, replica
        self._device, self._name_of = device, name_of

    def begin(self, state: int) -> None:
        """Check that the iterators of all ranks that read have a first micro-batch. Collective.

        Args:
            state: the state of this rank: NO_READER, ENDED or READY.

        Raises:
            StopIteration: the iterators of all ranks that read have ended.
            DataEnded: the iterators of some of these ranks have ended.
        """
        states = [row[0] for row in self._gather([state], "checking that all ranks have data")]
        ended_ranks, ready_ranks = (
            [rank for rank, value in enumerate(states) if value == target_state] for target_state in (ENDED, READY)
        )
        if ended_ranks and ready_ranks:
            raise DataEnded(
                "all ranks that read data must have the same number of micro-batches, got none for this call on "
                f"{self._format_ranks(ended_ranks)}, and more on {self._format_ranks(ready_ranks)}. {_ADVICE}"
            )
        if ended_ranks:
            raise StopIteration

    def end(self, ended_at: int | None, checksums: Sequence[int], num_micro_batches: int) -> None:
        """Check that no iterator ended during the call, and that the ranks of each replica read the same. Collective.

        Args:
            ended_at: index of the micro-batch at which this rank's iterator ended; None if it did not end.
            checksums: checksums of this rank's micro-batches; empty if it read none.
            num_micro_batches: number of micro-batches of the call.

        Raises:
            DataEnded: the iterator of some rank ended during the call.
            DataDisagreement: the checksums of the ranks of one replica differ.
        """
        local_row = [NO_VALUE if ended_at is None else ended_at, self._replica]
        if self.should_compare:
            local_row += list(checksums) or [NO_VALUE] * num_micro_batches
        rows = self._gather(local_row, "comparing the data of all ranks")
        num_read_by_rank = {rank: row[0] for rank, row in enumerate(rows) if row[0] != NO_VALUE}
        if num_read_by_rank:
            raise DataEnded(
                f"a global batch needs {num_micro_batches} micro-batches, but the data ended after "
                f"{', '.join(f'{count} on {self._name_of(rank)}' for rank, count in num_read_by_rank.items())}. "
                f"{_ADVICE}"
            )
        if self.should_compare:
            self._compare([(row[1], row[2:]) for row in rows])

    def _compare(self, rows: Sequence[tuple[int, list[int]]]) -> None:
        first_rank_of: dict[int, int] = {}
        for rank, (replica, checksums) in enumerate(rows):
            if NO_VALUE in checksums:
                continue
            first_rank = first_rank_of.setdefault(replica, rank)
            for micro_batch, (first_crc, crc) in enumerate(zip(rows[first_rank][1], checksums, strict=True)):
                if first_crc != crc:
                    raise DataDisagreement(
                        "all ranks of a replica that read data must read the same micro-batches, but micro-batch "
                        f"{micro_batch} differs: checksum {first_crc:08x} on {self._name_of(first_rank)}, {crc:08x} on "
                        f"{self._name_of(rank)}. Use the same loader with the same seed on the first and the last "
                        "stage, and a sampler that depends on the replica (data-parallel rank), not on the rank"
                    )

    def _gather(self, values: Sequence[int], operation: str) -> list[list[int]]:
        local = torch.tensor(values, dtype=torch.int64, device=self._device)
        gathered = local.new_empty(dist.get_world_size(self._group) * len(local))
        with collective_scope(self._stage, operation):
            dist.all_gather_into_tensor(gathered, local, group=self._group)
        rows: list[list[int]] = gathered.view(-1, len(local)).tolist()
        return rows

    def _format_ranks(self, ranks: Sequence[int]) -> str:
        shown = [self._name_of(rank) for rank in ranks[:4]]
        return ", ".join(shown) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


_ADVICE = (
    "Provide the same number of micro-batches on every rank that reads data, a multiple of "
    "gradient_accumulation_steps (drop_last=True), or use a loader that restarts (deepspeed.utils.RepeatingLoader)"
)


def checksum(value: Any, initial_crc: int = 0) -> int:
    """Compute a checksum over the tensors in ``value``, their types and shapes, and its structure.

    Args:
        initial_crc: the checksum to continue from.
    """
    if isinstance(value, torch.Tensor):
        header_crc = zlib.crc32(f"{value.dtype}{list(value.shape)}".encode(), initial_crc)
        flat = value.detach().cpu().contiguous().reshape(-1)
        return zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), header_crc)
    if isinstance(value, Mapping):
        value = [item for key in value for item in (str(key), value[key])]
    if isinstance(value, (tuple, list)):
        initial_crc = zlib.crc32(f"{len(value)}(".encode(), initial_crc)
        for element in value:
            initial_crc = checksum(element, initial_crc)
        return initial_crc
    return zlib.crc32(repr(value).encode(), initial_crc)
