"""Machines and their links, read from and written to JSON; GPUs from data sheets; factors fitted to timed layers."""

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

from megatron.costs.memory import FP8_RATE_RATIO, PEAK_TFLOPS, has_fp8
from megatron.errors import ConfigError

# Factors for the matmuls and memory passes of a unit (an embedding, a layer, a norm or the head): from closed forms, or
# fitted to timed layers.
#
# A unit takes longer than the sum of its operations: separate kernels between matmuls read and write more bytes than
# the saved activations have, and matmuls are not square. The time of a forward or backward pass is therefore modelled
# as ``products * (time of its matmuls) + passes * (one pass over its saved activations) + scores * (one pass over its
# attention scores)``. ``--calibrate`` fits the three factors to timed layers. For layers that are split over tensor
# ranks, the factors are multiplied by the measured slowdown. A machine without measurements uses ``LAYER`` and
# ``HEAD``. A pass of the head is one pass over its logits.


@dataclass(frozen=True)
class EfficiencyFactor:
    """Factors on the time of matmuls, of a pass over the saved activations, and of a pass over the scores."""

    products: float
    passes: float
    scores: float = 0.0

    def scaled(self, factor: float) -> EfficiencyFactor:
        """Return factors for a unit that takes ``factor`` times as long."""
        return EfficiencyFactor(factor * self.products, factor * self.passes, factor * self.scores)

    def predict(self, terms: tuple[float, float, float]) -> float:
        """Predict a unit's time: the sum of ``terms`` (matmuls, activation pass, score pass), each times its factor."""
        products, activation_pass, score_pass = terms
        return self.products * products + self.passes * activation_pass + self.scores * score_pass


@dataclass(frozen=True)
class EfficiencyFactors:
    """Factors for the forward and backward passes."""

    forward: EfficiencyFactor
    backward: EfficiencyFactor


Table = Mapping[str, Mapping[str, EfficiencyFactors]]
"""dtype -> type of unit ("gpt2 layer", "t5 head") -> its factors."""
SPLIT_SUFFIX = ", cut over tensor ranks"
"""Suffix for the type of a unit that is split over tensor ranks: its matmuls are smaller, and its ranks wait."""
LAYER = EfficiencyFactors(EfficiencyFactor(1.0, 2.0), EfficiencyFactor(1.0, 3.0))
"""Forward writes the saved activations of a layer once, and the next operation reads them about once (2 passes).
Backward reads them, and reads and writes gradients of about the same size (3 passes). The same holds for norms, dropout
and additions to the residual stream."""
HEAD = EfficiencyFactors(EfficiencyFactor(1.0, 3.0), EfficiencyFactor(1.0, 2.0))


@dataclass(frozen=True)
class Sample:
    """A measurement.

    Args:
        terms: times of (matmuls, activation pass, score pass), in seconds.
        seconds: measured unit time, minus the times that no factor applies to.
        scale: seconds by which the fit divides the error of this sample.
    """

    terms: tuple[float, float, float]
    seconds: float
    scale: float


def fit_factors(samples: Sequence[Sample]) -> EfficiencyFactor:
    """Fit nonnegative factors by least squares, with the error of each sample divided by its ``scale``."""
    rows = [[term / sample.scale for term in sample.terms] for sample in samples]
    targets = [sample.seconds / sample.scale for sample in samples]
    best, least_error = [0.0] * 3, sum(value**2 for value in targets)
    for count in (1, 2, 3):
        for subset in combinations(range(3), count):
            factors = _least_squares([[row[n] for n in subset] for row in rows], targets)
            if factors is None or min(factors) < 0:
                continue
            error = sum(
                (_dot(factors, [row[n] for n in subset]) - value) ** 2 for row, value in zip(rows, targets, strict=True)
            )
            if error < least_error:
                best, least_error = [dict(zip(subset, factors, strict=True)).get(n, 0.0) for n in range(3)], error
    return EfficiencyFactor(*best)


def slowdown(samples: Sequence[Sample], efficiency: EfficiencyFactor) -> float:
    """Return the median ratio of measured times to ``efficiency`` predictions, at least 1."""
    measured_and_predicted = [(sample.seconds, efficiency.predict(sample.terms)) for sample in samples]
    ratios = [measured / predicted for measured, predicted in measured_and_predicted if predicted > 0]
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


