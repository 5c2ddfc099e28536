"""The table of GPUs."""

from __future__ import annotations

import pytest

from megatron.costs import memory


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA B200", 2250),
        ("AMD Instinct MI300X", 1300),
    ],
)
def test_known_gpus_have_dense_peak(name, tflops):
    assert memory.peak_flops(name) == tflops * 1e12


def test_unknown_device_has_no_peak():
    assert memory.peak_flops("Some CPU") is None
