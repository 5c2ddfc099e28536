"""The number format of weights and activations, and the loss scale that fp16 needs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.option import option

DTYPES = ("fp32", "bf16", "fp16", "fp64")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """``dtype`` None: not said; ``resolve_dtype`` then takes what suits the device."""

    dtype: str | None = option(
        None,
        "number format: --fp16, --bf16, --fp32, or --fp64 for comparisons",
        flag="",
        choices=DTYPES,
        constants={f"--{name}": name for name in ("fp16", "bf16", "fp32", "fp64")},
        shown_default="bf16 on GPUs that have it, fp16 on older ones, fp32 on CPU",
    )
    loss_scale: float = option(0.0, "fixed loss scale of fp16; 0: dynamic", minimum=0)
    initial_scale_power: int = option(16, "the dynamic loss scale starts at 2 to this power", minimum=0, maximum=64)
    loss_scale_window: int = option(1000, "steps without overflow before the scale doubles", minimum=1)
    hysteresis: int = option(
        2, "the overflow that halves the scale first; each one after it does too, until a good window", minimum=1
    )
    min_scale: float = option(1.0, "lowest dynamic loss scale", above=0)
    excluded: tuple[str, ...] = ()  # formats that the JSON says are not enabled; never chosen for the device

    @property
    def is_dynamic(self) -> bool:
        """True when the loss scale follows overflows."""
        return self.loss_scale == 0