def _least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float] | None:
    """Solve the normal equations for one factor per column; return None if they are singular."""
    columns = list(zip(*rows, strict=True))
    matrix = [[*[_dot(column, other) for other in columns], _dot(column, targets)] for column in columns]
    for pivot, row in enumerate(matrix):
        if row[pivot] <= 1e-9 * _dot(columns[pivot], columns[pivot]):
            return None
        for other in matrix:
            if other is not row:
                factor = other[pivot] / row[pivot]
                other[:] = [value - factor * pivot_value for value, pivot_value in zip(other, row, strict=True)]
    return [row[-1] / row[pivot] for pivot, row in enumerate(matrix)]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def table_from_dict(value: Mapping[str, Any]) -> Table:
    """Build a table from ``value``, the result of ``dataclasses.asdict``.

    Raises:
        TypeError, KeyError, AttributeError: ``value`` does not have that form.
    """
    return {
        dtype: {
            unit_type: EfficiencyFactors(
                EfficiencyFactor(**factors["forward"]), EfficiencyFactor(**factors["backward"])
            )
            for unit_type, factors in by_type.items()
        }
        for dtype, by_type in value.items()
    }


def named_factors(table: Table) -> Iterator[tuple[str, float]]:
    """Yield (name, value) for every factor."""
    for dtype, by_type in table.items():
        for unit_type, factors in by_type.items():
            for direction, efficiency in asdict(factors).items():
                yield from (
                    (f"tempos of {dtype}, {unit_type}, {direction}: {name}", value)
                    for name, value in efficiency.items()
                )


# Measurable properties of a device and of the links between devices, as JSON.

FORMAT = "megatron-machine 1"


