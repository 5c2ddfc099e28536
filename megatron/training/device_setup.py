"""Device selection for torch, DeepSpeed and plug-ins.

DeepSpeed selects and logs its accelerator when it is imported, so DS_ACCELERATOR is set before the import. For a
plug-in's device, DeepSpeed may use the plug-in's accelerator object, which also provides the properties that the
plug-in does not define.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from megatron import accelerators, device
from megatron.accelerators import Accelerator, is_on
from megatron.arguments import check_device
from megatron.config import Config
from megatron.config.optimizer import ROWWISE
from megatron.errors import ConfigError
from megatron.mpu.fp8 import FP8_CAPABILITY, has_fp8_products
from megatron.training.determinism import configure_determinism
from megatron.training.fused_kernels import check_fused_kernels


def configure_device(config: Config) -> str:
    """Select the device type, configure determinism, and return the device type.

    A plug-in's device is prepared and its adaptors are applied. Further calls have no effect.

    Raises:
        ConfigError: the --device is not available, a plug-in is incompatible, or --deterministic is not possible.
    """
    try:
        device_type = device.choose(config.parallel.device)
        plugin = accelerators.find(device_type)
        if plugin is not None and accelerators.applied(device_type) is None:
            _activate_plugin(plugin)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    os.environ["DS_ACCELERATOR"] = device_type
    if device_type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # partial sums stay in fp32
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    configure_determinism(config, device_type)
    return device_type


def _activate_plugin(plugin: Accelerator) -> None:
    """Prepare a plug-in's device, first for torch and then for DeepSpeed, and apply its adaptors."""
    device.prepare(plugin.name)
    # DeepSpeed selects an accelerator when an adaptor imports it, and may not know the plug-in's name.
    os.environ["DS_ACCELERATOR"] = plugin.name if plugin.deepspeed is None else "cpu"
    if plugin.deepspeed is not None:
        from deepspeed.accelerator import set_accelerator

        set_accelerator(plugin.deepspeed())
    accelerators.adapt(plugin.name)


def check_device_fits(config: Config, device_type: str) -> None:
    """Check that the device supports the requested precision, FP8 and fused kernels.

    Raises:
        ConfigError: it does not support them.
    """
    if device_type in accelerators.BUILT_IN:
        check_device(
            config, device_type == "cuda", device_type != "cuda" or device.default_precision(device_type) == "bf16"
        )
    elif problem := device.missing_dtype(device_type, config.precision.dtype):
        raise ConfigError(problem)
    if problem := fp8_device_problem(config, device_type):
        raise ConfigError(problem)
    check_fused_kernels(config, device_type)


def fp8_device_problem(config: Config, device_type: str) -> str | None:
    """Explain why the device has no products in FP8; None if it has them, or if they are not needed."""
    precision = config.precision
    if precision.fp8_format is None or device_type == "cpu":
        return None
    got = f"got --fp8-format {precision.fp8_format}"
    if device_type != "cuda":
        return f"products in FP8 are supported on CPUs and CUDA devices, {got} and --device {device_type}. Remove it"
    has_experts = bool(config.model.num_experts) and precision.fp8_recipe == ROWWISE
    if has_fp8_products(device_type, of_experts=has_experts):
        return None
    capability = device.compute_capability(device_type)
    gpu_text = f"{device.name(device_type)} ({'no' if capability is None else '{}.{}'.format(*capability)})"
    if has_experts:
        return (
            "products in FP8 of experts need a GPU of NVIDIA with compute capability 9.x (H100, H200, GH200), for "
            f"which torch has a grouped kernel, {got} on {gpu_text}. Use --fp8-recipe blockwise, which is emulated, "
            "or remove --fp8-format"
        )
    lowest = "{}.{}".format(*FP8_CAPABILITY)
    return (
        f"products in FP8 need a GPU of NVIDIA with compute capability {lowest} or more, {got} on {gpu_text}. Remove "
        "--fp8-format"
    )


def check_deepspeed_device(device_type: str) -> None:
    """Check that DeepSpeed, which has been imported, uses this device type, too.

    Raises:
        ConfigError: DeepSpeed selected another device type.
    """
    from deepspeed.accelerator import get_accelerator

    deepspeed_device = get_accelerator().device_name().partition(":")[0]
    if deepspeed_device != device_type:
        raise ConfigError(
            f"DeepSpeed must use the device of --device, got {deepspeed_device} and {device_type}: it was imported "
            f"before the device was selected. Set DS_ACCELERATOR={device_type} in the environment"
        )


def default_backend(device_type: str) -> str:
    """Return a device type's torch.distributed backend; by default, DeepSpeed's accelerator selects it."""
    backend = device.backend(device_type)
    if backend:
        return backend
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().communication_backend_name()


def device_rows(device_type: str) -> Iterator[tuple[str, str]]:
    """Yield the start-table row that lists a plug-in's active adaptors."""
    plugin = accelerators.find(device_type)
    if plugin is None or not plugin.adaptors:
        return
    adaptors = [
        f"{adaptor.part}: {adaptor.name} ({len(adaptor.patches)}){'' if is_on(adaptor) else ', off'}"
        for adaptor in plugin.adaptors
    ]
    yield "adaptors", "; ".join(adaptors)
