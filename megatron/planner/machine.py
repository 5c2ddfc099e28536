"""Machine and its links as JSON; GPUs by data sheet; factors fitted to whole layers."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from megatron.costs.memory import PEAK_TFLOPS
from megatron.errors import ConfigError

# How often a unit's products and its passes over memory count: by closed forms, or as whole layers took them.
#
# What the operations of a unit add up to by themselves is less than the unit takes: between products numbers are passed
# over more often than what is kept tells, by kernels of their own, and products are no squares. So the seconds of a
# forward, and those of a backward, are ``products * those of its products + passes * one pass over what it keeps +
# scores * one pass over the scores of its attention``, and the three numbers come from whole layers that
# ``--calibrate`` has timed; for layers cut over tensor ranks they are multiplied by what these took longer. A machine
# without measurement has ``LAYER`` and ``HEAD``; a pass of the head is one over its logits.


@dataclass(frozen=True)
class EfficiencyFactor:
    """Factors on the seconds of all products, of one pass over what is kept, and of one over the scores."""

    products: float
    passes: float
    scores: float = 0.0

    def times(self, factor: float) -> EfficiencyFactor:
        """Return the factors of what takes so many times as long."""
        return EfficiencyFactor(factor * self.products, factor * self.passes, factor * self.scores)

    def of(self, parts: tuple[float, float, float]) -> float:
        """Return the seconds of these products, pass and pass over scores."""
        products, passed, scored = parts
        return self.products * products + self.passes * passed + self.scores * scored


@dataclass(frozen=True)
class EfficiencyFactors:
    """Of a forward and of a backward."""

    forward: EfficiencyFactor
    backward: EfficiencyFactor


Table = Mapping[str, Mapping[str, EfficiencyFactors]]
"""Format of numbers -> kind of unit ("gpt2 layer", "t5 head") -> its tempos."""
CUT = ", cut over tensor ranks"
"""What the kind of a unit ends with whose layers are cut: smaller products, and ranks that wait for the slower one."""
LAYER = EfficiencyFactors(EfficiencyFactor(1.0, 2.0), EfficiencyFactor(1.0, 3.0))
"""What is kept of a layer is written once in forward and read about once more by the operation that follows; backward
reads it, and writes a gradient for about as much. Norms, dropout and sums with the residual stream all pass so."""
HEAD = EfficiencyFactors(EfficiencyFactor(1.0, 3.0), EfficiencyFactor(1.0, 2.0))


@dataclass(frozen=True)
class Sample:
    """Seconds of products and of the passes, those that all took together, and those that an error is measured by."""

    parts: tuple[float, float, float]
    seconds: float
    scale: float


def fitted(samples: Sequence[Sample]) -> EfficiencyFactor:
    """Return the factors, none below 0, for which the sum of squares of errors over ``scale`` is least."""
    rows = [[part / one.scale for part in one.parts] for one in samples]
    wanted = [one.seconds / one.scale for one in samples]
    best, least = [0.0] * 3, sum(value**2 for value in wanted)
    for number in (1, 2, 3):
        for chosen in combinations(range(3), number):
            found = _least_squares([[row[n] for n in chosen] for row in rows], wanted)
            if found is None or min(found) < 0:
                continue
            error = sum(
                (_dot(found, [row[n] for n in chosen]) - value) ** 2 for row, value in zip(rows, wanted, strict=True)
            )
            if error < least:
                best, least = [dict(zip(chosen, found, strict=True)).get(n, 0.0) for n in range(3)], error
    return EfficiencyFactor(*best)


def slowdown(samples: Sequence[Sample], efficiency: EfficiencyFactor) -> float:
    """Return how many times as long as ``efficiency`` says the samples took: their median, 1 at least."""
    said = [(one.seconds, efficiency.of(one.parts)) for one in samples]
    ratios = [own / other for own, other in said if other > 0]
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


def _least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float] | None:
    """Return the factors of the columns by their normal equations; None where these do not tell them apart."""
    columns = list(zip(*rows, strict=True))
    matrix = [[*[_dot(one, other) for other in columns], _dot(one, wanted)] for one in columns]
    for pivot, row in enumerate(matrix):
        if row[pivot] <= 1e-9 * _dot(columns[pivot], columns[pivot]):
            return None
        for other in matrix:
            if other is not row:
                factor = other[pivot] / row[pivot]
                other[:] = [value - factor * own for value, own in zip(other, row, strict=True)]
    return [row[-1] / row[pivot] for pivot, row in enumerate(matrix)]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def read(value: Mapping[str, Any]) -> Table:
    """Return the table of what ``asdict`` made of one.

    Raises:
        TypeError, KeyError, AttributeError: it is none.
    """
    return {
        dtype: {
            kind: EfficiencyFactors(EfficiencyFactor(**own["forward"]), EfficiencyFactor(**own["backward"]))
            for kind, own in kinds.items()
        }
        for dtype, kinds in value.items()
    }


def numbers(table: Table) -> Iterator[tuple[str, float]]:
    """Yield every factor with its name."""
    for dtype, kinds in table.items():
        for kind, own in kinds.items():
            for way, efficiency in asdict(own).items():
                yield from ((f"tempos of {dtype}, {kind}, {way}: {name}", value) for name, value in efficiency.items())


# What a device and the wires between devices can do, in numbers that can be measured, as JSON and back.

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

    def slowed(self, factor: float) -> Link:
        """Return the link whose messages take so many times as long."""
        return Link(
            **{
                name: Wire(latency_s=factor * own.latency_s, bandwidth=own.bandwidth / factor)
                for name, own in vars(self).items()
            }
        )


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
        reference_s: seconds of ``megatron.planner.reference`` at the speed of all rates; 0: not measured.
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
    tempos: Table = field(default_factory=dict)
    ranks_per_core: float = 1.0
    reference_s: float = 0.0
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

    def efficiency(self, dtype: str, kind: str, otherwise: EfficiencyFactors = LAYER) -> EfficiencyFactors:
        """Return how often products and passes of a kind of unit count."""
        return self.tempos.get(dtype, {}).get(kind, otherwise)

    def slowed(self, factor: float) -> Machine:
        """Return the machine on which everything takes so many times as long; what units take beside it stays."""
        tables = {
            dtype: tuple((side, rate / factor) for side, rate in table) for dtype, table in self.product_flops.items()
        }
        return replace(
            self,
            peak_flops={dtype: peak / factor for dtype, peak in self.peak_flops.items()},
            product_flops=tables,
            overhead_s=factor * self.overhead_s,
            intra=self.intra.slowed(factor),
            inter=self.inter.slowed(factor),
            reference_s=factor * self.reference_s,
            **{name: getattr(self, name) / factor for name in _RATES},
        )

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
    for name in ("overhead_s", "reserved_bytes", "reference_s"):
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
    for name, value in numbers(machine.tempos):
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
_READ = {"intra": _link, "inter": _link, "product_flops": _tables, "tempos": read}


# GPUs that are known without measuring: data sheets, and what programs usually reach of them.
#
# One set of shares holds for a GPU, whatever the model: docs/planner.md compares what follows from them with published
# runs. Links are those of the usual nodes: eight devices, and a network card for each. A cluster of another kind is
# told by ``--machine FILE``, best begun with ``--calibrate`` on one of its nodes.

SIDES = ((64, 0.02), (128, 0.08), (256, 0.25), (512, 0.5), (1024, 0.75), (2048, 0.92), (4096, 1.0))
"""Side of a product -> share of what the largest products reach."""
STREAM = 0.8
"""Share of the memory's bandwidth that elementwise kernels reach."""
WIRE = 0.75
"""Share of a link's bandwidth that collectives reach."""
LAUNCH_S, INTRA_LATENCY_S, INTER_LATENCY_S = 4e-6, 8e-6, 2e-5
RESERVED = 4 * 10**9
"""Bytes of a GPU for its context, NCCL and what lies between tensors."""

