"""What happens before what on the streams of a log, and what of it is only luck.

Each stream has a vector clock: how many operators of every stream are done, for certain, when its next one begins. An
event takes the clock of the stream that records it to those that wait for it; what the host has waited for is done for
whatever it starts afterwards.

| a fault | is |
|---|---|
| read too early | of a storage whose last write is on another stream, without a path from there |
| written too early | likewise, where another stream may still read or write the storage |
| freed too early | the allocator gives the memory to the next tensor of the stream that it was made on, while another stream may still use it: neither waited for nor told by ``record_stream`` |

The host is a stream, too: what it reads of page-locked memory must have come, what it changes there must have been read.
"""  # noqa: E501

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.cuda.device import HOST, Operator
from tests.cuda.fake_cuda import Kind

Clock = dict[int, int]


@dataclass
class Use:
    """The last uses of a storage: by stream the number of the operator there, and its name."""

    made_on: int = 0
    write: tuple[int, int, str] | None = None
    reads: dict[int, tuple[int, str]] = field(default_factory=dict)
    kept_for: set[int] = field(default_factory=set)


class Order:
    """Follows a log.

    Attributes:
        faults: in words, each once.
    """

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}
        self._clocks: dict[int, Clock] = defaultdict(dict)
        self._events: dict[int, Clock] = {}
        self._counts: dict[int, int] = defaultdict(int)
        self._uses: dict[int, Use] = defaultdict(Use)

    def follow(self, log: Iterable[tuple[int, int, int]], operators: Sequence[Operator]) -> None:
        """Take note of all rows of ``log``."""
        for kind, first, second in log:
            if kind == Kind.OPERATOR:
                self._run(operators[first], second)
            elif kind == Kind.RECORD:
                self._events[first] = dict(self._clocks[second])
            elif kind == Kind.WAIT:
                _join(self._clocks[second], self._events.get(first, {}))
            elif kind in (Kind.HOST_EVENT, Kind.QUERY):
                self._host_knows(self._events.get(first, {}))
            elif kind == Kind.HOST_STREAM:
                self._host_knows(self._clocks[first])
            elif kind == Kind.HOST_DEVICE:
                for clock in list(self._clocks.values()):
                    self._host_knows(clock)
            elif kind == Kind.MADE:
                self._uses[first] = Use(made_on=second)
            elif kind == Kind.KEEP:
                self._uses[first].kept_for.add(second)
            elif kind == Kind.FREE:
                self._free(first)

    def _host_knows(self, clock: Clock) -> None:
        _join(self._clocks[HOST], clock)

    def _run(self, operator: Operator, stream: int) -> None:
        clock = self._clocks[stream]
        if stream != HOST:
            _join(clock, self._clocks[HOST])
        for storage in operator.reads:
            use = self._uses[storage]
            if use.write is not None and not _is_done(use.write, clock, stream):
                self._fault("read too early", operator, use.write[2])
        for storage in operator.writes:
            use = self._uses[storage]
            earlier = [(at, count, name) for at, (count, name) in use.reads.items()]
            for each in [*earlier, *([use.write] if use.write is not None else [])]:
                if not _is_done(each, clock, stream):
                    self._fault("written too early", operator, each[2])
        self._counts[stream] += 1
        clock[stream] = count = self._counts[stream]
        said = f"{operator.name} in {operator.place or 'backward'}"
        for storage in operator.reads:
            self._uses[storage].reads[stream] = count, said
        for storage in operator.writes:
            use = self._uses[storage]
            use.write = stream, count, said
            use.reads.clear()

    def _free(self, storage: int) -> None:
        use = self._uses.pop(storage, None)
        if use is None:
            return
        clock = dict(self._clocks[use.made_on])
        for stream in (HOST, *use.kept_for):  # for the latter an event of now is waited for
            _join(clock, self._clocks[stream])
        last = [(at, count, name) for at, (count, name) in use.reads.items()]
        last += [use.write] if use.write is not None else []
        for at, count, name in last:
            if not _is_done((at, count, name), clock, use.made_on):
                self._fault("freed too early", None, name)

    def _fault(self, what: str, operator: Operator | None, other: str) -> None:
        by = "" if operator is None else f": {operator.name} in {operator.place or 'backward'}"
        text = f"{what}{by}, while another stream may not be through with {other}"
        self.faults[text] = self.faults.get(text, 0) + 1


def _is_done(use: tuple[int, int, str], clock: Clock, stream: int) -> bool:
    at, count, _ = use
    return at == stream or clock.get(at, 0) >= count


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count
