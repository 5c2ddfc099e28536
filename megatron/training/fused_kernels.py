"""``--fused-kernels``: norms and Adam of torch or of NVIDIA's apex on CUDA.

| flag | norms | AdamW |
|---|---|---|
| auto, torch | ``torch.nn.functional`` | ``torch.optim.AdamW(fused=True)`` |
| apex | ``apex.normalization``, except for layer norms without bias | ``apex.optimizers.FusedAdam``, if not offloaded |

"auto" uses torch's kernels even if apex is installed: installed packages must not change the results of a run, and apex
has not been measured to be faster. Both compute the same functions up to rounding, so a run may resume with the other.
"""  # noqa: E501

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron.config import Config
from megatron.errors import ConfigError

APEX_MODULES = ("apex.normalization.fused_layer_norm", "apex.optimizers", "fused_layer_norm_cuda", "amp_C")
"""Modules of apex: its Python files, and the extensions without which they fail at the first call."""


def check_fused_kernels(config: Config, device_type: str) -> None:
    """Check that apex can be used if ``--fused-kernels apex`` is given.

    Raises:
        ConfigError: it cannot be used.
    """
    if config.parallel.fused_kernels != "apex":
        return
    if device_type != "cuda":
        raise ConfigError(
            f"--fused-kernels apex needs a GPU, got --device {device_type}: apex has only CUDA kernels. Leave it out"
        )
    if config.precision.dtype == "fp64":
        raise ConfigError("--fused-kernels apex needs fp32, bf16 or fp16, got --fp64. Use --fused-kernels torch")
    if import_problem := _import_problem():
        raise ConfigError(
            f"--fused-kernels apex needs NVIDIA's apex with its CUDA extensions, got {import_problem}. Build apex with "
            "APEX_CPP_EXT=1 APEX_CUDA_EXT=1, or use --fused-kernels torch, which has no requirements"
        )


def _import_problem() -> str | None:
    """Return the reason why apex cannot be imported, or None."""
    for name in APEX_MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return str(error)
    return None


def set_norm_kernels(config: Config, module: torch.nn.Module) -> int:
    """Switch the norms in ``module`` to apex's kernels, if selected; return the number of changed norms."""
    if config.parallel.fused_kernels != "apex":
        return 0
    # Imported here because models import the compiler. That takes a second, which tools without a model do not need.
    from megatron.models.common.norms import LayerNorm, RMSNorm

    num_norms = 0
    for norm in module.modules():
        if isinstance(norm, RMSNorm):
            norm.kernel, num_norms = apex_rms_norm, num_norms + 1
        elif isinstance(norm, LayerNorm) and norm.bias is not None:  # apex has no layer norm without bias
            norm.kernel, num_norms = apex_layer_norm, num_norms + 1
    return num_norms


def apex_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute ``megatron.models.common.norms.layer_norm`` with apex."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine(x, weight, bias, (x.shape[-1],), epsilon)


def apex_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute ``megatron.models.common.norms.rms_norm`` with apex."""
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    return fused_rms_norm_affine(x, weight, (x.shape[-1],), epsilon)


def uses_apex_adam(config: Config) -> bool:
    """Return True if apex provides the optimizer: AdamW with fp32 states on the GPU."""
    settings = config.optimizer
    is_on_gpu = not settings.offload_optimizer
    return (
        config.parallel.fused_kernels == "apex"
        and settings.optimizer == "adamw"
        and is_on_gpu
        and not (settings.bf16_states or settings.quantized_states)
    )


def apex_adam(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """Build apex's FusedAdam over ``groups``; ``settings`` are keyword arguments for ``torch.optim.AdamW``.

    apex counts steps per group. Checkpoints store a count per parameter, as in torch, so every parameter also has a
    count.
    """
    from apex.optimizers import FusedAdam

    class CountedAdam(FusedAdam):  # type: ignore[misc, valid-type]
        @torch.no_grad()
        def step(self, *args: Any, **kwargs: Any) -> Any:
            for group in self.param_groups:
                counts = [self.state[p]["step"] for p in group["params"] if "step" in self.state.get(p, ())]
                group["step"] = counts[0] if counts else 0
            result = super().step(*args, **kwargs)
            for group in self.param_groups:
                for parameter in group["params"]:
                    if self.state.get(parameter):
                        self.state[parameter]["step"] = group["step"]
            return result

    return CountedAdam(groups, adam_w_mode=True, **settings)


def fused_kernel_rows(config: Config, device_type: str) -> Iterator[tuple[str, str]]:
    """Yield the start-table row that names the fused kernels' library."""
    if config.parallel.fused_kernels == "apex":
        adam_text = "" if uses_apex_adam(config) else "; the optimizer is not apex's, which has only AdamW on the GPU"
        yield "fused kernels", f"apex's norms{' and AdamW' if uses_apex_adam(config) else ''}{adam_text}"
    elif device_type == "cuda" and config.parallel.fused_kernels == "auto" and _import_problem() is None:
        yield "fused kernels", "torch's (apex is installed, too: --fused-kernels apex uses its norms and AdamW)"
    else:
        yield "fused kernels", "torch's"
