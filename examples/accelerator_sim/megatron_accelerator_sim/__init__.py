"""A device called "sim", simulated in Python: ``import megatron_accelerator_sim`` lets ``--device`` name it.

Its memory is the host's under another label and its kernels are the CPU's, so it computes the CPU's numbers, slowly. To
torch, DeepSpeed and this project it is a device that they do not know: none of their ``if device == "cuda"`` helps it.
That is what it is for: to try, without hardware, all that a plug-in for a new device goes through.
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
