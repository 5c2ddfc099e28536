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
from tests.cuda.fake_cuda import EventType

Clock = dict[int, int]


@dataclass
class StorageUse:
    """The last uses of a storage: by stream the number of the operator there, and its name."""

    allocation_stream: int = 0
    write: tuple[int, int, str] | None = None
    reads: dict[int, tuple[int, str]] = field(default_factory=dict)
    retained_for: set[int] = field(default_factory=set)


class StreamOrder:
    """Follows a log.

    Attributes:
        faults: in words, each once.
    """

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}
        self._clocks: dict[int, Clock] = defaultdict(dict)
        self._events: dict[int, Clock] = {}
        self._counts: dict[int, int] = defaultdict(int)
        self._uses: dict[int, StorageUse] = defaultdict(StorageUse)

    def replay(self, log: Iterable[tuple[int, int, int]], operators: Sequence[Operator]) -> None:
        """Take note of all rows of ``log``."""
        for event_type, first, second in log:
            if event_type == EventType.OPERATOR:
                self._run_operator(operators[first], second)
            elif event_type == EventType.RECORD:
                self._events[first] = dict(self._clocks[second])
            elif event_type == EventType.WAIT:
                _join(self._clocks[second], self._events.get(first, {}))
            elif event_type in (EventType.HOST_EVENT, EventType.QUERY):
                self._synchronize_host(self._events.get(first, {}))
            elif event_type == EventType.HOST_STREAM:
                self._synchronize_host(self._clocks[first])
            elif event_type == EventType.HOST_DEVICE:
                for clock in list(self._clocks.values()):
                    self._synchronize_host(clock)
            elif event_type == EventType.MADE:
                self._uses[first] = StorageUse(allocation_stream=second)
            elif event_type == EventType.KEEP:
                self._uses[first].retained_for.add(second)
            elif event_type == EventType.FREE:
                self._free(first)

    def _synchronize_host(self, clock: Clock) -> None:
        _join(self._clocks[HOST], clock)

    def _run_operator(self, operator: Operator, stream: int) -> None:
        clock = self._clocks[stream]
        if stream != HOST:
            _join(clock, self._clocks[HOST])
        for storage in operator.reads:
            use = self._uses[storage]
            if use.write is not None and not _is_done(use.write, clock, stream):
                self._fault("read too early", operator, use.write[2])
        for storage in operator.writes:
            use = self._uses[storage]
            earlier = [(use_stream, count, name) for use_stream, (count, name) in use.reads.items()]
            for previous in [*earlier, *([use.write] if use.write is not None else [])]:
                if not _is_done(previous, clock, stream):
                    self._fault("written too early", operator, previous[2])
        self._counts[stream] += 1
        clock[stream] = count = self._counts[stream]
        description = f"{operator.name} in {operator.location or 'backward'}"
        for storage in operator.reads:
            self._uses[storage].reads[stream] = count, description
        for storage in operator.writes:
            use = self._uses[storage]
            use.write = stream, count, description
            use.reads.clear()

    def _free(self, storage: int) -> None:
        use = self._uses.pop(storage, None)
        if use is None:
            return
        clock = dict(self._clocks[use.allocation_stream])
        for stream in (HOST, *use.retained_for):  # for the latter an event of now is waited for
            _join(clock, self._clocks[stream])
        last_uses = [(use_stream, count, name) for use_stream, (count, name) in use.reads.items()]
        last_uses += [use.write] if use.write is not None else []
        for use_stream, count, name in last_uses:
            if not _is_done((use_stream, count, name), clock, use.allocation_stream):
                self._fault("freed too early", None, name)

    def _fault(self, fault_type: str, operator: Operator | None, other_use: str) -> None:
        operator_text = "" if operator is None else f": {operator.name} in {operator.location or 'backward'}"
        text = f"{fault_type}{operator_text}, while another stream may not be through with {other_use}"
        self.faults[text] = self.faults.get(text, 0) + 1


def _is_done(use: tuple[int, int, str], clock: Clock, stream: int) -> bool:
    use_stream, count, _ = use
    return use_stream == stream or clock.get(use_stream, 0) >= count


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count
