"""PrecisionSpeedWarning: warns at the start if matrix products in a 16-bit type are slow on this CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron import device, log
from megatron.config import Config
from megatron.mpu.mappings import all_reduce
from megatron.training.trainer import Callback

MATRIX_SIZE = 256
"""Rows and columns of the timed matrices: 0.03 s per product at 1 GFLOP/s, the slowest rate observed."""
MAX_ROUNDS = 4
MAX_S = 0.2
"""No further round starts after this many seconds."""
MIN_SLOWDOWN = 2.0
"""Smallest slowdown that is reported."""

Timer = Callable[[Callable[[], torch.Tensor]], float]


class PrecisionSpeedWarning(Callback):
    """Warns on rank 0 if matrix products in bf16 or fp16 take at least ``MIN_SLOWDOWN`` times as long as in fp32.

    A CPU without instructions for a 16-bit type computes products 4 to 200 times slower than in fp32. CPU names and
    torch versions do not show which ones are affected, so the first rank on each node times the products once before
    the first step. Does nothing on other devices.
    """

    def on_train_start(self) -> None:
        world, dtype = self.trainer.world, self.trainer.config.precision.dtype
        if world.device_type != "cpu" or dtype not in ("bf16", "fp16"):
            return
        slowdown = product_slowdown(device.DTYPES[dtype]) if world.local_rank == 0 else Slowdown(0.0, 0.0)
        slowest = all_reduce(torch.tensor(slowdown, dtype=torch.float32), world.grid.world, dist.ReduceOp.MAX)
        slowdown = Slowdown(*slowest.tolist())
        if max(slowdown) >= MIN_SLOWDOWN and world.rank == 0:
            log.warning(slowdown_message(slowdown, self.trainer.config))


class Slowdown(NamedTuple):
    """Ratio of the time in a 16-bit type to the time in fp32, for the forward and the two backward products."""

    forward: float
    backward: float


def time_product(product: Callable[[], torch.Tensor]) -> float:
    """Time one call of ``product`` in seconds."""
    start = time.perf_counter()
    product()
    return time.perf_counter() - start


def product_slowdown(dtype: torch.dtype, timer: Timer = time_product) -> Slowdown:
    """Measure how much slower than in fp32 a linear layer's three matrix products are in ``dtype``.

    The types are timed in turn and the minimum per product is used, so that other programs on the machine are not
    mistaken for a slow type. Takes at most twice ``MAX_S``, even if a product is 200 times slower than in fp32.

    Args:
        timer: returns the duration of a call in seconds.
    """
    types = (torch.float32, dtype)
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, generator=generator) for _ in range(3))
    products = {type_: _products(x.to(type_), weight.to(type_), grad.to(type_)) for type_ in types}
    best = {type_: [float("inf")] * 3 for type_ in types}
    spent_s = 0.0
    for round_idx in range(MAX_ROUNDS):
        for type_ in types:
            times = [timer(product) for product in products[type_]]
            best[type_] = [min(pair) for pair in zip(best[type_], times, strict=True)]
            spent_s += sum(times)
        if round_idx and spent_s > MAX_S:  # the first round includes the initialisation of kernels
            break
    (forward, *backward), (slow_forward, *slow_backward) = best[torch.float32], best[dtype]
    return Slowdown(slow_forward / forward, sum(slow_backward) / sum(backward))


def _products(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
    return [lambda: x @ weight.t(), lambda: grad @ weight, lambda: grad.t() @ x]


def slowdown_message(slowdown: Slowdown, config: Config) -> str:
    """Format the warning: the slowdown, the setting that selected the type, and the setting to change."""
    dtype = config.precision.dtype
    is_set_by_json = config.deepspeed.get(str(dtype), {}).get("enabled") is True
    if is_set_by_json and "dtype" not in config.explicit_fields:
        setting, fix = f'"{dtype}": {{"enabled": true}} of the DeepSpeed JSON', f"Set {dtype}.enabled to false"
    else:
        setting, fix = f"--{dtype}", f"Leave --{dtype} out or use --fp32"
    return (
        f"{setting} is slow on this CPU: products take {slowdown.forward:.1f} times as long as in fp32 in the forward "
        f"pass and {slowdown.backward:.1f} times in the backward pass. {fix}; fp32 is the default on a CPU"
    )
