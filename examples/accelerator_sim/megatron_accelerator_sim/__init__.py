"""A device "sim", simulated in Python. After ``import megatron_accelerator_sim`` it can be selected with ``--device``.

Its memory is host memory with another device label, and it runs the CPU's kernels, so it computes the same values as
the CPU, slowly. torch, DeepSpeed and this project do not know the device, so that no ``if device == "cuda"`` applies.
Its purpose is to test, without hardware, everything that a plug-in for a new device needs.
"""

from __future__ import annotations

from typing import Any

from megatron.accelerators import Accelerator, register

NAME = "sim"


def _prepare() -> None:
    from megatron_accelerator_sim import kernels

    kernels.install(NAME)


def _deepspeed() -> Any:
    from megatron_accelerator_sim.deepspeed_object import SimAccelerator

    return SimAccelerator()


def _hooks() -> dict[str, Any]:
    from megatron_accelerator_sim import hooks

    return hooks.HOOKS


def _accelerator() -> Accelerator:
    from megatron_accelerator_sim.adaptors import ADAPTORS

    return Accelerator(
        name=NAME,
        is_available=lambda: True,
        backend="cpu:gloo,sim:gloo",
        dtypes=("fp32", "fp64", "bf16"),
        prepare=_prepare,
        deepspeed=_deepspeed,
        hooks=_hooks(),
        adaptors=ADAPTORS,
        module=__name__,
    )


register(_accelerator())
