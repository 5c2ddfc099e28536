"""GatherOrder: the order in which ZeRO 3 gathers units, which the replicas agree on and which prefetching uses.

Replicas must gather the same units in the same order, or they would receive shards of other units. If the order is
known, the next unit is gathered during the computation of the current one.

A pass is a micro-batch of training (forward, recompute, backward) or one call in an evaluation. In a pipeline, a pass
is one action of the schedule: a forward or a backward of one chunk, or one half of a split backward.

| pass | gathers | replicas compare |
|---|---|---|
| the first of its type: its order is recorded | each unit when it is needed | the next unit, before each gather |
| a later one, in that order | the next unit as soon as one is used | a rolling hash of the order, at the end |
| a later one that departs from the order | from then on as in a first pass | as in a first pass |

If the pass type changes (training, or evaluation of one module), the pass departs from the previous order, unless the
order recorded for the new type starts with the same unit. Actions of a pipeline never depart when they begin: all
replicas follow the same schedule, so each knows the type of the others' passes (``begin_action``). The first unit of an
action is prefetched while the stage waits for its inputs.

A departing replica reports its departure in the gather that the other replicas expect next: each message has room for a
few integers per replica (``Note``). If all replicas depart to the same unit, they continue and record the new order.
Otherwise the departing replicas raise an error. On a CPU the other replicas raise it as well, because they can read the
notes without waiting for a device. On other devices they block in a collective until the launcher terminates them. The
hash detects all other differences. It is read when the next pass ends or the optimizer step begins, so that the host
does not wait for the device. Actions of a pipeline are short, so their hashes are read up to 16 actions later.

An update makes prefetched weights outdated, so they are dropped when the weights change (``drop``).

Source: Zhao et al. 2023, "PyTorch FSDP", section 3.3.2, for prefetching in the order of the previous iteration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from megatron import device
from megatron.errors import ConfigError
from megatron.mpu.groups import Group
from megatron.optim.zero.gather import Gather
from megatron.torch_compat import all_gather_single

END = -1
"""Index in place of a unit at the end of a pass."""
TRAINING = 0
"""Type of a training pass. Evaluations have one type per module that may be called: 1, 2, ..."""
MAX_ANNOUNCED_ACTIONS = 16
"""Actions of a pipeline whose hashes are compared later, so that the host can run ahead of the device."""
FACTOR, MODULUS = 1_000_003, 2**61 - 1
"""Constants of the rolling hash."""
DIGIT = 256
"""Base of the digits of a ``Note``. Integers up to this value are exact in every floating-point dtype of weights."""


class GatherUnit(Protocol):
    """Weights that are gathered together."""

    name: str

    def start(self, note: Sequence[int]) -> Iterator[Gather]:
        """Yield the gathers of the weights, each started when requested; the first sends ``note`` along. Collective."""

    def finish(self, gathers: Iterable[Gather]) -> None:
        """Allocate the full weights and copy the results of ``start`` into them."""


class Note(NamedTuple):
    """A replica's message: its pass type, the unit that it gathers, and the unit that the order has at this position.

    Both units are None if the replica follows the order.
    """

    pass_type: int
    unit: int | None = None
    instead_of: int | None = None

    def digits(self) -> list[int]:
        """Encode the note as six integers below ``DIGIT``."""
        codes = [self.pass_type % DIGIT**2, *(0 if unit is None else unit + 2 for unit in self[1:])]  # END becomes 1
        return [digit for code in codes for digit in divmod(code, DIGIT)]

    @classmethod
    def from_digits(cls, digits: Sequence[float]) -> Note:
        """Decode ``digits``."""
        pass_type, *codes = (int(high) * DIGIT + int(low) for high, low in zip(digits[::2], digits[1::2], strict=True))
        unit, instead_of = (code - 2 if code else None for code in codes)
        return cls(pass_type, unit, instead_of)


class GatherOrder:
    """Gathers units, prefetches the next one if the order is known, and compares the order with other replicas.

    Args:
        group: group of the replicas.
        units: the units, by index.
        device: device of the tensors that the group communicates.
        prefetches: gather the next unit early.
        reads_notes: read each gather's notes; None: only on a CPU, where the host need not wait for a device.

    Attributes:
        pass_type: type of the current pass; None between passes.
    """

    def __init__(
        self,
        group: Group,
        units: Sequence[GatherUnit],
        device: torch.device,
        *,
        prefetches: bool = True,
        reads_notes: bool | None = None,
    ) -> None:
        self.pass_type: int | None = None
        self._group, self._units, self._device = group, units, device
        self._prefetches = prefetches
        self._reads_notes = device.type == "cpu" if reads_notes is None else reads_notes
        self._orders: dict[int, list[int]] = {}  # by pass type; each order ends with END
        self._order: list[int] | None = None  # order that the current pass follows; None: record one
        self._last_order: list[int] | None = None  # order of the previous pass
        self._must_depart = False  # True: _order is the previous pass's order, from which the current pass will depart
        self._gathered: list[int] = []
        self._hash = 0
        self._max_announced = 1
        self._prefetched: list[Gather] = []  # prefetch of the next unit in the order
        # Announcements that have not been compared: gathered hashes, their event, local order.
        self._announced: deque[tuple[torch.Tensor, Any, list[int]]] = deque()

    def begin(self, pass_type: int) -> None:
        """Begin a pass. No-op while a training micro-batch is running, because its pass continues."""
        if self.pass_type is not None and self.pass_type != TRAINING:
            self.end()  # the previous evaluation failed before its end
        if self.pass_type is None:
            self._begin_pass(pass_type)

    def begin_action(self, pass_type: int) -> None:
        """Begin a pass of a type on which all replicas agree, after the current one; prefetch its first unit.

        Collective.

        Raises:
            ConfigError: see ``end``.
        """
        if self.pass_type is not None:
            self.end()
        self.pass_type, self._gathered, self._hash = pass_type, [], 0
        self._order, self._must_depart = self._orders.get(pass_type), False
        self._max_announced = MAX_ANNOUNCED_ACTIONS
        self._start_next()

    def gather(self, unit: int) -> None:
        """Gather a unit and prefetch the next one. Collective.

        Raises:
            ConfigError: another replica gathers another unit.
        """
        if self.pass_type is None:
            self._begin_pass(TRAINING)
        self._agree(unit)
        self._finish(unit, _drain(self._prefetched) if self._prefetched else self._start(unit))
        self._record(unit)
        self._start_next()

    def end(self) -> None:
        """End the pass. Collective.

        Raises:
            ConfigError: another replica has not ended its pass, or has gathered in another order.
        """
        if self.pass_type is None:
            self._begin_pass(TRAINING)
        is_known = self._order is not None
        self._agree(END)
        if is_known and self._order is not None:
            self._announce(END)
            if self._reads_notes:
                self._check_announced()
        self._record(END)
        assert self.pass_type is not None
        self._orders[self.pass_type], self._last_order, self.pass_type = self._gathered, self._gathered, None

    def drop(self) -> None:
        """Drop the prefetched unit when weights change or all are gathered. Must be called on all replicas."""
        if self._prefetched:
            self._drop_prefetched()
            self._order = None  # the prefetched position of the order will be gathered again

    def check(self) -> None:
        """Compare the orders of the last pass, before an update. Collective.

        Raises:
            ConfigError: the orders differ; raised on every replica.
        """
        if self.pass_type is not None and self.pass_type != TRAINING:
            self.end()
        self._check_announced()

    def num_prefetched_bytes(self) -> int:
        """Return the size of prefetched weights in bytes."""
        return sum(gather.gathered.nbytes for gather in self._prefetched)

    # The order of the current pass.

    def _begin_pass(self, pass_type: int) -> None:
        self.pass_type, self._gathered, self._hash = pass_type, [], 0
        recorded, last_order = self._orders.get(pass_type), self._last_order
        self._must_depart = last_order is not None and (recorded is None or recorded[0] != last_order[0])
        self._order = last_order if self._must_depart else recorded

    def _agree(self, unit: int) -> None:
        """Agree with the other replicas on ``unit`` as the next one: by the order, or by announcements."""
        if self._order is None:
            self._announce(unit)
            self._check_announced()
        elif self._must_depart or self._order[len(self._gathered)] != unit:
            self._depart(unit)

    def _depart(self, unit: int) -> None:
        """Depart from the order with all replicas, by a note in the collective that the others expect."""
        assert self._order is not None
        instead_of = self._order[len(self._gathered)]
        expected = self._order[len(self._gathered) + bool(self._prefetched)]
        self._drop_prefetched()
        recorded = self._orders.get(self.pass_type) if self._must_depart and self.pass_type is not None else None
        self._order, self._must_depart = recorded if recorded is not None and recorded[0] == unit else None, False
        if expected == END:
            self._announce(unit)
            self._check_announced(other_unit=None if self._reads_notes else instead_of)
            return
        first, *remaining = self._start(expected, unit, instead_of)
        for gather in (first, *remaining):
            gather.wait()
        if self._group.size > 1:
            self._compare(self._notes(first), expected)

    def _record(self, unit: int) -> None:
        self._gathered.append(unit)
        self._hash = (self._hash * FACTOR + unit + 2) % MODULUS

    def _start_next(self) -> None:
        if self._prefetches and self._order is not None:
            next_unit = self._order[len(self._gathered)]
            if next_unit != END:
                self._prefetched = list(self._start(next_unit))

    def _drop_prefetched(self) -> None:
        for gather in _drain(self._prefetched):
            gather.wait()  # its memory must not be freed while the collective writes to it

    def _start(self, unit: int, *departure: int) -> Iterator[Gather]:
        assert self.pass_type is not None
        return self._units[unit].start(Note(self.pass_type, *departure).digits())

    def _finish(self, unit: int, gathers: Iterator[Gather]) -> None:
        reads_note = self._reads_notes and self._group.size > 1 and self._order is not None
        self._units[unit].finish(self._check_first(unit, gathers) if reads_note else gathers)

    def _check_first(self, unit: int, gathers: Iterator[Gather]) -> Iterator[Gather]:
        """Yield ``gathers`` after checking the notes of the first one."""
        first = next(gathers)
        first.wait()
        self._compare(self._notes(first), unit)
        yield first
        del first  # frees its memory before the next gather allocates
        yield from gathers

    # Messages of the replicas.

    def _notes(self, gather: Gather) -> list[Note]:
        return [Note.from_digits(digits) for digits in self._on_host(gather.notes).tolist()]

    def _on_host(self, values: torch.Tensor) -> torch.Tensor:
        copy, event = self._copy_to_host(values)
        if event is not None:
            event.synchronize()
        return copy

    def _copy_to_host(self, values: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if self._device.type == "cpu":
            return values, None
        copy = device.host_memory(tuple(values.shape), values.dtype, self._device)
        copy.copy_(values, non_blocking=True)
        return copy, device.record_event(self._device)

    def _announce(self, unit: int) -> None:
        """All-gather the hash, type and next unit of this pass, for ``_check_announced`` to compare. Collective."""
        if self._group.size == 1:
            return
        while len(self._announced) >= self._max_announced:
            self._check_oldest()
        assert self.pass_type is not None
        local = torch.empty(3, dtype=torch.int64, device=self._device)
        for idx, value in enumerate((self._hash, self.pass_type, unit)):
            local[idx].fill_(value)  # a copy from the host could block
        gathered = local.new_empty(self._group.size * len(local))
        all_gather_single(gathered, local, group=self._group.handle)
        self._announced.append((*self._copy_to_host(gathered), [*self._gathered, unit]))

    def _check_announced(self, *, other_unit: int | None = None) -> None:
        """Compare all announcements of this replica with those of the others; see ``_check_oldest``."""
        while self._announced:
            self._check_oldest(other_unit=other_unit)

    def _check_oldest(self, *, other_unit: int | None = None) -> None:
        """Compare all replicas' oldest announcements.

        Args:
            other_unit: None if all replicas compare now; they exchange their orders for the error message. Otherwise
                only departing replicas compare, and ``other_unit`` is the next unit of the order. A replica with
                another hash has not departed, so the error message names ``other_unit`` as its next unit.
        """
        values, event, local_order = self._announced.popleft()
        if event is not None:
            event.synchronize()
        rows = values.view(self._group.size, -1).tolist()
        if len({order_hash for order_hash, *_ in rows}) > 1:
            pass_types = [pass_type for _, pass_type, _ in rows]
            if other_unit is None:
                self._raise_order_error(self._first_difference(self._group.gather_objects(local_order), pass_types))
            self._raise_order_error(
                self._describe_units(
                    [unit if order_hash == self._hash else other_unit for order_hash, _, unit in rows], pass_types
                )
            )
        self._compare([Note(pass_type, unit) for _, pass_type, unit in rows], END)

    def _compare(self, notes: Sequence[Note], expected: int) -> None:
        if len(set(notes)) > 1:
            position = next((note.instead_of for note in notes if note.instead_of is not None), expected)
            units = [position if note.unit is None else note.unit for note in notes]
            self._raise_order_error(self._describe_units(units, [note.pass_type for note in notes]))

    def _first_difference(self, orders: Sequence[Sequence[int]], pass_types: Sequence[int]) -> list[str]:
        """Describe the first position at which the orders differ, once per replica."""
        positions = (idx for idx, units in enumerate(zip(*orders, strict=False)) if len(set(units)) > 1)
        position = next(positions, -1)
        return self._describe_units([order[position] for order in orders], pass_types)

    def _describe_units(self, units: Sequence[int], pass_types: Sequence[int]) -> list[str]:
        actions = [
            "has finished its micro-batch" if unit == END else f"gathers {self._units[unit].name}" for unit in units
        ]
        if len(set(pass_types)) == 1:
            return actions
        phases = ["in training" if pass_type == TRAINING else "in an evaluation" for pass_type in pass_types]
        return [f"{action} {phase}" for action, phase in zip(actions, phases, strict=True)]

    def _raise_order_error(self, texts: Sequence[str]) -> NoReturn:
        orders = ", ".join(f"replica {replica} {text}" for replica, text in enumerate(texts[:8]))
        more = f" and {len(texts) - 8} others" if len(texts) > 8 else ""
        raise ConfigError(
            "with --zero-stage 3 all replicas must call the same layers in the same order, because each has a shard of "
            f"every weight, but {orders}{more}. The step did not change the weights. Make all replicas call the same "
            "layers, or use --zero-stage 2"
        )


def _drain(gathers: list[Gather]) -> Iterator[Gather]:
    """Yield ``gathers`` and remove each from the list, so that its memory is freed once it is used."""
    while gathers:
        yield gathers.pop(0)
