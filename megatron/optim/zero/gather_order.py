"""GatherOrder: ZeRO 3 gathers a unit ahead, in the order of the micro-batch before, which all replicas share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from megatron import device
from megatron.errors import ConfigError
from megatron.mpu.groups import Group
from megatron.optim.zero.gather import Gather
from megatron.torch_compat import all_gather_single

# ZeRO 3: replicas must gather the same units in the same order, or one would take the parts of another unit; and a unit
# that is known ahead is gathered while the one before it computes.
#
# A pass is a micro-batch of training (forward, recompute, backward), or one call in an evaluation.
#
# | a pass | gathers | replicas compare |
# |---|---|---|
# | the first of its kind: its order is recorded | each unit where it is needed | what each gathers next, ahead of it |
# | a later one follows the order | the next unit as soon as one is used | a rolling hash of the order, at the end |
# | one that departs from the order | from there on as a first one | as a first one |
#
# A pass of another kind than the one before departs from the order of that one, but where both begin with one unit.
#
# Who departs says so in the gather that the others expect next: its message has room for a few numbers of each replica.
# If all depart, and to the same unit, they go on and record the new order. If not, those who depart raise; so do the
# others where they can read the numbers without a wait, which is on a CPU. Elsewhere they stand in a collective until
# the launcher ends them, and the hash is for what none of this sees. It is looked at when the next pass ends or the
# step begins, so that the host need not wait for the device.
#
# What is gathered ahead has the weights of now: it is dropped when the weights change (``drop``).
#
# Source: Zhao et al. 2023, "PyTorch FSDP", section 3.3.2, for prefetching in the order of the iteration before.

END = -1
"""In the place of a unit: the pass is through."""
TRAINING = 0
"""The kind of pass of a micro-batch of training. Evaluations have one for each module that is called: 1, 2, ..."""
FACTOR, MODULUS = 1_000_003, 2**61 - 1
"""Of the rolling hash."""
DIGIT = 256
"""Integers up to here are exact in each floating type of weights."""


class Gathered(Protocol):
    """Weights that are gathered together."""

    name: str

    def start(self, note: Sequence[int]) -> Iterator[Gather]:
        """Yield each gather of the weights, started when it is asked for; ``note`` goes with the first. Collective."""

    def finish(self, gathers: Iterable[Gather]) -> None:
        """Have the whole weights here, from what ``start`` yields."""


class Word(NamedTuple):
    """What a replica says: its kind of pass, the unit that it gathers, and the one that the order has in its place.

    Both None: it follows the order.
    """

    kind: int
    number: int | None = None
    instead_of: int | None = None

    def digits(self) -> list[int]:
        """Return it as six numbers, below ``DIGIT`` each."""
        codes = [self.kind % DIGIT**2, *(0 if each is None else each + 2 for each in self[1:])]  # END is 1
        return [digit for code in codes for digit in divmod(code, DIGIT)]

    @classmethod
    def of(cls, digits: Sequence[float]) -> Word:
        """Return what has been said by ``digits``."""
        kind, *codes = (int(high) * DIGIT + int(low) for high, low in zip(digits[::2], digits[1::2], strict=True))
        number, instead_of = (code - 2 if code else None for code in codes)
        return cls(kind, number, instead_of)


class GatherOrder:
    """Gathers units, one ahead where the order is known, and holds the order against the other replicas'.

    Args:
        units: by number.
        place: where the group sends from.
        prefetches: gather a unit ahead.
        reads_words: look at what each message says; None: where nothing need be waited for.

    Attributes:
        kind: of the pass that is on, or None.
    """

    def __init__(
        self,
        group: Group,
        units: Sequence[Gathered],
        place: torch.device,
        *,
        prefetches: bool = True,
        reads_words: bool | None = None,
    ) -> None:
        self.kind: int | None = None
        self._group, self._units, self._place = group, units, place
        self._prefetches = prefetches
        self._reads_words = place.type == "cpu" if reads_words is None else reads_words
        self._orders: dict[int, list[int]] = {}  # by kind of pass, with END behind
        self._order: list[int] | None = None  # that this pass follows
        self._last: list[int] | None = None  # of the pass before
        self._is_other = False  # the order is that of the pass before, which this one is to depart from
        self._done: list[int] = []
        self._hash = 0
        self._ahead: list[Gather] = []  # of the next unit of the order
        self._seen: tuple[torch.Tensor, Any, list[int]] | None = None  # hashes, the event behind them, this order

    def begin(self, kind: int) -> None:
        """Take note that a pass begins, unless a micro-batch is on, which it is of then."""
        if self.kind is not None and self.kind != TRAINING:
            self.end()  # an evaluation that failed
        if self.kind is None:
            self._open(kind)

    def gather(self, number: int) -> None:
        """Have the whole weights of unit ``number`` here, and let the next one come. Collective.

        Raises:
            ConfigError: another replica gathers something else.
        """
        if self.kind is None:
            self._open(TRAINING)
        self._agree(number)
        self._take(number, _popped(self._ahead) if self._ahead else self._start(number))
        self._note(number)
        self._start_next()

    def end(self) -> None:
        """Take note that the pass is through. Collective.

        Raises:
            ConfigError: another replica goes on, or has gathered in another order.
        """
        if self.kind is None:
            self._open(TRAINING)
        is_known = self._order is not None
        self._agree(END)
        if is_known and self._order is not None:
            self._announce(END)
            if self._reads_words:
                self._look()
        self._note(END)
        assert self.kind is not None
        self._orders[self.kind], self._last, self.kind = self._done, self._done, None

    def drop(self) -> None:
        """Forget what is gathered ahead, since the weights change or all are gathered. On all replicas."""
        if self._ahead:
            self._forget_next()
            self._order = None  # the gather ahead is of a place in the order that would come again

    def check(self) -> None:
        """Look at the orders of the last pass, ahead of an update. Collective.

        Raises:
            ConfigError: they are not the same; the same on every replica.
        """
        if self.kind is not None and self.kind != TRAINING:
            self.end()
        self._look()

    def num_bytes_ahead(self) -> int:
        """Return the bytes of what is gathered ahead of its use."""
        return sum(gather.gathered.nbytes for gather in self._ahead)

    # The order of this pass.

    def _open(self, kind: int) -> None:
        self.kind, self._done, self._hash = kind, [], 0
        own, last = self._orders.get(kind), self._last
        self._is_other = last is not None and (own is None or own[0] != last[0])
        self._order = last if self._is_other else own

    def _agree(self, number: int) -> None:
        """Go on with ``number``: by the order, or as all replicas say now."""
        if self._order is None:
            self._announce(number)
            self._look()
        elif self._is_other or self._order[len(self._done)] != number:
            self._depart(number)

    def _depart(self, number: int) -> None:
        """Leave the order with all others: say so in the collective that those who follow it expect."""
        assert self._order is not None
        instead_of = self._order[len(self._done)]
        expected = self._order[len(self._done) + bool(self._ahead)]
        self._forget_next()
        own = self._orders.get(self.kind) if self._is_other and self.kind is not None else None
        self._order, self._is_other = own if own is not None and own[0] == number else None, False
        if expected == END:
            self._announce(number)
            self._look(others=None if self._reads_words else instead_of)
            return
        first, *others = self._start(expected, number, instead_of)
        for gather in (first, *others):
            gather.wait()
        if self._group.size > 1:
            self._compare(self._words(first), expected)

    def _note(self, number: int) -> None:
        self._done.append(number)
        self._hash = (self._hash * FACTOR + number + 2) % MODULUS

    def _start_next(self) -> None:
        if self._prefetches and self._order is not None:
            following = self._order[len(self._done)]
            if following != END:
                self._ahead = list(self._start(following))

    def _forget_next(self) -> None:
        for gather in _popped(self._ahead):
            gather.wait()  # it writes into memory that is given back

    def _start(self, number: int, *departure: int) -> Iterator[Gather]:
        assert self.kind is not None
        return self._units[number].start(Word(self.kind, *departure).digits())

    def _take(self, number: int, gathers: Iterator[Gather]) -> None:
        self._units[number].finish(self._heard(number, gathers) if self._listens() else gathers)

    def _listens(self) -> bool:
        return self._reads_words and self._group.size > 1 and self._order is not None

    def _heard(self, number: int, gathers: Iterator[Gather]) -> Iterator[Gather]:
        """Yield ``gathers``, and look at what the first says before anybody uses it."""
        first = next(gathers)
        first.wait()
        self._compare(self._words(first), number)
        yield first
        del first  # its memory is given back before the next one takes some
        yield from gathers

    # What the replicas say.

    def _words(self, gather: Gather) -> list[Word]:
        return [Word.of(digits) for digits in self._on_host(gather.notes).tolist()]

    def _on_host(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return ``numbers`` where the host can read them, which waits for them."""
        copy, event = self._copied(numbers)
        if event is not None:
            event.synchronize()
        return copy

    def _copied(self, numbers: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if self._place.type == "cpu":
            return numbers, None
        copy = device.host_memory(tuple(numbers.shape), numbers.dtype, self._place)
        copy.copy_(numbers, non_blocking=True)
        return copy, device.mark(self._place)

    def _announce(self, number: int) -> None:
        """Tell the others kind and hash of this pass, and what is next; ``_look`` compares them. Collective."""
        if self._group.size == 1:
            return
        self._look()
        assert self.kind is not None
        mine = torch.empty(3, dtype=torch.int64, device=self._place)
        for place, value in enumerate((self._hash, self.kind, number)):
            mine[place].fill_(value)  # a copy from the host might hold the host up
        every = mine.new_empty(self._group.size * len(mine))
        all_gather_single(every, mine, group=self._group.handle)
        self._seen = *self._copied(every), [*self._done, number]

    def _look(self, *, others: int | None = None) -> None:
        """Compare what all have told last.

        Args:
            others: what replicas with another hash have gathered here; None: all look now, and tell their orders.
        """
        if self._seen is None:
            return
        (said, event, own), self._seen = self._seen, None
        if event is not None:
            event.synchronize()
        rows = said.view(self._group.size, -1).tolist()
        if len({hashed for hashed, *_ in rows}) > 1:
            kinds = [kind for _, kind, _ in rows]
            if others is None:
                self._refuse(self._first_difference(self._group.gather_objects(own), kinds))
            self._refuse(self._texts([n if hashed == self._hash else others for hashed, _, n in rows], kinds))
        self._compare([Word(kind, number) for _, kind, number in rows], END)

    def _compare(self, words: Sequence[Word], expected: int) -> None:
        if len(set(words)) > 1:
            where = next((word.instead_of for word in words if word.instead_of is not None), expected)
            numbers = [where if word.number is None else word.number for word in words]
            self._refuse(self._texts(numbers, [word.kind for word in words]))

    def _first_difference(self, orders: Sequence[Sequence[int]], kinds: Sequence[int]) -> list[str]:
        """Return what each replica does where the first of them does something else; each order begins alike."""
        places = (place for place, each in enumerate(zip(*orders, strict=False)) if len(set(each)) > 1)
        place = next(places, -1)
        return self._texts([order[place] for order in orders], kinds)

    def _texts(self, numbers: Sequence[int], kinds: Sequence[int]) -> list[str]:
        what = ["is through with its micro-batch" if n == END else f"calls {self._units[n].name}" for n in numbers]
        if len(set(kinds)) == 1:
            return what
        during = ["in training" if kind == TRAINING else "in an evaluation" for kind in kinds]
        return [f"{a} {b}" for a, b in zip(what, during, strict=True)]

    def _refuse(self, said: Sequence[str]) -> NoReturn:
        orders = ", ".join(f"replica {replica} {text}" for replica, text in enumerate(said[:8]))
        more = f" and {len(said) - 8} others" if len(said) > 8 else ""
        raise ConfigError(
            "under --zero-stage 3 replicas must call the same layers in the same order, for each holds a part of "
            f"every weight, got replicas that call other layers: {orders}{more}. The weights are as before this "
            "step. Let all replicas take the same way through the model, or use --zero-stage 2"
        )


def _popped(gathers: list[Gather]) -> Iterator[Gather]:
    """Yield ``gathers`` and let go of each: its memory is given back once it is used."""
    while gathers:
        yield gathers.pop(0)
