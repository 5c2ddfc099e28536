"""One device for torch, DeepSpeed and plug-ins.

DeepSpeed chooses for itself when it is imported and says so, so it is told before, by DS_ACCELERATOR. For the device
of a plug-in it may be given the plug-in's own accelerator object; what the plug-in leaves open, the object says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from megatron import accelerators, device
from megatron.accelerators import Accelerator, is_on
from megatron.arguments import check_device
from megatron.config import Config
from megatron.errors import ConfigError
from megatron.training.determinism import configure_determinism
from megatron.training.fused_kernels import check_fused_kernels


def configure_device(config: Config) -> str:
    """Choose the kind of device, and whether it repeats itself to the bit, and return the kind.

    A plug-in's device is made ready here, and its adaptors are applied; a second call changes nothing.

    Raises:
        ConfigError: --device asks for one that is not there, a plug-in does not fit, or --deterministic cannot be held.
    """
    try:
        kind = device.choose(config.parallel.device)
        plugin = accelerators.find(kind)
        if plugin is not None and accelerators.applied(kind) is None:
            _open(plugin)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    os.environ["DS_ACCELERATOR"] = kind
    if kind == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # parts of a sum stay in fp32
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    configure_determinism(config, kind)
    return kind


def _open(plugin: Accelerator) -> None:
    """Make a plug-in's device ready, first for torch, then for DeepSpeed, and apply its adaptors."""
    device.prepare(plugin.name)
    # DeepSpeed takes one of its own when it is imported, which an adaptor may do, and knows ours by its name or not.
    os.environ["DS_ACCELERATOR"] = plugin.name if plugin.deepspeed is None else "cpu"
    if plugin.deepspeed is not None:
        from deepspeed.accelerator import set_accelerator

        set_accelerator(plugin.deepspeed())
    accelerators.adapt(plugin.name)


def check_device_fits(config: Config, kind: str) -> None:
    """Check that the device computes in the number format that was said, if one was, and has the kernels asked for.

    Raises:
        ConfigError: it does not.
    """
    if kind in accelerators.BUILT_IN:
        check_device(config, kind == "cuda", kind != "cuda" or device.default_precision(kind) == "bf16")
    elif problem := device.missing_dtype(kind, config.precision.dtype):
        raise ConfigError(problem)
    check_fused_kernels(config, kind)


def check_agreement(kind: str) -> None:
    """Check that DeepSpeed, which has been imported, works on this kind of device too.

    Raises:
        ConfigError: it chose another one.
    """
    from deepspeed.accelerator import get_accelerator

    theirs = get_accelerator().device_name().partition(":")[0]
    if theirs != kind:
        raise ConfigError(
            f"DeepSpeed must use the device of --device, got {theirs} and {kind}: it was imported before the "
            f"device was chosen. Set DS_ACCELERATOR={kind} in the environment"
        )


def backend_of(kind: str) -> str:
    """Return torch.distributed's backend for this kind: the seam's, or where that is open DeepSpeed's accelerator's."""
    own = device.backend(kind)
    if own:
        return own
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().communication_backend_name()


def device_rows(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the row of the start table that says which adaptors of a plug-in are on."""
    plugin = accelerators.find(kind)
    if plugin is None or not plugin.adaptors:
        return
    adaptors = [f"{a.part}: {a.name} ({len(a.patches)}){'' if is_on(a) else ', off'}" for a in plugin.adaptors]
    yield "adaptors", "; ".join(adaptors)