@dataclass(frozen=True, kw_only=True)
class Wire:
    """One type of communication over one link. A message takes ``latency_s + bytes sent by a rank / bandwidth``.

    Args:
        latency_s: message latency between two ranks; a collective over n ranks has log2(n) times this latency.
        bandwidth: bytes/s per rank while all ranks on the link send.
    """

    latency_s: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """The connection between ranks, by communication type.

    Args:
        all_reduce: a rank of n sends 2 (n - 1) / n of the bytes.
        gather: a rank of n sends (n - 1) / n of the gathered bytes.
        send: point-to-point; a rank sends all bytes to one other rank.
        scatter: reduce-scatter; the same bytes as gather, except for gloo, which computes the full sum.
    """

    all_reduce: Wire
    gather: Wire
    send: Wire
    scatter: Wire

    @classmethod
    def uniform(cls, bandwidth: float, latency_s: float) -> Link:
        """Return a link that is equally fast for all communication types."""
        wire = Wire(latency_s=latency_s, bandwidth=bandwidth)
        return cls(all_reduce=wire, gather=wire, send=wire, scatter=wire)

    def slowed(self, factor: float) -> Link:
        """Return a link that is ``factor`` times as slow."""
        return Link(
            **{
                name: Wire(latency_s=factor * wire.latency_s, bandwidth=wire.bandwidth / factor)
                for name, wire in vars(self).items()
            }
        )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device, the device count per node, and the links within and between nodes.

    Args:
        memory_bytes: memory per device.
        reserved_bytes: device memory that training cannot use: driver, communication library, and allocator
            fragmentation.
        peak_flops: dtype -> dense FLOP/s of the data sheet, the denominator of MFU.
        product_flops: dtype -> ((side, FLOP/s of matmuls), ...), sorted by side. The side of a matmul [n, k] x [k, m]
            is the cube root of n k m. Rates between two sides are interpolated linearly in log(side). "fp8": products
            in FP8 with scales per row.
        memory_bandwidth: bytes/s that elementwise kernels read and write in total.
        update_bandwidth: the same for the optimizer's update.
        overhead_s: overhead per operation, in addition to its work.
        host_bandwidth: bytes/s between one device and the host's memory, in one direction.
        host_update_bandwidth: as ``update_bandwidth``, for an update on the host.
        intra: link between devices in a node.
        inter: link between nodes; its bandwidth is per device, while all devices in the node send.
        tempos: factors of units that were timed; other units use ``LAYER`` and ``HEAD``.
        ranks_per_core: if above 1, ranks take turns on a core; all rates are per rank, while all ranks run.
        reference_s: duration of the ``megatron.planner.reference`` workload in seconds, at the machine speed that all
            rates are scaled to; 0: not measured.
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
        """Bytes per device that training can use."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def first_dtype(self) -> str:
        """Default dtype of runs: fp32 on a CPU, otherwise bf16 or fp16 if the machine has rates for it."""
        order = ("fp32", "bf16", "fp16") if self.is_cpu else ("bf16", "fp16", "fp32")
        return next((name for name in order if name in self.product_flops), order[0])

    def product_rate(self, dtype: str, side: float) -> float:
        """Return the matmul FLOP/s for this side.

        Raises:
            ConfigError: the machine has no rate for ``dtype``.
        """
        if dtype not in self.product_flops:
            raise ConfigError(
                f"the machine {self.name} has matmul rates for {', '.join(self.product_flops)}, got {dtype}. Use "
                "one of these, or measure with --calibrate FILE and plan with --machine FILE"
            )
        table = self.product_flops[dtype]
        for (small, slow), (large, fast) in zip(table, table[1:], strict=False):
            if side <= large:
                share = math.log(max(side, small) / small) / math.log(large / small)
                return slow + share * (fast - slow)
        return table[-1][1]

    def fp8_rate(self, side: float) -> float:
        """Return the FLOP/s of products in FP8 with scales per row for this side, without the quantization.

        The rate is that of "fp8" in ``product_flops``, which ``--calibrate`` measures. Without it, a CPU has the rate
        of fp32, in which it emulates these products, and a GPU ``FP8_RATE_RATIO`` times the rate of bf16.

        Raises:
            ConfigError: the device has no products in FP8, or no rate for bf16.
        """
        if "fp8" in self.product_flops:
            return self.product_rate("fp8", side)
        if self.is_cpu:
            return self.product_rate("fp32", side)
        if not has_fp8(self.name):
            raise ConfigError(
                f"--fp8-format needs a GPU with products in FP8 (H100, H200, H20, GH200, B200, L40S), got {self.name}. "
                "Remove --fp8-format"
            )
        return FP8_RATE_RATIO * self.product_rate("bf16", side)

    def idle(self, bubble: float) -> float:
        """Return a core's idle share of a step.

        If ranks share a core, other ranks use it while one rank waits, so the core is idle for less than ``bubble``.

        Args:
            bubble: share of a step that a rank would wait with a core of its own.
        """
        return max(0.0, 1 - self.ranks_per_core * (1 - bubble))

    def efficiency(self, dtype: str, unit_type: str, default: EfficiencyFactors = LAYER) -> EfficiencyFactors:
        """Return efficiency factors for a unit type; ``default`` if it was not timed."""
        return self.tempos.get(dtype, {}).get(unit_type, default)

    def slowed(self, factor: float) -> Machine:
        """Return a machine whose operations take ``factor`` times as long; efficiency factors are unchanged."""
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
        """Format the machine as JSON for ``from_json``."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str = "the text") -> Machine:
        """Parse the output of ``to_json``.

        Args:
            origin: where ``text`` comes from, for messages.

        Raises:
            ConfigError: the text does not describe a valid machine.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{origin} must be a JSON file: {error}. Create one with --calibrate") from None
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise ConfigError(f'a machine needs "format": "{FORMAT}", {origin} has none. Create one with --calibrate')
        try:
            machine = cls(**{key: _PARSERS.get(key, _identity)(value) for key, value in values.items()})
            invalid = list(_invalid_fields(machine))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ConfigError(f"the machine in {origin} cannot be read: {error}. Create one with --calibrate") from None
        if invalid:
            raise ConfigError(
                f"the machine in {origin} is invalid: {'; '.join(invalid)}. Correct it, or use --calibrate"
            )
        return machine

    def save(self, path: Path) -> None:
        """Write the machine to a file."""
        path.write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Machine:
        """Read a machine from a file.

        Raises:
            ConfigError: the file cannot be read, or does not describe a valid machine.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--machine needs a file that --calibrate wrote, got {path}: {error}") from None
        return cls.from_json(text, str(path))


