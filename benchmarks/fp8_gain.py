"""Estimate when FP8 pays: the time of a layer in bf16 and with --fp8-format, by hidden size and tokens.

    python -m benchmarks.fp8_gain --gpu h200

prints the table of docs/fp8.md. The times are estimates of the planner; no GPU was measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from megatron.arguments import parse
from megatron.planner.estimate import Planner
from megatron.planner.layout import layout_of
from megatron.planner.machine import gpu_machine

HIDDEN_SIZES = (1024, 2048, 4096, 8192)
TOKENS = (4096, 32768)
SEQ_LENGTH = 4096
HEAD_SIZE = 128
MANY_MICRO_BATCHES = 16
"""Micro-batches per step of the last column; they share the quantized weights."""


class LayerTimes(NamedTuple):
    """Times of forward and backward of a LLaMA layer with one tensor rank, in seconds per micro-batch.

    Args:
        bf16, fp8: the layer in bf16 and with --fp8-format.
        products: its products with weights in bf16.
        quantization: quantization of the factors.
    """

    bf16: float
    fp8: float
    products: float
    quantization: float

    @property
    def speedup(self) -> float:
        return self.bf16 / self.fp8


def layer_times(hidden_size: int, num_tokens: int, gpu: str = "h100-80g", num_micro_batches: int = 1) -> LayerTimes:
    """Estimate the times of a layer.

    Args:
        num_tokens: tokens of a micro-batch, a multiple of ``SEQ_LENGTH``.
        num_micro_batches: micro-batches per step, which share the quantized weights.
        gpu: name of a GPU, as for ``tools/plan.py --gpu``.

    Raises:
        ConfigError: the GPU is unknown or has no products in FP8.
    """
    ff_size = -(-8 * hidden_size // 3 // 256) * 256
    flags = (
        f"--num-layers 1 --hidden-size {hidden_size} --num-attention-heads {hidden_size // HEAD_SIZE} "
        f"--ff-hidden-size {ff_size} --seq-length {SEQ_LENGTH} --batch-size {num_tokens // SEQ_LENGTH} "
        f"--gas {num_micro_batches} "
        "--vocab-size 32000 --data-path none --bf16"
    )
    seconds, operations = [], []
    for extra in ("", "--fp8-format e4m3"):
        config = parse(f"{flags} {extra}".split(), world_size=1, env={}, family="llama").with_vocab(32000)
        planner, layout = Planner(config, gpu_machine(gpu)), layout_of(config, 1)
        seconds.append(planner.unit_seconds(layout)[1].total)
        operations.append(planner.model(layout).compute.operation_times(layout)[1])
    plain, quantized = operations
    quantization_s = quantized.unscaled_forward + quantized.unscaled_backward
    return LayerTimes(*seconds, 2 * plain.products + plain.weight_grads, quantization_s)


def table_lines(gpu: str = "h100-80g") -> Iterator[str]:
    """Yield the lines of the Markdown table."""
    columns = (
        "hidden size", "tokens", "layer in bf16 (ms)", "layer with FP8 (ms)", "quantization (ms)", "speedup",
        f"speedup with {MANY_MICRO_BATCHES} micro-batches",
    )  # fmt: skip
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for hidden_size in HIDDEN_SIZES:
        for num_tokens in TOKENS:
            times = layer_times(hidden_size, num_tokens, gpu)
            many = layer_times(hidden_size, num_tokens, gpu, MANY_MICRO_BATCHES)
            yield (
                f"| {hidden_size} | {num_tokens} | {1e3 * times.bf16:.2f} | {1e3 * times.fp8:.2f} | "
                f"{1e3 * times.quantization:.2f} | {times.speedup:.2f} | {many.speedup:.2f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the estimated gain of --fp8-format by hidden size.")
    parser.add_argument("--gpu", default="h100-80g", help="name of a GPU, as for tools/plan.py (default h100-80g)")
    for line in table_lines(parser.parse_args().gpu):
        print(line)


if __name__ == "__main__":
    main()