SLOWER = (1.1, 1.14)
"""Steps of published runs with fused attention over their plans, least and most (docs/planner.md)."""


@dataclass(frozen=True)
class Sheet:
    """What the data sheet says: GB, TB/s, GB/s in one direction; ``reached`` of the peak by the largest products."""

    part: str  # name in PEAK_TFLOPS
    gigabytes: float
    memory_tb_s: float
    intra_gb_s: float
    inter_gb_s: float
    reached: float
    fp32_tflops: float
    formats: Sequence[str] = ("bf16", "fp16")
    host_gb_s: float = 25.0


SHEETS = {
    "v100-32g": Sheet("V100", 34.1, 0.9, 150, 12.5, 0.78, 15.7, formats=("fp16",), host_gb_s=12),
    "v100-16g": Sheet("V100", 17.0, 0.9, 150, 12.5, 0.78, 15.7, formats=("fp16",), host_gb_s=12),
    "a100-40g": Sheet("A100", 42.4, 1.555, 300, 25, 0.81, 19.5),
    "a100-80g": Sheet("A100", 85.0, 2.039, 300, 25, 0.81, 19.5),
    "h100-80g": Sheet("H100", 85.0, 3.35, 450, 50, 0.72, 67, host_gb_s=50),
    "h100-pcie": Sheet("H100 PCIE", 85.0, 2.0, 64, 25, 0.65, 51, host_gb_s=50),
    "h200": Sheet("H200", 150.0, 4.8, 450, 50, 0.72, 67, host_gb_s=50),
    "h20": Sheet("H20", 102.0, 4.0, 450, 50, 0.92, 44, host_gb_s=50),
    "gh200": Sheet("GH200", 102.0, 4.0, 450, 50, 0.72, 67, host_gb_s=400),
    "b200": Sheet("B200", 192.0, 8.0, 900, 50, 0.72, 80, host_gb_s=50),
    "l40s": Sheet("L40S", 51.5, 0.864, 32, 12.5, 0.65, 91.6),
    "mi300x": Sheet("MI300X", 206.0, 5.3, 448, 50, 0.5, 163, host_gb_s=50),
}
"""Name for --gpu -> data sheet."""


