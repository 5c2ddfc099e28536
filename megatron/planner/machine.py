"""What a device and the wires between devices can do, in numbers that can be measured, as JSON and back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from megatron.planner import tempo

FORMAT = "megatron-machine 1"


@dataclass(frozen=True, kw_only=True)
class Wire:
    """One kind of message over one link: ``latency_s + bytes a rank sends / bandwidth``.

    Args:
        latency_s: of a message between two ranks; a collective of n ranks has it log2(n) times.
        bandwidth: bytes/s that one rank sends while all ranks of the link do.
    """

    latency_s: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """What lies between ranks, by kind of message.

    Args:
        all_reduce: a rank of n sends 2 (n - 1) / n of the bytes.
        gather: a rank of n sends (n - 1) / n of the whole.
        send: from one rank to one other.
        scatter: a sum of which each rank gets its part; as gather, but for gloo, which makes the whole sum.
    """

    all_reduce: Wire
    gather: Wire
    send: Wire
    scatter: Wire

    @classmethod
    def of(cls, bandwidth: float, latency_s: float) -> Link:
        """Return a link on which all kinds of messages are equally fast."""
        wire = Wire(latency_s=latency_s, bandwidth=bandwidth)
        return cls(all_reduce=wire, gather=wire, send=wire, scatter=wire)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device, how many of them share a node, and the links within and between nodes.

    Args:
        memory_bytes: of one device.
        reserved_bytes: of these, what training cannot have: the driver's, the communication library's, and what the
            allocator loses between tensors.
        peak_flops: dtype -> FLOP/s of the data sheet, dense: MFU's denominator.
        product_flops: dtype -> ((side, FLOP/s), ...) that matrix products reach, sides rising. The side of a product
            of [n, k] and [k, m] is the cube root of n k m; between sides the rate is linear in the side's logarithm.
        memory_bandwidth: bytes/s that elementwise kernels read and write, together.
        update_bandwidth: the same of the optimizer's update.
        overhead_s: of each operation, on top of its work.
        host_bandwidth: bytes/s of one device from and to the memory of the host.
        host_update_bandwidth: as ``update_bandwidth``, of an update on the host.
        intra: between the devices of a node.
        inter: between nodes; the bandwidth is a device's share, as if all devices of the node sent at once.
        tempos: of units that were timed; others go by the closed forms.
        ranks_per_core: above 1 ranks take turns, and all rates are those of a rank beside all others.
    """

    name: str
    memory_bytes: int
    devices_per_node: int
    peak_flops: Mapping[str, float]
    product_flops: Mapping[str, tuple[tuple[float, float], ...]]
    memory_bandwidth: float
    update_bandwidth: float
    overhead_s: float
    intra: Link
    inter: Link
    host_bandwidth: float = 20e9
    host_update_bandwidth: float = 10e9
    reserved_bytes: int = 0
    is_cpu: bool = False
    tempos: tempo.Table = field(default_factory=dict)
    ranks_per_core: float = 1.0
    notes: str = field(default="", compare=False)

    @property
    def usable_bytes(self) -> int:
        """Bytes of a device that training can have."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def first_dtype(self) -> str:
        """The format of runs that name none: fp32 on a CPU, else the first of 16 bits that the machine knows."""
        order = ("fp32", "bf16", "fp16") if self.is_cpu else ("bf16", "fp16", "fp32")
        return next((name for name in order if name in self.product_flops), order[0])

    def product_rate(self, dtype: str, side: float) -> float:
        """Return the FLOP/s of products of that side.

        Raises:
            ConfigError: the machine has no rate for ``dtype``.
        """
        if dtype not in self.product_flops:
            raise ConfigError(
                f"the machine {self.name} knows matrix products in {', '.join(self.product_flops)}, got {dtype}. Use "
                "one of these, or --calibrate and --machine FILE"
            )
        table = self.product_flops[dtype]
        for (small, slow), (large, fast) in zip(table, table[1:], strict=False):
            if side <= large:
                share = math.log(max(side, small) / small) / math.log(large / small)
                return slow + share * (fast - slow)
        return table[-1][1]

    def idle(self, bubble: float) -> float:
        """Return the share of a step in which ranks wait that all wait ``bubble`` of it, each on cores of its own.

        Where ranks take turns on a core, one that waits leaves it to another: only what is left of it is idle.
        """
        return max(0.0, 1 - self.ranks_per_core * (1 - bubble))

    def tempo(self, dtype: str, kind: str, otherwise: tempo.Tempos = tempo.LAYER) -> tempo.Tempos:
        """Return how often products and passes of a kind of unit count."""
        return self.tempos.get(dtype, {}).get(kind, otherwise)

    def to_json(self) -> str:
        """Return the machine as text; ``from_json`` reads it."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str = "the text") -> Machine:
        """Return the machine that ``to_json`` wrote.

        Raises:
            ConfigError: it is no such text; ``origin`` says where it comes from.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"a machine is JSON, got {origin}: {error}. Make one with --calibrate") from None
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise ConfigError(f'a machine has "format": "{FORMAT}", got {origin} without it. Make one with --calibrate')
        try:
            machine = cls(**{key: _READ.get(key, _same)(value) for key, value in values.items()})
            wrong = list(_wrong(machine))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ConfigError(f"the machine in {origin} cannot be read: {error}. Make one with --calibrate") from None
        if wrong:
            raise ConfigError(f"the machine in {origin} cannot be: {'; '.join(wrong)}. Mend it, or use --calibrate")
        return machine

    def save(self, path: Path) -> None:
        """Write the machine to a file."""
        path.write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Machine:
        """Return the machine of a file.

        Raises:
            ConfigError: the file cannot be read.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--machine needs a file that --calibrate wrote, got {path}: {error}") from None
        return cls.from_json(text, str(path))


