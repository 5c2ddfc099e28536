"""What GPUs can do at best."""

from __future__ import annotations

PEAK_TFLOPS = {
    "H100 PCIE": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H20": 148.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "V100": 125.0,
    "MI300X": 1300.0,
}
"""Dense 16-bit peaks (bf16; fp16 on V100), by a part of the device's name; the longest part that fits is taken."""


def peak_flops(device_name: str) -> float | None:
    """Return the dense 16-bit FLOP/s of a GPU by its name, or None for one that the table does not know."""
    name = device_name.upper()
    parts = [part for part in PEAK_TFLOPS if all(word in name for word in part.split())]
    return PEAK_TFLOPS[max(parts, key=len)] * 1e12 if parts else None