def device(name: str) -> Machine:
    """Return the machine of nodes with eight GPUs of that name.

    Raises:
        ConfigError: the GPU is not known.
    """
    if name not in SHEETS:
        raise ConfigError(
            f"--gpu must be one of {', '.join(SHEETS)}, got {name}. Give another as --machine FILE, which --calibrate "
            "writes"
        )
    sheet = SHEETS[name]
    peak = PEAK_TFLOPS[sheet.part] * 1e12
    peaks = {**dict.fromkeys(sheet.formats, peak), "fp32": sheet.fp32_tflops * 1e12}
    memory = sheet.memory_tb_s * 1e12 * STREAM
    return Machine(
        name=name,
        memory_bytes=int(sheet.gigabytes * 1e9),
        reserved_bytes=RESERVED,
        devices_per_node=8,
        peak_flops=peaks,
        product_flops={
            dtype: tuple((side, share * most * sheet.reached) for side, share in SIDES) for dtype, most in peaks.items()
        },
        memory_bandwidth=memory,
        update_bandwidth=memory,
        overhead_s=LAUNCH_S,
        host_bandwidth=sheet.host_gb_s * 1e9 * STREAM,
        intra=Link.of(sheet.intra_gb_s * 1e9 * WIRE, INTRA_LATENCY_S),
        inter=Link.of(sheet.inter_gb_s * 1e9 * WIRE, INTER_LATENCY_S),
        notes="data sheet and usual shares of it; not measured",
    )


# The machine that the command line names: a device that is known, or a file, with what the user says of its nodes.


def machine_of(flags: argparse.Namespace) -> Machine:
    """Return the machine that the flags name.

    Raises:
        ConfigError: there is no such device, the file cannot be read, or no memory is left.
    """
    machine = Machine.load(flags.machine) if flags.machine else device(flags.gpu or "h100-80g")
    if flags.gpus_per_node:
        machine = replace(machine, devices_per_node=flags.gpus_per_node)
    if flags.memory:
        machine = replace(machine, memory_bytes=int(flags.memory * 1e9))
    if machine.usable_bytes <= 0:
        raise ConfigError(
            f"--memory must be more than the {machine.reserved_bytes / 1e9:g} GB that the driver and the libraries "
            f"take, got {machine.memory_bytes / 1e9:g}. Use more"
        )
    return machine


def check_nodes(world: int, machine: Machine) -> None:
    """Return if the devices are those of whole nodes, or of a part of one.

    Raises:
        ConfigError: a node would be used in part, beside others.
    """
    node = machine.devices_per_node
    if world > node and world % node:
        raise ConfigError(
            f"--gpus must be a multiple of the devices of a node, {node}, where there are several nodes, got {world}. "
            f"Use {world // node * node} or {(world // node + 1) * node}, or say --gpus-per-node"
        )