def _invalid_fields(machine: Machine) -> Iterator[str]:
    """Yield a message for each invalid value in a machine from JSON."""
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
    for name, expected_type in (("name", str), ("notes", str), ("is_cpu", bool)):
        if not isinstance(getattr(machine, name), expected_type):
            yield f"{name} must be {expected_type.__name__}, got {getattr(machine, name)!r}"
    for link_name in ("intra", "inter"):
        for message_type, wire in vars(getattr(machine, link_name)).items():
            if not _is_number(wire.latency_s) or not _is_number(wire.bandwidth, above=0):
                yield f"{link_name}.{message_type} must have numbers, the bandwidth above 0, got {vars(wire)}"
    if not _is_number(machine.ranks_per_core) or machine.ranks_per_core < 1:
        yield f"ranks_per_core must be a number of at least 1, got {machine.ranks_per_core!r}"
    yield from _invalid_tables(machine)


def _invalid_tables(machine: Machine) -> Iterator[str]:
    for dtype, peak in machine.peak_flops.items():
        if not _is_number(peak, above=0):
            yield f"peak_flops of {dtype} must be a number above 0, got {peak!r}"
    if not machine.product_flops:
        yield "product_flops must have a dtype, got none"
    for dtype, table in machine.product_flops.items():
        sides = [side for side, _ in table]
        is_rising = all(small < large for small, large in zip(sides, sides[1:], strict=False))
        if not table or not is_rising or not all(_is_number(value, above=0) for row in table for value in row):
            yield f"product_flops of {dtype} must be pairs above 0 in ascending order of sides, got {list(table)}"
    for name, value in named_factors(machine.tempos):
        if not _is_number(value):
            yield f"{name} must be a number of at least 0, got {value!r}"


def _is_number(value: Any, above: float | None = None) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return value >= 0 if above is None else value > above


def _identity(value: Any) -> Any:
    return value


def _parse_link(value: Mapping[str, Mapping[str, float]]) -> Link:
    return Link(**{name: Wire(**wire) for name, wire in value.items()})


def _parse_tables(value: Mapping[str, Any]) -> dict[str, tuple[tuple[float, float], ...]]:
    return {dtype: tuple((float(side), float(rate)) for side, rate in table) for dtype, table in value.items()}


_RATES = ("memory_bandwidth", "update_bandwidth", "host_bandwidth", "host_update_bandwidth")
"""Fields in bytes/s."""
_PARSERS = {"intra": _parse_link, "inter": _parse_link, "product_flops": _parse_tables, "tempos": table_from_dict}


# GPUs known without measurement: data sheet values, and the shares of these values that programs usually reach.
#
# The shares of a GPU are the same for all models. docs/planner.md compares the resulting estimates with published runs.
# Links are for common nodes with eight devices and one network card per device. Describe another type of cluster with
# ``--machine FILE``, preferably starting from ``--calibrate`` on one of its nodes.

SIDES = ((64, 0.02), (128, 0.08), (256, 0.25), (512, 0.5), (1024, 0.75), (2048, 0.92), (4096, 1.0))
"""Side of a matmul -> its rate as a share of the rate of the largest matmuls."""
STREAM_SHARE = 0.8
"""Share of the memory bandwidth that elementwise kernels reach."""
LINK_SHARE = 0.75
"""Share of a link's bandwidth that collectives reach."""
LAUNCH_S, INTRA_LATENCY_S, INTER_LATENCY_S = 4e-6, 8e-6, 2e-5
RESERVED_BYTES = 4 * 10**9
"""Bytes of a GPU's memory for its context, NCCL and fragmentation."""

ACTUAL_OVER_PLANNED = (1.1, 1.14)
"""Smallest and largest actual / planned step time of published runs with fused attention (docs/planner.md)."""


@dataclass(frozen=True)
class DataSheet:
    """GPU data sheet, with one-directional links. ``reachable_share``: large matmuls' share of peak FLOP/s."""

    peak_key: str  # name in PEAK_TFLOPS
    gigabytes: float
    memory_tb_s: float
    intra_gb_s: float
    inter_gb_s: float
    reachable_share: float
    fp32_tflops: float
    formats: Sequence[str] = ("bf16", "fp16")
    host_gb_s: float = 25.0


