"""GPUs that are known without measuring: data sheets, and what programs usually reach of them.

One set of shares holds for a GPU, whatever the model: docs/planner.md compares what follows from them with published
runs. Links are those of the usual nodes: eight devices, and a network card for each. A cluster of another kind is
told by ``--machine FILE``, best begun with ``--calibrate`` on one of its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.cost.peaks import PEAK_TFLOPS
from megatron.errors import ConfigError
from megatron.planner.machine import Link, Machine

SIDES = ((64, 0.02), (128, 0.08), (256, 0.25), (512, 0.5), (1024, 0.75), (2048, 0.92), (4096, 1.0))
"""Side of a product -> share of what the largest products reach."""
STREAM = 0.8
"""Share of the memory's bandwidth that elementwise kernels reach."""
WIRE = 0.75
"""Share of a link's bandwidth that collectives reach."""
LAUNCH_S, INTRA_LATENCY_S, INTER_LATENCY_S = 4e-6, 8e-6, 2e-5
RESERVED = 4 * 10**9
"""Bytes of a GPU for its context, NCCL and what lies between tensors."""

SLOWER = (1.04, 1.14)
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