def _wrong(machine: Machine) -> Iterator[str]:
    """Yield what of a machine that was read can be none."""
    for name in ("memory_bytes", "devices_per_node"):
        value = getattr(machine, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield f"{name} must be a whole number of at least 1, got {value!r}"
    for name in _RATES:
        if not _is_number(getattr(machine, name), above=0):
            yield f"{name} must be a number above 0, got {getattr(machine, name)!r}"
    for name in ("overhead_s", "reserved_bytes"):
        if not _is_number(getattr(machine, name)):
            yield f"{name} must be a number of at least 0, got {getattr(machine, name)!r}"
    for name, kinds in (("name", str), ("notes", str), ("is_cpu", bool)):
        if not isinstance(getattr(machine, name), kinds):
            yield f"{name} must be {kinds.__name__}, got {getattr(machine, name)!r}"
    for place in ("intra", "inter"):
        for kind, wire in vars(getattr(machine, place)).items():
            if not _is_number(wire.latency_s) or not _is_number(wire.bandwidth, above=0):
                yield f"{place}.{kind} must have numbers, the bandwidth above 0, got {vars(wire)}"
    if not _is_number(machine.ranks_per_core) or machine.ranks_per_core < 1:
        yield f"ranks_per_core must be a number of at least 1, got {machine.ranks_per_core!r}"
    yield from _wrong_tables(machine)


def _wrong_tables(machine: Machine) -> Iterator[str]:
    for dtype, peak in machine.peak_flops.items():
        if not _is_number(peak, above=0):
            yield f"peak_flops of {dtype} must be a number above 0, got {peak!r}"
    if not machine.product_flops:
        yield "product_flops must have a number format, got none"
    for dtype, table in machine.product_flops.items():
        sides = [side for side, _ in table]
        is_rising = all(small < large for small, large in zip(sides, sides[1:], strict=False))
        if not table or not is_rising or not all(_is_number(value, above=0) for row in table for value in row):
            yield f"product_flops of {dtype} must be pairs above 0 with rising sides, got {list(table)}"
    for name, value in tempo.numbers(machine.tempos):
        if not _is_number(value):
            yield f"{name} must be a number of at least 0, got {value!r}"


def _is_number(value: Any, above: float | None = None) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return value >= 0 if above is None else value > above


def _same(value: Any) -> Any:
    return value


def _link(value: Mapping[str, Mapping[str, float]]) -> Link:
    return Link(**{name: Wire(**wire) for name, wire in value.items()})


def _tables(value: Mapping[str, Any]) -> dict[str, tuple[tuple[float, float], ...]]:
    return {dtype: tuple((float(side), float(rate)) for side, rate in table) for dtype, table in value.items()}


_RATES = ("memory_bandwidth", "update_bandwidth", "host_bandwidth", "host_update_bandwidth")
"""Fields that are bytes/s."""
_READ = {"intra": _link, "inter": _link, "product_flops": _tables, "tempos": tempo.read}