DATA_SHEETS = {
    "v100-32g": DataSheet("V100", 34.1, 0.9, 150, 12.5, 0.78, 15.7, formats=("fp16",), host_gb_s=12),
    "v100-16g": DataSheet("V100", 17.0, 0.9, 150, 12.5, 0.78, 15.7, formats=("fp16",), host_gb_s=12),
    "a100-40g": DataSheet("A100", 42.4, 1.555, 300, 25, 0.81, 19.5),
    "a100-80g": DataSheet("A100", 85.0, 2.039, 300, 25, 0.81, 19.5),
    "h100-80g": DataSheet("H100", 85.0, 3.35, 450, 50, 0.72, 67, host_gb_s=50),
    "h100-pcie": DataSheet("H100 PCIE", 85.0, 2.0, 64, 25, 0.65, 51, host_gb_s=50),
    "h200": DataSheet("H200", 150.0, 4.8, 450, 50, 0.72, 67, host_gb_s=50),
    "h20": DataSheet("H20", 102.0, 4.0, 450, 50, 0.92, 44, host_gb_s=50),
    "gh200": DataSheet("GH200", 102.0, 4.0, 450, 50, 0.72, 67, host_gb_s=400),
    "b200": DataSheet("B200", 192.0, 8.0, 900, 50, 0.72, 80, host_gb_s=50),
    "l40s": DataSheet("L40S", 51.5, 0.864, 32, 12.5, 0.65, 91.6),
    "mi300x": DataSheet("MI300X", 206.0, 5.3, 448, 50, 0.5, 163, host_gb_s=50),
}
"""Value of --gpu -> data sheet."""


def gpu_machine(name: str) -> Machine:
    """Return a machine with eight GPUs of this name per node.

    Raises:
        ConfigError: the GPU is unknown.
    """
    if name not in DATA_SHEETS:
        raise ConfigError(
            f"--gpu must be one of {', '.join(DATA_SHEETS)}, got {name}. Describe another device with --machine FILE, "
            "which --calibrate writes"
        )
    data_sheet = DATA_SHEETS[name]
    peak = PEAK_TFLOPS[data_sheet.peak_key] * 1e12
    peaks = {**dict.fromkeys(data_sheet.formats, peak), "fp32": data_sheet.fp32_tflops * 1e12}
    memory = data_sheet.memory_tb_s * 1e12 * STREAM_SHARE
    return Machine(
        name=name,
        memory_bytes=int(data_sheet.gigabytes * 1e9),
        reserved_bytes=RESERVED_BYTES,
        devices_per_node=8,
        peak_flops=peaks,
        product_flops={
            dtype: tuple((side, share * peak_rate * data_sheet.reachable_share) for side, share in SIDES)
            for dtype, peak_rate in peaks.items()
        },
        memory_bandwidth=memory,
        update_bandwidth=memory,
        overhead_s=LAUNCH_S,
        host_bandwidth=data_sheet.host_gb_s * 1e9 * STREAM_SHARE,
        intra=Link.uniform(data_sheet.intra_gb_s * 1e9 * LINK_SHARE, INTRA_LATENCY_S),
        inter=Link.uniform(data_sheet.inter_gb_s * 1e9 * LINK_SHARE, INTER_LATENCY_S),
        notes="from the data sheet, with typical shares of its values; not measured",
    )


# The machine given on the command line: a known device or a file, with overrides of its nodes.


def machine_of(flags: argparse.Namespace) -> Machine:
    """Build the machine from the flags.

    Raises:
        ConfigError: the device is unknown, the file cannot be read, or no memory is left.
    """
    machine = Machine.load(flags.machine) if flags.machine else gpu_machine(flags.gpu or "h100-80g")
    if flags.gpus_per_node:
        machine = replace(machine, devices_per_node=flags.gpus_per_node)
    if flags.memory:
        machine = replace(machine, memory_bytes=int(flags.memory * 1e9))
    if machine.usable_bytes <= 0:
        raise ConfigError(
            f"--memory must be above the {machine.reserved_bytes / 1e9:g} GB that the driver and the libraries "
            f"use, got {machine.memory_bytes / 1e9:g}. Increase it"
        )
    return machine


def check_nodes(world: int, machine: Machine) -> None:
    """Check that the devices fill whole nodes, or fit into one node.

    Raises:
        ConfigError: several nodes are needed, and one of them would be partly used.
    """
    node = machine.devices_per_node
    if world > node and world % node:
        raise ConfigError(
            f"--gpus ({world}) on several nodes must be a multiple of the devices per node ({node}). "
            f"Use {world // node * node} or {(world // node + 1) * node}, or set --gpus-per-node"
        )
